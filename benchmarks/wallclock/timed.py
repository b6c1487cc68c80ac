"""One run, timed: the Trainer of the study of reuse behind a slow source, with the package's default settings."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import lightning.pytorch as pl
from learning.reuse.clock import pack_counts, unpack_counts
from learning.reuse.studies import Study
from learning.rules import reached_at
from learning.run import ENDLESS, Module
from timing import Stopwatch
from torch.utils.data import DataLoader
from trainer import be_quiet, quiet_trainer

from lightning_echo import EchoCallback, EchoDataModule, TargetIdle
from lightning_echo.measure.summary import EpochReport
from wallclock.plans import STEADY, TARGET_IDLE, Plan
from wallclock.stages import Stage, behind, make_source
from wallclock.stopwatch import TimedEvaluator, WaitProfiler

__all__ = ["TimedRow", "factor_changes", "timed_run"]


@dataclass(frozen=True)
class TimedRow:
    """One run.

    Attributes:
        task: Its name.
        ratio: R as wanted.
        arm: Its name.
        factor: Echo factor at the start.
        rate: Learning rate.
        seed: Of split, weights, order and augmentation.
        wanted_steps: Steps after which it was to end; 0: at the target.
        is_reached: Whether the target was reached.
        seconds: From the first batch's request to the end, evaluations taken out.
        steps: Optimizer steps until then.
        fresh: Fresh examples of each batch, as `pack_counts` says them.
        first_batch_seconds: Start of the workers and wait for the first batch; part of the time.
        idle_seconds: Waiting for later batches, by `EchoCallback`.
        evaluation_seconds: Taken out of the time.
        last_factor: In force at the end; on demand the mean so far.
        factors: In force, as epoch:factor where it changed.
        buffer_size: Live examples.
        load: Load average of the machine when the run began.
        source: One of `SOURCES`.
        late_idle: Waiting for batches from step `LATE_STEP` on, as a share of the time since then.
    """

    task: str
    ratio: int
    arm: str
    factor: float
    rate: float
    seed: int
    wanted_steps: int
    is_reached: bool
    seconds: float
    steps: int
    fresh: str
    first_batch_seconds: float
    idle_seconds: float
    evaluation_seconds: float
    last_factor: float
    factors: str
    buffer_size: int
    load: float
    source: str = STEADY
    late_idle: float = math.nan

    @property
    def plan(self) -> Plan:
        """The run that it is."""
        return Plan(self.task, self.ratio, self.arm, self.factor, self.rate, self.seed, self.wanted_steps, self.source)

    @cached_property
    def fresh_counts(self) -> list[int]:
        """Fresh examples of each batch."""
        return unpack_counts(self.fresh)


def timed_run(study: Study, plan: Plan, stage: Stage, watch: Stopwatch | None = None) -> TimedRow:
    """Trains to the target, or as many steps as the plan says.

    Args:
        study: What is trained, and how often it is evaluated.
        plan: How.
        stage: Behind which source.
        watch: The clock; None: a new one.
    """
    load = os.getloadavg()[0]
    be_quiet()
    pl.seed_everything(plan.seed, verbose=False)
    module = Module(study.task, plan.rate)  # first of all: the same weights in each arm
    split = study.task.make_split(plan.seed)
    source = make_source(stage, plan.seed)
    data = behind(source, split.train)
    loader = DataLoader(
        data, study.task.batch_size, shuffle=True, drop_last=True, num_workers=stage.workers, collate_fn=split.collate
    )
    echo = EchoCallback(TargetIdle() if plan.arm == TARGET_IDLE else None, summary=False)
    evaluator = TimedEvaluator(_until(study, plan), split.evaluate, source, echo, watch)
    # first the callback that measures steps: an evaluation is no part of them
    profiler = WaitProfiler()
    trainer = quiet_trainer([echo, evaluator], **ENDLESS, profiler=profiler)
    trainer.fit(module, datamodule=EchoDataModule.from_dataloaders(loader, **plan.options, seed=plan.seed))
    buffer_size = trainer.datamodule.loader.buffer_size  # type: ignore[attr-defined]
    return _row(study, plan, evaluator, profiler, echo.reports, buffer_size, load)


def factor_changes(reports: Sequence[EpochReport]) -> str:
    """Where the factor changed, as ``epoch:factor``.

    Example:
        >>> reports = [EpochReport(epoch, 16, factor, 0, 0) for epoch, factor in enumerate([1, 4.3, 4.3, 4.1])]
        >>> factor_changes(reports)
        '0:1 1:4.3 3:4.1'
    """
    epochs = [list(same) for _, same in groupby(reports, key=lambda report: report.factor)]
    return " ".join(f"{same[0].epoch}:{same[0].factor:g}" for same in epochs)


def _until(study: Study, plan: Plan) -> Study:
    """The study with the end that a plan asks for."""
    if not plan.steps:
        return study
    never = float("inf") if study.task.is_higher_better else -float("inf")
    return replace(study, task=replace(study.task, target=never), most_steps=plan.steps)


def _row(
    study: Study,
    plan: Plan,
    evaluator: TimedEvaluator,
    profiler: WaitProfiler,
    reports: Sequence[EpochReport],
    buffer_size: int,
    load: float,
) -> TimedRow:
    run, since = evaluator.run, evaluator.late_since_seconds
    steps = run.evaluations[-1].steps
    late_idle = math.nan if since is None else profiler.late_seconds(steps) / (evaluator.seconds[-1] - since)
    waits = [(report.data_wait_seconds or 0.0) * report.steps for report in reports]
    return TimedRow(
        task=plan.task,
        ratio=plan.ratio,
        arm=plan.arm,
        factor=plan.factor,
        rate=plan.rate,
        seed=plan.seed,
        wanted_steps=plan.steps,
        is_reached=reached_at(study.task, run.evaluations) is not None,
        seconds=round(evaluator.seconds[-1], 4),
        steps=steps,
        fresh=pack_counts(run.fresh),
        first_batch_seconds=round(evaluator.first_batch_seconds or 0.0, 4),
        idle_seconds=round(sum(waits), 4),
        evaluation_seconds=round(evaluator.watch.stood_seconds, 4),
        last_factor=reports[-1].factor,
        factors=factor_changes(reports),
        buffer_size=buffer_size,
        load=round(load, 2),
        source=plan.source,
        late_idle=round(late_idle, 5),
    )
