"""What learning allows: the largest speed-up over training without echoing that the measured numbers of steps leave.

    bound(e) = F * u / (S(e) * max(b * u / e, d))

    F     fresh examples that training without echoing needs to reach the target
    u     upstream seconds per fresh example: what all workers together take to deliver it, b * u being the time of a batch
    S(e)  optimizer steps to the target at echo factor e
    b     examples in a batch
    d     seconds of a step in the Trainer where the data is already there

F * u is the time that reading takes without echoing; at factor e a step takes as long as the slower one of reading its share
of fresh examples, b / e, and stepping itself. F and S(e) come from the runs whose times are compared, seed by seed; u and d
are measured beforehand. What it leaves out, and what keeps a run under it: the start, what is redone for each use, jitter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learning.rules import interval_of_median

__all__ = ["best_factor", "speedup_bound"]


def speedup_bound(
    baseline_fresh: float,
    steps: float,
    factor: float,
    *,
    upstream_seconds: float,
    step_seconds: float,
    batch_size: int,
) -> float:
    """The bound at one factor; 0 where the target was missed (infinitely many steps).

    Args:
        baseline_fresh: F.
        steps: S(e).
        factor: e.
        upstream_seconds: u, per example.
        step_seconds: d.
        batch_size: b.

    Example:
        >>> speedup_bound(3200, 150, 4, upstream_seconds=0.005, step_seconds=0.04, batch_size=32)  # 16 s / (150 * 40 ms)
        2.666...
    """
    return baseline_fresh * upstream_seconds / (steps * max(batch_size * upstream_seconds / factor, step_seconds))


def best_factor(bounds: Mapping[float, Sequence[float]]) -> float:
    """The factor whose bound is the largest: the median over the seeds, so that no single seed's luck chooses."""
    return max(bounds, key=lambda factor: interval_of_median(bounds[factor]).middle)
