"""The user's loader: its kind, how it is rebuilt around a plan, and at which insertion point it is echoed."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo.cache.holding import Hold, find_holds, holds_found, no_hold
from lightning_echo.cache.kept import CacheConfig, changed_by_reading
from lightning_echo.cache.reads import Caching
from lightning_echo.data.copies import nbytes
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.data.objects import is_stateful
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.requests import draws_by_itself, sampler_in_words
from lightning_echo.pipeline.streams import StreamEcho, StreamRequest
from lightning_echo.pipeline.worker import EchoCollate, EchoDataset, ExampleCache, Request
from lightning_echo.plan.plan import PlanShape, Reuse
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.describe import ReadRefused, SplitRefused
from lightning_echo.split.prove import (
    Split,
    find_split,
    holds_iteration,
    ignores_index,
    make_stages,
    needs_one_call,
    read_plainly,
    weighed,
    whole_batch,
)
from lightning_echo.split.staged import Stages, batched, size_of_examples, uncut_stages

# ---------------------------------------------------------------------- source
# A plain ``DataLoader`` is rebuilt: same data set, same workers, same options, but the plan is its batch sampler. Over a stream,
# which has no index, the plan runs in the workers. Anything else that yields batches is iterated as it is, pass after pass, and
# only its batches are echoed.

_ONLY_SHUFFLE = ("torch", "lightning", "pytorch_lightning")  # packages


class Source:
    """The user's loader and its parts.

    Attributes:
        rebuilds: Whether it is a ``DataLoader`` that is rebuilt around a plan of indices.
        streams: Whether it is a ``DataLoader`` that makes batches from a stream's examples.

    Raises:
        TypeError: The loader cannot be iterated, or only once; it is a collection of loaders; or its sampler has no length.
        ValueError: The loader is empty, or yields batches in another order than its sampler's.
    """

    def __init__(self, loader: Any) -> None:
        _check_kind(loader)
        self.loader = loader
        makes_batches = _makes_batches_plainly(loader)
        self.streams = makes_batches and isinstance(loader.dataset, IterableDataset)
        self.rebuilds = makes_batches and not self.streams
        self.num_workers: int = getattr(loader, "num_workers", 0)
        if getattr(loader, "in_order", True) is False:
            raise ValueError(
                "loader has in_order=False: batches would arrive in an order that depends on timing, and counts and resuming "
                "could not be exact. Set in_order=True"
            )
        _length_of(loader, is_needed=self.rebuilds)

    @property
    def length(self) -> int | None:
        """Present number of batches in a pass; None if a pass ends where its iteration ends."""
        return _length_of(self.loader, is_needed=self.rebuilds)

    @property
    def reads_stream(self) -> bool:
        """Whether another iteration may have other examples.

        It may if the loader reads a stream, is its own iterator, or has a loader of accelerate around torchdata's, whose first
        iteration draws its order otherwise than later ones.
        """
        loader = self.loader
        if isinstance(loader, Iterator) or is_stateful(getattr(loader, "base_dataloader", None)):
            return True
        return any(isinstance(each, IterableDataset) for each in (loader, getattr(loader, "dataset", None)))

    @property
    def own_batches(self) -> bool:
        """Whether the user's batch sampler decides which examples are in a batch."""
        return self.rebuilds and self.loader.batch_size is None

    @property
    def sampler(self) -> Any:
        """The user's own batch sampler if there is one, else the sampler: it decides the order."""
        return self.loader.batch_sampler if self.own_batches else self.loader.sampler

    @property
    def shards_itself(self) -> bool:
        samplers = (self.sampler, getattr(self.sampler, "sampler", None)) if self.rebuilds else (self.loader,)
        return any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers)

    def hearers(self) -> tuple[Any, ...]:
        """Returns the objects whose ``set_epoch`` is the user's and gets the pass. The order, and the length, may follow that.

        The ``set_epoch`` of torch's and Lightning's own samplers only makes another shuffle.
        """
        if self.streams:
            return ()
        loader = self.loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        told = {id(each): each for each in (loader, getattr(loader, "sampler", None), batch_sampler)}
        told.update({id(inner): inner for inner in (getattr(batch_sampler, "sampler", None),)})
        return tuple(
            each
            for each in told.values()
            if callable(getattr(each, "set_epoch", None)) and type(each).__module__.partition(".")[0] not in _ONLY_SHUFFLE
        )

    @property
    def is_sequential(self) -> bool:
        return type(self.sampler) is SequentialSampler and self._covers_dataset()

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is that of ``DataLoader(shuffle=True)``. Then the package draws it, and not the sampler."""
        sampler = self.sampler
        return (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.generator is self.loader.generator
            and self._covers_dataset()
        )

    @property
    def order_by(self) -> str | None:
        """The order in words, such as its sampler; None if that is the loader's own affair."""
        if not self.rebuilds:
            return None
        if self.is_sequential or self.is_shuffled:
            return "shuffle=True" if self.is_shuffled else "shuffle=False"
        return sampler_in_words(self.sampler)

    def watched_parts(self) -> dict[str, Any]:
        """Returns, by name, the parts that decide the examples and that a plain loader's next epoch would see; empty if none."""
        has_lasting_workers = self.num_workers > 0 and getattr(self.loader, "persistent_workers", False)
        # A stream that is read in this process changes by being read.
        if has_lasting_workers or not (self.rebuilds or (self.streams and self.num_workers)):
            return {}
        return {"dataset": self.loader.dataset, "collate_fn": self.loader.collate_fn}

    def watched_sampler(self) -> dict[str, Any]:
        """Returns the sampler if it is one of torch's: the user's own may change by itself, and others draw nothing."""
        is_torchs = self.rebuilds and not (self.is_sequential or self.is_shuffled) and draws_by_itself(self.sampler)
        return {"sampler": self.sampler} if is_torchs else {}

    def changed_by_reading(self) -> set[str]:
        """Returns the paths in the data set that reading itself changes, such as a counter of reads. See `watched_parts`."""
        return changed_by_reading(self.loader, _dataset_alone, (), self.readable_indices) if self.rebuilds else set()

    @property
    def may_run_in_thread(self) -> bool:
        """Whether a thread may fetch batches while the training runs, since their order does not use the global random states."""
        return self.rebuilds and (self.is_sequential or self.is_shuffled or draws_by_itself(self.sampler))

    @property
    def prefetched_batches(self) -> int:
        return self.num_workers * (getattr(self.loader, "prefetch_factor", None) or 2) if self.num_workers else 0

    @property
    def prepared_in_workers(self) -> bool:
        """Whether a ``worker_init_fn`` may change the data set in each worker."""
        return self.num_workers > 0 and self.loader.worker_init_fn is not None

    @property
    def readable_index(self) -> int | None:
        """An index that the plain loader would read; None if no such index is known."""
        if not self.rebuilds or self.own_batches:
            return None
        sampler = self.sampler
        if type(sampler) is SubsetRandomSampler:
            return next(iter(sampler.indices), None)
        if type(sampler) in (SequentialSampler, RandomSampler) and self._covers_dataset():
            return 0
        return 0 if type(sampler) is WeightedRandomSampler else None

    @property
    def readable_indices(self) -> Any:
        """The indices that may be read to look at an example; None if all may be read."""
        indices = self.sampler.indices if type(self.sampler) is SubsetRandomSampler else None
        return indices if isinstance(indices, Sized) and len(indices) else None

    def _covers_dataset(self) -> bool:
        """Whether the sampler was made over this data set, and yields as many indices as that has."""
        return self.sampler.data_source is self.loader.dataset and len(self.sampler) == len(self.loader.dataset)

    def rebuild(
        self,
        requests: Iterable[Request],
        make_stages: Callable[[Any], Stages],
        key: int,
        workers: WorkerProcesses,
        caching: Caching | None = None,
        *,
        is_seeded: bool = True,
    ) -> DataLoader[Any]:
        """Returns the user's ``DataLoader``, rebuilt around requests.

        ``workers`` has the function that the workers run first, and notes the processes that are started. ``is_seeded`` is as in
        `ExampleCache`.
        """
        cache = ExampleCache(self.loader.dataset, make_stages, key, self.loader.collate_fn, caching, is_seeded=is_seeded)
        return self._rebuilt(requests, cache, key, workers)

    def rebuild_stream(
        self, requests: Iterable[StreamRequest], shape: PlanShape, key: int, workers: WorkerProcesses
    ) -> DataLoader[Any]:
        """Returns the same for a stream. ``shape`` has the sizes of the plan of one worker."""
        loader = self.loader
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        turn = context.Lock() if self.num_workers else None
        echo = StreamEcho(loader.dataset, shape, key, loader.collate_fn, drop_last=loader.drop_last, turn=turn)
        return self._rebuilt(requests, echo, key, workers)

    def _rebuilt(self, requests: Iterable[Any], answering: Any, key: int, workers: WorkerProcesses) -> DataLoader[Any]:
        """Returns the user's ``DataLoader``, rebuilt with the same workers and options, and a data set that answers requests."""
        loader = self.loader
        options: dict[str, Any] = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "timeout")}
        if self.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["multiprocessing_context"] = workers.noted_by(loader.multiprocessing_context)
        if getattr(loader, "pin_memory_device", ""):
            options["pin_memory_device"] = loader.pin_memory_device
        generator = loader.generator
        if generator is None:  # without a generator, making the iterator would draw from the random state of the training
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own loader has given the same warnings already
            dataset: Any = EchoDataset(answering)
            collate: Any = EchoCollate(loader.collate_fn)
            return DataLoader(
                dataset,
                batch_sampler=requests,
                collate_fn=collate,
                worker_init_fn=workers.worker_init_fn,
                generator=generator,
                **options,
            )


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

    @property
    def batch_size(self) -> Any:
        """The batch size of the loader inside: the number of examples, or None if it has a ``batch_sampler`` of its own."""
        return self.loader.batch_size

    @property
    def collate_fn(self) -> Any:
        """The collate function of the loader inside."""
        return self.loader.collate_fn

    @property
    def drop_last(self) -> Any:
        """Whether the loader inside leaves out a last batch that is not full."""
        return self.loader.drop_last

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


def _check_kind(loader: Any) -> None:
    """Raises a TypeError if this is not a single loader that can be iterated again and again."""
    kind = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"loader must be a DataLoader or another iterable of batches, got {kind}")
    is_sequence_of_loaders = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
    if isinstance(loader, dict) or is_sequence_of_loaders or hasattr(loader, "flattened"):  # the last: a CombinedLoader
        raise TypeError(
            f"loader must be a single loader, got a {kind} of loaders; wrap each of them in an EchoLoader, or pass a single one"
        )
    if isinstance(loader, Iterator) and _cannot_begin_again(type(loader)):
        raise TypeError(
            f"loader must be iterable again in every pass, got the iterator {kind}; pass the object that it was made from"
        )


def _cannot_begin_again(kind: type) -> bool:
    """Returns whether an iterator of this class is known to end after one pass: generators and the iterators of Python and torch.

    Others may begin again in their ``__iter__``. If they do not, the second pass shows it.
    """
    begin = inspect.getattr_static(kind, "__iter__")
    return not inspect.isfunction(begin) or begin.__module__.startswith("torch.")


def _makes_batches_plainly(loader: Any) -> bool:
    """Whether this is a ``DataLoader`` that makes batches of examples, and is iterated as torch iterates it.

    Data pipes are iterated as they are: torch divides them among its workers only if they are the data set of its loader.
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterDataPipe)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def _length_of(loader: Any, *, is_needed: bool) -> int | None:
    """Returns the number of batches of a loader; None if it has no length, and needs none."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError) as error:
        if not is_needed:
            return None
        raise TypeError(
            f"loader must have a length, but len({type(loader).__name__}) fails: {error}. "
            "Give its sampler (or its data set) a __len__ that says how many indices a pass has"
        ) from None
    if not length:
        raise ValueError(
            "loader is empty: it has no batch (an empty data set, or drop_last=True with too few examples). "
            "Give its data set examples, or set drop_last=False"
        )
    return length


def _dataset_alone(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset}


# ---------------------------------------------------------------------- layout
# The values with which a pipeline is started. Nothing is started or read here.


@dataclass(frozen=True)
class Layout:
    """How a pass is cut into batches and divided among the ranks. A state can only be resumed exactly under the same layout.

    Items are examples. They are batches if only whole batches are known: with a user's batch sampler, or with a loader that is
    not a plain ``DataLoader``. Sizes are those on one rank, except ``length``, the number of items in a pass over all ranks (of
    batches over a stream whose loader has a length). ``batches_per_pass`` is as with the plain loader; 0 if that has no length.
    """

    length: int
    replicas: int
    batch_size: int
    last_batch_size: int
    batches_per_pass: int

    @property
    def pass_length(self) -> int:
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    def items_per_pass(self, by_batches: bool) -> int:
        """Positions of a pass on one rank: batches if whole batches are echoed, else examples."""
        return self.batches_per_pass if by_batches else self.pass_length

    def state(self) -> dict[str, int]:
        return asdict(self)


def layout_of(source: Source, replicas: int) -> Layout:
    """Cuts a pass into batches and divides it among ranks, as ``DataLoader`` and ``DistributedSampler`` do."""
    if source.streams:  # a pass ends where the stream ends; at most the length of its loader is known
        size = source.loader.batch_size
        return Layout(source.length or 0, 1, size, size, source.length or 0)
    if not source.rebuilds or source.own_batches:
        length = len(source.sampler) if source.rebuilds else source.length or 0
        return Layout(length, replicas, 1, 1, -(-length // replicas))
    length, size = len(source.sampler), source.loader.batch_size
    here = -(-length // replicas)
    if source.loader.drop_last:
        return Layout(length, replicas, size, size, here // size)
    batches = -(-here // size)
    return Layout(length, replicas, size, here - (batches - 1) * size, batches)


def shape_of(
    source: Source, layout: Layout, buffer_size: int, seed: int, by_batches: bool, reuse: Reuse = Reuse.each
) -> PlanShape:
    """Returns the sizes of the plan of a pipeline. If ``by_batches``, the plan is over whole batches."""
    if by_batches:
        return PlanShape(
            batch_size=1,
            last_batch_size=1,
            batches_per_pass=max(layout.batches_per_pass, 1),  # 0 means unknown, and a plan over batches does not depend on it
            workers=1,
            buffer_size=buffer_size,
            seed=seed,
            distinct=False,
            reuse=reuse,
        )
    return PlanShape(
        batch_size=layout.batch_size,
        last_batch_size=layout.last_batch_size,
        batches_per_pass=layout.batches_per_pass,
        workers=source.num_workers,
        buffer_size=buffer_size,
        seed=seed,
        reuse=reuse,
    )


def shape_of_stream_worker(source: Source, buffer_size: int, seed: int, reuse: Reuse = Reuse.each) -> PlanShape:
    """Returns the sizes of one worker's plan, for its part of a stream, whose length is not known.

    ``buffer_size`` is the largest number of live examples in all workers together.
    """
    size = source.loader.batch_size
    return PlanShape(
        batch_size=size,
        last_batch_size=size,
        batches_per_pass=1,
        workers=1,
        buffer_size=buffer_size // max(source.num_workers, 1),
        seed=seed,
        distinct=False,
        reuse=reuse,
    )


class Start(NamedTuple):
    """Where a new plan begins: stream position of its first fresh item, and number of its first batch in the run."""

    position: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The values that a run gives to the pipeline that it starts.

    Attributes:
        seed: Seed of the run. The seeds of order, draws and augmentation are derived from it.
        factor: Echo factor of a new plan.
        state: State of the pipeline before, see `RestartablePipeline.state`: ``plan``, ``order`` and ``stream``. A part that is
            None or missing begins newly.
        begin_at: Where a new plan begins. Over a stream, its ``number`` is used with a state, too.
        worker_init_fn: The user's function that each worker runs first, or the one that Lightning has set on the `EchoLoader`.
    """

    seed: int
    factor: float
    state: dict[str, Any]
    begin_at: Start
    worker_init_fn: Any


# ---------------------------------------------------------------------- choice
# Where a loader is echoed: at the insertion point that the user asks for, or for ``auto`` at the earliest that is possible.

_ECHOES_REPEAT = "if the data set augments, its echoes repeat that augmentation, which a StagedDataset can redo for each use"

# An example of at most this size is read again, to see whether its data set ignores the index.
_MOST_COMPARED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Choice:
    """The insertion point that was chosen.

    Attributes:
        point: The point, never ``auto``.
        reason: Why ``auto`` did not choose an earlier point; empty if it chose the earliest, or if the user asked for the point.
        make_stages: Makes the stages of a data set, in a worker.
        reused: Names of the stages that an echo reuses, for people.
        redone: Names of the stages that each use redoes, for people.
        item_bytes: Estimated memory of a live item (an example, or a batch if whole batches are echoed); 0 if unknown.
        caution: Why a resumed run gets other examples from this data set; empty if no reason is known.
        split: Where the data set is split; None if it is not.
        holds: What a cache can hold, the earliest cut first; empty if that was not asked.
    """

    point: InsertionPoint
    reason: str
    make_stages: Callable[[Any], Stages]
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    item_bytes: int
    caution: str = ""
    split: Split | None = None
    holds: Sequence[Hold] = ()


def choose_later(reason: str) -> Choice:
    """Returns the choice of the earliest point at which no data set is cut, because of a ``reason`` that ``auto`` has."""
    return _uncut(earliest(Needs.examples), reason)


def choose(source: Source, point: InsertionPoint, cache: CacheConfig | None = None) -> Choice:
    """Returns the insertion point to use. Examples are read in another process (data/elsewhere.py), all in the same one.

    Args:
        point: The point that the user asks for; ``auto`` for the earliest that is possible, from ``before_augmentation`` on.
        cache: The options of a cache; None: the choice has no ``holds``.

    Raises:
        ValueError: The point, or the cache, is impossible with this loader.
        Exception: The data set itself raises it when it is read, and the user asks for a point, or a cache, that needs this.
    """
    if source.streams:
        return _choose_for_stream(point)
    is_auto, cuts, reason = point is InsertionPoint.auto, point not in points_from(Needs.examples), ""
    later = earliest(Needs.examples) if is_auto else point
    if not source.rebuilds or source.own_batches:
        if not is_auto and point not in points_from(Needs.batches):
            raise ValueError(f"{point.option} is impossible here: {_why_batches_only(source)}. Use {_ways_out(Needs.batches)}")
        cuts, later = False, earliest(Needs.batches) if is_auto else point
        reason = _why_batches_only(source) if is_auto else ""
    index = source.readable_index
    if not cuts and index is None and cache is None and (later.by_batches or batched(source.loader.dataset) is None):
        return _uncut(later, reason, caution=_caution(source))
    hold = None if cache is None else (cache.hold, cache.bytes_of())
    asked = _Asked(point, cuts, index, source.readable_indices, hold, source.loader.collate_fn)
    found = read_elsewhere(source.loader, _look, asked)
    if isinstance(found, NotRead):
        if index is None and found.error is not None:
            sampler = type(source.sampler).__name__
            found = NotRead(f"its sampler ({sampler}) seems to yield no integers: {found.reason}")
        if cache is not None:
            holds_found(found)
        if cuts and not is_auto:
            raise found.error or ValueError(f"{point.option} is impossible here: {found.reason}. Use {_ways_out(Needs.examples)}")
        why = reason or (f"{found.reason}; {_ECHOES_REPEAT}" if is_auto else "")
        return _uncut(later, why, caution=_caution(source))
    return _chosen(source, point, later, reason, found)


def _chosen(source: Source, point: InsertionPoint, later: InsertionPoint, reason: str, found: _Found) -> Choice:
    """Returns the choice that follows from the findings.

    ``later`` is the point to use if the data set is not split. ``reason`` is why ``auto`` takes it; empty if because the data set
    cannot be split.
    """
    holds, is_auto = holds_found(found.holds), point is InsertionPoint.auto
    if found.whole_batch and not later.by_batches:
        if not is_auto:
            raise ValueError(f"{point.option} is impossible here: {found.whole_batch}. Use {_ways_out(Needs.batches)}")
        later, reason = earliest(Needs.batches), found.whole_batch
    if isinstance(found.split, Split):
        return replace(_cut(found.split, is_asked=not is_auto), holds=holds)
    if found.split is not None and not is_auto:
        raise ValueError(f"{point.option} is impossible here: {found.split}") from found.split
    if found.split is not None:
        reason = f"{found.split.reason}; {_ECHOES_REPEAT}"
    item_bytes = found.example_bytes * ((source.loader.batch_size or 1) if later.by_batches else 1)
    caution = _caution(source, ignores_index=found.ignores_index)
    return replace(_uncut(later, reason, item_bytes, caution), holds=holds)


def _caution(source: Source, *, ignores_index: bool = False) -> str:
    """Returns why a resumed run gets other examples; empty if no reason is known."""
    dataset = getattr(source.loader, "dataset", None)
    if not (ignores_index or (source.rebuilds and holds_iteration(dataset))):
        return ""
    return (
        f"{type(dataset).__name__} returns what comes next, whatever index it is asked for: an example that is read again after "
        "a resume is another one"
    )


# --- in the process that reads ---------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """The questions to the process that reads a few examples.

    ``cuts``: whether the data set is to be split at ``point``, if possible. ``first`` is an index that may be read (None: none is
    known), ``indices`` are all of them (None: all). ``hold`` has the stages that a cache is asked to hold, and its bytes.
    """

    point: InsertionPoint
    cuts: bool
    first: int | None
    indices: Any
    hold: tuple[str, int] | None
    collate_fn: Any


class _Found(NamedTuple):
    """The findings from reading a few examples.

    Attributes:
        split: Where the data set can be split, or why not; None: that was not asked, and the data set is not split.
        example_bytes: Memory of the largest example that was read, of a data set that is not split; 0 if none was read.
        ignores_index: Whether such a data set returns what comes next, whatever its index.
        holds: What a cache can hold, or why nothing; empty if that was not asked.
        whole_batch: Why the result of one call of the data set cannot be taken apart; empty if it can.
    """

    split: Split | SplitRefused | None
    example_bytes: int
    ignores_index: bool
    holds: list[Hold] | ValueError
    whole_batch: str = ""


def _look(dataset: Any, asked: _Asked) -> _Found:
    """Reads a few examples, in a process that ends afterwards. An error of the data set that does not come again is ignored."""
    try:
        return _look_once(dataset, asked)
    except Exception:
        return _look_once(dataset, asked)


def _look_once(dataset: Any, asked: _Asked) -> _Found:
    is_asked, indices = asked.point is not InsertionPoint.auto, asked.indices
    split: Split | SplitRefused | None = None
    why, example_bytes = whole_batch(dataset, indices)
    if not why and not asked.point.by_batches and asked.hold is None:  # a cache has a proof of its own
        why = needs_one_call(dataset, indices, asked.collate_fn)
    if why:
        return _Found(None, example_bytes, False, [] if asked.hold is None else no_hold(why), why)
    if asked.cuts:
        try:
            split = weighed(dataset, find_split(dataset, indices, raw=asked.point is earliest(Needs.raw_items)), indices)
        except SplitRefused as refused:
            split = refused
            if is_asked:
                return _Found(split, 0, False, [])
    ignores = False
    if asked.first is not None and not isinstance(split, Split):
        example_bytes = nbytes(read_plainly(dataset, [asked.first]).examples[0])
        other = asked.first + 1 if indices is None else indices[-1]  # not by the length: a data set need not have one
        if other != asked.first and example_bytes <= _MOST_COMPARED_BYTES:
            ignores = ignores_index(dataset, asked.first, other)
            spread = size_of_examples(dataset, uncut_stages, indices)
            example_bytes = max(example_bytes, 0 if spread is None else spread.largest)
    holds: list[Hold] | ValueError = []
    if asked.hold is not None:
        found = split if isinstance(split, Split) else None
        make = uncut_stages if found is None else partial(_watched_stages, split=found, is_asked=is_asked)
        holds = find_holds(dataset, indices, found, asked.hold[0], make, asked.hold[1])
    return _Found(split, example_bytes, ignores, holds)


# --- the kinds of loaders --------------------------------------------------------------------------------------------


def _choose_for_stream(point: InsertionPoint) -> Choice:
    reason = "the data set is a stream, which has no index"
    if point is InsertionPoint.auto:
        return _uncut(earliest(Needs.examples), reason)
    if point not in points_from(Needs.examples):
        raise ValueError(f"{point.option} is impossible here: {reason}. Use {_ways_out(Needs.examples)}")
    return _uncut(point, "")


def _ways_out(needs: Needs) -> str:
    """Returns, in words, the insertion points that the user may ask for with such a loader."""
    names = [repr(point.value) for point in points_from(needs) if point.properties.for_auto]
    return f"{', '.join(names)} or {InsertionPoint.auto.value!r}"


def _why_batches_only(source: Source) -> str:
    """Returns why only whole batches of this loader can be echoed."""
    loader = source.loader
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is an iterable of batches, and does not tell which examples are in them"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None, and only its data set knows which examples are in what it yields"
    if source.rebuilds:
        return (
            "the loader has a batch_sampler of its own, which decides what is in a batch: give the loader batch_size and a "
            "sampler for an earlier point, or augment on the device, which is redone for each use"
        )
    return f"{type(loader).__name__} has an __iter__ of its own, which a rebuilt loader would not run"


def _uncut(point: InsertionPoint, reason: str, item_bytes: int = 0, caution: str = "") -> Choice:
    """Returns a choice that leaves the data set as it is. Reading and decoding are then one stage, "load"."""
    reused = ["load", *(stage for stage in point.properties.reused if stage not in ("read", "decode"))]
    return Choice(point, reason, uncut_stages, tuple(reused), point.properties.redone, item_bytes, caution)


def _cut(split: Split, *, is_asked: bool) -> Choice:
    """Returns a choice that cuts the data set. ``is_asked``: whether the user asked for the point."""
    return Choice(
        earliest(Needs.raw_items if split.raw else Needs.split),
        "",
        partial(_watched_stages, split=split, is_asked=is_asked),
        split.reused,
        split.redone,
        split.example_bytes,
        split=split,
    )


def _watched_stages(dataset: Any, split: Split, is_asked: bool) -> WatchedStages:
    """Makes the stages that a worker runs. If the user asked for the point, an example that does not fit is an error."""
    refusal = ReadRefused if split.raw else SplitRefused
    stages = make_stages(dataset, split.conventions, raw=split.raw)
    return WatchedStages(stages, dataset, refusal=refusal if is_asked else None, may_fail=not is_asked)


def reads_whole_batches(source: Source, choice: Choice) -> bool:
    """Returns whether the workers read the fresh examples of a batch in one call."""
    return choice.make_stages(source.loader.dataset).load_many is not None
