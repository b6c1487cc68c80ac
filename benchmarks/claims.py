"""What the summary says about the speed-up of a run, against the same training at factor 1, in turn with it.

The truth is the ratio of the seconds per step of both, taken by a clock of this benchmark: from the end of an epoch's first step
to the end of its last one. Four runs in turn are a round. It counts if both at factor 1 are alike, and both that echo. Sources
sleep, as behind a network, or work, and so do augmentations. Some of the runs are fed by their factor, some are not, one has no
workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from report import Table, progress, verdict
from torch.utils.data import DataLoader
from trainer import SleepingModel, fit
from workloads import Busy, Sleeping

from lightning_echo import EchoCallback, EchoLoader

_BATCH_SIZE, _EPOCHS, _REQUIRED = 16, 2, 0.9
_ALIKE, _MOST_LEFT_OUT = 1.15, 12


class _Setting(NamedTuple):
    """A pipeline; milliseconds per batch of one worker."""

    point: str
    factor: float
    workers: int
    read: float
    augment: float
    step: float
    works: bool = False


_SETTINGS = (
    _Setting("before_augmentation", 2, 2, read=24, augment=0, step=8),
    _Setting("before_augmentation", 4, 1, read=24, augment=3, step=8),
    _Setting("before_augmentation", 8, 2, read=32, augment=8, step=6),
    _Setting("after_augmentation", 3, 2, read=16, augment=16, step=6),
    _Setting("after_augmentation", 1.3, 1, read=24, augment=0, step=8),
    _Setting("after_batching", 4, 2, read=40, augment=0, step=8),
    _Setting("before_augmentation", 4, 1, read=24, augment=3, step=8, works=True),
    _Setting("after_augmentation", 2, 2, read=16, augment=8, step=8, works=True),
    _Setting("after_batching", 4, 2, read=16, augment=4, step=6, works=True),
    _Setting("before_augmentation", 2, 0, read=12, augment=4, step=8),
)


class _Source(Sleeping):
    """Reads and augments, asleep or at work."""

    def __init__(self, read: Callable[[], Any], augment: Callable[[], Any], length: int) -> None:
        super().__init__(0.0, length)
        self._read, self._augment = read, augment

    def read(self, index: Any) -> Any:
        self._read()
        return index

    def augment(self, example: Any) -> Any:
        self._augment()
        return example


def claims(quick: bool) -> Table:
    steps, rounds = (120, 1) if quick else (300, 2)
    rows, covered, runs = [], 0, 0
    for setting in _SETTINGS:
        progress(f"speed-up claimed, {setting.point}, factor {setting.factor:g}, {setting.workers} workers")
        found, left_out = _measure(setting, steps, rounds)
        known = [(said, each.truth) for each in found if (said := each.said) is not None]
        right = sum(low <= truth <= high for (low, high), truth in known)
        covered, runs = covered + right, runs + 2 * rounds
        rows.append(
            (
                *(setting.point, setting.factor, setting.workers, "works" if setting.works else "sleeps"),
                *(_middle([each.plain * 1e3 for each in found]), _middle([each.echoed * 1e3 for each in found])),
                *(_middle([truth for _, truth in known]), *(_middle([said[end] for said, _ in known]) for end in (0, 1))),
                *(2 * rounds, right, left_out, ""),
            )
        )
    share = covered / runs
    rows.append(("all", None, None, "", *[None] * 5, runs, covered, None, verdict(share >= _REQUIRED)))
    text = (
        f"batch {_BATCH_SIZE}, {_EPOCHS} epochs of {steps // _EPOCHS} steps; truth: mean of both runs at factor 1 of a round, "
        f"over the echoed one; medians; left out: rounds with such runs more than {_ALIKE:g} times apart; required: "
        f"{_REQUIRED:.0%} of all runs claim an interval that has the truth"
    )
    columns = (
        *("point", "e", "workers", "source", "plain ms", "echoed ms", "truth", "said from", "said to"),
        *("runs", "covered", "left out", "passed"),
    )
    return Table("claims", text, columns, rows)


class _Found(NamedTuple):
    """A run: its claim, its seconds per step, and those of factor 1 around it."""

    said: tuple[float, float] | None
    echoed: float
    plain: float

    @property
    def truth(self) -> float:
        return self.plain / self.echoed


def _measure(setting: _Setting, steps: int, rounds: int) -> tuple[list[_Found], int]:
    """Returns the runs of rounds that count, and how many rounds do not: then something else took the machine."""
    example = [_work_of(seconds / 1e3 / _BATCH_SIZE, works=setting.works) for seconds in (setting.read, setting.augment)]
    run = partial(_run, setting, _Source(*example, steps // _EPOCHS * _BATCH_SIZE), steps)
    found, left_out = list[_Found](), 0
    while len(found) < 2 * rounds and left_out < _MOST_LEFT_OUT:
        plain, echoed = zip(*((run(1.0)[1], run(setting.factor)) for _ in range(2)), strict=True)
        if all(max(each) <= _ALIKE * min(each) for each in (plain, [seconds for _, seconds in echoed])):
            found += [_Found(said, seconds, statistics.mean(plain)) for said, seconds in echoed]
        else:
            left_out += 1
    return found, left_out


def _middle(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


class _StepEnds(pl.Callback):
    """Seconds between the steps of an epoch, and how many they were."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self._last: float | None = None

    def on_train_epoch_start(self, *args: Any) -> None:
        self._last = None

    def on_train_batch_end(self, *args: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds, self.steps = self.seconds + now - self._last, self.steps + 1
        self._last = now


def _run(setting: _Setting, dataset: _Source, steps: int, factor: float) -> tuple[tuple[float, float] | None, float]:
    loader = DataLoader(dataset, _BATCH_SIZE, num_workers=setting.workers)
    echoed = EchoLoader(loader, factor, insertion_point=setting.point, seed=0)
    callback, ends = EchoCallback(summary=False), _StepEnds()
    fit(SleepingModel(setting.step / 1e3), echoed, [callback, ends], max_epochs=_EPOCHS)
    echoed.close()
    return callback.reports[-1].speedup, ends.seconds / ends.steps


def _work_of(seconds: float, *, works: bool) -> Callable[[], Any]:
    if not seconds:
        return _nothing
    return partial(Busy(seconds).read, 0) if works else partial(time.sleep, seconds)


def _nothing() -> None:
    pass
