"""`EchoLoader`: the loader that users hold. It owns the options, the epochs and their length.

The plan is one endless sequence of batches, and an epoch is a stretch of it. ``iter()`` begins the next epoch. After a state was
loaded, it continues the present epoch. If an epoch is cut short, the next one continues at that batch. Therefore workers and
their queues stay alive from epoch to epoch.

A call of ``iter()`` changes nothing before the first batch is asked for, because Lightning calls it more often than it iterates.
If the length of a pass is not known, an epoch ends when a pass ends. Over a stream with a state only the first one does: later
epochs have as many steps as the plain loader's pass (`EchoRun.begin_epoch`).
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from torch.utils.data import IterableDataset

from lightning_echo import config as options
from lightning_echo.cache.kept import CacheConfig, read_cache_config
from lightning_echo.cache.node_cache import CacheCounts
from lightning_echo.data.objects import names_options
from lightning_echo.insertion import InsertionPoint, Needs, Reads, earliest
from lightning_echo.loader.epochs import BatchesUsed, Caller, Epoch, Iterations, Steps, TrainerPlace, caller, few_workers
from lightning_echo.loader.resuming import EpochListener
from lightning_echo.loader.run import EchoRun, RunFactor
from lightning_echo.loader.setting import Setting, world
from lightning_echo.loader.state import EchoCounts
from lightning_echo.pipeline.journal import Replay, check_folder
from lightning_echo.pipeline.worker import StageSeconds
from lightning_echo.plan.memory import make_plan
from lightning_echo.schema import LEFT_OUT
from lightning_echo.share.config import ShareConfig, read_share_config
from lightning_echo.share.sharing import LoaderSharing, begins
from lightning_echo.split.prove import Split


class PlainAttributes:
    """Gives other code the attributes of the plain loader inside, if that loader has them.

    Only those from which nobody builds another loader: that loader would train without echoing, and no error would show it.
    """

    loader: Any

    @property
    def dataset(self) -> Any:
        """The data set of the loader inside. A stream must be read from there: ``.loader.dataset``.

        Raises:
            AttributeError: The loader inside has no data set, or it is a stream.
        """
        dataset = self.loader.dataset
        if isinstance(dataset, IterableDataset):
            self._refuse("dataset")
        return dataset

    batch_size = property(
        attrgetter("loader.batch_size"),
        doc="The batch size of the loader inside: the number of examples, or None if it has a ``batch_sampler`` of its own.",
    )
    collate_fn = property(attrgetter("loader.collate_fn"), doc="The collate function of the loader inside.")
    drop_last = property(
        attrgetter("loader.drop_last"), doc="Whether the loader inside leaves out a last batch that is not full."
    )

    @property
    def sampler(self) -> NoReturn:
        """Not there: Lightning would tell epochs to it behind the plan, and others would build a plain loader from it.

        Raises:
            AttributeError: Always.
        """
        self._refuse("sampler")

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}, since a loader that is built from it would not echo. If a Trainer of "
            "transformers resumes here, set ignore_data_skip=True and load the state of the EchoLoader instead. Otherwise ask "
            f"the plain loader: its .loader.{name}"
        )


@names_options
class EchoLoader(PlainAttributes):
    """Echoes a training loader: one delivered example in ``factor`` is fresh, and the others are echoed.

    The user's collate function makes the batches, as without echoing. Each ``for batch in loader`` is one epoch. A Trainer that
    validates, tests or predicts with it gets the plain loader inside.

    Args:
        loader: A ``DataLoader``. For ``after_batching`` and ``after_transfer`` any iterable of batches will do. A stream must
            divide its data among the ranks itself.
        factor: Echo factor: the uses per fresh example on average, a real number >= 1. 1 means no echoing. ``"demand"``: a batch
            takes the fresh examples that have arrived, and echoes for the rest. A `Replay` repeats such a run to the bit.
        insertion_point: Where the echo stage stands, see `InsertionPoint` and `EchoConfig`.
        buffer_size: The largest number of live examples per rank, or the memory that they may take, see `EchoConfig`.
        reuse: Which examples are used again, ``"memory"`` or ``"each"``, see `EchoConfig`.
        epoch_length: How many steps an epoch has, ``"fixed"`` or ``"full_pass"``, see `EchoConfig`.
        seed: Seed of the order, the draws and the augmentation, see `EchoConfig`.
        num_replicas: Number of ranks that the data is divided among, as in ``DistributedSampler``. Default:
            ``torch.distributed`` is asked. 1 (with ``rank=0``) gives all data to each rank. Set it if ranks share the work on the
            same data (tensor parallelism).
        rank: Number of this rank, from 0.
        cache: A cache that keeps examples, so that they are read once: a `CacheConfig`, a mapping of its fields, or its size
            alone (``"8GiB"``). None: there is no cache. With ``share``, it is the reader's, and all trainings that share give the
            same.
        share: The name under which this training shares the reading with others on this machine. Or a `ShareConfig`, or a
            mapping of its fields. None: this loader reads for itself.
        reads_in_flight: How many reads may be under way at once on a rank: an integer from 1, or ``"auto"``, see `EchoConfig`.
        max_factor: With ``factor="demand"``: the most uses per fresh example on average, a real number >= 1. Default: 8.
        journal: The folder in which a run on demand is written down, so that a `Replay` can repeat it: a few bytes for each
            batch. None: it is not, unless an `EchoCallback` has a log directory.

    Attributes:
        limit_train_batches: The Trainer's option of this name; None if unknown. A resumed run uses it to see whether the epoch
            was at its end.
        factor_owner: Name of the object on which users must set the factor, because it tells the Trainer the new length of
            epochs. Empty: users set the factor on this loader.
        is_transferred: Whether the consumer can put a `BatchUse` on the device. ``after_transfer`` yields such objects.
        epoch_goes_on: A function that is called if several loaders make up an epoch. It returns whether the present epoch
            continues, or None if that is not known.

    Raises:
        ValueError: An option has an impossible value, or does not fit the loader.
        TypeError: An option has a wrong type, or ``loader`` is not a loader.

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
        factor: float | str | Replay,
        *,
        insertion_point: InsertionPoint | str = InsertionPoint.auto.value,
        buffer_size: int | float | str | None = None,
        reuse: str = "memory",
        epoch_length: str = "fixed",
        seed: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        cache: CacheConfig | Mapping[str, Any] | str | float | int | None = None,
        share: ShareConfig | Mapping[str, Any] | str | None = None,
        reads_in_flight: int | str | None = None,
        max_factor: int | float | None = None,
        journal: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(loader, EchoLoader):
            raise ValueError("loader is echoed already: pass the loader inside (its .loader), or set .factor on it")
        replay, (on_demand, factor) = Replay.of(factor), options.check_demand(factor, max_factor)
        point = options.check_point(insertion_point)
        buffer_size = options.check_buffer_size(buffer_size)
        epoch_length = options.check_epoch_length(epoch_length)
        ranks = options.check_ranks(num_replicas, rank)
        seed = options.check_seed(seed)
        self._cache = read_cache_config(cache)
        self._setting = Setting(
            loader,
            point,
            buffer_size,
            factor,
            ranks,
            epoch_length,
            self._cache,
            options.check_reuse(reuse),
            read_share_config(share),
            options.check_reads_in_flight(reads_in_flight),
            on_demand=on_demand,
            replay=replay,
        )
        self._run = EchoRun(self._setting, factor, seed)
        if journal is not None and not self._setting.has_journal:
            raise ValueError(
                f"journal={journal!r} is impossible here: only a run with factor='demand' has a journal, and none with "
                "share=. Leave it out"
            )
        self.journal = journal
        self._iterations = Iterations()
        self._told_length: int | None = None
        self._has_said_plain = self._has_told_workers = False
        weakref.finalize(self, _close, weakref.ref(self._run)).atexit = False  # a later loader may still refer to it
        if self._setting.buffer.warning:
            self._run.warn(self._setting.buffer.warning)
        self.factor_owner = ""
        self.limit_train_batches: int | float | None = None
        self.is_transferred = False
        self.epoch_goes_on: Callable[[], bool | None] | None = None

    # ------------------------------------------------------------------ properties

    @property
    def loader(self) -> Any:
        """The user's loader. Iterate over it if you want to look at data during training."""
        return self._setting.kind.loader

    @property
    def split(self) -> Split | None:
        """Where the data set is split; None if an echo reuses whole examples or batches."""
        return self._setting.choice.split

    @property
    def insertion_point(self) -> InsertionPoint:
        """The insertion point that was chosen, never ``auto``."""
        return self._setting.choice.point

    @property
    def buffer_size(self) -> int:
        """The largest number of live examples per rank, or of live batches if whole batches are reused.

        If the size depends on the free memory, it is an estimate until the first batch. Then all ranks take the smallest size of
        any rank. A resumed run keeps the size of its state, if memory has room for it.
        """
        return self._setting.buffer_size

    def settle(self) -> None:
        """Opens the cache and makes `buffer_size` final. Otherwise the first batch does this. All ranks must call it together.

        Raises:
            ValueError: The memory that the user asks for cannot hold a batch, or the cache cannot be opened.
        """
        self._run.settle()

    @property
    def seed(self) -> int | None:
        """The seed in use; None until the first batch, if none was given."""
        return self._run.seed

    @property
    def reuse(self) -> str:
        """Which examples are used again: ``"each"`` or ``"memory"``."""
        return self._setting.reuse.value

    @property
    def epoch_length(self) -> str:
        """``"fixed"`` or ``"full_pass"``. Without a known length ``"full_pass"``, unless the data is a stream with a state."""
        return self._setting.epoch_length

    @property
    def name(self) -> str:
        """The name of this loader among several that a Trainer combines; empty if it is the only one.

        Loaders with different names get different seeds by default.
        """
        return self._run.says.name

    @name.setter
    def name(self, value: str) -> None:
        self._run.says.name = value

    @property
    def factor(self) -> float:
        """The echo factor that was set last; on demand ``max_factor``. It applies from the first batch not planned yet."""
        return self._run.factor.value

    @factor.setter
    def factor(self, value: float) -> None:
        if self.factor_owner and self.epoch_length == "full_pass" and self.has_length:
            raise AttributeError(
                "factor cannot be set here: with epoch_length='full_pass' it changes the length of epochs, and the Trainer must "
                f"be told. Set .factor on the {self.factor_owner} instead"
            )
        self.set_factor(value)

    @property
    def on_demand(self) -> bool:
        """Whether batches echo on demand (``factor="demand"``). `factor` is then the bound ``max_factor``."""
        return self._setting.on_demand

    @property
    def repeats(self) -> bool:
        """Whether a run on demand is repeated (``factor=Replay(...)``)."""
        return self._setting.replay is not None

    @property
    def journal(self) -> str | None:
        """The folder in which a run on demand is written down; None if it is not. It applies when workers are started."""
        return self._run.journal.folder

    @journal.setter
    def journal(self, value: str | os.PathLike[str] | None) -> None:
        self._run.write_journal_in(None if value is None else check_folder("journal", value))

    def why_not_on_demand(self) -> str:
        """Returns why this loader cannot echo on demand, in words; empty if it can."""
        return self._setting.why_not_on_demand()

    def echo_on_demand(self, max_factor: float) -> None:
        """Lets this loader echo on demand from its first batch on. Call it before that, and only if it can.

        Args:
            max_factor: The most uses per fresh example on average.
        """
        if not self.is_at_start:
            raise RuntimeError("a run that has begun cannot change to echo on demand: please report this")
        self._setting.on_demand, self._run.factor = True, RunFactor(options.check_factor(max_factor))

    def check_factor(self, value: float) -> float:
        """Returns the factor as a float, if it can be set on this loader, now or later.

        Args:
            value: The factor.

        Raises:
            TypeError: The factor is not a number.
            ValueError: The factor is below 1, not finite, above the limit, or needs a larger buffer.
        """
        value = options.check_factor(value)
        self._setting.check_factor(value)
        return value

    def set_factor(self, value: float, since: int | None = None) -> None:
        """Sets the factor, also if there is a `factor_owner`.

        Args:
            value: The factor.
            since: Number of the first batch of the run to which the factor applies. None: the first batch not yet planned.

        Raises:
            TypeError: The factor is not a number.
            ValueError: The factor is below 1, not finite, above the limit, or needs a larger buffer. Or batch ``since`` may be
                planned already. Or nothing is planned yet, and ``since`` is not the next batch.
        """
        value = self.check_factor(value)
        if value != self.factor:
            self._run.change_factor(value, since)

    @property
    def factor_in_force(self) -> float:
        """The factor that the next batch was planned with."""
        return self._run.factor.in_force(self.delivered_batches)

    @property
    def factor_since(self) -> int:
        """Number of the first batch of the run to which `factor` applies."""
        return self._run.factor.since

    @property
    def planned_ahead(self) -> int:
        """The largest number of batches that are planned beyond the delivered one, because workers and thread work on them."""
        return self._setting.lookahead(self._run.factor.largest)

    @property
    def settled_at(self) -> int:
        """Number of the batch of the run from which on the share of fresh examples is ``1 / factor``.

        Before that batch, the buffer is being filled, so that the share may be larger.
        """
        setting = self._setting
        if setting.on_demand:
            return self.factor_since
        filling = 0 if self.factor == 1 else setting.kind.filling_batches(setting.layout(), setting.buffer_size, setting.reuse)
        return self.factor_since + filling

    @property
    def delivered_batches(self) -> int:
        """Number of batches delivered on this rank so far. It is also the number of the next batch."""
        return self._run.delivery.batches

    @property
    def counts(self) -> EchoCounts:
        """Examples delivered on this rank so far."""
        return self._run.delivery.counts

    @property
    def saved_counts(self) -> EchoCounts:
        """`counts` as a `state_dict` has them now: within a step of a Trainer without its batch, which a resumed run repeats."""
        return self._run.saved_counts

    @property
    def last_batch_counts(self) -> EchoCounts:
        """Examples in the batch that was delivered last."""
        return self._run.delivery.last

    @property
    def cache(self) -> CacheConfig | None:
        """The options of the cache; None without one."""
        return self._cache

    @property
    def cache_counts(self) -> CacheCounts | None:
        """The contents of the cache of this node, and its hits and misses in this run; None without a cache."""
        if (sharing := self._setting.sharing) is not None:
            return sharing.cache_counts
        return None if self._setting.cache is None else self._setting.cache.counts

    @property
    def sharing(self) -> LoaderSharing | None:
        """How the reading is shared: the options, who shares it, the waiting for others, what was missed. None if not shared."""
        return self._setting.sharing

    @property
    def seconds(self) -> StageSeconds:
        """Seconds that the workers spent on the batches delivered so far. All are zero if the workers cannot be measured."""
        return replace(self._run.delivery.seconds)

    @property
    def reads_ahead(self) -> bool:
        """Whether threads may read examples ahead of time (``reads_in_flight``): the data set has a part that they may read."""
        return self._setting.choice.reading is not None

    @property
    def reads(self) -> Reads:
        """What is read at a time: ``examples``, those of a batch in ``calls``, a ``stream``, or ``batches`` that are echoed."""
        return self._setting.kind.reads

    @property
    def batches_used(self) -> Callable[[], BatchesUsed | None] | None:
        """A function that returns the number of batches used in the run and in the epoch, if the consumer fetches one ahead.

        Lightning fetches one batch ahead if the loader has no length. Counts and state are then those of the batch in use. If
        the consumer does not fetch ahead, this attribute is None, or the function returns None.
        """
        return self._run.delivery.batches_used

    @batches_used.setter
    def batches_used(self, value: Callable[[], BatchesUsed | None] | None) -> None:
        if value is None:
            self._run.delivery.settle()
        self._run.delivery.batches_used = value

    @property
    def trainer_place(self) -> Callable[[], TrainerPlace | None] | None:
        """A function that returns the Trainer's place in its epoch, if the Trainer iterates over this loader alone.

        An epoch of this loader then has the same place. If the place is not known, this attribute is None, or the function
        returns None.
        """
        return self._run.delivery.trainer_place

    @trainer_place.setter
    def trainer_place(self, value: Callable[[], TrainerPlace | None] | None) -> None:
        self._run.delivery.trainer_place = value

    @property
    def worker_init_fn(self) -> Any:
        """The function that each worker calls when it starts: the user's, or Lightning's if the user has none."""
        return self._run.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._run.worker_init_fn = value

    @property
    def num_workers(self) -> int:
        """Number of worker processes. If the loader shares its reading, 1: the reader's workers count as a single fast one."""
        return self._setting.kind.num_workers if self._setting.sharing is None else 1

    @property
    def batch_sampler(self) -> EpochListener:
        """An object on which Lightning sets the number of the epoch (see run.py). It does not make batches."""
        return EpochListener(getattr(self.loader, "batch_size", None) or 1, partial(setattr, self._run, "heard_epoch"))

    @property
    def is_running(self) -> bool:
        """Whether workers and thread run. If not, the next batch starts them. Without workers, the next batch begins to read."""
        return self._run.is_running

    @property
    def has_length(self) -> bool:
        """Whether the length of epochs is known beforehand. If not, the first epoch ends when a pass ends, see `epoch_length`."""
        return self._setting.has_length

    def __len__(self) -> int:
        """Returns the number of batches in the next epoch on this rank.

        Raises:
            TypeError: The length is not known, see `has_length`.
        """
        if not self.has_length:
            raise TypeError("this EchoLoader has no length, since its loader has none")
        if self.epoch_length == "full_pass" and caller().evaluates:
            return len(self.loader)
        self._told_length = self._run.length()
        return self._told_length

    def __repr__(self) -> str:
        return self._setting.describe(self.factor)

    @property
    def pass_batches(self) -> int:
        """Batches in one pass over the data on this rank: the length of the plain loader, or 0 if it has none."""
        return self._setting.layout().batches_per_pass

    @property
    def is_at_start(self) -> bool:
        """Whether no batch was delivered yet and no state was loaded."""
        return self._run.is_at_start

    def passes_in(self, batches: int) -> float | None:
        """Returns the number of passes over the data that the first batches of a run take, at the present factor.

        Args:
            batches: Number of batches.

        Returns:
            The number of passes. None for a stream and on demand, because batches cannot be planned beforehand.
        """
        setting = self._setting
        if setting.on_demand or setting.kind.plans_in_workers or not (items := setting.items_per_pass()):
            return None
        plan = make_plan(setting.kind.shape(setting.layout(), setting.buffer_size, 0, setting.reuse), self.factor)
        for _ in range(batches):
            plan.next_batch()
        return plan.position / items

    @property
    def passes(self) -> float:
        """Passes over the data so far, by the fresh examples delivered. If their length is not known: complete passes only."""
        return self._run.passes

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        epoch = Epoch(self._run.delivery, self._begin_epoch, self._run.fetch)
        self._iterations.add(epoch)
        return epoch

    def _begin_epoch(self, epoch: Epoch) -> None:
        by = caller()
        if by.evaluates or (
            by.trainer is not None and not by.is_its_loop and (self.factor_owner or by.trainer.train_dataloader is self)
        ):
            epoch.instead = iter(self._plain_loader(by))
            epoch.finished = True
            return
        self._iterations.check_alone(epoch)
        if not self.is_transferred and self.insertion_point.on_device:
            option = self.insertion_point.option
            raise RuntimeError(
                f"{option} reuses batches on the device, and this loop does not put them there. Train a single loader "
                f"with EchoDataModule(datamodule, factor, {option}) or EchoCallback(factor=factor, {option}), or use "
                f"'{earliest(Needs.batches)}'"
            )
        if by.trainer is not None and self.sharing is None and not self._has_told_workers:
            self._has_told_workers = True
            if found := few_workers(by.trainer, self.loader):
                warnings.warn(f"lightning_echo: {found[0]}", found[1], stacklevel=2)
        if self.sharing is not None:
            begins(self._run, self.sharing.config.name, epoch)
        keeps_length = bool(self.epoch_goes_on and self.epoch_goes_on())
        trainer: Any = by.trainer if by.is_its_loop else None
        is_single = trainer is not None and (self.trainer_place is not None or trainer.train_dataloader is self)
        self._run.begin_epoch(
            keeps_length=keeps_length,
            is_alone=not self.factor_owner,
            steps=None if trainer is None else Steps(trainer),
            is_limited=is_single and trainer.num_training_batches != math.inf,
            is_epoch=world()[0] == 1 if trainer is None else is_single and not trainer.reload_dataloaders_every_n_epochs,
        )

    def _plain_loader(self, by: Caller) -> Any:
        """Returns the loader inside, for a Trainer that evaluates and for a user who looks at data in a hook.

        Raises a RuntimeError if Lightning would have to divide the data of an evaluation among ranks.
        """
        what = "a loop in a hook gets"
        if by.evaluates:
            stage = by.trainer.state.stage.value
            if by.is_its_loop and world()[0] > 1 and by.trainer.distributed_sampler_kwargs is not None:
                raise RuntimeError(
                    f"an EchoLoader is the loader of stage {stage!r}, where nothing is echoed, and Lightning cannot divide its "
                    f"data among the {world()[0]} ranks: pass the plain loader there (its .loader)"
                )
            what = f"stage {stage!r} gets"
        if not self._has_said_plain:
            self._has_said_plain = True
            self._run.warn(f"only a training is echoed: {what} the plain loader inside this EchoLoader")
        return self.loader

    def notice_changes(self) -> None:
        """Checks whether the data was changed since the workers were started. If so, the next epoch starts new workers.

        The beginning of an epoch does the same. Call it before that, if you must know whether workers will start (`is_running`).
        """
        self._run.notice_changes()

    def refresh(self) -> None:
        """Lets the next batch come from the data as it is now: new workers are started, and all examples are read again.

        The beginning of an epoch does this by itself if it sees that the data was changed: attributes, members of lists and
        dicts, arrays and tensors of the data set and of all that it holds. Call this after a change that cannot be seen, such as
        other files under the same paths, or within an epoch. Counts and the place in the pass stay. A cache is emptied. All
        ranks must call it together.
        """
        self._run.refresh()

    def close(self) -> None:
        """Ends workers and thread. A later epoch starts new ones, and continues where this one stopped."""
        self._run.close()

    def follow(self, before: EchoLoader) -> None:
        """Takes the place of another loader in a run, and continues with its seed, factor and counts.

        If both loaders cut the data alike, the run continues at the same batch, otherwise with the next pass. A stream, or a
        loader without a length, needs a ``state_dict`` of its own to continue within a pass. Without it, the next pass begins,
        and a warning says so.

        Args:
            before: The loader that delivered batches until now.
        """
        self._run.follow(before._run)

    @property
    def has_kept_length(self) -> bool:
        """Whether the length of the next epoch differs from the length that the factor gives."""
        return self.has_length and len(self) != self._setting.epoch_batches(self.factor)

    def keep_length(self) -> None:
        """Keeps the length of the next epoch, even if the factor changes, because the Trainer has asked for it already."""
        self._run.delivery.progress.kept_length = len(self)

    def release_length(self) -> None:
        """Undoes `keep_length`, because the Trainer asks again. The length of a resumed epoch stays until that epoch ends."""
        if not self._run.delivery.progress.resuming:
            self._run.delivery.progress.kept_length = None

    def restart(self) -> None:
        """Goes back to the start of the run."""
        self._iterations = Iterations()
        self._run.restart()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state at the batch that was delivered last.

        It holds plain types: positions, but never examples. It is the same on all ranks, except for `refetched` among the
        counts, and for a state of the user's own loader, sampler or stream, which is part of it.
        """
        goes_on = LEFT_OUT if self.epoch_goes_on is None else self.epoch_goes_on()
        place = None if self.trainer_place is None else self.trainer_place()
        return self._run.state_dict(goes_on, place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was called. The loader may be running.

        Raises:
            EchoStateError: The state is not a state of an `EchoLoader`, or it is damaged, or it is of a later version or of
                another data set. Or it was taken within a pass, and this loader cannot continue there.
        """
        told = self._told_length
        self._run.load_state_dict(state, self.limit_train_batches)
        if self.has_length and not self.factor_owner and told not in (None, len(self)):
            self._run.warn(
                f"len() of this EchoLoader was {told} before its state was loaded, and is {len(self)} now. Lightning has asked "
                f"already, and takes {told} batches in this epoch. Make the EchoLoader with factor={self.factor:g}, or use "
                "EchoDataModule"
            )


def _close(run: weakref.ref[EchoRun]) -> None:
    if (left := run()) is not None:
        left.close()
