"""What the summary says about the speed-up of a run, against the same training at factor 1, in turn with it.

The truth is the ratio of the seconds per step of both, taken by a clock of this benchmark: from the end of an epoch's first step
to the end of its last one. Sources sleep, as behind a network, or work, and so do augmentations. Some of the runs are fed by
their factor, some are not, one has no workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from report import Table, progress, verdict
from timing import alternate
from torch.utils.data import DataLoader
from trainer import SleepingModel, fit
from workloads import Busy, Sleeping, sleep_for

from lightning_echo import EchoCallback, EchoLoader

_BATCH_SIZE, _EPOCHS, _REQUIRED = 16, 2, 0.9


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
    """Reads and augments for so many seconds, asleep or at work."""

    def __init__(self, read: float, augment: float, length: int, *, works: bool) -> None:
        super().__init__(0.0, length)
        self._read, self._augment = (_working(seconds) if works else _sleeping(seconds) for seconds in (read, augment))

    def read(self, index: Any) -> Any:
        self._read()
        return index

    def augment(self, example: Any) -> Any:
        self._augment()
        return example


def speedup_claims(quick: bool) -> Table:
    steps, rounds = (120, 3) if quick else (300, 5)
    rows, covered, claims = [], 0, 0
    for setting in _SETTINGS:
        progress(f"speed-up claimed, {setting.point}, factor {setting.factor:g}, {setting.workers} workers")
        said: list[tuple[float, float] | None] = []
        echoed = partial(_run, setting, setting.factor, steps, said.append)
        times = alternate({"plain": partial(_run, setting, 1.0, steps), "echoed": echoed}, rounds)
        ratios = [plain / mine for plain, mine in zip(times["plain"], times["echoed"], strict=True)]
        plain = statistics.median(times["plain"])
        truths = [plain / mine for mine in times["echoed"]]
        known = [(claim, truth) for claim, truth in zip(said, truths, strict=True) if claim is not None]
        right = sum(low <= truth <= high for (low, high), truth in known)
        covered, claims = covered + right, claims + len(known)
        ends = [statistics.median(claim[end] for claim, _ in known) if known else None for end in (0, 1)]
        rows.append(
            (
                *(setting.point, setting.factor, setting.workers, "works" if setting.works else "sleeps"),
                *(plain * 1e3, statistics.median(times["echoed"]) * 1e3, statistics.median(truths), min(ratios), max(ratios)),
                *(*ends, len(known), right, ""),
            )
        )
    share = covered / claims if claims else 0.0
    is_met = share >= _REQUIRED and claims == rounds * len(_SETTINGS)
    rows.append(("all", None, None, "", None, None, None, None, None, None, None, claims, covered, verdict(is_met)))
    text = (
        f"batch {_BATCH_SIZE}, {_EPOCHS} epochs of {steps // _EPOCHS} steps, {rounds} rounds; covered: claims whose interval has "
        f"the median of factor 1 over this run; required: {_REQUIRED:.0%} of all claims, and a claim from every run"
    )
    columns = (
        *("point", "e", "workers", "source", "plain ms", "echoed ms", "truth", "lowest", "highest"),
        *("said from", "said to", "claims", "covered", "passed"),
    )
    return Table("speedup_claims", text, columns, rows)


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


def _run(setting: _Setting, factor: float, steps: int, claim: Callable[[tuple[float, float] | None], None] | None = None) -> float:
    per_example = [seconds / 1e3 / _BATCH_SIZE for seconds in (setting.read, setting.augment)]
    dataset = _Source(*per_example, steps // _EPOCHS * _BATCH_SIZE, works=setting.works)
    loader = DataLoader(dataset, _BATCH_SIZE, num_workers=setting.workers)
    echoed = EchoLoader(loader, factor, insertion_point=setting.point, seed=0)
    callback, ends = EchoCallback(summary=False), _StepEnds()
    fit(SleepingModel(sleep_for(setting.step / 1e3)), echoed, [callback, ends], max_epochs=_EPOCHS)
    echoed.close()
    if claim is not None:
        claim(callback.reports[-1].speedup)
    return ends.seconds / ends.steps


def _sleeping(seconds: float) -> Callable[[], None]:
    asleep = sleep_for(seconds) if seconds else 0.0
    return partial(time.sleep, asleep) if asleep else _nothing


def _working(seconds: float) -> Callable[[], Any]:
    return partial(Busy(seconds).read, 0) if seconds else _nothing


def _nothing() -> None:
    pass
