"""The kinds of loaders: where each can be echoed, how its passes are cut, how a run over it resumes, the pipeline that it opens.

`kind_of` returns the kind of a user's loader, and `Kind.at` the kind that echoes at an insertion point:

=================  ==================================================  =====================================================
kind               the loader                                          what is echoed, and how it is read
=================  ==================================================  =====================================================
`Indexed`          a ``DataLoader`` over data that is read by index    examples; rebuilt: the plan is its batch sampler
`IndexedBatches`   the same, at a point of whole batches               batches; rebuilt
`OwnBatches`       the same, with a batch sampler of the user's        batches; rebuilt
`Stream`           a ``DataLoader`` over a stream                      examples; rebuilt: each worker has a plan of its own
`StreamBatches`    the same, at a point of whole batches               batches; iterated as it is, pass after pass
`Opaque`           any other iterable of batches                       batches; iterated as it is, pass after pass
=================  ==================================================  =====================================================

A rebuilt loader has the same data set, workers and options as the user's.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, ClassVar

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo.cache.exchange import Part, Rounds
from lightning_echo.cache.kept import changed_by_reading
from lightning_echo.cache.reads import Caching, Keys, NoKeysError
from lightning_echo.data.objects import in_words, is_stateful
from lightning_echo.data.randomness import PreservingIterator
from lightning_echo.insertion import InsertionPoint, Needs, Reads
from lightning_echo.pipeline.ahead import AheadOrder, Foreseen
from lightning_echo.pipeline.batches import BatchEcho, PassReader
from lightning_echo.pipeline.demand import examples_on_demand
from lightning_echo.pipeline.demand_batches import EndingExamples, batches_on_demand, plan_of_reads, repeated_batches
from lightning_echo.pipeline.demand_streams import StreamOnDemand, stream_on_demand
from lightning_echo.pipeline.demand_worker import Words
from lightning_echo.pipeline.pipelines import (
    IndexPipeline,
    Layout,
    Opening,
    Pipeline,
    StreamAnswers,
    StreamPipeline,
    StreamPlace,
    StreamRequests,
    pipeline_over,
    rebuilt_loader,
)
from lightning_echo.pipeline.prefetch import DEPTH, Prefetcher, WorkerProcesses
from lightning_echo.pipeline.reads import ReadAhead
from lightning_echo.pipeline.requests import (
    AllRanksOrder,
    BatchedOrder,
    BatchRequests,
    ExampleRequests,
    RequestsInRounds,
    SamplerOrder,
    draws_by_itself,
    origin_of,
    sampler_in_words,
    samplers_of_ranks,
)
from lightning_echo.pipeline.streams import StreamEcho, StreamRequest
from lightning_echo.pipeline.worker import HasLookups, LiveExamples, Request
from lightning_echo.plan.order import Order, SequentialOrder, ShuffledOrder
from lightning_echo.plan.plan import PlanShape, Reuse, mix
from lightning_echo.split.staged import Stages, batched

_ORDER_SEED, _PASS_SEED = 11, 13
_PREFETCHED_CALLS = 9  # batches of a worker: as many as the examples of a call earn with the default ``max_factor``, and the next
# Packages: `set_epoch` of their samplers makes another shuffle.
_ONLY_SHUFFLE = ("torch", "lightning", "lightning_fabric", "pytorch_lightning")


def kind_of(loader: Any) -> Kind:
    """Returns the kind of the user's loader, before an insertion point is chosen. Raises an error if it cannot be echoed."""
    _check_loader(loader)
    makes_batches_as_torch = (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterDataPipe)  # torch divides these among its workers only if they are its data set
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )
    if not makes_batches_as_torch:
        return Opaque(loader)
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader)
    return OwnBatches(loader) if loader.batch_size is None else Indexed(loader)


class Kind(ABC):
    """The user's loader, and what follows from the way in which it makes its batches."""

    needs: ClassVar[Needs]  # it can be echoed at the points that need no more
    by_batches: ClassVar[bool] = False  # whether whole batches are echoed, else examples
    plans_in_workers: ClassVar[bool] = False  # whether each worker has a plan of its own, for its part of a stream
    distinct: ClassVar[bool] = False  # whether no batch may hold an index twice
    needs_length: ClassVar[bool] = False  # whether a loader without a length is refused
    hears_passes: ClassVar[bool] = True  # whether a ``set_epoch`` of the user's gets the pass from this package
    laid_out: ClassVar[str] = "batches"  # the items of its layout
    pass_ends: ClassVar[str] = "the loader's pass ends"  # as the end of an epoch without a known length
    remark: ClassVar[str] = ""  # for the user, once
    whole_batches: ClassVar[type[Kind]]  # the kind of the same loader at a point of whole batches

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.num_workers: int = getattr(loader, "num_workers", 0)
        if getattr(loader, "in_order", True) is False:
            raise ValueError(
                "loader has in_order=False: batches would arrive in an order that depends on timing, and counts and resuming "
                "could not be exact. Set in_order=True"
            )
        _ = self.length

    def at(self, point: InsertionPoint) -> Kind:
        """Returns the kind that echoes this loader at a point, which `choose` has found possible."""
        if point.by_batches is self.by_batches:
            return self
        found = object.__new__(self.whole_batches)
        found.__dict__.update(self.__dict__)
        return found

    # ------------------------------------------------------------------ the loader

    @property
    def length(self) -> int | None:
        """Present number of batches in a pass; None if a pass ends where its iteration ends."""
        try:
            length = len(self.loader)
        except (TypeError, NotImplementedError) as error:
            if not self.needs_length:
                return None
            raise TypeError(
                f"loader must have a length, but len({type(self.loader).__name__}) fails: {error}. "
                "Give its sampler (or its data set) a __len__ that says how many indices a pass has"
            ) from None
        if not length:
            raise ValueError(
                "loader is empty: it has no batch (an empty data set, or drop_last=True with too few examples). "
                "Give its data set examples, or set drop_last=False"
            )
        return length

    @property
    def sampler(self) -> Any:
        """Decides the order: the user's own batch sampler if there is one, else the sampler."""
        return self.loader.sampler

    @property
    def reads_stream(self) -> bool:
        """Whether another iteration may have other examples."""
        loader = self.loader
        # A loader of accelerate around torchdata's draws its order in its first iteration otherwise than in later ones.
        if isinstance(loader, Iterator) or is_stateful(getattr(loader, "base_dataloader", None)):
            return True
        return any(isinstance(each, IterableDataset) for each in (loader, getattr(loader, "dataset", None)))

    @property
    def shards_itself(self) -> bool:
        """Whether the user's loader divides the data among the ranks."""
        return _shards(self.loader)

    @property
    def deals_out(self) -> bool:
        """Whether this package divides the data among the ranks. Otherwise the user's loader does so, or nobody."""
        return not self.shards_itself

    def hearers(self) -> tuple[Any, ...]:
        """Returns the objects whose ``set_epoch`` is the user's and gets the pass. The order, and the length, may follow that."""
        loader = self.loader
        if not self.hears_passes:
            return ()
        batch_sampler = getattr(loader, "batch_sampler", None)
        samplers = getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)
        told = {id(each): each for each in (loader, *samplers)}
        return tuple(
            each
            for each in told.values()
            if callable(getattr(each, "set_epoch", None)) and type(each).__module__.partition(".")[0] not in _ONLY_SHUFFLE
        )

    @property
    def order_by(self) -> str | None:
        """The order in words, such as its sampler; None if that is the loader's own affair."""
        return None

    @property
    def prefetched_batches(self) -> int:
        return self.num_workers * (getattr(self.loader, "prefetch_factor", None) or 2) if self.num_workers else 0

    @property
    def prefetched_on_demand(self) -> int:
        """The same for echo on demand of examples."""
        return self.prefetched_batches

    @property
    def reads(self) -> Reads:
        """What a worker reads at a time; ``batches`` also where whole batches are echoed."""
        return "stream" if self.plans_in_workers else "batches"

    @property
    def may_run_in_thread(self) -> bool:
        """Whether a thread may fetch batches while the training runs, since their order does not use the global random states."""
        return False

    @property
    def readable_index(self) -> int | None:
        """An index that the plain loader would read; None if no such index is known."""
        return None

    @property
    def readable_indices(self) -> Any:
        """The indices that may be read to look at an example; None if all may be read."""
        return None

    # ------------------------------------------------------------------ changes of the data

    def watched_parts(self) -> dict[str, Any]:
        """Returns, by name, the parts that decide the examples and that a plain loader's next epoch would see; empty if none."""
        return {}

    def watched_sampler(self) -> dict[str, Any]:
        """Returns the sampler if it is one of torch's: the user's own may change by itself, and others draw nothing."""
        return {}

    def changed_by_reading(self) -> set[str]:
        """Returns the paths in the data set that reading itself changes, such as a counter of reads. See `watched_parts`."""
        return set()

    # ------------------------------------------------------------------ echoing

    @property
    @abstractmethod
    def why_later(self) -> str:
        """Why this loader cannot be echoed at an earlier point than those of `needs`, for people; empty if there is none."""

    def check_cache(self) -> None:
        """Raises a ValueError if this loader cannot have a cache, because its examples cannot be found again. Reads nothing."""
        what = "the data set is a stream, which has no index"
        if not self.reads_stream:
            what = f"{type(self.loader).__name__} does not tell which examples are in its batches"
        raise ValueError(
            f"cache is impossible here: {what}, so that an example cannot be found again. Leave the cache out and echo the "
            "loader, copy a stream to a local disk, or use a DataLoader over a map-style data set"
        )

    @abstractmethod
    def layout(self, replicas: int) -> Layout:
        """Cuts a pass into batches and divides it among ranks, as ``DataLoader`` and ``DistributedSampler`` do."""

    def items_per_pass(self, layout: Layout) -> int:
        """Returns the number of positions of a pass on one rank; 0 if it is not known."""
        return layout.items_per_pass(self.by_batches)

    def expected_items(self, layout: Layout) -> int | None:
        """Returns the expected number of items in a pass on this rank; None if not known."""
        return None if self.length is None else self.items_per_pass(layout)

    def shape(self, layout: Layout, buffer_size: int, seed: int, reuse: Reuse = Reuse.each) -> PlanShape:
        """Returns the sizes of the plan of a pipeline, or of each worker's plan (`plans_in_workers`)."""
        size, last, batches, workers = layout.batch_size, layout.last_batch_size, layout.batches_per_pass, self.num_workers
        if self.by_batches:
            size, last, workers = 1, 1, 1
            batches = max(batches, 1)  # 0 means unknown, and a plan over batches does not depend on it
        elif self.plans_in_workers:
            batches, workers = 1, 1  # the length of a worker's part is not known
            buffer_size //= max(self.num_workers, 1)
        return PlanShape(
            batch_size=size,
            last_batch_size=last,
            batches_per_pass=batches,
            workers=workers,
            buffer_size=buffer_size,
            seed=seed,
            distinct=self.distinct,
            reuse=reuse,
        )

    @property
    def stateful(self) -> Any:
        """The user's object whose own state decides where an iteration continues."""
        return self.loader.dataset if self.plans_in_workers else self.loader

    @property
    def resumes(self) -> bool:
        """Whether a run can continue in the middle of a pass: from a state of the loader or stream, or by reading it again."""
        return is_stateful(self.stateful) or not (self.reads_stream or self.length is None)

    @property
    def reads_own_passes(self) -> bool:
        """Whether only the loader itself knows what its next pass has."""
        return self.length is None

    def has_length(self, epoch_length: str) -> bool:
        """Whether the length of epochs is known. If not, an epoch ends when a pass ends."""
        return self.length is not None and not (self.plans_in_workers and epoch_length == "full_pass")

    @property
    def state_workers(self) -> int:
        """The number of workers with which a state can be resumed exactly."""
        return self.num_workers

    def filling_batches(self, layout: Layout, buffer_size: int, reuse: Reuse) -> int:
        """Returns the number of batches after which the share of fresh examples in each batch is the one of the factor."""
        if reuse is Reuse.memory:
            return 1 if self.by_batches else max(self.num_workers, 1)
        return buffer_size if self.by_batches else -(-buffer_size // layout.batch_size)

    def lookahead(self, largest_factor: float) -> int:
        """Returns the largest number of batches that may be planned after the delivered one, however fast the workers are."""
        return self.prefetched_batches + DEPTH if self.num_workers else 0

    @abstractmethod
    def open(self, opening: Opening) -> Pipeline:
        """Starts a pipeline: its workers, and the thread that fetches ahead if one may run."""


# ---------------------------------------------------------------------- read by index


class Indexed(Kind):
    """A ``DataLoader`` that makes batches of examples, which it reads by their index."""

    needs = Needs.raw_items
    distinct = True
    needs_length = True
    laid_out = "examples"
    resumes = True
    why_later = ""
    _least_in_batch = 1  # examples in a batch, for a guess of its memory

    @property
    def shards_itself(self) -> bool:
        return _shards(self.sampler) or _shards(getattr(self.sampler, "sampler", None))

    @property
    def is_sequential(self) -> bool:
        return type(self.sampler) is SequentialSampler and self._covers_dataset()

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is that of ``DataLoader(shuffle=True)``. Then the package draws it, and not the sampler."""
        sampler = self.sampler
        is_plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is self.loader.generator
        return is_plain and self._covers_dataset()

    @property
    def order_by(self) -> str | None:
        if self.is_sequential or self.is_shuffled:
            return "shuffle=True" if self.is_shuffled else "shuffle=False"
        return sampler_in_words(self.sampler)

    @property
    def is_own_order(self) -> bool:
        """Whether the package makes the order, and not the sampler."""
        return self.is_sequential or self.is_shuffled

    @property
    def is_foreseeable(self) -> bool:
        """Whether the order may be looked at earlier than its batches are requested, see ``pipeline/ahead.py``."""
        return self.is_own_order or draws_by_itself(self.sampler)

    @property
    def reads(self) -> Reads:
        if self.by_batches:
            return "batches"
        return "examples" if batched(self.loader.dataset) is None else "calls"

    @property
    def prefetched_on_demand(self) -> int:
        # A worker cannot echo within a call. So before it, it makes as many batches as the call earns by default.
        return max(self.prefetched_batches, self.num_workers * _PREFETCHED_CALLS if self.reads == "calls" else 0)

    @property
    def may_run_in_thread(self) -> bool:
        return self.is_own_order or draws_by_itself(self.sampler)

    @property
    def prepared_in_workers(self) -> bool:
        """Whether a ``worker_init_fn`` may change the data set in each worker."""
        return self.num_workers > 0 and self.loader.worker_init_fn is not None

    @property
    def readable_index(self) -> int | None:
        sampler = self.sampler
        if type(sampler) is SubsetRandomSampler:
            return next(iter(sampler.indices), None)
        if type(sampler) in (SequentialSampler, RandomSampler) and self._covers_dataset():
            return 0
        return 0 if type(sampler) is WeightedRandomSampler else None

    @property
    def readable_indices(self) -> Any:
        indices = self.sampler.indices if type(self.sampler) is SubsetRandomSampler else None
        return indices if isinstance(indices, Sized) and len(indices) else None

    def _covers_dataset(self) -> bool:
        """Whether the sampler was made over this data set, and yields as many indices as that has."""
        return self.sampler.data_source is self.loader.dataset and len(self.sampler) == len(self.loader.dataset)

    def watched_parts(self) -> dict[str, Any]:
        return _examples_of(self.loader)

    def watched_sampler(self) -> dict[str, Any]:
        is_torchs = not (self.is_sequential or self.is_shuffled) and draws_by_itself(self.sampler)
        return {"sampler": self.sampler} if is_torchs else {}

    def changed_by_reading(self) -> set[str]:
        return changed_by_reading(self.loader, _dataset_alone, (), self.readable_indices)

    def check_cache(self) -> None:
        try:
            Keys(self.loader.dataset)
        except NoKeysError as error:
            raise ValueError(f"cache is impossible here: {error}") from None

    def layout(self, replicas: int) -> Layout:
        length, size = len(self.sampler), self.loader.batch_size
        here = -(-length // replicas)
        if self.loader.drop_last:
            return Layout(length, replicas, size, size, here // size)
        batches = -(-here // size)
        return Layout(length, replicas, size, here - (batches - 1) * size, batches)

    def part_in_cache(self, layout: Layout, shards: tuple[int, int]) -> Part:
        """Returns the facts about this rank, with its share of the data, that the other ranks of a partitioned cache need."""
        (shares, share), sampler, refusal = shards, self.sampler, ""
        if self.shards_itself and type(sampler) is DistributedSampler:  # Lightning puts one into a user's loader
            shares, share = sampler.num_replicas, sampler.rank
        elif not self.deals_out:
            refusal = (
                f"the sampler {type(sampler).__name__} divides its indices among the ranks by itself, so that this loader "
                "cannot compute what other ranks need: leave that sampler out, the loader divides them, too"
            )
        ahead = self.prefetched_batches + DEPTH
        origin = "" if refusal or self.is_sequential or self.is_shuffled else origin_of(sampler)
        return Part(shares, share, self.num_workers, max(layout.batch_size, self._least_in_batch), ahead, origin, refusal)

    # ------------------------------------------------------------------ opening

    def open(self, opening: Opening) -> Pipeline:
        if opening.on_demand and not self.by_batches:
            return examples_on_demand(self, opening)
        launch, choice, cache = opening.launch, opening.choice, opening.cache
        rounds = None if cache is None else cache.begin_rounds()
        caching = None if cache is None else cache.caching(rounds)
        reading = None if rounds is not None else self.reading(opening)
        order: Any = self._order_in_rounds(opening, rounds)
        if launch.state["order"] is not None:
            order.load(launch.state["order"])
        if self.by_batches and self.laid_out != "batches":
            layout = opening.layout
            order = BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass)
        if reading is not None and self.is_foreseeable:
            order = AheadOrder(order, opening.layout.items_per_pass(self.by_batches), crosses=self.is_own_order)
        requests: ExampleRequests | BatchRequests
        if self.by_batches:
            requests = BatchRequests(plan_of_reads(opening) if opening.on_demand else opening.plan(), order)
        else:
            stages = choice.make_stages(self.loader.dataset)
            requests = ExampleRequests(opening.plan(), order, whole_calls=stages.load_many is not None)
        sent: Iterator[Request] = requests
        if isinstance(order, AheadOrder):
            assert reading is not None
            window = reading.window(opening.layout.pass_length // max(self.num_workers, 1))
            batches_ahead = max(window // opening.layout.batch_size, 1)
            sent = Foreseen(requests, order, self.num_workers, batches_ahead if self.by_batches else window)
        if rounds is not None:
            sent = RequestsInRounds(requests, rounds, order if isinstance(order, AllRanksOrder) else None)
        repeated = repeated_batches(opening, self.num_workers) if opening.on_demand else None
        workers = WorkerProcesses(launch.worker_init_fn)
        # Code that may draw from the global random states must not run while the training draws from them, too.
        in_thread = self.num_workers > 0 and self.may_run_in_thread
        words = Words(self.loader) if opening.on_demand else None
        rebuilt = self.rebuild(sent, choice.make_stages, opening.key, workers, caching, reading, words=words)
        batches: Iterator[Any] = iter(rebuilt)
        if rounds is not None and rounds.exchange is not None:
            rounds.exchange.begin()
        pools = None if reading is None else reading.pools
        if isinstance(requests, BatchRequests) and words is not None:
            return batches_on_demand(self.loader, opening, requests, batches, words, workers, pools, repeated)
        are_owned = self.num_workers > 0  # once a worker has sent a batch, it does not use its memory any more
        on_device = choice.point.on_device
        return pipeline_over(
            requests,
            batches,
            workers,
            on_device=on_device,
            in_thread=in_thread,
            are_owned=are_owned,
            rounds=rounds,
            pools=pools,
        )

    def reading(self, opening: Opening) -> ReadAhead | None:
        """Returns what the workers need to read ahead; None if they read one example after the other."""
        part, cache = opening.choice.reading, opening.cache
        if part is None:
            return None
        until = opening.choice.split if cache is None else cache.cut
        return ReadAhead.of(self.loader, part, until, opening.in_flight, opening.most_ahead_bytes)

    def order(self, layout: Layout, distance: int, seed: int, rank: int, *, is_whole: bool = False) -> Order:
        """Returns the order of the indices, or of the batches of a user's batch sampler.

        ``distance`` is the least number of positions between two uses of an index, after passes are spread. ``is_whole``: whether
        the order of all slots is returned, as if there were one rank.
        """
        dealt_out = (layout.length, layout.pass_length, layout.replicas, rank)
        if is_whole:
            dealt_out = (layout.length, layout.pass_length * layout.replicas, 1, 0)
        if self.is_sequential:
            return SequentialOrder(*dealt_out)
        if self.is_shuffled:
            return ShuffledOrder(*dealt_out, distance, layout.replicas, seed=mix(seed, _ORDER_SEED))
        preserves = self.by_batches and not self.num_workers
        order_seed = mix(seed, _ORDER_SEED)
        return SamplerOrder(self.sampler, *dealt_out, distance, layout.replicas, seed=order_seed, preserves=preserves)

    def _order_in_rounds(self, opening: Opening, rounds: Rounds | None) -> Order:
        """Returns the order of this rank, with those of the others if this rank exchanges examples for all ranks."""
        layout, distance, seed, rank = opening.layout, opening.shape.distance, opening.launch.seed, opening.rank
        if rounds is None or rounds.exchange is None:
            return self.order(layout, distance, seed, rank)
        if self.shards_itself:  # the sampler is a DistributedSampler
            dealt_out, seed = (layout.length, layout.pass_length, 1, 0, distance), mix(seed, _ORDER_SEED)
            orders = [SamplerOrder(each, *dealt_out, seed=seed) for each in samplers_of_ranks(self.sampler)]
            return AllRanksOrder(orders, len(orders), rounds.share)
        return AllRanksOrder(self.order(layout, distance, seed, rank, is_whole=True), layout.replicas, rank)

    def rebuild(
        self,
        requests: Iterable[Request],
        make_stages: Callable[[Any], Stages],
        key: int,
        workers: WorkerProcesses,
        caching: Caching | None = None,
        reading: ReadAhead | None = None,
        *,
        is_seeded: bool = True,
        counted: HasLookups | None = None,
        words: Words | None = None,
    ) -> DataLoader[Any]:
        """Returns the user's ``DataLoader``, rebuilt around requests. ``is_seeded`` and ``counted`` are as in `LiveExamples`.

        ``words`` are given on demand. A ``timeout`` then counts from when the training asks, which the main process watches.
        """
        dataset, collate_fn = self.loader.dataset, self.loader.collate_fn
        if words is None:
            live = LiveExamples(dataset, make_stages, key, collate_fn, caching, reading, is_seeded=is_seeded, counted=counted)
            return rebuilt_loader(self.loader, requests, live, key, workers)
        live = EndingExamples(dataset, make_stages, key, collate_fn, caching, reading, is_seeded=is_seeded, words=words)
        return rebuilt_loader(self.loader, requests, live, key, workers, timeout=0)


class IndexedBatches(Indexed):
    """The same loader, of which whole batches are echoed."""

    needs = Needs.batches
    by_batches = True
    distinct = False

    def lookahead(self, largest_factor: float) -> int:
        if not self.num_workers:
            return 0
        # Between two batches that are read, up to ceil(e) + 1 are delivered, and a few more if the buffer is smaller than that.
        uses = math.ceil(largest_factor) + 1 if largest_factor > 1 else 1
        return (self.prefetched_batches + 3) * uses + DEPTH


class OwnBatches(IndexedBatches):
    """A ``DataLoader`` with a batch sampler of the user's, which decides what is in a batch."""

    laid_out = "batches"
    readable_index = None
    _least_in_batch = 64
    why_later = (
        "the loader has a batch_sampler of its own, which decides what is in a batch: give the loader batch_size and a "
        "sampler for an earlier point, or augment on the device, which is redone for each use"
    )

    @property
    def sampler(self) -> Any:
        return self.loader.batch_sampler

    def layout(self, replicas: int) -> Layout:
        length = len(self.sampler)
        return Layout(length, replicas, 1, 1, -(-length // replicas))


# ---------------------------------------------------------------------- streams, and any other loader


class _OfStream(Kind):
    """A ``DataLoader`` over a stream, which has no index."""

    deals_out = False
    hears_passes = False

    def watched_parts(self) -> dict[str, Any]:
        return _examples_of(self.loader) if self.num_workers else {}  # in this process, a stream changes by being read

    def layout(self, replicas: int) -> Layout:
        size, length = self.loader.batch_size, self.length or 0  # a pass ends where the stream ends: the length is expected
        return Layout(length, 1, size, size, length)


class Stream(_OfStream):
    """A ``DataLoader`` that makes batches of a stream's examples. Each worker plans for its part of the stream."""

    needs = Needs.examples
    plans_in_workers = True
    reads_own_passes = True
    pass_ends = "the stream ends"
    why_later = "the data set is a stream, which has no index"

    def open(self, opening: Opening) -> Pipeline:
        launch = opening.launch
        state, delivered = launch.state.get("stream"), launch.begin_at.number
        if state is None:
            workers = max(self.num_workers, 1)
            place = StreamPlace(0, 0, False, frozenset(), (0,) * workers, (None,) * workers)
            factors, pending = [(0, launch.factor)], []
        else:
            place = StreamPlace.from_state(state)
            factors, pending = ([(at, value) for at, value in state[name]] for name in ("factors", "pending"))
        requests = StreamRequests(place, factors, pending, self.prefetched_batches)
        processes = WorkerProcesses(launch.worker_init_fn)
        loader = self.loader
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        turn = context.Lock() if self.num_workers else None
        if opening.on_demand:  # with workers, a time-out counts from when the training asks

            def answered_by(sent: Iterator[StreamRequest], fetcher: StreamOnDemand) -> Iterator[Any]:
                return iter(rebuilt_loader(loader, sent, fetcher, opening.key, processes, timeout=0))

            return stream_on_demand(loader, opening, requests, place, processes, turn, answered_by)
        echo = StreamEcho(loader.dataset, opening.shape, opening.key, loader.collate_fn, drop_last=loader.drop_last, turn=turn)
        answers = StreamAnswers(iter(rebuilt_loader(loader, requests, echo, opening.key, processes)), requests, place, delivered)
        ahead = Prefetcher(answers, lost=processes.lost) if self.num_workers else PreservingIterator(answers)
        return StreamPipeline(requests, ahead, processes, place, delivered)


class Opaque(Kind):
    """Any iterable of batches. It is iterated as it is, and only its whole batches can be echoed."""

    needs = Needs.batches
    by_batches = True
    deals_out = False
    remark = "examples are counted by the leading dimension of a batch's first tensor"

    @property
    def why_later(self) -> str:
        loader = self.loader
        if not isinstance(loader, DataLoader):
            return f"{type(loader).__name__} is an iterable of batches, and does not tell which examples are in them"
        if loader.batch_sampler is None:
            return "the loader has batch_size=None, and only its data set knows which examples are in what it yields"
        return f"{type(loader).__name__} has an __iter__ of its own, which a rebuilt loader would not run"

    def layout(self, replicas: int) -> Layout:
        length = self.length or 0
        return Layout(length, replicas, 1, 1, -(-length // replicas))

    def lookahead(self, largest_factor: float) -> int:
        # A batch is read when it is asked for. Only the batch at which a pass has ended is planned before.
        return int(self.length is None)

    def open(self, opening: Opening) -> Pipeline:
        launch, length = opening.launch, opening.layout.batches_per_pass or None
        reader = PassReader(self.loader, length, mix(launch.seed, _PASS_SEED), is_estimate=self.reads_stream)
        if launch.state["order"] is not None:
            reader.load(launch.state["order"])
        requests = BatchRequests(opening.plan(), reader)
        reader.may_come_late = frozenset(requests.not_held)
        on_device = opening.choice.point.on_device
        batches = BatchEcho(requests, reader, on_device=on_device)
        return IndexPipeline(requests, batches, WorkerProcesses(), reader=reader, on_device=on_device)


class StreamBatches(_OfStream, Opaque):
    """A stream's loader, of which whole batches are echoed."""


Indexed.whole_batches = IndexedBatches
Stream.whole_batches = StreamBatches


def _shards(divided_by: Any) -> bool:
    """Whether a sampler or a loader divides its indices among the ranks by itself."""
    return hasattr(divided_by, "num_replicas") and hasattr(divided_by, "rank")


def _examples_of(loader: Any) -> dict[str, Any]:
    """Returns the parts of a loader that decide its examples; none if its workers outlive an epoch, as they see no change."""
    is_lasting = loader.num_workers > 0 and getattr(loader, "persistent_workers", False)
    return {} if is_lasting else {"dataset": loader.dataset, "collate_fn": loader.collate_fn}


def _dataset_alone(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset}


# ---------------------------------------------------------------------- looking at a loader


def _check_loader(loader: Any) -> None:
    """Raises a TypeError if this is not a single loader that can be iterated again and again."""
    kind, expected = type(loader).__name__, "loader must be a DataLoader or another iterable of batches"
    if isinstance(loader, type):
        raise TypeError(f"{expected}, got {in_words(loader)}")
    if not hasattr(loader, "__iter__"):
        hint = "; pass the loader that it returns" if inspect.isroutine(loader) else ""
        raise TypeError(f"{expected}, got {kind}{hint}")
    is_sequence_of_loaders = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
    if isinstance(loader, dict) or is_sequence_of_loaders or hasattr(loader, "flattened"):  # the last: a CombinedLoader
        is_one = isinstance(loader, list | tuple | dict) and len(loader) == 1
        hint = "pass the loader itself" if is_one else "wrap each of them in an EchoLoader, or pass a single one"
        number = "one loader" if is_one else "loaders"
        raise TypeError(f"loader must be a single loader, got a {kind} of {number}; {hint}")
    if isinstance(loader, Iterator):
        # Generators and the iterators of Python and torch end after one pass. Others may begin again in their `__iter__`. If they
        # do not, the second pass shows it.
        begin = inspect.getattr_static(type(loader), "__iter__")
        if not inspect.isfunction(begin) or begin.__module__.startswith("torch."):
            raise TypeError(
                f"loader must be iterable again in every pass, got the iterator {kind}; pass the object that it was made from"
            )
