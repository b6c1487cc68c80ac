"""What wrapping a loader costs where nothing is echoed: throughput at factor 1 against the bare ``DataLoader``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from report import Table, progress, verdict
from speedup import POINTS
from timing import alternate, seconds_per_batch
from workloads import BATCH_SIZE, WORKERS, Busy, Sleeping, loader

from lightning_echo import EchoLoader, InsertionPoint


def factor_one(quick: bool) -> Table:
    cases = (("sleep", 0.001, Sleeping(0.001), 0.98, 60), ("busy", 0.00005, Busy(0.00005), 0.93, 1000))
    rounds = 3 if quick else 15
    rows = []
    for kind, seconds, dataset, required, batches in cases:
        progress(f"factor 1, {seconds * 1e3:g} ms per example, {kind}")

        runs: dict[str, Callable[[], float]] = {"plain": partial(_plain, dataset, batches)}
        for point in POINTS:
            runs[point.value] = partial(_wrapped, dataset, point, batches)
        times = alternate(runs, rounds)
        for point in POINTS:
            ratios = [a / b for a, b in zip(times["plain"], times[point.value], strict=True)]
            middle = statistics.median(ratios)
            rows.append(
                (
                    *(point.value, kind, seconds * 1e3),
                    *(statistics.median(times["plain"]) * 1e3, statistics.median(times[point.value]) * 1e3),
                    *(middle, min(ratios), max(ratios), required, verdict(middle >= required)),
                )
            )
    text = f"batch {BATCH_SIZE}, {WORKERS} workers, no step; ratio = plain / wrapped time, median of {rounds} pairs of runs"
    columns = (
        *("point", "source", "ms per example", "plain ms/batch", "wrapped ms/batch", "ratio", "lowest", "highest"),
        *("required", "passed"),
    )
    return Table("factor_one", text, columns, rows)


def _plain(dataset: Sleeping, batches: int) -> float:
    return seconds_per_batch(loader(dataset), batches)


def _wrapped(dataset: Sleeping, point: InsertionPoint, batches: int) -> float:
    return seconds_per_batch(EchoLoader(loader(dataset), 1, insertion_point=point, seed=0), batches)
