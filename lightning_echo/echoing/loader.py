"""`EchoLoader`: the only owner of epochs, length and state.

The batches form one endless stream, laid down by the plan. An epoch is a stretch of it: ``iter()`` begins the next one (unless a
state was loaded: then it goes on), and where an epoch is cut short, the next one goes on there. Workers and their queues
therefore live on from epoch to epoch. ``iter()`` by itself does nothing: Lightning calls it more often than it iterates.
Where passes have no known length, an epoch ends with a pass.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_echo.echoing import options
from lightning_echo.echoing.counts import EchoCounts
from lightning_echo.echoing.delivery import Delivery, Item
from lightning_echo.echoing.epochs import Epoch, Iterations, Progress
from lightning_echo.echoing.factor import RunFactor
from lightning_echo.echoing.hashing import named_seed
from lightning_echo.echoing.insertion import InsertionPoint
from lightning_echo.echoing.pipeline import Pipeline
from lightning_echo.echoing.prefetch import clear_frames
from lightning_echo.echoing.ranks import default_seed, world
from lightning_echo.echoing.resuming import adapt_state, begin_next_pass, has_own_states
from lightning_echo.echoing.run import Layout, Run
from lightning_echo.echoing.seconds import StageSeconds
from lightning_echo.echoing.setting import Setting
from lightning_echo.echoing.state import STATE_VERSION, EchoStateError, check_state, differences, where_to_go_on
from lightning_echo.echoing.stream_run import StreamRun

__all__ = ["EchoLoader"]

_log = logging.getLogger("lightning_echo")


class EchoLoader:
    """Echoes a training loader: every fresh example is used ``factor`` times, spread over several batches.

    The batches are exactly what the user's collate function makes. Iterating goes through all epochs of a training: each
    ``for batch in loader`` is one epoch.

    Args:
        loader: A ``DataLoader``, or (where batches are reused) any iterable of batches. Streams are not dealt out to ranks here.
        factor: Echo factor, a real number >= 1: uses per fresh example. 1 is the plain loader.
        insertion_point: Where the echo stage stands, see `InsertionPoint`; ``"auto"`` takes the earliest possible one, from
            ``"before_augmentation"`` on. ``"after_transfer"`` needs a Trainer with an `EchoDataModule` or `EchoCallback`, which
            put the batches on the device.
        buffer_size: Most live examples per rank that echoes are drawn from (batches for ``after_batching`` and
            ``after_transfer``, there in device memory). Default: two batches per worker (four where batches are reused), less
            if memory is short. Where it hardly holds a batch, single examples get a use more or less than the factor.
        epoch_length: ``"fixed"``: an epoch has as many steps as without echoing. ``"full_pass"``: ``round(factor * steps)``,
            so that it delivers as many fresh examples as one pass over the data holds; over a stream it ends where the stream
            does, and so does every epoch of a loader without a length.
        seed: Seed of order, draws and augmentation. Default: that of ``seed_everything``, else drawn once.
        num_replicas: Number of ranks, as in ``DistributedSampler``; default: ask ``torch.distributed``. 1 (and ``rank=0``)
            switches sharding off.
        rank: This rank.

    Attributes:
        limit_train_batches: As in ``Trainer``, None if unknown. It tells a resumed run whether an epoch was at its end.
        factor_owner: Name of what must hear of a new factor where that changes the length of epochs; empty: nobody.
        is_transferred: Whether who iterates can put a `BatchUse` on the device: what ``after_transfer`` yields.
        name: Its name among several loaders that a Trainer combines; makes a default seed its own. Empty: it is the only one.
        epoch_goes_on: Where several make up an epoch: says whether the one under way goes on (None: not known).

    Raises:
        ValueError: An option has an impossible value, or does not fit the loader.
        TypeError: An option has an impossible type, or ``loader`` is no loader.

    Source: Choi et al. 2019, arXiv 1907.05550.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = EchoLoader(DataLoader(range(64), batch_size=8), 2, insertion_point="after_augmentation", seed=0)
        >>> for epoch in range(2):
        ...     batches = list(loader)
        >>> len(batches), loader.counts.delivered, loader.counts.factor > 1.8
        (8, 128, True)
    """

    _pipeline: Pipeline
    _iterations: Iterations

    def __init__(
        self,
        loader: Any,
        factor: float,
        *,
        insertion_point: InsertionPoint | str = "auto",
        buffer_size: int | None = None,
        epoch_length: str = "fixed",
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if isinstance(loader, EchoLoader):
            raise ValueError("loader is echoed already: pass the loader inside (its .loader), or set .factor on it")
        self._factor = RunFactor(options.check_factor(factor))
        point = options.check_point(insertion_point)
        buffer_size = options.check_buffer_size(buffer_size)
        self.epoch_length = options.check_epoch_length(epoch_length)
        ranks = options.check_ranks(num_replicas, rank)
        self._seed = options.check_seed(seed)
        self._setting = Setting(loader, point, buffer_size, self.factor, ranks)
        if self._setting.source.length is None:
            self.epoch_length = "full_pass"
        self.factor_owner = self.name = ""
        if self._setting.warning:
            self._warn(self._setting.warning)
        self.worker_init_fn = getattr(loader, "worker_init_fn", None)  # Lightning sets its own here where there is none
        self.limit_train_batches: int | float | None = None
        self.is_transferred = False
        self.epoch_goes_on: Callable[[], bool | None] | None = None
        self._said = False
        self._delivery = Delivery()
        self._reset()

    # ------------------------------------------------------------------ what it is

    @property
    def loader(self) -> Any:
        """The user's loader. Iterate this one to look at data during training."""
        return self._setting.source.loader

    @property
    def insertion_point(self) -> InsertionPoint:
        """The resolved insertion point, never ``auto``."""
        return self._setting.choice.point

    @property
    def buffer_size(self) -> int:
        """Most live examples per rank (batches where they are reused)."""
        return self._setting.buffer_size

    @property
    def seed(self) -> int | None:
        """The seed in use; None until it is drawn at the first batch."""
        return self._seed

    @property
    def factor(self) -> float:
        """The echo factor last set. A new one counts from the first batch that cannot be in flight already."""
        return self._factor.value

    @factor.setter
    def factor(self, value: float) -> None:
        if self.factor_owner and self.epoch_length == "full_pass" and self.has_length:
            raise AttributeError(
                "factor cannot be set here: with epoch_length='full_pass' it changes the length of epochs, which the Trainer must"
                f" hear of. Set that of the {self.factor_owner} instead"
            )
        self.set_factor(value)

    def check_factor(self, value: float) -> float:
        """Whether a factor could be set, now or later.

        Raises:
            TypeError: It is no number.
            ValueError: It is below 1, or the buffer cannot hold what it needs.
        """
        value = options.check_factor(value)
        self._setting.check_factor(value)
        return value

    def set_factor(self, value: float) -> None:
        """Sets the factor, whoever the `factor_owner` is."""
        value = self.check_factor(value)
        if value == self.factor:
            return
        largest = max(self._factor.largest, value)
        fetched = self._delivery.progress.delivered
        number = fetched + self._setting.lookahead(largest)
        self._pipeline.change_factor(number, value)
        self._factor.change(value, number, fetched)

    @property
    def factor_in_force(self) -> float:
        """The factor that the next batch to be delivered was planned with."""
        return self._factor.in_force(self.delivered)

    @property
    def factor_since(self) -> int:
        """Number in the run of the first batch that `factor` counts for."""
        return self._factor.since

    @property
    def settled_at(self) -> int:
        """Number in the run of the batch by which the buffer is full: before, more of each batch is fresh than ``1 / factor``."""
        return self.factor_since + (0 if self.factor == 1 else self._setting.filling_batches())

    @property
    def delivered(self) -> int:
        """Batches delivered on this rank so far: the number of the next one."""
        return self._delivery.batches

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered on this rank so far."""
        return self._delivery.counts

    @property
    def last_batch_counts(self) -> EchoCounts:
        """The same for the batch delivered last."""
        return self._delivery.last

    @property
    def seconds(self) -> StageSeconds:
        """What the batches delivered by this object cost its workers; all zero where the loader itself cannot be looked into."""
        return replace(self._delivery.seconds)

    @property
    def taken(self) -> Callable[[], tuple[int, int] | None] | None:
        """Says how many batches who iterates has taken into use, in its run and in its epoch, where it asks for one ahead, as
        Lightning does where there is no length: then counts and state are those of the batch in use. None: it does not."""
        return self._delivery.taken

    @taken.setter
    def taken(self, value: Callable[[], tuple[int, int] | None] | None) -> None:
        if value is None:
            self._delivery.settle()
        self._delivery.taken = value

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader."""
        return self._setting.source.num_workers

    @property
    def has_length(self) -> bool:
        """Whether epochs have a known length; else they end where passes do."""
        return self._setting.source.length is not None and not (self._setting.by_streams and self.epoch_length == "full_pass")

    def __len__(self) -> int:
        """Batches in the next epoch on this rank.

        Raises:
            TypeError: It is not known, see `has_length`.
        """
        if not self.has_length:
            raise TypeError("this EchoLoader has no length: an epoch ends where a pass of its loader ends")
        kept = self._delivery.progress.kept_length
        return self._own_length() if kept is None else kept

    def _own_length(self) -> int:
        batches = self.pass_batches
        return batches if self.epoch_length == "fixed" else round(self.factor * batches)

    def __repr__(self) -> str:
        return self._setting.describe(self.factor)

    @property
    def pass_batches(self) -> int:
        """Batches that one pass over the data has on this rank: the length of the plain loader; 0 if it has none."""
        return self._setting.layout().batches_per_pass

    @property
    def passes(self) -> float:
        """Passes over the data so far, from the fresh examples delivered; those that are over where none has a known length."""
        items = self._setting.items_per_pass()
        if not items:
            return float(self._delivery.passes_over)
        if self._setting.by_streams:
            return self.counts.fresh / items
        plan = self._pipeline.state()["plan"]
        taken = self._pipeline.begin_at[0] if plan is None else plan["position"]
        return float(taken / items)

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        epoch = Epoch(lambda: self._delivery.progress, self._begin_epoch, self._next_batch)
        self._iterations.add(epoch)
        return epoch

    def _begin_epoch(self, epoch: Epoch) -> None:
        self._iterations.check_alone(epoch)
        keeps_length = bool(self.epoch_goes_on and self.epoch_goes_on())
        self._delivery.begin_epoch(len(self) if self.has_length else -1, keeps_length=keeps_length)

    def _next_batch(self) -> Any:
        if self.insertion_point is InsertionPoint.after_transfer and not self.is_transferred:
            raise RuntimeError(
                "insertion_point='after_transfer' reuses batches on the device, but nobody here puts them there: train with "
                "EchoDataModule(datamodule, factor, insertion_point='after_transfer') or "
                "EchoCallback(echo=EchoConfig(factor, insertion_point='after_transfer')), on a single loader; or use "
                "'after_batching'"
            )
        run = self._pipeline.run or self._start()
        return self._delivery.fetch(lambda: self._next_item(run))

    def _next_item(self, run: Run | StreamRun) -> Item | None:
        """The next batch, over the ends of passes; None where an epoch ends with a pass."""
        try:
            while (item := run.next_batch()) is None:
                self._delivery.end_pass()
                if not self.has_length:
                    break
            return item
        except BaseException as error:
            try:
                clear_frames(error)
            finally:
                self.close()
            raise

    def close(self) -> None:
        """Ends workers and thread; a later epoch starts them anew and goes on where this one stopped."""
        self._pipeline.stop(before=self._delivery.forget_unused())

    def follow(self, before: EchoLoader) -> None:
        """Takes the place of another loader in a run: goes on with its seed, factor and counts.

        Where both cut the data alike it goes on at the same batch, else with the next pass.
        """
        state = before.state_dict()
        if not self.has_length or not before.has_length or self._setting.by_streams:
            self._follow_with_next_pass(before)
            return
        if before._setting.layout() == self._setting.layout() and before.insertion_point is self.insertion_point:
            self._factor.constructed = before._factor.constructed
            self.load_state_dict(state)
            progress, others = self._delivery.progress, before._delivery.progress
            progress.resuming, progress.kept_length = others.resuming, others.kept_length
            return
        self._follow_anew(before)
        if state["plan"] is not None:
            taken, layout = state["plan"]["position"], Layout(**state["layout"])
            number = 1 + taken // layout.items_per_pass(before._setting.by_batches)
            batches = self._delivery.progress.delivered = number * self.pass_batches
            self._pipeline.begin_at = (number * self._setting.items_per_pass(), batches)

    def _follow_anew(self, before: EchoLoader) -> None:
        """Goes on with seed, factor and counts alone."""
        self._seed = before.seed
        self._delivery.begin_at(Progress(), before.counts, before._delivery.passes_over)
        self._factor.restart(before.factor)

    def _follow_with_next_pass(self, before: EchoLoader) -> None:
        """Of another stream no place is known: its first pass is the next one of the run."""
        self._follow_anew(before)
        self._delivery.progress.delivered = before.delivered
        self._pipeline.begin_at = (0, before.delivered)

    @property
    def keeps_length(self) -> bool:
        """Whether the length of the next epoch is another one than the factor would make it."""
        return self.has_length and self._delivery.progress.kept_length not in (None, self._own_length())

    def keep_length(self) -> None:
        """Leaves the length of the next epoch as it is, whatever the factor does: who trains believes in it already."""
        self._delivery.progress.kept_length = len(self)

    def release_length(self) -> None:
        """Who trains asks anew: ends `keep_length`, unless a resumed epoch is still to be ended."""
        if not self._delivery.progress.resuming:
            self._delivery.progress.kept_length = None

    def restart(self) -> None:
        """Goes back to the very start of the run."""
        self._pipeline.stop()
        self._reset()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The state at the batch delivered last: plain types, the same on all ranks, positions but never examples."""
        in_use = self._delivery.in_use
        return {
            "version": STATE_VERSION,
            **self._setting.depends_on(),
            **self._pipeline.saved_for,  # a state that was loaded and not started from is still that of its own run
            "seed": self._seed,
            **self._factor.state(),
            **in_use.progress,
            **({} if self.epoch_goes_on is None else {"epoch_goes_on": self.epoch_goes_on()}),
            "begin_at": list(self._pipeline.begin_at),
            "passes_over": in_use.passes_over,
            "counts": [in_use.counts.fresh, in_use.counts.echoed, in_use.counts.refetched],
            **self._pipeline.state(before=int(self._delivery.is_ahead)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken, also on a loader that is running.

        Raises:
            EchoStateError: The state is none of an `EchoLoader`, of a later version, of another data set, or of the middle of a
                pass where the loader cannot go on.
        """
        check_state(state)
        if state["layout"]["length"] != (length := self._setting.layout().length) and state["delivered"]:
            raise EchoStateError(
                f"the state is of a pass of {state['layout']['length']:,} items, this loader's has {length:,}: the data set, "
                "sampler or kind of insertion point is another one. Resume with the same one, or start anew without the "
                "loader's state"
            )
        state = adapt_state(state, self._setting)
        if has_own_states(state) and world()[0] > 1:
            self._warn(
                "the loader's own state is that of rank 0, which every rank goes on from now: this is right where all ranks are "
                "at the same place of their shares"
            )
        self._pipeline.load(state)
        if state["constructed_factor"] != self._factor.constructed:
            self._warn(
                f"factor={self._factor.constructed:g} is not used: the state goes on with factor {state['factor']:g}. "
                "Set .factor after resuming to change it"
            )
        self._factor.load(state)
        self._seed = state["seed"] if state["seed"] is not None else self._seed
        progress = Progress.from_state(state, self.limit_train_batches)
        self._delivery.begin_at(progress, EchoCounts(*state["counts"]), state.get("passes_over", 0))
        if progress.resuming and self.has_length and state["layout"] == self._setting.layout().state():
            progress.kept_length = progress.epoch_batches  # the one under way; dealt out anew: see _start

    # ------------------------------------------------------------------ inside

    def _reset(self) -> None:
        self._pipeline = Pipeline()
        self._iterations = Iterations()
        self._delivery.reset()
        self._factor.restart()

    def _start(self) -> Run | StreamRun:
        if self._seed is None:
            self._seed = named_seed(default_seed(self.loader), self.name)
        resumed = self._pipeline.state()["plan"] is not None
        state, position = self._where_to_go_on()
        run = self._setting.start(
            factor=self.factor, seed=self._seed, state=state, position=position, worker_init_fn=self.worker_init_fn
        )
        if resumed and not run.exact:
            sampler = type(self._setting.source.sampler).__name__
            self._warn(
                f"{sampler} has neither state_dict and load_state_dict, nor a torch generator, nor "
                "set_epoch: the order of the resumed pass may be another one"
            )
        if self._setting.rank_of_process() == 0 and not self._said:
            self._said = True
            reason = self._setting.choice.reason
            auto = f" (auto: {reason})" if reason else ""
            # As text: who keeps the record would keep the loader, and its workers.
            _log.info("%s%s%s%s", self._prefix, repr(self), auto, self._setting.remark(self.has_length))
        return self._pipeline.start(run)

    def _where_to_go_on(self) -> tuple[dict[str, Any], tuple[int, int]]:
        """State to start from, and stream position and batch number where it has no plan."""
        pipeline = self._pipeline
        state, position = pipeline.state(), pipeline.begin_at
        if (next_pass := begin_next_pass(self.state_dict(), self._setting)) is not None:
            self._warn("the pass that was under way when workers were ended cannot be gone on with: the next one begins")
            pipeline.load({**self.state_dict(), **next_pass})
            state, position = pipeline.state(), pipeline.begin_at
        if self._setting.by_streams:
            return state, (0, self._delivery.progress.delivered)
        if state["plan"] is None or not (changed := differences(pipeline.saved_for, self._setting.depends_on())):
            return state, position
        position = where_to_go_on(state["plan"], pipeline.saved_for, self._setting.layout(), self._setting.by_batches)
        self._warn(
            f"the state was saved with {changed}: the run goes on at the same place of the pass and leaves nothing out, "
            "but its batches are not those of the run that was saved"
        )
        progress = self._delivery.progress
        progress.in_epoch, progress.epoch_batches, progress.delivered = 0, len(self), position[1]
        return {"plan": None, "order": state["order"]}, position

    def _warn(self, message: str) -> None:
        if self._setting.rank_of_process() == 0:
            warnings.warn(self._prefix + message, UserWarning, stacklevel=3)

    @property
    def _prefix(self) -> str:
        return f"{self.name}: " if self.name else ""
