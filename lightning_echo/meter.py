"""`RunMeter`: what a training measures, epoch by epoch, joined over ranks.

Between Lightning's hooks and the clocks and metrics of ``measuring/``: it is told of steps, and says at an epoch's end what they
came to. Ranks exchange a few numbers then, and the counts where they are logged; a step exchanges nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_echo.echoing.batches import count_examples
from lightning_echo.echoing.insertion import InsertionPoint
from lightning_echo.echoing.loader import EchoLoader
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.measuring.metrics import EchoCounter, IdleFraction, JobSteps
from lightning_echo.measuring.timing import DeviceEvent, StepTimer
from lightning_echo.profiler_tap import ProfilerTap

__all__ = ["EpochMeasures", "RunMeter"]

FEWEST_STEPS = 4  # fewer say nothing about a factor
_LEAST_IDLE = 0.01  # less says nothing about a source that cannot be looked into


@dataclass(frozen=True)
class EpochMeasures:
    """One epoch of the job.

    Attributes:
        whole: All its steps; None where nothing was seen of the fetching.
        judged: Those planned with the factor in force; None if there are too few.
        costs: Of the slowest rank's pipeline; None if it cannot be looked into and does not wait.
        first_batch_seconds: Wait for the first batch, of the rank that waited longest.
        fresh: Fresh examples in the epoch, all ranks.
        echoed: Echoed examples in the epoch, all ranks.
    """

    whole: JobSteps | None
    judged: JobSteps | None
    costs: PipelineCosts | None
    first_batch_seconds: float | None
    fresh: int
    echoed: int


class RunMeter:
    """Measures one ``fit``.

    Attributes:
        timer: The clocks of the steps.
        idle: Waits of the epoch's steps, in the job.
        counter: Examples delivered in the run.
        totals: Fresh and echoed examples of the job when they were last added up.
        world_size: Number of ranks.
    """

    def __init__(self) -> None:
        self.timer = StepTimer()
        self.idle, self.counter = IdleFraction(), EchoCounter()
        self.totals = (0, 0)
        self._at_totals = (0, 0)  # what the metric had counted on this rank then
        self._at_epoch_start: tuple[int, int] | None = None  # the totals then
        self._local = (0, 0)  # examples delivered on this rank
        self._counted = (0, 0)  # those of them that the metric knows of
        self._stages: tuple[float, float, float] | None = None  # seconds per batch, when last measured
        self._tap: ProfilerTap | None = None
        self.world_size = 1

    @property
    def is_in_epoch(self) -> bool:
        """Whether steps were measured of an epoch that has not ended."""
        return self.idle.per_step.shape[-1] > 0

    # ------------------------------------------------------------------ told by hooks

    def start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: EchoLoader | None) -> None:
        """The training begins, or goes on."""
        device = pl_module.device
        self._pl_module, self.world_size = pl_module, trainer.world_size
        self.idle.to(device)
        self.counter.to(device)
        if not trainer.is_global_zero:  # a checkpoint holds the job's totals: they count once
            self.counter.reset()
        if device.type == "cuda":
            self.timer = StepTimer(_timing_event)
        self._tap = ProfilerTap(trainer.profiler, self.timer)  # type: ignore[attr-defined]  # Trainer sets it outside __init__
        # What prepares batches by other means than workers may do so during the steps.
        self._workers = getattr(trainer.train_dataloader, "num_workers", 1) if loader is None else 1
        self._workers_run_at = 0 if loader is None else loader.delivered + loader.num_workers
        if self._at_epoch_start is None:
            self._at_epoch_start = self.count(loader)
        else:  # what the loader has delivered so far is in the checkpoint's totals
            self._local = self._counted = self._delivered(loader)
            self._at_totals = self._metric_counts()
        self.begin_epoch(loader)

    def begin_epoch(self, loader: EchoLoader | None) -> None:
        """An epoch begins, or goes on after a resume; with a loader that a reload has made anew and that counts from 0."""
        self.timer.begin_epoch()
        self._counted = self._delivered(loader)
        self._mark(loader)

    def begin_step(self) -> None:
        """A batch is there; what follows uses it."""
        self.timer.begin_step()

    def end_step(self, loader: EchoLoader | None, batch: Any) -> None:
        """The step is over; a model that takes ``dataloader_iter`` has fetched its batch only now."""
        self.timer.end_step()
        if loader is None and batch is not None:
            self._local = (self._local[0] + count_examples(batch), 0)
        if loader is not None and loader.delivered == self._workers_run_at:
            self._mark(loader)  # the workers' first batches include their start

    def stop(self) -> None:
        """The training is over; may be called at any time."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None

    # ------------------------------------------------------------------ joined over ranks: all of them must call these together

    def count(self, loader: EchoLoader | None) -> tuple[int, int]:
        """Fresh and echoed examples of the run so far, all ranks."""
        self._count_local(loader)
        counts = self.counter.compute()
        self.totals = (int(counts["fresh_examples"]), int(counts["echoed_examples"]))
        self._at_totals = self._metric_counts()
        return self.totals

    def end_epoch(self, loader: EchoLoader | None) -> EpochMeasures:
        """What the epoch came to."""
        self.timer.settle()
        self.idle.update(*self.timer.take())
        before, (fresh, echoed) = self._at_epoch_start or (0, 0), self.count(loader)
        self._at_epoch_start = self.totals
        with self.idle.sync_context():
            whole = self.idle.steps()
            judged = None if whole is None else self.idle.steps(self._first_judged(loader, whole.steps))
        self.idle.reset()
        if judged is not None and judged.steps < FEWEST_STEPS:
            judged = None
        stages = self._stages_per_batch(loader)
        first = self.timer.first_batch_seconds
        gathered = self._gather([*stages, math.nan if first is None else first])
        longest = gathered[:, 3].nan_to_num(-1).max().item()
        costs = self._costs(gathered[:, :3], loader, judged or whole)
        return EpochMeasures(whole, judged, costs, longest if longest >= 0 else None, fresh - before[0], echoed - before[1])

    # ------------------------------------------------------------------ state

    def state_dict(self, loader: EchoLoader | None) -> dict[str, Any]:
        """Plain types and tensors. What other ranks have counted since it was added up is taken to be what this one has."""
        self._count_local(loader)
        self.idle.update(*self.timer.take())
        since = [now - then for now, then in zip(self._metric_counts(), self._at_totals, strict=True)]
        return {
            "counts": [total + self.world_size * added for total, added in zip(self.totals, since, strict=True)],
            "at_epoch_start": list(self._at_epoch_start or self.totals),
            "per_step": self.idle.per_step.cpu(),
            "stages": self._stages,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before `start`."""
        fresh, echoed = state["counts"]
        self.counter.reset()
        self.idle.reset()
        self.counter.update(fresh, echoed)
        self.totals = (fresh, echoed)
        self._at_epoch_start = (state["at_epoch_start"][0], state["at_epoch_start"][1])
        self.idle.update(*state["per_step"])
        self._stages = state["stages"]

    # ------------------------------------------------------------------ inside

    def _metric_counts(self) -> tuple[int, int]:
        fresh, echoed = self.counter.counts.tolist()
        return fresh, echoed

    def _delivered(self, loader: EchoLoader | None) -> tuple[int, int]:
        return self._local if loader is None else (loader.counts.fresh, loader.counts.echoed)

    def _mark(self, loader: EchoLoader | None) -> None:
        """What workers have spent up to here does not count."""
        if loader is not None:
            self._seconds_before, self._delivered_before = loader.seconds, (loader.counts.delivered, loader.delivered)

    def _count_local(self, loader: EchoLoader | None) -> None:
        """Hands the examples delivered since the last time on to the metric."""
        self._local, before = self._delivered(loader), self._counted
        self.counter.update(self._local[0] - before[0], self._local[1] - before[1])
        self._counted = self._local

    def _first_judged(self, loader: EchoLoader | None, steps: int) -> int:
        """The first of the epoch's steps that shows the factor in force, and came from workers that run."""
        if loader is None:
            return 0
        return max(0, steps - (loader.delivered - max(loader.settled_at, self._workers_run_at)))

    def _stages_per_batch(self, loader: EchoLoader | None) -> tuple[float, float, float]:
        """Worker seconds of source, rest and collate per batch of fresh examples; NaN where they are not known."""
        if loader is not None:
            spent = loader.seconds - self._seconds_before
            examples, batches = loader.counts.delivered - self._delivered_before[0], loader.delivered - self._delivered_before[1]
            if spent.examples and spent.batches:
                size = examples / batches
                self._stages = (spent.source / spent.examples * size, spent.rest / spent.batches, spent.collate / spent.batches)
        return self._stages or (math.nan, math.nan, math.nan)

    def _gather(self, values: list[float]) -> Tensor:
        """Of every rank, shape (ranks, values)."""
        tensor = torch.tensor(values, dtype=torch.float32, device=self._pl_module.device)
        gathered = self._pl_module.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered.reshape(-1, len(values)).cpu()

    def _costs(self, stages: Tensor, loader: EchoLoader | None, steps: JobSteps | None) -> PipelineCosts | None:
        if steps is None:
            return None
        factor = 1.0 if loader is None else loader.factor
        known = stages[~stages.isnan().any(dim=1)].tolist()
        if loader is not None and known:
            point: InsertionPoint = loader.insertion_point
            device, workers = steps.step_seconds, loader.num_workers
            of_ranks = [PipelineCosts(point.value, source, rest, collate, device, workers) for source, rest, collate in known]
            return max(of_ranks, key=lambda costs: costs.host_seconds(factor))
        if steps.idle_fraction < _LEAST_IDLE:
            return None
        return PipelineCosts.of_waiting(steps.wait_seconds + steps.step_seconds, steps.idle_fraction, factor, self._workers)


def _timing_event() -> DeviceEvent:
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
