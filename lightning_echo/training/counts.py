"""Counts of a run on all ranks: examples, caches, sharing; and the controller's one decision for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.measure.control import (
    Controller,
    Decision,
    Moment,
    Observation,
    PipelineCosts,
    Reason,
    RecentSteps,
    as_count,
    check_on_demand,
    load_state_by_kind,
)
from lightning_echo.measure.target_idle import recommend
from lightning_echo.measure.timing import EchoCounter, JobSteps
from lightning_echo.schema import entry, inside
from lightning_echo.share.sharing import LoaderSharing
from lightning_echo.training.loaders import Echoed, EchoLoaders, common_factor, parts_of
from lightning_echo.training.package import MisconfigurationException
from lightning_echo.training.trainer import check_factor_during_training

# ---------------------------------------------------------------------- run counts
# A checkpoint holds only the state of rank 0, so the state of `RunCounts` holds the counts of the whole job.


class Examples(NamedTuple):
    fresh: int = 0
    echoed: int = 0

    @property
    def uses(self) -> float:
        """Uses per fresh example; 1 if no example was fresh."""
        return (self.fresh + self.echoed) / self.fresh if self.fresh else 1.0

    def since(self, before: Examples) -> Examples:
        return Examples(self.fresh - before.fresh, self.echoed - before.echoed)


class RunCounts:
    """Joins the examples delivered on this rank with those of the other ranks."""

    def __init__(self) -> None:
        self.counter = EchoCounter()
        self.totals = Examples()  # of the job, when the ranks last added them up
        self._in_metric_at_totals = Examples()  # examples that the metric had counted on this rank then
        # Of the examples delivered on this rank, those that the metric has counted. A newly made loader may begin at 0 or at
        # another number: set this then.
        self.counted = Examples()

    def go_on_from(self, delivered: Examples) -> None:
        """Notes the examples that this rank has delivered so far. The loaded totals contain them."""
        self.counted, self._in_metric_at_totals = delivered, self._in_metric()

    def correct(self, of_job: Examples, *, counts_job: bool) -> None:
        """Takes what all ranks have delivered for loaded totals of as many examples.

        On demand, the assumption of `state` is wrong, but a resumed loader knows the examples of its own rank. ``counts_job``:
        whether the metric of this rank holds the totals.
        """
        if sum(of_job) == sum(self.totals):
            self.totals = of_job
            if counts_job:
                self.counter.reset()
                self.counter.update(*of_job)

    def update(self, delivered: Examples) -> None:
        self.counter.update(delivered.fresh - self.counted.fresh, delivered.echoed - self.counted.echoed)
        self.counted = delivered

    def add_up(self) -> Examples:
        """Adds up the examples of all ranks, which must call this together."""
        counts = self.counter.compute()
        self.totals = Examples(int(counts["fresh_examples"]), int(counts["echoed_examples"]))
        self._in_metric_at_totals = self._in_metric()
        return self.totals

    def state(self, world_size: int, under_way: Examples) -> list[int]:
        """Returns the job's fresh and echoed examples, without those of a step that a resumed run repeats.

        It assumes that since the totals every other rank has counted as many examples as this one, see `correct`.
        """
        since = self._in_metric().since(self._in_metric_at_totals).since(under_way)
        return [self.totals.fresh + world_size * since.fresh, self.totals.echoed + world_size * since.echoed]

    def load(self, state: list[int]) -> None:
        self.totals = Examples(*state)
        self.counter.reset()
        self.counter.update(self.totals.fresh, self.totals.echoed)

    def _in_metric(self) -> Examples:
        return Examples(*self.counter.counts.tolist())


# ---------------------------------------------------------------------- cache meter
# Hits and misses are counts of a node. All its ranks report the same counts, so their sum over ranks would count them several
# times. Therefore each rank reports its own fresh examples, multiplied by its node's share of hits. The sum of these numbers over
# the ranks of a node is the node's hits, for any number of ranks, whether they share a cache or not.
#
# The counts must be read while no rank can deliver a batch. So all ranks read them between two exchanges: after all ranks have
# delivered their last batch of the epoch, and before any of them continues.

_NANOSECONDS = 1_000_000_000


class CacheUse(NamedTuple):
    """The contents of a cache at an epoch's end, and its use in the epoch."""

    hits: float  # fresh examples of the epoch that the cache had, all ranks; it need not be a whole number, see above
    fresh: int  # fresh examples of the epoch, all ranks
    examples: int  # that are held on a node; if nodes differ, the mean over the ranks
    bytes: int  # of these examples
    is_full: bool  # nothing more is added on any node
    hold: str  # the form of an example, on the node of this rank
    received: float | None = None  # hits that came from another node; None if the cache is not partitioned
    exchange_seconds: float | None = None  # of the epoch, for the node that took longest; None if the cache is not partitioned

    @property
    def received_fraction(self) -> float | None:
        return self.received / self.fresh if self.fresh and self.received is not None else None

    @property
    def hit_fraction(self) -> float | None:
        return self.hits / self.fresh if self.fresh else None

    def logged(self) -> dict[str, float]:
        """Returns the known values to log, by name.

        >>> CacheUse(3.0, 12, 6, 600, True, "loaded").logged()
        {'cache_hit_fraction': 0.25, 'cached_examples': 6, 'cache_bytes': 600}
        """
        values = {"cache_hit_fraction": self.hit_fraction, "cached_examples": self.examples, "cache_bytes": self.bytes}
        values["cache_received_fraction"] = self.received_fraction
        return {name: value for name, value in values.items() if value is not None}


class CacheMeter:
    def __init__(self) -> None:
        self._at_start: dict[str, list[int]] = {}

    def begin_epoch(self, parts: Mapping[str, EchoLoader]) -> None:
        """Notes the counts when an epoch begins, or continues after a resume. A reload may have brought other loaders."""
        self._at_start = {name: _lookups(part) for name, part in parts.items()}

    def end_epoch(self, parts: Mapping[str, EchoLoader], gather: Callable[[list[int]], Tensor]) -> dict[str, CacheUse]:
        """Returns the measures of the epoch for each loader that has a cache, by the loader's name.

        All ranks must call this together, after an exchange that follows the epoch's last batch. Only if there is a cache, it
        calls ``gather``, which returns the values of every rank, shape (ranks, values).
        """
        holds: dict[str, str] = {}
        row: list[int] = []
        for name, part in parts.items():
            if (counts := part.cache_counts) is not None:
                now = _lookups(part)
                since = [number - before for number, before in zip(now, self._at_start.get(name, [0] * len(now)), strict=True)]
                if min(since[1:]) < 0:  # a reload brought other data: the cache is a new one and counts from 0
                    since[1:] = now[1:]
                fresh, hits, misses, *exchanged = since
                row += [fresh, hits, hits + misses, counts.examples, counts.bytes, counts.is_full, *exchanged, counts.nodes]
                holds[name] = counts.hold
        if not holds:
            return {}
        gathered = gather(row)
        of_parts = gathered.reshape(len(gathered), len(holds), -1).transpose(0, 1).tolist()
        return {name: _joined(of_ranks, hold) for (name, hold), of_ranks in zip(holds.items(), of_parts, strict=True)}


def together(caches: Iterable[CacheUse]) -> CacheUse | None:
    """Returns the figures of several loaders' caches as those of one cache; None if there are none.

    >>> together([CacheUse(3.0, 12, 6, 600, True, "loaded"), CacheUse(3.0, 4, 1, 10, False, "raw")])[:6]
    (6.0, 16, 7, 610, False, 'loaded and raw')
    """
    each = list(caches)
    if not each:
        return None
    return CacheUse(
        hits=sum(cache.hits for cache in each),
        fresh=sum(cache.fresh for cache in each),
        examples=sum(cache.examples for cache in each),
        bytes=sum(cache.bytes for cache in each),
        is_full=all(cache.is_full for cache in each),
        hold=" and ".join(sorted({cache.hold for cache in each})),
        received=_sum_of_known(cache.received for cache in each),
        exchange_seconds=_sum_of_known(cache.exchange_seconds for cache in each),
    )


def metrics_of_parts(caches: Mapping[str, CacheUse]) -> dict[str, float]:
    """Returns the metrics of each loader's cache, if there are several loaders; none for a single one.

    >>> sorted(metrics_of_parts({"scans": CacheUse(3.0, 12, 6, 600, True, "loaded")}))
    ['echo/scans/cache_bytes', 'echo/scans/cache_hit_fraction', 'echo/scans/cached_examples']
    """
    return {f"echo/{name}/{key}": value for name, cache in caches.items() if name for key, value in cache.logged().items()}


def _lookups(part: EchoLoader) -> list[int]:
    """Returns the fresh examples of this rank so far, and the hits, misses, received examples and exchange time of its node."""
    if (counts := part.cache_counts) is None:
        return [part.counts.fresh, 0, 0, 0, 0]
    return [part.counts.fresh, counts.hits, counts.misses, counts.received, int(counts.exchange_seconds * _NANOSECONDS)]


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _joined(of_ranks: list[list[int]], hold: str) -> CacheUse:
    """Joins the ranks' reports on a loader's cache: nine numbers for each rank, see `CacheMeter.end_epoch`."""
    hits = sum(fresh * hits / lookups for fresh, hits, lookups, *_ in of_ranks if lookups)
    received = sum(of_rank[0] * of_rank[6] / of_rank[2] for of_rank in of_ranks if of_rank[2])
    fresh, _, _, examples, size, full, *_ = (sum(column) for column in zip(*of_ranks, strict=True))
    ranks, seconds = len(of_ranks), max(of_rank[7] for of_rank in of_ranks) / _NANOSECONDS
    exchanged = (received, seconds) if of_ranks[0][8] > 1 else (None, None)
    return CacheUse(hits, fresh, round(examples / ranks), round(size / ranks), full == ranks, hold, *exchanged)


# ---------------------------------------------------------------------- share meter
# Only a single loader can share.


class ShareUse(NamedTuple):
    """The effect of sharing in an epoch."""

    trainings: int  # that the reader has at the end of the epoch, this one included
    waited_seconds: float  # in which a batch waited for another training, on the rank where this was longest
    missed: int  # examples that other trainings had and this one did not, in the run so far, all ranks
    read_again: int  # examples that were read again for this training, in the run so far, all ranks
    saved_cpu_seconds: float  # in the run so far, all ranks
    slowest_training: str = ""  # this rank waited for it longest in the run so far; empty if it waited for none


class ShareMeter:
    def __init__(self) -> None:
        self._waited_at_start = 0.0

    def begin_epoch(self, loader: Any) -> None:
        sharing = _sharing_of(loader)
        self._waited_at_start = 0.0 if sharing is None else sharing.waited.for_peers

    def end_epoch(self, loader: Any, gather: Callable[[list[int]], Tensor]) -> ShareUse | None:
        """Returns the measures of the epoch; None if the loader does not share: then ``gather`` is not called."""
        if (sharing := _sharing_of(loader)) is None:
            return None
        waited = sharing.waited.for_peers - self._waited_at_start
        saved = int(sharing.saved_cpu_seconds * _NANOSECONDS)
        counts = [sharing.trainings, int(waited * _NANOSECONDS), sharing.missed_examples, sharing.read_again_examples, saved]
        trainings, waits, missed, again, saves = zip(*gather(counts).tolist(), strict=True)
        by_peer = sharing.waited.by_peer
        slowest = max(by_peer, key=by_peer.__getitem__, default="")
        return ShareUse(max(trainings), max(waits) / _NANOSECONDS, sum(missed), sum(again), sum(saves) / _NANOSECONDS, slowest)


def _sharing_of(loader: Any) -> LoaderSharing | None:
    return loader.sharing if isinstance(loader, EchoLoader) else None


# ---------------------------------------------------------------------- asking
# `AskingSteps`: after which steps a controller is asked within an epoch.
#
# After these steps the ranks exchange their measurements. All ranks must find the same answer without asking each other, so it
# depends only on numbers of batches.


class AskingSteps:
    """The steps of a controller. It raises a TypeError or a ValueError if their numbers are impossible."""

    def __init__(self, controller: Controller | None) -> None:
        name = type(controller).__name__
        self._first = as_count(f"{name}.first_after_steps", getattr(controller, "first_after_steps", None))
        self._every = as_count(f"{name}.every_n_steps", getattr(controller, "every_n_steps", None))
        asked_after = getattr(controller, "asked_after", ())
        if not isinstance(asked_after, Collection) or isinstance(asked_after, str):
            raise TypeError(
                f"{name}.asked_after must be a collection of numbers of batches, such as (100, 1000), got {asked_after!r}"
            )
        self._asked_after = frozenset(as_count(f"each of {name}.asked_after", number) for number in asked_after)
        self._is_possible = False

    def start(self, loader: Echoed | None) -> None:
        parts = parts_of(loader).values()
        # Lightning can be told of another length of epochs only between two epochs.
        self._is_possible = bool(parts) and all(part.epoch_length == "fixed" or not part.has_length for part in parts)

    def rest(self) -> None:
        """Ends asking in this ``fit``. Call it before `start`."""
        self.first_after_steps, self._every, self._asked_after = None, None, frozenset()

    def after_step(self, in_epoch: int, in_run: int, *, ends_epoch: bool) -> Moment | None:
        """Returns why the controller is asked after a step; None: it is not asked, or anyway at the end of the epoch.

        The answer depends on the numbers of batches alone, so it is the same on all ranks, and after a resume.
        """
        if not self._is_possible or ends_epoch:
            return None
        if (self._every is not None and in_epoch % self._every == 0) or in_run in self._asked_after:
            return Moment.within_epoch
        return Moment.early if self._is_early(in_run) else None

    def _is_early(self, in_run: int) -> bool:
        if self._first is None or (self._every is not None and in_run >= self._every):
            return False
        times, rest = divmod(in_run, self._first)
        return not rest and times.bit_count() == 1


# ---------------------------------------------------------------------- decider
# `Decider` shows the controller the same observation on every rank, and gives all ranks the decision of rank 0.
#
# Each rank has a controller and asks it, after the ranks have joined their times (``meters.py``) and their logged metrics
# (`Decider.observe`). Then rank 0 sends its decision to the others (`Decider.decide`), and on each rank `EchoCallback` sets that
# factor on its own loader.


class Decider:
    """Asks a controller at the end of each epoch, and within epochs. All ranks must call its methods together.

    Without a controller, epochs are observed, but nothing is decided.
    """

    def __init__(self, controller: Controller | None) -> None:
        self._controller = controller
        self._recent = RecentSteps()
        self.validated = False  # in this fit
        self._logged_before: dict[str, Tensor] = {}  # from the checkpoint: a resumed Trainer has forgotten the logged values
        self._logged_last: dict[str, Tensor] = {}  # the tensors of the last epoch: a value that is logged again may be equal

    def rest(self) -> None:
        """Decides nothing in this ``fit``."""
        self._controller = None

    def check(self, trainer: pl.Trainer, loader: Echoed | None) -> None:
        """Refuses, before training, a setting that would end the training with an error later."""
        if self._controller is None:
            return
        if loader is None:
            raise MisconfigurationException(
                f"EchoCallback({self._controller!r}) has no EchoLoader to drive: the Trainer has an EchoDataModule, if only of "
                "an earlier fit, and trains on another loader. Pass EchoLoader(loader, 1) to fit, or use another Trainer"
            )
        common_factor({name: part.factor for name, part in parts_of(loader).items()})
        if loader.on_demand:
            check_on_demand(self._controller, MisconfigurationException)
            if not all(part.on_demand for part in parts_of(loader).values()):
                raise MisconfigurationException(
                    f"EchoCallback({self._controller!r}) sets one factor for all loaders, but some of them echo on demand, where "
                    "it is a bound, and others by a constant factor: give all of them factor='demand', or none"
                )
        largest = self._controller.largest_factor()
        if largest is not None:
            check_factor_during_training(trainer, loader, largest)

    def observe(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        epoch: int,
        factor: float,
        measured: tuple[JobSteps | None, PipelineCosts | None],
        moment: Moment = Moment.epoch_end,
        mean_uses: float | None = None,
    ) -> Observation:
        """Returns the observation at a moment, equal on all ranks. ``measured``: the steps to judge, and the pipeline's costs."""
        metrics, newly_logged = ({}, frozenset[str]()) if self._controller is None else self._join_logged(trainer, pl_module)
        judged, costs = measured
        return Observation(
            epoch=epoch,
            factor=factor,
            steps=0 if judged is None else judged.steps,
            idle_fraction=None if judged is None else judged.idle_fraction,
            step_seconds=None if judged is None else judged.wait_seconds + judged.busy_seconds,
            costs=costs,
            metrics=metrics,
            logged=newly_logged,
            validated=self.validated or not trainer.enable_validation,
            moment=moment,
            batches=trainer.fit_loop.total_batch_idx + 1,
            idle_low=None if judged is None else judged.idle_low,
            mean_uses=mean_uses,
        )

    def _join_logged(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[dict[str, float], frozenset[str]]:
        """Returns the means of the logged metrics over the ranks, and the names of those that were logged since last time."""
        logged = self._logged(trainer)
        names = trainer.strategy.broadcast(sorted(logged))
        new = [name for name, value in logged.items() if self._is_new(name, value)]
        newly_logged = frozenset(trainer.strategy.broadcast(new))
        self._logged_last.update(logged)
        if not names:
            return {}, newly_logged
        values = torch.tensor([float(logged.get(name, float("nan"))) for name in names], device=pl_module.device)
        gathered = pl_module.all_gather(values)
        assert isinstance(gathered, Tensor)
        means = gathered.reshape(-1, len(names)).nanmean(dim=0).tolist()
        return dict(zip(names, means, strict=True)), newly_logged

    def decide(self, trainer: pl.Trainer, observation: Observation, loader: Echoed | None = None) -> Decision | None:
        """Returns the decision of rank 0; None without a controller. A result that is not a `Decision` raises a TypeError."""
        if self._controller is None:
            return None
        decision = self._controller.decide(observation)
        if not isinstance(decision, Decision):
            raise TypeError(f"{type(self._controller).__name__}.decide must return a Decision, got {decision!r}")
        decision = _within_surplus(decision, observation.factor, loader)
        fields = (decision.factor, decision.reason.value, decision.message, decision.since)
        factor, reason, message, since = trainer.strategy.broadcast(fields)
        return Decision(factor, Reason(reason), message, since)

    def joined_with_recent(self, observation: Observation) -> Observation:
        """See `RecentSteps.joined`. Call it once for each observation."""
        return self._recent.joined(observation)

    def recommend(self, loader: Echoed | None, observation: Observation, decision: Decision | None) -> Decision:
        """Returns the factor that follows from the measurements: the controller's, or the choice of ``TargetIdle()``."""
        if loader is not None and loader.on_demand:
            return Decision(observation.factor, Reason.not_measured, "on demand no factor is recommended")
        if decision is not None and decision.reason.is_measured:
            return decision
        if not isinstance(loader, EchoLoaders) or loader.has_one_factor:
            return recommend(observation)
        why = "the loaders have different factors, and it is not known which of them the accelerator waits for"
        return Decision(observation.factor, Reason.not_measured, why)

    def metrics_state(self, trainer: pl.Trainer) -> dict[str, tuple[float, bool]]:
        """Returns for each logged metric its value, and whether it is new: a resumed Trainer has lost both."""
        if self._controller is None:
            return {}
        return {name: (float(value), self._is_new(name, value)) for name, value in self._logged(trainer).items()}

    def load_metrics_state(self, state: dict[str, tuple[float, bool]]) -> None:
        with inside("metrics"):
            state = {name: entry(state, name, tuple[float, bool]) for name in state}
        self._logged_before = {name: torch.tensor(value) for name, (value, _) in state.items()}
        self._logged_last = {name: self._logged_before[name] for name, (_, is_new) in state.items() if not is_new}

    def state_dict(self) -> dict[str, Any]:
        return {} if self._controller is None else {type(self._controller).__name__: self._controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._controller is not None:
            load_state_by_kind(self._controller, state)

    def recent_state(self) -> dict[str, Any]:
        return self._recent.state_dict()

    def load_recent_state(self, state: dict[str, Any]) -> None:
        self._recent.load_state_dict(state)

    def _logged(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        found = {**self._logged_before, **trainer.callback_metrics}
        return {name: value for name, value in found.items() if not name.startswith("echo/")}

    def _is_new(self, name: str, value: Tensor) -> bool:
        """Whether a metric was logged since the last epoch's end. ``callback_metrics`` also keeps older values."""
        last = self._logged_last.get(name)
        return last is None or last.data_ptr() != value.data_ptr()


def _within_surplus(decision: Decision, factor: float, loader: Echoed | None) -> Decision:
    """Returns a decision that does not make the training slower than others that share its reading, which would wait for it."""
    sharing = _sharing_of(loader)
    most = None if sharing is None else sharing.most_factor
    if most is None or decision.factor <= max(most, factor) or not decision.reason.is_measured:
        return decision
    why = f"with more than {most:g} this training would be slower than those that share its reading"
    return Decision(max(most, factor), Reason.at_maximum, f"{decision.message}; {why}", decision.since)
