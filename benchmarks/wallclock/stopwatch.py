"""Notes when a run was evaluated, by the clock of a run: from the request of the first batch, evaluations taken out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import lightning.pytorch as pl
from learning.reuse.run import StepEvaluator
from learning.reuse.studies import Study
from timing import Stopwatch

from lightning_echo import EchoCallback
from wallclock.source import SlowSource

__all__ = ["TimedEvaluator"]


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
    """

    def __init__(
        self,
        study: Study,
        evaluate: Callable[[object], float],
        source: SlowSource,
        echo: EchoCallback,
        watch: Stopwatch | None = None,
    ) -> None:
        super().__init__(study, evaluate)
        self._source, self._echo = source, echo
        self.watch = Stopwatch() if watch is None else watch
        self.seconds: list[float] = []
        self.first_batch_seconds: float | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.watch.is_started:  # an EchoLoader starts its workers when the first batch is asked for, which comes next
            self.watch.start()

    def on_train_batch_start(self, *args: object) -> None:
        if self.first_batch_seconds is None:
            self.first_batch_seconds = self.watch.seconds

    def evaluated(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> float:
        self.seconds.append(self.watch.seconds)
        with ExitStack() as stack:
            stack.enter_context(self.watch.standing_still())
            stack.enter_context(self._source.standing_still())
            self._echo.on_validation_start(trainer, pl_module)
            value = super().evaluated(trainer, pl_module)
            self._echo.on_validation_end(trainer, pl_module)
        return value
