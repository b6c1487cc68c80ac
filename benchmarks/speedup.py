"""Speed-up over the bare ``DataLoader``, as a share of what is possible at all.

A source R times slower than the step is echoed by e = R, where source and step are exactly balanced and any jitter costs, and
by e = 1.25 R. Nothing can be faster than the bound ``max(h(1), d) / max(h(e), d)``. Here h(1) is the time per batch of the bare
loader alone, d what the step really takes, and h(e) = h(1) / e, as if collating were echoed too: a little too strict.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from report import Table, progress, verdict
from timing import alternate, seconds_per_batch
from workloads import BATCH_SIZE, CASES, WORKERS, Sleeping, echoed_loader, plain_loader, real_sleep, sleep_for

_STEP_SECONDS = 0.004
_REQUIRED = {1.25: 0.95, 1.0: 0.90}  # per factor / R


def speedup(quick: bool) -> Table:
    ratios, rounds, echoed_batches, plain_batches = ((2,), 3, 250, 60) if quick else ((2, 4, 8), 5, 700, 120)
    step_seconds = real_sleep(_STEP_SECONDS)
    rows = []
    for case in CASES:
        for ratio in ratios:
            progress(f"speed-up, {case}, R about {ratio}")
            dataset = Sleeping(sleep_for(ratio * step_seconds * WORKERS / BATCH_SIZE))
            base = partial(seconds_per_batch, plain_loader(case, dataset), plain_batches // 2)
            measured = statistics.median(base() for _ in range(3)) / step_seconds
            runs: dict[str, Callable[[], float]] = {"base": base, "plain": partial(_plain, case, dataset, plain_batches)}
            factors = {share: max(share * measured, 1.0) for share in _REQUIRED}
            for share, factor in factors.items():
                runs[str(share)] = partial(_echoed, case, dataset, factor, echoed_batches)
            times = alternate(runs, rounds)
            for share, required in _REQUIRED.items():
                factor = factors[share]
                bounds = [max(base, step_seconds) / max(base / factor, step_seconds) for base in times["base"]]
                speedups = [plain / echoed for plain, echoed in zip(times["plain"], times[str(share)], strict=True)]
                reached = [speedup / bound for speedup, bound in zip(speedups, bounds, strict=True)]
                middle = statistics.median(reached)
                rows.append(
                    (
                        *(case, round(measured, 2), share, round(factor, 2)),
                        *(statistics.median(times["plain"]) * 1e3, statistics.median(times[str(share)]) * 1e3),
                        *(statistics.median(speedups), statistics.median(bounds), middle, min(reached), max(reached)),
                        *(required, verdict(middle >= required)),
                    )
                )
    text = (
        f"batch {BATCH_SIZE}, {WORKERS} workers, step {step_seconds * 1e3:.3f} ms; reached = speed-up / bound, median of "
        f"{rounds} rounds"
    )
    columns = (
        *("point", "R", "e/R", "e", "plain ms", "echoed ms", "speed-up", "bound", "reached", "lowest", "highest"),
        *("required", "passed"),
    )
    return Table("speedup", text, columns, rows)


def _step() -> None:
    time.sleep(_STEP_SECONDS)


def _plain(case: str, dataset: Sleeping, batches: int) -> float:
    return seconds_per_batch(plain_loader(case, dataset), batches, _step)


def _echoed(case: str, dataset: Sleeping, factor: float, batches: int) -> float:
    return seconds_per_batch(echoed_loader(case, dataset, factor), batches, _step)
