"""The phases of a loader that cannot be run in parts: a stream, or a data set that makes its batches itself.

Its examples come in the order in which they come, so that the same ones cannot be asked for again: reading and preparation are
not told apart, and all that the workers do is in ``decode``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.probing.loading import FirstBatches, fewest
from lightning_echo.analysis.probing.phases import LoaderPhases
from lightning_echo.analysis.probing.ranks import gathered
from lightning_echo.insertion import Needs, points_from

__all__ = ["measure_stream"]

_SKIPPED = (
    "skipped: fetch rate, preparation rate and single stages. The training loader goes over {what}, whose examples cannot be "
    "asked for a second time; only the loader as a whole was measured, and fetch and prep stall are not told apart"
)
_NOTHING = Spread.exactly(0.0)


def measure_stream(
    loader: DataLoader[Any], steps: int, batch_size: int, most_seconds: float, say: Callable[[str], None]
) -> LoaderPhases:
    """Runs the loader as a whole: whatever makes its batches.

    Args:
        loader: The user's.
        steps: Batches at most.
        batch_size: Examples in a batch.
        most_seconds: It ends with the first batch after so long, but has `fewest`.
        say: Told what is done.

    Raises:
        ValueError: It has fewer batches than steps.
        Exception: The data set raises it.
    """
    say("the loader: as a whole")
    seconds: list[float] = []
    ended = True
    begin = last = time.perf_counter()
    for _ in FirstBatches(loader, steps):
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
        if now - begin > most_seconds and len(seconds) >= fewest(loader.num_workers):
            ended = False
            break
    shortest = min(gathered(len(seconds) if ended else steps))  # all ranks hear of it
    if shortest < steps:
        raise ValueError(f"steps must be at most {shortest}, the batches of the training loader, got {steps}")
    workers = max(loader.num_workers, 1)
    counted = seconds[min(workers, len(seconds) - 1) :]  # until then workers start
    per_example = workers / batch_size
    own = loader.batch_size is None or type(loader).__iter__ is not DataLoader.__iter__  # single examples are not known
    return LoaderPhases(
        read=_NOTHING,
        read_cached=_NOTHING,
        decode=Spread.of([each * per_example for each in counted], period=workers),
        augment=_NOTHING,
        collate=_NOTHING,
        read_cpu_share=0.0,
        prepare_cpu_share=0.0,
        points=tuple(point.value for point in points_from(Needs.batches if own else Needs.examples)),
        read_sharing=0.0,
        prepare_sharing=0.0,
        takes_ahead=False,
        batch_size=batch_size,
        transforms={},
        files=(),
        real=FirstBatches(loader, min(gathered(len(seconds)))),
        in_memory=None,
        raw=None,
        kept={},
        notes=(
            _SKIPPED.format(what=type(loader.dataset).__name__),
            "skipped: processor time. More workers than cores may be predicted to help",
        ),
    )
