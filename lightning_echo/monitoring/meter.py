"""`RunMeter`: what a training measures, epoch by epoch, joined over ranks.

Between Lightning's hooks and the clocks and metrics of ``measuring/``: it is told of steps, and says at an epoch's end what they
came to. Ranks exchange a few numbers then, and the counts where they are logged; a step exchanges nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_echo.fetching.batches import count_examples
from lightning_echo.loading.loader import EchoLoader
from lightning_echo.measuring.cost import PipelineCosts
from lightning_echo.measuring.metrics import IdleFraction, JobSteps
from lightning_echo.measuring.timing import DeviceEvent, StepTimer
from lightning_echo.monitoring.profiler_tap import ProfilerTap
from lightning_echo.monitoring.run_counts import RunCounts
from lightning_echo.monitoring.upstream import NOT_KNOWN, Stages, Upstream, costs_of
from lightning_echo.training.collection import Echoed, EchoLoaders, leaves_of, parts_at_leaves, parts_of

__all__ = ["EpochMeasures", "RunMeter"]

_LEAST_IDLE = 0.01  # less says nothing about a source that cannot be looked into


@dataclass(frozen=True)
class EpochMeasures:
    """One epoch of the job.

    Attributes:
        whole: All its steps; None where nothing was seen of the fetching.
        judged: Those planned with the factor in force; None if there are none.
        costs: Of the slowest rank's pipeline; None if it cannot be looked into and does not wait.
        first_batch_seconds: Wait for the first batch where workers had to start for it, of the rank that waited longest.
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
        counts: Examples delivered in the run.
        parts: The same of each of several loaders, by name.
        world_size: Number of ranks.
    """

    def __init__(self) -> None:
        self.timer = StepTimer()
        self.idle, self.counts = IdleFraction(), RunCounts()
        self.parts: dict[str, RunCounts] = {}
        self._at_epoch_start: tuple[int, int] | None = None  # the totals then
        self._local = (0, 0)  # examples of a loader that is not echoed, on this rank
        self._upstreams: dict[str, Upstream] = {}
        self._stages: dict[str, Stages] = {}  # from a checkpoint, until there are loaders
        self._tap: ProfilerTap | None = None
        self._has_stepped = False
        self.world_size = 1

    @property
    def is_in_epoch(self) -> bool:
        """Whether steps were measured of an epoch that has not ended."""
        return self.idle.per_step.shape[-1] > 0

    @property
    def totals(self) -> tuple[int, int]:
        """Fresh and echoed examples of the job when they were last added up."""
        return self.counts.totals

    # ------------------------------------------------------------------ told by hooks

    def start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loader: Echoed | None) -> None:
        """The training begins, or goes on."""
        device = pl_module.device
        self._pl_module, self.world_size = pl_module, trainer.world_size
        self.idle.to(device)
        self._add_parts(loader)
        for counts in self._all_counts():
            counts.counter.to(device)
            if not trainer.is_global_zero:  # a checkpoint holds the job's totals: they count once
                counts.counter.reset()
        if device.type == "cuda":
            self.timer = StepTimer(_timing_event)
        self._tap = ProfilerTap(trainer.profiler, self.timer)  # type: ignore[attr-defined]  # Trainer sets it outside __init__
        self._given = trainer.train_dataloader
        self._workers = None if loader is not None else _plain_workers(self._given)
        self._upstreams = {name: Upstream(part, self._stages.get(name)) for name, part in parts_of(loader).items()}
        if self._at_epoch_start is None:
            self._at_epoch_start = self.count(loader)
        else:  # what the loader has delivered so far is in the checkpoint's totals
            self.counts.go_on(self._delivered(loader))
            for name, part in self._named(loader).items():
                self.parts[name].go_on(self._delivered(part))
        self.begin_epoch(loader)

    def begin_epoch(self, loader: Echoed | None) -> None:
        """An epoch begins, or goes on after a resume; with a loader that a reload has made anew and that counts from 0.

        All ranks must call this together: where workers start on one of them, all wait. Workers that somebody ends within an
        epoch are waited for like any others.
        """
        starts = not self._has_stepped or self._starts_workers(loader)
        self.timer.begin_epoch(goes_on=not self._gather([float(starts)]).any())
        self.counts.skip_to(self._delivered(loader))
        self._add_parts(loader)
        for name, part in parts_of(loader).items():
            if name in self.parts:
                self.parts[name].skip_to(self._delivered(part))
            if name in self._upstreams:
                self._upstreams[name].begin_epoch(part)
            else:
                self._upstreams[name] = Upstream(part)

    def begin_step(self) -> None:
        """A batch is there; what follows uses it."""
        self.timer.begin_step()

    def end_step(self, loader: Echoed | None, batch: Any) -> None:
        """The step is over; a model that takes ``dataloader_iter`` has fetched its batch only now."""
        self.timer.end_step()
        self._has_stepped = True
        if loader is None and batch is not None:
            parts = parts_at_leaves(self._given, batch)
            self._local = (self._local[0] + sum(count_examples(part) for part in parts if part is not None), 0)
        for name, part in parts_of(loader).items():
            self._upstreams[name].end_step(part)

    def stop(self) -> None:
        """The training is over; may be called at any time."""
        if self._tap is not None:
            self._tap.close()
            self._tap = None

    # ------------------------------------------------------------------ joined over ranks: all of them must call these together

    def count(self, loader: Echoed | None) -> tuple[int, int]:
        """Fresh and echoed examples of the run so far, all ranks."""
        self._count_local(loader)
        for counts in self._all_counts():
            counts.add_up()
        return self.totals

    def of_parts(self, loader: Echoed | None, *, passes: bool = False) -> dict[str, float]:
        """To be logged of each of several loaders, as counted last; passes too, which take a little longer."""
        found: dict[str, float] = {}
        for name, part in self._named(loader).items():
            fresh, echoed = self.parts[name].totals
            found |= {f"echo/{name}/factor": part.factor_in_force, f"echo/{name}/fresh_examples": fresh}
            found[f"echo/{name}/echoed_examples"] = echoed
            if passes:
                found[f"echo/{name}/passes"] = part.passes
        return found

    def end_epoch(self, loader: Echoed | None) -> EpochMeasures:
        """What the epoch came to."""
        self.timer.settle()
        self.idle.update(*self.timer.take())
        before, (fresh, echoed) = self._at_epoch_start or (0, 0), self.count(loader)
        self._at_epoch_start = self.totals
        with self.idle.sync_context():
            whole = self.idle.steps()
            judged = None if whole is None else self.idle.steps(self._first_judged(loader, whole.steps))
        self.idle.reset()
        stages = {name: self._upstreams[name].measure(part) for name, part in parts_of(loader).items()}
        first = self.timer.first_batch_seconds
        values = list(chain.from_iterable(stages.values())) or NOT_KNOWN
        gathered = self._gather([*values, math.nan if first is None else first])
        longest = gathered[:, -1].nan_to_num(-1).max().item()
        of_ranks = {name: gathered[:, 3 * i : 3 * i + 3] for i, name in enumerate(stages)}
        costs = self._costs(of_ranks, loader, judged or whole)
        return EpochMeasures(whole, judged, costs, longest if longest >= 0 else None, fresh - before[0], echoed - before[1])

    # ------------------------------------------------------------------ state

    def state_dict(self, loader: Echoed | None) -> dict[str, Any]:
        """Plain types and tensors."""
        self._count_local(loader)
        self.idle.update(*self.timer.take())
        stages = {**self._stages, **{name: each.stages for name, each in self._upstreams.items() if each.stages is not None}}
        return {
            "counts": self.counts.state(self.world_size),
            "parts": {name: counts.state(self.world_size) for name, counts in self.parts.items()},
            "at_epoch_start": list(self._at_epoch_start or self.totals),
            "per_step": self.idle.per_step.cpu(),
            "stages": stages,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before `start`."""
        self.idle.reset()
        self.counts.load(state["counts"])
        self.parts = {name: RunCounts() for name in state.get("parts", {})}
        for name, counts in self.parts.items():
            counts.load(state["parts"][name])
        self._at_epoch_start = (state["at_epoch_start"][0], state["at_epoch_start"][1])
        self.idle.update(*state["per_step"])
        stages = state["stages"] or {}
        self._stages = stages if isinstance(stages, dict) else {"": stages}  # one loader's alone, before there were several

    # ------------------------------------------------------------------ inside

    def _add_parts(self, loader: Echoed | None) -> None:
        """Each of several loaders is counted for itself, too; a reload of the user's may bring new ones."""
        for name in loader if isinstance(loader, EchoLoaders) else ():
            if name not in self.parts:
                self.parts[name] = RunCounts()
                self.parts[name].counter.to(self._pl_module.device)

    def _starts_workers(self, loader: Echoed | None) -> bool:
        """Whether the next batch has to wait for workers to start.

        Those of an `EchoLoader` live on. Plain loaders begin anew in each epoch: where their workers persist, their queues are
        filled anew. Without workers nothing starts, and reading is waited for as in any other step.
        """
        echoed = parts_of(loader)
        plain = [leaf for name, leaf in leaves_of(self._given).items() if name not in echoed]
        return any(map(_workers_of, plain)) or any(part.num_workers and not part.is_running for part in echoed.values())

    def _all_counts(self) -> list[RunCounts]:
        return [self.counts, *self.parts.values()]

    def _named(self, loader: Echoed | None) -> dict[str, EchoLoader]:
        return {name: part for name, part in parts_of(loader).items() if name in self.parts}

    def _delivered(self, loader: Echoed | None) -> tuple[int, int]:
        return self._local if loader is None else (loader.counts.fresh, loader.counts.echoed)

    def _count_local(self, loader: Echoed | None) -> None:
        """Hands the examples delivered since the last time on to the metrics."""
        self.counts.update(self._delivered(loader))
        for name, part in self._named(loader).items():
            self.parts[name].update(self._delivered(part))

    def _first_judged(self, loader: Echoed | None, steps: int) -> int:
        """The first of the epoch's steps that shows the factor in force, and came from workers that run."""
        judged = [self._upstreams[name].judged_batches(part) for name, part in parts_of(loader).items()]
        return max(0, steps - min(judged)) if judged else 0

    def _gather(self, values: list[float]) -> Tensor:
        """Of every rank, shape (ranks, values)."""
        tensor = torch.tensor(values, dtype=torch.float32, device=self._pl_module.device)
        gathered = self._pl_module.all_gather(tensor)
        assert isinstance(gathered, Tensor)
        return gathered.reshape(-1, len(values)).cpu()

    def _costs(self, of_ranks: dict[str, Tensor], loader: Echoed | None, steps: JobSteps | None) -> PipelineCosts | None:
        if steps is None:
            return None
        if loader is not None and any(not stages.isnan().all() for stages in of_ranks.values()):
            taken = {self._upstreams[name].batches(part) for name, part in parts_of(loader).items()}
            found = {name: [(row[0], row[1], row[2]) for row in stages.tolist()] for name, stages in of_ranks.items()}
            return costs_of(loader, found, steps.step_seconds, in_step=len(taken) == 1)
        if steps.idle_fraction < _LEAST_IDLE or (isinstance(loader, EchoLoaders) and not loader.fits_cost_model):
            return None
        workers = 1 if loader is not None else self._workers
        if workers is None:
            return None
        factor = 1.0 if loader is None else loader.factor
        return PipelineCosts.of_waiting(steps.wait_seconds + steps.step_seconds, steps.idle_fraction, factor, workers)


def _plain_workers(loaders: Any) -> int | None:
    """Of what a training takes its batches from, unechoed; None where some loaders of it have workers and others have none.

    What prepares batches by other means than workers may do so during the steps.
    """
    found = {_workers_of(leaf) for leaf in leaves_of(loaders).values()}
    return None if 0 in found and len(found) > 1 else max(found, default=1)


def _workers_of(loader: Any) -> int:
    """Those of a plain loader; what does not say how many it has may have some."""
    return getattr(loader, "num_workers", 1)


def _timing_event() -> DeviceEvent:
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
