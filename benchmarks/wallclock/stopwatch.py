"""Notes when a run was evaluated, by the clock of a run: from the request of the first batch, evaluations taken out."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

import lightning.pytorch as pl
from learning.reuse.run import StepEvaluator
from learning.reuse.studies import Study
from lightning.pytorch.profilers import Profiler
from timing import Stopwatch

from lightning_echo import EchoCallback
from wallclock.source import Source

__all__ = ["LATE_STEP", "TimedEvaluator", "WaitProfiler"]

_FETCH = ".train_dataloader_next"  # as Lightning calls the action
LATE_STEP = 20  # from then on a training must not wait more than one that is never starved


class WaitProfiler(Profiler):
    """Notes how long the training waited for each batch: a measure of its own, beside that of `EchoCallback`.

    Attributes:
        waits: Seconds, of each batch.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._clock = clock
        self._begin = 0.0
        self.waits: list[float] = []

    def start(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self._begin = self._clock()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(_FETCH):
            self.waits.append(self._clock() - self._begin)

    def late_seconds(self, steps: int) -> float:
        """Waiting for the batches of the steps from `LATE_STEP` up to and with ``steps``."""
        return sum(self.waits[LATE_STEP:steps])


class TimedEvaluator(StepEvaluator):
    """Notes the time of each evaluation; nothing goes on while it evaluates.

    Args:
        study: Task, spacing and end.
        evaluate: The metric of a model.
        source: Stands still during an evaluation.
        echo: Is told of an evaluation as of a validation, which it does not count.
        watch: The clock.

    Attributes:
        seconds: At each evaluation.
        first_batch_seconds: From the first request until the first batch is there: workers start, and read a batch.
        late_since_seconds: When step `LATE_STEP` had ended.
    """

    def __init__(
        self,
        study: Study,
        evaluate: Callable[[object], float],
        source: Source,
        echo: EchoCallback,
        watch: Stopwatch | None = None,
    ) -> None:
        super().__init__(study, evaluate)
        self._source, self._echo = source, echo
        self.watch = Stopwatch() if watch is None else watch
        self.seconds: list[float] = []
        self.first_batch_seconds: float | None = None
        self.late_since_seconds: float | None = None
        self._step = 0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.watch.is_started:  # an EchoLoader starts its workers when the first batch is asked for, which comes next
            self._source.begin()
            self.watch.start()

    def on_train_batch_start(self, *args: object) -> None:
        if self.first_batch_seconds is None:
            self.first_batch_seconds = self.watch.seconds

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: object) -> None:
        self._step += 1
        if self._step == LATE_STEP:
            self.late_since_seconds = self.watch.seconds
        super().on_train_batch_end(trainer, pl_module, *args)

    def evaluated(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        self.seconds.append(self.watch.seconds)
        with ExitStack() as stack:
            stack.enter_context(self.watch.standing_still())
            stack.enter_context(self._source.standing_still())
            self._echo.on_validation_start(trainer, pl_module)
            value = super().evaluated(trainer, pl_module)
            self._echo.on_validation_end(trainer, pl_module)
        return value
