"""What `TargetIdle` finds from factor 1 on, against the smallest constant factor that is measured to be enough."""

from __future__ import annotations

from itertools import pairwise

from report import Table, progress, verdict
from timing import WARM_UP_BATCHES
from trainer import SleepingModel, fit
from workloads import BATCH_SIZE, WORKERS, Sleeping, loader, sleep_for

from lightning_echo import EchoCallback, EchoLoader, InsertionPoint, TargetIdle

_POINTS = (InsertionPoint.before_augmentation, InsertionPoint.after_augmentation, InsertionPoint.after_batching)
_TARGET, _STEP_SECONDS, _MAX_FACTOR = 0.05, 0.008, 8.0


def target_idle(quick: bool) -> Table:
    steps = 100 if quick else 250
    rows = []
    for ratio in (1.5, 3.0, 6.0):
        for point in _POINTS:
            progress(f"TargetIdle, R = {ratio:g}, {point.value}")
            reports = _run(ratio, point, 1, steps, epochs=4, controlled=True)
            factors = [report.factor for report in reports]
            idle = [report.idle_fraction for report in reports]
            ideal = _ideal(ratio, point, steps)
            found, left = factors[-1], idle[-1]
            decisions = sum(before != after for before, after in pairwise(factors))
            passed = left is not None and left < _TARGET and abs(found / ideal - 1) <= 0.1 and decisions <= 2
            shares = (idle[0] or 0.0, left or 0.0)
            rows.append((ratio, point.value, found, decisions, *shares, ideal, found / ideal, verdict(passed)))
    text = (
        f"step {_STEP_SECONDS * 1e3:g} ms, batch {BATCH_SIZE}, {WORKERS} workers, target {_TARGET:g}, "
        f"max_factor {_MAX_FACTOR:g}, 4 epochs of {steps} steps; ideal: smallest of a 4% grid with idle under target"
    )
    columns = ("R", "point", "factor", "decisions", "idle at 1", "idle at the end", "ideal", "factor / ideal", "passed")
    return Table("target_idle", text, columns, rows)


def _ideal(ratio: float, point: InsertionPoint, steps: int) -> float:
    factor = 0.8 * ratio
    while (idle := _run(ratio, point, factor, steps, epochs=2)[-1].idle_fraction) is None or idle >= _TARGET:
        factor *= 1.04
    return factor


def _run(ratio: float, point: InsertionPoint, factor: float, steps: int, epochs: int, *, controlled: bool = False) -> list:
    per_example = sleep_for(ratio * _STEP_SECONDS * WORKERS / BATCH_SIZE)
    dataset = Sleeping(per_example, length=max(steps, WARM_UP_BATCHES) * BATCH_SIZE)
    echoed = EchoLoader(loader(dataset), max(factor, 1.0), insertion_point=point, seed=0)
    callback = EchoCallback(TargetIdle(_TARGET, max_factor=_MAX_FACTOR) if controlled else None, summary=False)
    fit(SleepingModel(sleep_for(_STEP_SECONDS)), echoed, [callback], max_epochs=epochs)
    return callback.reports
