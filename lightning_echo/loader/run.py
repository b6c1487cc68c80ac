"""`EchoRun`: the whole run of an `EchoLoader`, however often it is stopped. It owns everything that changes."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.node_cache import gathered
from lightning_echo.data.fingerprint import Changed, Changes
from lightning_echo.insertion import Needs, earliest
from lightning_echo.loader.epochs import Delivered, Delivery, Progress, Steps, TrainerPlace
from lightning_echo.loader.ranks import RankPlaces, continued_on_demand, counts_of_rank, own_place
from lightning_echo.loader.resuming import (
    Beginning,
    adapt_state,
    begin_next_pass,
    begins_alike,
    check_same_passes,
    continued_elsewhere,
    follow_state,
    has_own_states,
    is_between_passes,
    predecessor_of,
    start_of_next_pass,
    why_next_pass,
)
from lightning_echo.loader.setting import Setting, default_seed, ranks_on_node, world
from lightning_echo.loader.state import Conditions, EchoCounts, EchoState
from lightning_echo.log import Says
from lightning_echo.pipeline.demand import DemandPipeline
from lightning_echo.pipeline.journal import RunJournal, StretchOver
from lightning_echo.pipeline.kinds import Indexed
from lightning_echo.pipeline.pipelines import Launch, Pipeline, RestartablePipeline, Start
from lightning_echo.pipeline.prefetch import clear_frames
from lightning_echo.pipeline.requests import OtherLength
from lightning_echo.plan.plan import named_seed
from lightning_echo.schema import LeftOut
from lightning_echo.split.check import SplitFails

# ---------------------------------------------------------------------- factor


class RunFactor:
    """A factor that may change while batches that were planned with an earlier factor are still to come.

    ``value`` was set last and applies from batch ``since`` of the run on, ``before`` until then. ``largest`` so far decides how
    far ahead batches may be planned.

    >>> factor = RunFactor(2.0)
    >>> factor.change(4.0, since=10, delivered=3)
    >>> factor.value, factor.in_force(9), factor.in_force(10)
    (4.0, 2.0, 4.0)
    """

    def __init__(self, factor: float) -> None:
        self.constructed = factor
        self.restart()

    def restart(self, value: float | None = None) -> None:
        self.value = self.largest = self.before = self.constructed if value is None else value
        self.since = 0

    def change(self, value: float, since: int, delivered: int) -> None:
        """Sets a factor after ``delivered`` batches of the run. It applies from batch ``since`` on."""
        self.before = self.in_force(delivered)
        self.value, self.since, self.largest = value, since, max(self.largest, value)

    def in_force(self, number: int) -> float:
        """Returns the factor that batch ``number`` was planned with. It is right for batches delivered after the last change."""
        return self.value if number >= self.since else self.before

    def load(self, state: EchoState) -> None:
        self.value, self.largest = state.factor, state.largest_factor
        if state.plan is not None:
            self.since = max((change.number for change in state.plan.pending), default=0)
            self.before = state.plan.factor
        elif state.demand is not None:
            self.since = max((change.number for change in state.demand.pending), default=0)
            self.before = state.demand.max_factor
        elif state.stream is not None:
            self.since, self.before = state.factor_since, state.factor_before
        else:
            self.since, self.before = 0, self.value


# ---------------------------------------------------------------------- echo run
# `EchoRun` is the whole run of an `EchoLoader`, however often it is stopped. `Setting` holds the parts that no run changes.
# The seed, the factor (`RunFactor`), the pipeline with its workers (`RestartablePipeline`) and the counts (`Delivery`) do change.
# They are saved and loaded together. A resumed run continues
#
# * at the same batch, if everything is as it was;
# * at the same place of the pass, if the number of ranks, the batch size or the number of workers has changed;
# * with the next pass, if the loader cannot find a place within a pass.


class EchoRun:
    """The place of a run, and how it continues.

    Attributes:
        seed: Seed in use; None before the first batch, if none was given: then it is drawn there.
        worker_init_fn: The function that each worker calls when it starts.
        heard_epoch: Number of the epoch that Lightning set last; -1 if it set none.
        predecessor: The run of the loader that was made before over the same data, if that run is alive. None once this run
            begins.
    """

    _pipeline: RestartablePipeline

    def __init__(self, setting: Setting, factor: float, seed: int | None) -> None:
        self._setting, self.seed, self.says = setting, seed, Says(setting.rank_of_process)
        self.factor, self.delivery = RunFactor(factor), Delivery()
        self.worker_init_fn: Any = getattr(setting.kind.loader, "worker_init_fn", None)
        self.heard_epoch = -1
        self.journal = RunJournal()
        self.beginning = Beginning()
        self.predecessor: EchoRun | None = predecessor_of(self, setting.kind.loader)
        self._has_described = False  # whether the line about the loader was logged
        self._is_limited = False  # as in `begin_epoch`
        self._keeps_steps = False  # whether epochs without a known length keep their number of steps
        self._has_noted = False  # whether the message of a worker was shown
        self._reset()

    def restart(self) -> None:
        self._pipeline.stop(self.delivery.batches)
        self._reset()

    def _reset(self) -> None:
        self._pipeline = RestartablePipeline()
        # To which the pipeline's state belongs: those of its start, or of a loaded state. None: the present ones.
        self._conditions: Conditions | None = None
        self._places: RankPlaces | None = None  # of a run on demand on several ranks, once it has begun
        kind = self._setting.kind
        self._changes = Changes(kind.watched_parts, kind.watched_sampler, by_reading=kind.changed_by_reading)
        self._changed = Changed()
        self.journal.forget()
        self._kept_steps: int | None = None  # their number; None: no pass has ended yet
        self._have_agreed = False  # whether all ranks keep the same
        self._compared: Pipeline | None = None  # the pipeline after whose start the data of the cache was compared
        self.delivery.reset()
        self.factor.restart()

    @property
    def passes(self) -> float:
        """Passes over the data so far, see `EchoLoader.passes`."""
        items = self._setting.items_per_pass()
        if not items:
            return float(self.delivery.ended_passes)
        if self._setting.kind.plans_in_workers:
            return self.delivery.counts.fresh / items
        position = self._pipeline.position(self.delivery.batches)
        assert position is not None  # it is not a stream
        layout = self._setting.layout() if self._conditions is None else self._conditions.layout
        return position / layout.items_per_pass(self._setting.kind.by_batches)

    def length(self) -> int:
        """Returns the number of batches in the next epoch on this rank; -1 if it is not known, because a pass ends it."""
        if not self._setting.has_length:
            return -1
        kept = self.delivery.progress.kept_length
        if kept is not None:
            return kept
        return self.delivery.progress.trainers_length(self._setting.epoch_batches(self.factor.value), self.delivery.place())

    def change_factor(self, value: float, since: int | None = None) -> None:
        """Applies a factor from batch ``since`` of the run on, see `EchoLoader.set_factor`."""
        fetched = self.delivery.batches
        is_planned = self._pipeline.started is not None or self.state().pending is not None
        if is_planned:  # a consumer that fetches ahead may have done so or not: it must not matter
            used = self.delivery.batches_used
            fetched += used is not None and used() is not None
        earliest = fetched + (self._setting.lookahead(self.factor.largest) if is_planned else 0)
        number = earliest if since is None else since
        if number < earliest:
            raise ValueError(
                f"since must be the number of a batch that is not planned yet, here {earliest} or more, got {number}: "
                f"{fetched} batches are delivered, and the workers may have been asked for {earliest - fetched} more. With a "
                "smaller prefetch_factor fewer are planned ahead"
            )
        if number > earliest and not is_planned:
            raise ValueError(
                f"since must be {earliest} or None before the first batch, got {number}: a factor that is set by then counts "
                "from it. Set the factor after the first batch"
            )
        if self._pipeline.started is None:
            self._pipeline.wait_with(self.state().with_change(number, value).pipeline())
        else:
            self._pipeline.started.change_factor(number, value)
        self.factor.change(value, number, fetched)

    @property
    def is_at_start(self) -> bool:
        return not self.delivery.progress.delivered and not self.delivery.progress.epoch_batches and self._conditions is None

    # ------------------------------------------------------------------ running

    @property
    def is_running(self) -> bool:
        """Whether the next batch comes from running workers. They cannot be used if the data set has changed."""
        if self._pipeline.started is None or any(self._changed):
            return False
        return self.delivery.progress.resuming or not self._has_other_length()

    def begin_epoch(
        self,
        *,
        keeps_length: bool,
        is_alone: bool,
        steps: Steps | None = None,
        is_limited: bool = False,
        is_epoch: bool = True,
    ) -> None:
        """Begins the next epoch, or continues a resumed one. ``keeps_length`` is as in `Progress.begin`.

        ``is_alone``: whether this loader must find out by itself whether it continues the run of another loader. Otherwise an
        `EchoDataModule` or `EchoCallback` arranges that. ``is_limited``: whether the Trainer ends an epoch after some number of
        steps. An epoch of a loader without a length then continues with the next pass, as a plain loader would begin again: only
        a pass that began in the epoch ends it. ``is_epoch``: whether this loader alone makes up an epoch, the next epoch asks it
        again, and all ranks begin epochs together. Only then may an epoch end within a pass.
        """
        predecessor, before = self.predecessor, self.beginning.before
        self.predecessor = self.beginning.before = None
        if is_alone and self.is_at_start:
            self._succeed(predecessor, before)
        if (cache := self._setting.cache) is not None and (correction := cache.correction()):
            self.says.once(f"{correction}; {self._setting.describe(self.factor.value)}")
        self.notice_changes()
        self._empty_cache()
        if self._places is not None:
            self._places.ask_again(self.says.inform)
        if self._pipeline.started is None:
            self._setting.tell_pass(self.state())
        if not self.delivery.progress.resuming:
            self._follow_changes()
        self._is_limited, progress = is_limited, self.delivery.progress
        self._keeps_steps = is_epoch and not is_limited and self._setting.may_keep_steps
        length = self._steps_to_keep() if self._keeps_steps and not progress.resuming else self.length()
        self.delivery.begin_epoch(length, keeps_length=keeps_length, steps=steps)
        if not progress.in_epoch:
            progress.has_begun_pass = is_limited and not self._setting.has_length and is_between_passes(self.state())
        beginning, pass_batches = self.beginning, self._setting.layout().batches_per_pass
        beginning.epochs += 1
        beginning.heard_epoch, beginning.seed = self.heard_epoch, self.seed
        if beginning.epochs == 1:
            is_known = pass_batches and progress.epoch_batches > 0
            uses = 1.0 if self._setting.on_demand else self.factor.value  # on demand, nobody knows yet what will be echoed
            beginning.share = progress.epoch_batches / uses / pass_batches if is_known else 1.0

    def _steps_to_keep(self) -> int:
        """Returns the number of steps of the next epoch, without a known length; -1: it ends when a pass ends.

        If nothing was echoed yet, it ends as with the plain loader. The streams of ranks may differ, but not their steps: the
        least number counts. So all ranks call this function together.
        """
        if self.factor.largest == 1 or (self._kept_steps is None and not self.beginning.epochs):
            return -1
        if not self._have_agreed:
            of_ranks = gathered(self._kept_steps)
            known = [steps for steps in of_ranks if steps is not None]
            if len(known) < len(of_ranks):
                return -1
            self._kept_steps, self._have_agreed = min(known), True
        return self._kept_steps or -1

    def _has_other_length(self) -> bool:
        """Whether the data set has grown or shrunk since the workers were started, or since the loaded state was saved."""
        before, setting = self._conditions, self._setting
        return before is not None and not setting.kind.plans_in_workers and before.layout.length != setting.layout().length

    def notice_changes(self) -> None:
        """Checks whether the data was changed since the workers were started. If so, the next epoch starts new ones."""
        if self._pipeline.started is not None and not any(self._changed):
            self._changed = self._changes.look()
            self.says.once(self._changes.why_slow)

    def refresh(self) -> None:
        """Ends the workers, because the data has changed, and forgets all examples that were read."""
        self._changed = Changed()
        self.close()
        if self._setting.cache is not None:
            self.says.once(self._setting.cache.forget())

    def _empty_cache(self) -> None:
        """Empties the cache if the data was changed since it was opened. All ranks call this function together."""
        if (cache := self._setting.cache) is None:
            return
        started = self._pipeline.started
        is_due = started is None or started is not self._compared or bool(self._changed.data)  # a look may take a second
        if started is not None and not self._setting.kind.watched_parts():
            is_due = False  # its workers live on, and see no change
        self._compared = started
        changed = cache.change() if is_due else ""
        if any(gathered(bool(changed))):
            self.says.once(cache.forget(changed))
            if self._pipeline.started is not None:
                self.close()

    def _follow_changes(self) -> None:
        """Ends the workers if the data was changed since they were started."""
        changed, self._changed = self._changed, Changed()
        if self._has_other_length() or changed.order:
            self._begin_next_pass(changed.order)
        elif changed.data and self._setting.sharing is not None and not self._setting.sharing.has_other_part:
            self.says.once(f"{changed.data}: this was set after the reader of share= had started, and does not reach it")
        elif changed.data:
            self.says.once(f"{changed.data} now: new workers are started, and live examples are read again")
            self.close()

    def _begin_next_pass(self, changed_order: str) -> None:
        """Begins the next pass, because the data set has another length, or the sampler another order."""
        setting, state = self._setting, self.state()
        setting.tell_pass(state, is_next=True)
        begin_at = start_of_next_pass(state, setting.layout(), setting.kind.by_batches)
        if not self._has_other_length() and changed_order:
            cut = "" if is_between_passes(state) else ", and the rest of the present one is left out"
            self.says.once(f"{changed_order}: the next pass begins{cut}")
        elif state.delivered:
            self.warn(why_next_pass(state, setting))
        self._pipeline.go_to(begin_at)
        self._conditions, self._places = setting.conditions(), None
        self.delivery.progress.delivered = begin_at.number

    def _succeed(self, predecessor: EchoRun | None, before: Beginning | None) -> None:
        """Continues the run of a predecessor, if it should."""
        if self.heard_epoch <= 0:
            seed = self.seed if self.seed is not None else os.environ.get("PL_GLOBAL_SEED")
            if begins_alike(before, None if seed is None else int(seed), self.heard_epoch):
                self.warn(
                    "this EchoLoader begins where the one before it over the same data set began, with the same seed: each "
                    "training gets the same part of a pass. To continue instead, make the EchoLoader once and pass it to each "
                    f"fit, or use EchoCallback(factor={self.factor.value:g}). To begin again on purpose, give another seed"
                )
            return
        seeds = {self.seed, None if predecessor is None else predecessor.seed} - {None}
        if predecessor is not None and predecessor.heard_epoch == self.heard_epoch - 1 and len(seeds) < 2:
            factor, self._has_described = self.factor.value, True
            self.follow(predecessor)
            predecessor.close()
            if factor != self.factor.value:
                self.change_factor(factor)
            return
        self.warn(
            f"the Trainer is in epoch {self.heard_epoch}, but this EchoLoader is at the start of its run, so that the data of "
            "epoch 0 comes again. Either a hook has made a new EchoLoader, or its state was not loaded: Lightning does not save "
            "the state of a loader in a checkpoint at the end of an epoch. Use EchoDataModule or "
            f"EchoCallback(factor={self.factor.value:g}), which continue the run"
        )

    def fetch(self) -> Any:
        """Returns the next batch; StopIteration where a pass ends the epoch. Starts the workers if they do not run."""
        started, delivery = self._pipeline.started, self.delivery
        pipeline, delivered = started or self._start(), delivery.progress.delivered
        try:
            try:
                batch = delivery.fetch(pipeline.next_batch, self._crosses_passes)
            except (OtherLength, SplitFails, StretchOver) as error:
                self._go_around(error)
                clear_frames(error)
                error.__traceback__ = None  # it refers to the iterator of this epoch, and the pipeline that ends keeps the error
                started, delivered = None, delivery.progress.delivered
                batch = delivery.fetch(self._start().next_batch, self._crosses_passes)
            self._leave_place()
            if started is None:
                self._changes.note_own()
                if self._setting.cache is not None:
                    self._setting.cache.note_own()
            if delivery.note and not self._has_noted:
                self._has_noted = True
                self.warn(delivery.note)
            return batch
        except StopIteration:
            raise
        except BaseException as error:  # also an interrupt: a batch that was made and not delivered is made again
            try:
                clear_frames(error)
            finally:
                delivery.take_back(delivered)
                if self._places is not None:
                    self._places.take_back(delivered + 1)
                self.close()
            raise

    def _keep_order(self) -> None:
        """Keeps the order from where the slowest rank is."""
        if isinstance(self._pipeline.started, DemandPipeline):
            self._pipeline.started.keep_order_from(math.inf if self._places is None else self._places.slowest)

    def _leave_place(self) -> None:
        """Lets other ranks know what this one has delivered."""
        pipeline = self._pipeline.started
        if self._places is not None and isinstance(pipeline, DemandPipeline):
            number, booked = pipeline.place()
            self._places.leave(number, booked, self.delivery.all_counts)

    def _go_around(self, error: OtherLength | SplitFails | StretchOver) -> None:
        """Ends the workers, so that new ones can make the next batch in spite of an error, or raises it.

        If a pass has another length than the one before, it begins, and an epoch that has no batch yet has its length. If the
        split of the data set does not hold, the run continues without it, and live examples are read again. A replay continues
        with an empty memory where the run that it repeats did so.
        """
        if isinstance(error, StretchOver):
            self._pipeline.stop(self.delivery.progress.delivered)
            return
        self.close()
        if isinstance(error, SplitFails):
            if not self._setting.leave_split("the split of the data set does not hold"):
                raise error
            self._conditions = self._setting.conditions()
            self.warn(
                "the split of the data set does not hold, so the run continues at "
                f"{self._setting.choice.point.option} from batch {self.delivery.batches:,} on: {error.reason}. Ask for that "
                "point at the start"
            )
            return
        if self._setting.has_several_places:  # each rank comes to its next pass at another batch
            raise error
        self._begin_next_pass("")
        if not self.delivery.progress.in_epoch:
            self.delivery.progress.epoch_batches = self.length()

    def _crosses_passes(self) -> bool:
        """Notes that a pass has ended. Returns whether the epoch continues."""
        progress, is_limited = self.delivery.progress, self._is_limited and not self._setting.has_length
        if self._keeps_steps and self._kept_steps is None:
            self._kept_steps = self._steps_of_pass()
        keeps_steps = self._keeps_steps and progress.epoch_batches >= 0
        crosses = self._setting.has_length or keeps_steps or (is_limited and not progress.has_begun_pass)
        progress.has_begun_pass = is_limited
        return crosses

    def _steps_of_pass(self) -> int | None:
        """Returns how many batches the plain loader makes of the pass of a stream that has ended; None if not known."""
        stream = EchoState.parts_of(self._pipeline.state(self.delivery.progress.delivered)).stream
        loader = self._setting.kind.loader
        return None if stream is None else stream.plain_batches(loader.batch_size, drop_last=loader.drop_last)

    def close(self) -> None:
        """Ends workers and thread. A later fetch starts new ones and continues where this one stopped."""
        self.delivery.forget_unused()
        self._pipeline.stop(self.delivery.progress.delivered)

    def _start(self) -> Pipeline:
        setting = self._setting
        if self.seed is None:
            self.seed = self.beginning.seed = named_seed(default_seed(setting.kind.loader), self.says.name)
        self.settle()
        self._setting.tell_pass(self.state())
        before = self.state(self.delivery.all_fetched)  # where a replay starts workers again, the last one may not be in use yet
        state = self._state_to_start_from(before)
        self._changes.begin()
        self._open_journals()
        launch = Launch(
            seed=self.seed,
            factor=self.factor.value,
            state=state.pipeline(),
            begin_at=state.begin_at,
            worker_init_fn=self.worker_init_fn,
            journal=self.journal.file,
            repeated=self.journal.repeated,
            passes_over=state.passes_over,
        )
        if setting.on_demand:
            setting.check_ranks_on_demand()
        if setting.has_several_places and self._places is None:
            self._places = RankPlaces.join(*setting.place_of_rank(), own_place(state, self.delivery.all_counts))
        started = setting.start(launch, self.says.warn_here)  # each rank has a source, and waits for it
        if (before.plan is not None or before.demand is not None) and not started.exact:
            sampler = type(setting.kind.sampler).__name__
            self.warn(
                f"{sampler} has neither state_dict and load_state_dict, nor a torch generator, nor set_epoch: if it remembers "
                "anything from one pass to the next, the resumed pass has another order"
            )
        if not self._has_described:
            self._has_described = True
            for line in setting.introduction(self.factor.value, keeps_steps=self._keeps_steps):
                self.says.inform(line)
            if setting.on_demand and self.delivery.progress.delivered:
                self.says.inform("memory begins empty: the next batches echo few examples often. Warm up the learning rate")
            if why_not := setting.why_not_deterministic(self.journal.folder):
                self.warn(why_not)
        self._conditions = None if setting.kind.plans_in_workers else setting.conditions()  # a stream's length is only expected
        self._pipeline.start(started, self.delivery.progress.delivered)
        self._keep_order()
        self._leave_place()
        return started

    def write_journal_in(self, folder: str | None) -> None:
        """Sets the folder in which the run is written down. It counts when workers are started."""
        if folder is not None and self._setting.has_journal and self._pipeline.started is not None and self.journal.file is None:
            self.says.inform(
                "this run is not written down for a Replay, because its first batch was fetched before its folder was known. "
                "Give the folder at the start: EchoLoader(..., journal=folder)"
            )
        self.journal.folder = folder

    def _open_journals(self) -> None:
        """Reads the journal of the run that is repeated, and prepares that of this one."""
        setting, rank = self._setting, self._setting.rank_of_process()
        if setting.replay is not None and self.journal.repeated is None:
            repeated = self.journal.repeat(setting.replay, self.says.name, rank)
            self.says.inform(repeated.describe())
            if not self.delivery.progress.delivered:
                self.factor.constructed = repeated.stretches[0].begin.max_factor
                self.factor.restart()
        if setting.has_journal:
            self.journal.open(self.says.name, rank, self.says.warn_here)  # each rank has a file

    def settle(self) -> None:
        """Opens the cache, and makes the sizes that depend on the free memory final. See `EchoLoader.settle`."""
        if (cache := self._setting.cache) is not None:
            self._open_cache(cache)  # before the buffer: the cache's memory is not the buffer's
        elif (sharing := self._setting.sharing) is not None:
            self.delivery.add_lookups = sharing.add_lookups
        buffer = self._setting.buffer
        if not buffer.is_settled:
            message = buffer.settle(self.factor.value, self._setting.room(ranks_on_node()), gathered)
            if message:
                self.warn(message)

    def _open_cache(self, cache: LoaderCache) -> None:
        if message := cache.open(self._setting.part_in_cache()):
            self.says.warn_here(message)
        self.delivery.add_lookups = cache.add_lookups
        if line := cache.describe():
            self.says.inform(line)

    def _state_to_start_from(self, state: EchoState) -> EchoState:
        """Returns the state to start from. If it has no plan, the next plan begins at its `begin_at`."""
        setting = self._setting
        next_pass, is_cut = begin_next_pass(state, setting)
        if is_cut:
            self.warn("the present pass cannot be continued, because its workers were ended: the next pass begins")
        if next_pass is not None:
            self._pipeline.go_to(next_pass.begin_at, next_pass.pipeline())
            self._conditions = next_pass.conditions
            state = next_pass
        progress = self.delivery.progress
        if setting.kind.plans_in_workers:
            return replace(state, begin_at=Start(state.counts.fresh, progress.delivered))
        is_of_demand = state.demand is not None or (state.plan is not None and setting.on_demand)
        state, number, message = (continued_on_demand if is_of_demand else continued_elsewhere)(state, setting)
        if message:  # ranks that are not of one job each have a message of their own
            (self.warn if setting.is_job or not is_of_demand else self.says.warn_here)(message)
        if number is not None:
            progress.in_epoch, progress.epoch_batches, progress.delivered = 0, self.length(), number
        return state

    # ------------------------------------------------------------------ continuing

    def state(self, at: Delivered | None = None) -> EchoState:
        """Returns the state of the run at the batch in use, or ``at`` another one."""
        in_use, factor = at or self.delivery.in_use, self.factor
        progress = in_use.progress
        conditions = self._conditions or self._setting.conditions()
        parts = EchoState.parts_of(self._pipeline.state(progress.delivered))
        return EchoState(
            **conditions._asdict(),
            seed=self.seed,
            factor=factor.value,
            constructed_factor=factor.constructed,
            largest_factor=factor.largest,
            factor_before=factor.before,
            factor_since=factor.since,
            epoch=progress.epoch,
            epoch_batches=progress.epoch_batches,
            in_epoch=progress.in_epoch,
            delivered=progress.delivered,
            begin_at=self._pipeline.begin_at,
            passes_over=in_use.ended_passes,
            has_begun_pass=progress.has_begun_pass or None,
            kept_steps=self._kept_steps,
            counts=in_use.counts,
            plan=parts.plan,
            order=parts.order,
            stream=parts.stream,
            demand=parts.demand,
        )

    @property
    def _is_under_way(self) -> bool:
        """Whether a step of the Trainer has its batch and is not over, so that a state is that before this batch."""
        return self.delivery.is_under_way and self._pipeline.reaches(self.delivery.before_in_use.progress.delivered)

    @property
    def saved_counts(self) -> EchoCounts:
        return (self.delivery.before_in_use if self._is_under_way else self.delivery.in_use).counts

    def state_dict(self, epoch_goes_on: bool | LeftOut | None, place: TrainerPlace | None) -> dict[str, Any]:
        """Returns the state in plain types. Within a step of the Trainer, the run continues with the batch of that step."""
        at = self.delivery.before_in_use if self._is_under_way else None
        trainer, state = None if place is None else place.state(), self.state(at)
        if self._places is not None and state.demand is not None:
            ranks = self._places.collect(own_place(state, state.counts), self.says.warn_here)
            self._keep_order()
            state = self.state(at).with_ranks(ranks)
        new_length = self._setting.layout().length if self._has_other_length() else None
        written = self.journal.written()
        return replace(state, epoch_goes_on=epoch_goes_on, trainer=trainer, new_length=new_length, journal=written).to_dict()

    def load_state_dict(self, saved: dict[str, Any], limit: int | float | None) -> None:
        """Continues from a `state_dict`, see `EchoLoader.load_state_dict`. ``limit`` is as in `Progress.from_state`."""
        setting = self._setting
        state = EchoState.from_dict(saved, by_index=isinstance(setting.kind, Indexed))
        if may_change := bool(setting.kind.hearers()):
            self.close()  # the pass that is set now is not the one that it reads
        setting.tell_pass(state)
        check_same_passes(state, setting, may_change=may_change)
        if state.delivered and state.insertion_point is earliest(Needs.examples):
            setting.leave_split("the state was saved there")
        setting.keep_buffer_of(state)
        state = adapt_state(state, setting)
        if has_own_states(state) and world()[0] > 1:
            self.warn(
                "every rank continues from the loader's own state on rank 0: this is right if all ranks are at the same place of "
                "their shares of the data"
            )
        was_constant = setting.on_demand and state.plan is not None
        if state.constructed_factor != self.factor.constructed and not was_constant and setting.replay is None:
            name = "max_factor" if setting.on_demand else "factor"
            self.warn(
                f"{name}={self.factor.constructed:g} is not used: the resumed run continues with {name} {state.factor:g}. "
                "Set .factor after resuming to change it"
            )
        progress = Progress.from_state(state, limit)
        if setting.has_length and progress.epoch_batches < 0:  # a pass was to end the epoch, but here its length is known
            progress.resuming = False
        if progress.resuming and setting.has_length and state.layout == setting.layout():
            progress.kept_length = progress.epoch_batches  # for another layout, see _state_to_start_from
        self._go_to(state, progress)
        self.journal.continue_at(state.journal)
        if was_constant:  # its factor is not a bound
            self.factor.restart()

    def _go_to(self, state: EchoState, progress: Progress) -> None:
        """Ends workers and thread. The next start continues from a state."""
        self._pipeline.go_to(state.begin_at, state.pipeline())
        self._conditions, self._places = state.conditions, None
        self._kept_steps, self._have_agreed = state.kept_steps, state.kept_steps is not None
        self.factor.load(state)
        self.seed = state.seed if state.seed is not None else self.seed
        counts = counts_of_rank(state, *self._setting.place_of_rank())
        self.delivery.continue_at(progress, counts, state.passes_over)

    def follow(self, before: EchoRun) -> None:
        """Continues the run of another loader, see `EchoLoader.follow`."""
        if self._setting.cache is not None and before._setting.cache is not None:
            self._setting.cache.follow(before._setting.cache)
        self._setting.keep_buffer_of(before.state())
        self.journal.follow(before.journal)
        theirs = before.state()
        self._setting.tell_pass(theirs)
        state, is_cut = follow_state(theirs, before._setting, self._setting)
        if is_cut:
            message = (
                "a new loader was made within a pass that cannot be continued: the rest of that pass is left out. Return the "
                "same loader each time, or let epochs end where passes end, by epoch_length='full_pass'"
            )
            if state is None and theirs.layout.length == self._setting.layout().length:
                self.says.inform(message)  # another batch size, as Lightning's tuner tries them
            else:
                self.warn(message)
        if state is None:
            # Seed, factor and counts stay, but the next pass begins, because the loaders cut the data differently.
            mine, theirs_kind = self._setting, before._setting.kind
            self.seed, begin_at = before.seed, Start(0, before.delivery.batches)
            if mine.on_demand == before._setting.on_demand:
                self.factor.restart(before.factor.value)
            have_length = mine.has_length and before._setting.has_length
            if have_length and not mine.kind.plans_in_workers and not theirs_kind.plans_in_workers:
                begin_at = start_of_next_pass(before.state(), mine.layout(), mine.kind.by_batches)
            self.delivery.continue_at(Progress(delivered=begin_at.number), before.delivery.counts, before.delivery.ended_passes)
            self._pipeline.go_to(begin_at)
            self._conditions, self._places = mine.conditions(), None
            return
        self.factor.constructed = before.factor.constructed
        progress, others = Progress.from_state(state, None), before.delivery.progress
        progress.resuming = others.resuming
        progress.kept_length = others.kept_length if self._setting.has_length else None
        self._go_to(state, progress)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the run without workers, for a process that is spawned with the loader."""
        return {
            **vars(self),
            "_pipeline": self._pipeline.resting(self.delivery.batches),
            "predecessor": None,
            "_compared": None,
            "_places": None,
            "beginning": Beginning(),
        }

    def warn(self, message: str) -> None:
        self.says.warn(message)
