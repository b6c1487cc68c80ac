"""`EchoLoader`: what the user has in hands: its options, the epochs, their length.

The batches form one endless stream, laid down by the plan. An epoch is a stretch of it: ``iter()`` begins the next one (unless a
state was loaded: then it goes on), and where an epoch is cut short, the next one goes on there. Workers and their queues
therefore live on from epoch to epoch. ``iter()`` by itself does nothing: Lightning calls it more often than it iterates.
Where passes have no known length, an epoch ends with a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loading import options
from lightning_echo.loading.counts import EchoCounts
from lightning_echo.loading.echo_run import EchoRun
from lightning_echo.loading.epochs import Epoch, Iterations, TrainerPlace
from lightning_echo.loading.schema import LEFT_OUT
from lightning_echo.loading.setting import Setting
from lightning_echo.loading.succession import EpochListener
from lightning_echo.workers.seconds import StageSeconds

__all__ = ["EchoLoader"]


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
            ``after_transfer``, there in device memory). Default: 16 batches (4 in device memory), of a short pass a quarter,
            two batches per worker at least; less if memory is short. The larger, the fewer fresh examples learning takes. Where
            it hardly holds a batch, single examples get up to three uses more or fewer than the factor.
        epoch_length: ``"fixed"``: an epoch has as many steps as without echoing. ``"full_pass"``: ``round(factor * steps)``,
            so that it delivers as many fresh examples as one pass over the data holds; over a stream it ends where the stream
            does, and so does every epoch of a loader without a length.
        seed: Seed of order, draws and augmentation. Default: that of ``seed_everything``, else drawn once.
        num_replicas: Number of ranks, as in ``DistributedSampler``; default: ask ``torch.distributed``. 1 (and ``rank=0``)
            switches sharding off. To be given where ranks share the work on the same data (tensor parallelism).
        rank: This rank.

    Attributes:
        limit_train_batches: As in ``Trainer``, None if unknown. It tells a resumed run whether an epoch was at its end.
        factor_owner: Name of what must hear of a new factor where that changes the length of epochs; empty: nobody.
        is_transferred: Whether who iterates can put a `BatchUse` on the device: what ``after_transfer`` yields.
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

    def __init__(
        self,
        loader: Any,
        factor: float,
        *,
        insertion_point: InsertionPoint | str = InsertionPoint.auto.value,
        buffer_size: int | None = None,
        epoch_length: str = "fixed",
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if isinstance(loader, EchoLoader):
            raise ValueError("loader is echoed already: pass the loader inside (its .loader), or set .factor on it")
        factor = options.check_factor(factor)
        point = options.check_point(insertion_point)
        buffer_size = options.check_buffer_size(buffer_size)
        epoch_length = options.check_epoch_length(epoch_length)
        ranks = options.check_ranks(num_replicas, rank)
        seed = options.check_seed(seed)
        self._setting = Setting(loader, point, buffer_size, factor, ranks, epoch_length)
        self._run = EchoRun(self._setting, factor, seed)
        self._iterations = Iterations()
        self._told_length: int | None = None
        weakref.finalize(self, _close, weakref.ref(self._run)).atexit = False  # a later loader may still refer to it
        if self._setting.warning:
            self._run.warn(self._setting.warning)
        self.factor_owner = ""
        self.limit_train_batches: int | float | None = None
        self.is_transferred = False
        self.epoch_goes_on: Callable[[], bool | None] | None = None

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
        return self._run.seed

    @property
    def epoch_length(self) -> str:
        """``"fixed"`` or ``"full_pass"``; the latter where passes have no known length."""
        return self._setting.epoch_length

    @property
    def name(self) -> str:
        """Its name among several loaders that a Trainer combines; makes a default seed its own. Empty: it is the only one."""
        return self._run.name

    @name.setter
    def name(self, value: str) -> None:
        self._run.name = value

    @property
    def factor(self) -> float:
        """The echo factor last set. A new one counts from the first batch that cannot be in flight already."""
        return self._run.factor.value

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
        if value != self.factor:
            self._run.change_factor(value)

    @property
    def factor_in_force(self) -> float:
        """The factor that the next batch to be delivered was planned with."""
        return self._run.factor.in_force(self.delivered)

    @property
    def factor_since(self) -> int:
        """Number in the run of the first batch that `factor` counts for."""
        return self._run.factor.since

    @property
    def settled_at(self) -> int:
        """Number in the run of the batch by which the buffer is full: before, more of each batch is fresh than ``1 / factor``."""
        return self.factor_since + (0 if self.factor == 1 else self._setting.filling_batches())

    @property
    def delivered(self) -> int:
        """Batches delivered on this rank so far: the number of the next one."""
        return self._run.delivery.batches

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered on this rank so far."""
        return self._run.delivery.counts

    @property
    def last_batch_counts(self) -> EchoCounts:
        """The same for the batch delivered last."""
        return self._run.delivery.last

    @property
    def seconds(self) -> StageSeconds:
        """What the batches delivered by this object cost its workers; all zero where the loader itself cannot be looked into."""
        return replace(self._run.delivery.seconds)

    @property
    def taken(self) -> Callable[[], tuple[int, int] | None] | None:
        """Says how many batches who iterates has taken into use, in its run and in its epoch, where it asks for one ahead, as
        Lightning does where there is no length: then counts and state are those of the batch in use. None: it does not."""
        return self._run.delivery.taken

    @taken.setter
    def taken(self, value: Callable[[], tuple[int, int] | None] | None) -> None:
        if value is None:
            self._run.delivery.settle()
        self._run.delivery.taken = value

    @property
    def place(self) -> Callable[[], TrainerPlace | None] | None:
        """Says where the Trainer is that iterates this loader alone: an epoch is where the Trainer's is. None: nobody says."""
        return self._run.delivery.place

    @place.setter
    def place(self, value: Callable[[], TrainerPlace | None] | None) -> None:
        self._run.delivery.place = value

    @property
    def worker_init_fn(self) -> Any:
        """Runs in each worker that is started; the user's, or Lightning's where there is none."""
        return self._run.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._run.worker_init_fn = value

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader."""
        return self._setting.source.num_workers

    @property
    def batch_sampler(self) -> EpochListener:
        """Not what makes the batches, but what Lightning tells the epoch: see succession.py."""
        return EpochListener(getattr(self.loader, "batch_size", None) or 1, self._hear_epoch)

    def _hear_epoch(self, epoch: int) -> None:
        self._run.heard_epoch = epoch

    @property
    def is_running(self) -> bool:
        """Whether workers and thread are there; else the next batch starts them (without workers: begins to read)."""
        return self._run.is_running

    @property
    def has_length(self) -> bool:
        """Whether epochs have a known length; else they end where passes do."""
        return self._setting.has_length

    def __len__(self) -> int:
        """Batches in the next epoch on this rank.

        Raises:
            TypeError: It is not known, see `has_length`.
        """
        if not self.has_length:
            raise TypeError("this EchoLoader has no length: an epoch ends where a pass of its loader ends")
        self._told_length = self._run.length()
        return self._told_length

    def __repr__(self) -> str:
        return self._setting.describe(self.factor)

    @property
    def pass_batches(self) -> int:
        """Batches that one pass over the data has on this rank: the length of the plain loader; 0 if it has none."""
        return self._setting.layout().batches_per_pass

    @property
    def is_at_start(self) -> bool:
        """Whether nothing was delivered yet, and no state was loaded."""
        return self._run.is_at_start

    def passes_in(self, batches: int) -> float | None:
        """Passes over the data in the first batches of a run at the present factor, as they would be planned.

        Args:
            batches: How many.

        Returns:
            None over a stream, which nobody plans beforehand.
        """
        return self._setting.passes_in(batches, self.factor)

    @property
    def passes(self) -> float:
        """Passes over the data so far, from the fresh examples delivered; those that are over where none has a known length."""
        return self._run.passes

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        epoch = Epoch(self._run.delivery, self._begin_epoch, self._run.fetch)
        self._iterations.add(epoch)
        return epoch

    def _begin_epoch(self, epoch: Epoch) -> None:
        self._iterations.check_alone(epoch)
        if not self.is_transferred and self.insertion_point.on_device:
            option = self.insertion_point.option
            raise RuntimeError(
                f"{option} reuses batches on the device, but nobody here puts them there: train with "
                f"EchoDataModule(datamodule, factor, {option}) or EchoCallback(factor=factor, {option}), on a single "
                f"loader; or use '{earliest(Needs.batches)}'"
            )
        keeps_length = bool(self.epoch_goes_on and self.epoch_goes_on())
        self._run.begin_epoch(keeps_length=keeps_length, is_alone=not self.factor_owner)

    def close(self) -> None:
        """Ends workers and thread; a later epoch starts them anew and goes on where this one stopped."""
        self._run.close()

    def follow(self, before: EchoLoader) -> None:
        """Takes the place of another loader in a run: goes on with its seed, factor and counts.

        Where both cut the data alike it goes on at the same batch, else with the next pass. A stream, or a loader without a
        length, goes on within a pass by its own state; without one its next pass begins, with a warning.
        """
        self._run.follow(before._run)

    @property
    def keeps_length(self) -> bool:
        """Whether the length of the next epoch is another one than the factor would make it."""
        return self.has_length and len(self) != self._setting.epoch_batches(self.factor)

    def keep_length(self) -> None:
        """Leaves the length of the next epoch as it is, whatever the factor does: who trains believes in it already."""
        self._run.delivery.progress.kept_length = len(self)

    def release_length(self) -> None:
        """Who trains asks anew: ends `keep_length`, unless a resumed epoch is still to be ended."""
        if not self._run.delivery.progress.resuming:
            self._run.delivery.progress.kept_length = None

    def restart(self) -> None:
        """Goes back to the very start of the run."""
        self._iterations = Iterations()
        self._run.restart()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """The state at the batch delivered last: plain types, the same on all ranks, positions but never examples."""
        goes_on = LEFT_OUT if self.epoch_goes_on is None else self.epoch_goes_on()
        place = None if self.place is None else self.place()
        return self._run.state_dict(goes_on, place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where a state was taken, also on a loader that is running.

        Raises:
            EchoStateError: The state is none of an `EchoLoader`, of a later version, of another data set, or of the middle of a
                pass where the loader cannot go on.
        """
        told = self._told_length
        self._run.load_state_dict(state, self.limit_train_batches)
        if self.has_length and not self.factor_owner and told not in (None, len(self)):
            self._run.warn(
                f"len() of this EchoLoader was {told} until its state was loaded, and is {len(self)} now: Lightning has asked "
                f"already, and takes {told} batches in this epoch. Make the EchoLoader with factor={self.factor:g}, or use "
                "EchoDataModule"
            )


def _close(run: weakref.ref[EchoRun]) -> None:
    if (left := run()) is not None:
        left.close()
