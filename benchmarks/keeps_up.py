"""On demand where the source keeps up (R = 0.8), against the bare ``DataLoader``: hardly an echo, and no time lost.

Rules, fixed before the first run. A pair is one run of each, in turn, each other pair in the opposite order.

1. *Echoes*, as a share of all examples of all pairs, are at most `MOST_ECHOES`, or the share of the steps for which the bare
   loader made the training wait, if that is larger. It waits if a batch takes `WAIT_SHARE` of a step or more to come.
2. *Time* from batch to batch is at most `MOST_TIME` times that of the bare loader, by the median over the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from report import Cell, Table, progress, verdict
from timing import WARM_UP_BATCHES
from workloads import BATCH_SIZE, WORKERS, Sleeping, loader, sleep_for

from lightning_echo import EchoLoader

RATIO, STEP_SECONDS, PAIRS = 0.8, 0.02, 20
MOST_ECHOES, WAIT_SHARE, MOST_TIME = 0.01, 0.1, 1.01


@dataclass(frozen=True)
class Pair:
    """One run of each: time of a batch with its step, the share of steps that waited, and of examples that were echoes."""

    bare_seconds: float
    demand_seconds: float
    bare_waited: float
    demand_waited: float
    echoed: float


def keeps_up(quick: bool) -> list[Table]:
    """About 5 minutes: 40 runs of 300 steps of 20 ms, and their start."""
    pairs, steps = (2, 60) if quick else (PAIRS, 300 - WARM_UP_BATCHES)
    found = []
    for number in range(pairs):
        progress(f"a source that keeps up, pair {number + 1} of {pairs}")
        found.append(_pair(steps, demand_first=bool(number % 2)))
    return tables(found, steps)


def tables(pairs: Sequence[Pair], steps: int) -> list[Table]:
    """The rules, failures first, and the pairs."""
    lines = sorted(_rules(pairs), key=lambda line: line[-1] != verdict(False))
    text = (
        f"On demand behind a source that keeps up (R = {RATIO}), against the bare DataLoader: {len(pairs)} pairs of {steps} "
        f"steps of {1e3 * STEP_SECONDS:g} ms after the first {WARM_UP_BATCHES}; batch {BATCH_SIZE}, {WORKERS} workers; "
        "failures first"
    )
    columns = ("pair", "bare ms/step", "on demand ms/step", "ratio", "bare waited", "on demand waited", "echoes")
    rows = [
        (
            *(number, 1e3 * pair.bare_seconds, 1e3 * pair.demand_seconds, pair.demand_seconds / pair.bare_seconds),
            *(pair.bare_waited, pair.demand_waited, pair.echoed),
        )
        for number, pair in enumerate(pairs, 1)
    ]
    return [
        Table("keeps_up", text, ("goal", "bound", "measured", "met"), lines),
        Table("keeps_up_pairs", "Each pair; waited: share of steps; echoes: share of examples", columns, rows),
    ]


def _rules(pairs: Sequence[Pair]) -> list[tuple[Cell, ...]]:
    waited = statistics.fmean(pair.bare_waited for pair in pairs)
    echoed = statistics.fmean(pair.echoed for pair in pairs)
    most = max(MOST_ECHOES, waited)
    longer = [pair.demand_seconds / pair.bare_seconds for pair in pairs]
    middle = statistics.median(longer)
    return [
        ("echoes, share of all examples", f"<= {most:.4f} (bare waited {waited:.4f})", f"{echoed:.4f}", verdict(echoed <= most)),
        (
            *("time / bare DataLoader", f"<= {MOST_TIME}"),
            *(f"{middle:.4f} [{min(longer):.4f}, {max(longer):.4f}]", verdict(middle <= MOST_TIME)),
        ),
    ]


def _pair(steps: int, *, demand_first: bool) -> Pair:
    found: dict[bool, tuple[float, float, float]] = {}
    for is_on_demand in (demand_first, not demand_first):
        plain = loader(Sleeping(sleep_for(RATIO * STEP_SECONDS * WORKERS / BATCH_SIZE)))
        found[is_on_demand] = _run(EchoLoader(plain, "demand", seed=0) if is_on_demand else plain, steps)
    (bare, bare_waited, _), (demand, demand_waited, echoed) = found[False], found[True]
    return Pair(bare, demand, bare_waited, demand_waited, echoed)


def _run(batches: Iterable[Any], steps: int) -> tuple[float, float, float]:
    """Seconds of a batch with its step, the share of steps that waited, and of examples that were echoes."""
    step = sleep_for(STEP_SECONDS)
    iterator = iter(batches)
    for _ in range(WARM_UP_BATCHES):
        next(iterator)
        time.sleep(step)
    echoed, waited, begin = _echoed(batches), 0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        next(iterator)
        waited += time.perf_counter() - asked >= WAIT_SHARE * STEP_SECONDS
        time.sleep(step)
    seconds, echoed = time.perf_counter() - begin, _echoed(batches) - echoed
    del iterator  # ends the workers of a plain loader
    if isinstance(batches, EchoLoader):
        batches.close()
    return seconds / steps, waited / steps, echoed / (steps * BATCH_SIZE)


def _echoed(batches: Iterable[Any]) -> int:
    return batches.counts.echoed if isinstance(batches, EchoLoader) else 0
