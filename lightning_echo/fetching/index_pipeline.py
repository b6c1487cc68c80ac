"""A started pipeline: plan, order, the rebuilt loader and the thread that fetches ahead, ready to yield batches.

A pipeline has no epochs. A run starts one at its first batch, because the ranks and the seed are only known then. It drops the
pipeline when the run is closed or must go on at another place. `start_index_pipeline` makes a pipeline::

    echoing examples         plan, order      --> ExampleRequests --> rebuilt loader              --> Prefetcher
    echoing whole batches    plan, order      --> BatchRequests   --> rebuilt loader --> BatchEcho --> Prefetcher
    a loader not rebuilt     plan, PassReader --> BatchRequests   --> PassReader     --> BatchEcho

`PassReader` is both the order and the reader of a loader that is not rebuilt. `Prefetcher`, the thread, is left out if no thread
may run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning_echo.caching.cached_reads import Caching
from lightning_echo.caching.nodes.joining import Rounds
from lightning_echo.fetching.batches import BatchEcho, LiveBatchEcho, RequestedReader
from lightning_echo.fetching.choice import Choice, reads_whole_batches
from lightning_echo.fetching.layout import Launch, Layout
from lightning_echo.fetching.passes import PassOver, PassReader
from lightning_echo.fetching.prefetch import DEPTH, Prefetcher
from lightning_echo.fetching.requests import BatchedOrder, BatchRequests, ExampleRequests
from lightning_echo.fetching.rounds import AllRanksOrder, OrdersOfRanks, RequestsInRounds, samplers_of_ranks
from lightning_echo.fetching.sampler_order import SamplerOrder
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.hashing import mix
from lightning_echo.planning.order import Order, SequentialOrder, ShuffledOrder
from lightning_echo.planning.plan import Plan
from lightning_echo.planning.plans import make_plan, plan_from_state
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.randomness import PreservingIterator
from lightning_echo.workers.seconds import Report

__all__ = ["IndexPipeline", "index_order", "lookahead", "pipeline_over", "rank_key", "start_index_pipeline"]

_ORDER_SEED, _NOISE_SEED, _PASS_SEED = 11, 12, 13


class IndexPipeline:
    """Yields batch after batch, each with its `Report`.

    Args:
        requests: The requests for batches. They are made ahead of the batches.
        batches: Yields each batch with its `Report`. For live batches on the device, it yields a `UseToCome` in place of a batch.
        workers: The worker processes behind ``batches``.
        reader: Reads the loader if it is not rebuilt. It is closed with the pipeline.
        on_device: Whether the batches are live on the device.
        rounds: How the nodes exchange examples; None: they do not.

    Attributes:
        exact: Whether a resumed run gets the same order.
    """

    def __init__(
        self,
        requests: ExampleRequests | BatchRequests,
        batches: Iterator[Any],
        workers: WorkerProcesses,
        *,
        reader: PassReader | None = None,
        on_device: bool = False,
        rounds: Rounds | None = None,
    ) -> None:
        self._requests, self._workers, self._reader, self._rounds = requests, workers, reader, rounds
        self._batches: Iterator[Any] | None = batches
        self._on_device = on_device
        self._ended_at = 0  # number of batches of the run after which it was found that a pass had ended
        self.exact = requests.order.exact

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the next batch and its report; None if a pass without a known length has ended.

        Args:
            delivered: Number of batches of the run before this one. The caller counts them, because an interrupt may come before
                the caller gets a batch.
        """
        assert self._batches is not None
        self._requests.delivered = delivered
        note = "" if self._rounds is None else self._rounds.take_note()
        try:
            item: tuple[Any, Report] = next(self._batches)
        except PassOver:
            self._ended_at = delivered
            return None
        if item[1] is None:
            assert self._requests.failure is not None
            raise self._requests.failure
        if note:
            item = item[0], item[1]._replace(note=note)
        if self._on_device:
            use, report = item
            return use.hand_out(), report  # not in the thread, because a batch is prepared where it is used
        return item

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` on."""
        self._requests.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state from which a run resumes after ``delivered`` batches: those delivered so far, or one or two less."""
        state = self._requests.state(delivered)
        if delivered < self._ended_at:  # a resumed run finds that out again
            del state["order"]["passes"][-1]
        return state

    def close(self) -> None:
        """Ends the workers and the thread."""
        if self._rounds is not None:
            self._rounds.release()
        batches, self._batches = self._batches, None
        if isinstance(batches, Prefetcher):
            batches.close()
        self._workers.end_others()
        if self._reader is not None:
            self._reader.close()
        if self._rounds is not None:
            self._rounds.close()


# ---------------------------------------------------------------------- starting


def start_index_pipeline(
    source: Source,
    choice: Choice,
    layout: Layout,
    shape: PlanShape,
    launch: Launch,
    *,
    rank: int,
    key: int,
    caching: Caching | None = None,
    rounds: Rounds | None = None,
) -> IndexPipeline:
    """Starts a pipeline: its workers, and the thread that fetches ahead if one may run.

    Args:
        source: The user's loader.
        choice: The insertion point.
        layout: How a pass is cut into batches and divided among ranks.
        shape: Sizes of the plan.
        launch: How the run begins.
        rank: The number of this rank's share of a pass.
        key: Seed of this rank's random numbers in the workers, see `rank_key`.
        caching: The cache through which examples are read; None: there is no cache.
        rounds: How the nodes exchange examples; None: they do not.
    """
    if not source.rebuilds:
        return _start_reading(source, choice, layout, shape, launch)
    order = _order(source, choice, layout, shape, launch, rank, rounds)
    requests = _requests(source, choice, layout, shape, launch, order)
    in_rounds = None
    if rounds is not None:
        in_rounds = RequestsInRounds(requests, rounds, order if isinstance(order, AllRanksOrder | OrdersOfRanks) else None)
    workers = WorkerProcesses(launch.worker_init_fn)
    # Code that may draw from the global random states must not run while the training draws from them, too.
    in_thread = source.num_workers > 0 and source.may_run_in_thread
    batches: Iterator[Any] = iter(source.rebuild(in_rounds or requests, choice.make_stages, key, workers, caching))
    if rounds is not None and rounds.exchange is not None:
        rounds.exchange.begin()
    # Once a worker has sent a batch, it does not use its memory any more.
    return pipeline_over(
        requests,
        batches,
        workers,
        on_device=choice.point.on_device,
        in_thread=in_thread,
        are_owned=source.num_workers > 0,
        rounds=rounds,
    )


def pipeline_over(
    requests: ExampleRequests | BatchRequests,
    batches: Iterator[Any],
    workers: WorkerProcesses,
    *,
    on_device: bool,
    in_thread: bool,
    are_owned: bool,
    rounds: Rounds | None = None,
) -> IndexPipeline:
    """Returns the pipeline over a rebuilt loader.

    Args:
        requests: The requests to the loader.
        batches: What the loader yields.
        workers: The worker processes of the loader.
        on_device: Whether the batches are live on the device.
        in_thread: Whether a thread fetches ahead. If not, the random states of the training are put back after each batch.
        are_owned: Whether no other code uses the memory of a batch.
        rounds: How the nodes exchange examples; None: they do not.
    """
    if not in_thread:
        batches = PreservingIterator(batches)
    if isinstance(requests, BatchRequests):
        read = RequestedReader(batches).read
        batches = LiveBatchEcho(requests, read, are_owned=are_owned) if on_device else BatchEcho(requests, read)
    if in_thread:
        batches = Prefetcher(batches, lost=workers.lost)
    return IndexPipeline(requests, batches, workers, on_device=on_device, rounds=rounds)


def _start_reading(source: Source, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch) -> IndexPipeline:
    """Starts the pipeline of a loader that is not rebuilt, but read as it is."""
    length = layout.batches_per_pass or None
    reader = PassReader(source.loader, length, mix(launch.seed, _PASS_SEED), is_estimate=source.reads_stream)
    if launch.state["order"] is not None:
        reader.load(launch.state["order"])
    requests = BatchRequests(_plan(shape, launch), reader)
    reader.expect(requests.not_held)
    on_device = choice.point.on_device
    batches = LiveBatchEcho(requests, reader.read) if on_device else BatchEcho(requests, reader.read)
    none_of_ours = WorkerProcesses()
    return IndexPipeline(requests, batches, none_of_ours, reader=reader, on_device=on_device)


def _requests(
    source: Source, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch, order: Order
) -> ExampleRequests | BatchRequests:
    """Returns the batch sampler of a rebuilt loader, at the batch to begin with."""
    by_batches, plan = choice.point.by_batches, _plan(shape, launch)
    if launch.state["order"] is not None:
        order.load(launch.state["order"])
    if not by_batches:
        return ExampleRequests(plan, order, whole_calls=reads_whole_batches(source, choice))
    if source.own_batches:
        return BatchRequests(plan, order)
    return BatchRequests(plan, BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass))


def _order(
    source: Source, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch, rank: int, rounds: Rounds | None
) -> Order:
    """Returns the order of this rank. If this rank exchanges examples for all ranks, the order also has those of the others."""
    preserves = choice.point.by_batches and not source.num_workers
    if rounds is None or rounds.exchange is None:
        return index_order(source, layout, shape.distance, launch.seed, rank, preserves=preserves)
    if source.shards_itself:  # the sampler is a DistributedSampler
        dealt_out, seed = (layout.length, layout.pass_length, 1, 0, shape.distance), mix(launch.seed, _ORDER_SEED)
        return OrdersOfRanks(
            [SamplerOrder(each, *dealt_out, seed=seed) for each in samplers_of_ranks(source.sampler)], rounds.share
        )
    whole = index_order(source, layout, shape.distance, launch.seed, rank, preserves=preserves, is_whole=True)
    return AllRanksOrder(whole, layout.replicas, rank)


def _plan(shape: PlanShape, launch: Launch) -> Plan:
    """Returns the plan, at the batch to begin with."""
    if launch.state["plan"] is not None:
        return plan_from_state(shape, launch.state["plan"])
    plan = make_plan(shape, launch.factor)
    plan.position, plan.number = launch.begin_at
    return plan


def index_order(
    source: Source, layout: Layout, distance: int, seed: int, rank: int, *, preserves: bool, is_whole: bool = False
) -> Order:
    """Returns the order of a rebuilt loader's indices, or of its batches if a batch sampler of the user's makes them.

    Args:
        source: The user's loader.
        layout: How a pass is cut into batches and divided among ranks.
        distance: Least number of positions between two uses of an index, after passes are spread.
        seed: Seed of the run.
        rank: The number of this rank's share of a pass.
        preserves: As in `SamplerOrder`.
        is_whole: Whether the order of all slots is returned, as if there were one rank.
    """
    dealt_out = (layout.length, layout.pass_length, layout.replicas, rank)
    if is_whole:
        dealt_out = (layout.length, layout.pass_length * layout.replicas, 1, 0)
    if source.is_sequential:
        return SequentialOrder(*dealt_out)
    if source.is_shuffled:
        return ShuffledOrder(*dealt_out, distance, layout.replicas, seed=mix(seed, _ORDER_SEED))
    return SamplerOrder(source.sampler, *dealt_out, distance, layout.replicas, seed=mix(seed, _ORDER_SEED), preserves=preserves)


def rank_key(seed: int, noise_rank: int) -> int:
    """Returns the seed of a rank's random numbers in the workers.

    Args:
        seed: Seed of the run.
        noise_rank: A number. Two ranks draw the same random numbers if, and only if, they have the same number.
    """
    return mix(seed, _NOISE_SEED, noise_rank)


def lookahead(source: Source, by_batches: bool, largest_factor: float) -> int:
    """Returns the largest number of batches that may be planned after the delivered one, however fast the workers are."""
    if by_batches and not source.rebuilds:
        # A batch is read when it is asked for. Only the batch at which a pass has ended is planned before.
        return int(source.length is None)
    if not source.num_workers:
        return 0
    if not by_batches:
        return source.prefetched_batches + DEPTH
    # Between two batches that are read, up to ceil(e) + 1 are delivered, and a few more if the buffer is smaller than that.
    uses = math.ceil(largest_factor) + 1 if largest_factor > 1 else 1
    return (source.prefetched_batches + 3) * uses + DEPTH
