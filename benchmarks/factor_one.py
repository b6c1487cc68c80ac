"""What wrapping a loader costs where nothing is echoed: throughput at factor 1 against the bare ``DataLoader``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from report import Table, progress, verdict
from timing import alternate, seconds_per_batch
from workloads import BATCH_SIZE, CASES, STREAM, WORKERS, Busy, Sleeping, echoed_loader, plain_loader


def factor_one(quick: bool) -> Table:
    cases = (("sleep", 0.001, Sleeping(0.001), 0.98, 60), ("busy", 0.00005, Busy(0.00005), 0.93, 1000))
    rounds = 3 if quick else 15
    rows = []
    for kind, seconds, dataset, required, batches in cases:
        progress(f"factor 1, {seconds * 1e3:g} ms per example, {kind}")

        runs: dict[str, Callable[[], float]] = {
            "plain": partial(_plain, CASES[0], dataset, batches),
            "plain stream": partial(_plain, STREAM, dataset, batches),
        }
        for case in CASES:
            runs[case] = partial(_wrapped, case, dataset, batches)
        times = alternate(runs, rounds)
        for case in CASES:
            partner = times["plain stream" if case == STREAM else "plain"]
            ratios = [a / b for a, b in zip(partner, times[case], strict=True)]
            middle = statistics.median(ratios)
            rows.append(
                (
                    *(case, kind, seconds * 1e3),
                    *(statistics.median(partner) * 1e3, statistics.median(times[case]) * 1e3),
                    *(middle, min(ratios), max(ratios), required, verdict(middle >= required)),
                )
            )
    text = f"batch {BATCH_SIZE}, {WORKERS} workers, no step; ratio = plain / wrapped time, median of {rounds} pairs of runs"
    columns = (
        *("point", "source", "ms per example", "plain ms/batch", "wrapped ms/batch", "ratio", "lowest", "highest"),
        *("required", "passed"),
    )
    return Table("factor_one", text, columns, rows)


def _plain(case: str, dataset: Sleeping, batches: int) -> float:
    return seconds_per_batch(plain_loader(case, dataset), batches)


def _wrapped(case: str, dataset: Sleeping, batches: int) -> float:
    return seconds_per_batch(echoed_loader(case, dataset, 1), batches)
