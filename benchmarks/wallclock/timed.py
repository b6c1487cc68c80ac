"""One run, timed: the learning experiments' Trainer behind a slow source."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import lightning.pytorch as pl
from learning.arms import Arm
from learning.rules import reached_at
from learning.run import ENDLESS, echoed
from learning.task import Task
from trainer import be_quiet, quiet_trainer

from lightning_echo import EchoCallback, TargetIdle
from lightning_echo.measuring.report import EpochReport
from wallclock.device import DeviceModule
from wallclock.plans import Plan
from wallclock.source import SlowSource
from wallclock.stages import EPOCH_STEPS, LARGEST_FACTOR, Stage
from wallclock.stopwatch import Stopwatch, TimedEvaluator

__all__ = ["TimedRow", "factor_changes", "timed_run"]


@dataclass(frozen=True)
class TimedRow:
    """One run.

    Attributes:
        task: Its name.
        ratio: R as wanted; 0: the source is not slowed.
        arm: Its name.
        factor: Echo factor at the start.
        point: Insertion point.
        rate: Learning rate.
        rate_from: Where that comes from.
        seed: Of split, weights, order and augmentation.
        seconds_to_target: From the first batch's request, evaluations taken out; infinite if the target was missed.
        fresh_to_target: Fresh examples until then.
        steps_to_target: Optimizer steps until then.
        first_batch_seconds: Start of the workers and wait for the first batch; part of the time.
        evaluation_seconds: Taken out of the time, in the whole run.
        evaluations: How many.
        seconds: Of the whole run, evaluations taken out.
        fresh: In the whole run.
        steps: In the whole run.
        last: The last metric.
        idle: Idle fraction by `EchoCallback` of all epochs but the first, mean over the steps; nan where there are none.
        factors: In force, as epoch:factor where it changed.
        load: Load average of the machine when the run began.
    """

    task: str
    ratio: float
    arm: str
    factor: float
    point: str
    rate: float
    rate_from: str
    seed: int
    seconds_to_target: float
    fresh_to_target: float
    steps_to_target: float
    first_batch_seconds: float
    evaluation_seconds: float
    evaluations: int
    seconds: float
    fresh: int
    steps: int
    last: float
    idle: float
    factors: str
    load: float

    @property
    def plan(self) -> Plan:
        """The run that it is."""
        return Plan(self.task, self.ratio, self.arm, self.factor, self.point, self.rate, self.rate_from, self.seed)


def timed_run(task: Task, plan: Plan, stage: Stage, watch: Stopwatch | None = None) -> TimedRow:
    """Trains until the target is reached or the budget is used.

    Args:
        task: What is trained.
        plan: How.
        stage: Behind which source.
        watch: The clock; None: a new one.
    """
    load = os.getloadavg()[0]
    be_quiet()
    pl.seed_everything(plan.seed, verbose=False)
    module = DeviceModule(task, plan.rate)  # first of all: the same weights in each arm
    split = task.make_split(plan.seed)
    source = SlowSource(stage.delay_seconds)
    split.train.before_read = source if plan.ratio else None  # type: ignore[attr-defined]
    arm = Arm(plan.factor, plan.point, buffer="default")  # type: ignore[arg-type]
    echo = EchoCallback(TargetIdle(max_factor=LARGEST_FACTOR) if plan.is_controlled else None, summary=False)
    evaluator = TimedEvaluator(task, arm, split.evaluate, source, echo, watch)
    # first the callback that measures steps: an evaluation is no part of them
    trainer = quiet_trainer([echo, evaluator], **ENDLESS, limit_train_batches=EPOCH_STEPS)
    trainer.fit(module, datamodule=echoed(task, arm, split, plan.seed, num_workers=stage.workers))
    return _row(task, plan, evaluator, echo.reports, load)


def factor_changes(reports: Sequence[EpochReport]) -> str:
    """Where the factor changed, as ``epoch:factor``.

    Example:
        >>> reports = [EpochReport(epoch, 16, factor, 0, 0) for epoch, factor in enumerate([1, 4.3, 4.3, 4.1])]
        >>> factor_changes(reports)
        '0:1 1:4.3 3:4.1'
    """
    epochs = [list(same) for _, same in groupby(reports, key=lambda report: report.factor)]
    return " ".join(f"{same[0].epoch}:{same[0].factor:g}" for same in epochs)


def _row(task: Task, plan: Plan, evaluator: TimedEvaluator, reports: Sequence[EpochReport], load: float) -> TimedRow:
    reached, end = reached_at(task, evaluator.evaluations), evaluator.evaluations[-1]
    seconds = math.inf if reached is None else evaluator.seconds[evaluator.evaluations.index(reached)]
    later = [(report.steps, report.idle_fraction) for report in reports[1:] if report.idle_fraction is not None]
    steps = sum(count for count, _ in later)
    return TimedRow(
        **vars(plan),
        seconds_to_target=round(seconds, 4),
        fresh_to_target=math.inf if reached is None else reached.fresh,
        steps_to_target=math.inf if reached is None else reached.steps,
        first_batch_seconds=round(evaluator.first_batch_seconds or 0.0, 4),
        evaluation_seconds=round(evaluator.watch.stood_seconds, 4),
        evaluations=len(evaluator.evaluations),
        seconds=round(evaluator.seconds[-1], 4),
        fresh=end.fresh,
        steps=end.steps,
        last=round(end.value, 4),
        idle=round(sum(count * idle for count, idle in later) / steps, 4) if steps else math.nan,
        factors=factor_changes(reports),
        load=round(load, 2),
    )
