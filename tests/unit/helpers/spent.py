"""Seconds as a loader adds them up, worked out anew."""

from lightning_echo.pipeline.worker import StageSeconds


def spent(before: StageSeconds, fresh: int, stages: tuple[float, float, float], in_flight: float = 0.0) -> StageSeconds:
    """What it is after one more batch with so many fresh examples, and so many reads under way."""
    if not any(stages):
        return before
    sums = [was + new for was, new in zip((before.source, before.rest, before.collate), stages, strict=True)]
    return StageSeconds(*sums, before.examples + fresh, before.batches + 1, before.in_flight + in_flight)
