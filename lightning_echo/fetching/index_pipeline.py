"""A started pipeline: plan, order, the rebuilt loader and the prefetching thread, ready to hand batches out.

Built by `EchoLoader` at the first batch, because only then ranks and seed are known; thrown away when it is closed or told to go
elsewhere. It knows no epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_echo.fetching.batches import BatchEcho, RequestedReader
from lightning_echo.fetching.choice import Choice, reads_whole_batches
from lightning_echo.fetching.live import LiveBatchEcho
from lightning_echo.fetching.passes import PassOver, PassReader
from lightning_echo.fetching.prefetch import DEPTH, Prefetcher
from lightning_echo.fetching.requests import BatchedOrder, BatchRequests, ExampleRequests
from lightning_echo.fetching.sampler_order import SamplerOrder
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.hashing import mix
from lightning_echo.planning.order import SequentialOrder, ShuffledOrder
from lightning_echo.planning.plan import EchoPlan
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.randomness import PreservingIterator
from lightning_echo.workers.seconds import Report

__all__ = ["IndexPipeline", "Layout", "layout_of", "lookahead", "rank_key", "shape_of"]

_ORDER_SEED, _NOISE_SEED, _PASS_SEED = 11, 12, 13


@dataclass(frozen=True)
class Layout:
    """How a pass is cut into batches and dealt out: what a state must agree with.

    Attributes:
        length: Items of a pass over all ranks: indices, or batches where a user's batch sampler (or loader) makes them.
        replicas: Ranks that it is dealt out to.
        batch_size: Items in a full batch on a rank.
        last_batch_size: Items in the last batch of a pass.
        batches_per_pass: Batches of a pass on a rank: the length of the plain loader there; 0 where it has none.
    """

    length: int
    replicas: int
    batch_size: int
    last_batch_size: int
    batches_per_pass: int

    @property
    def pass_length(self) -> int:
        """Items of a pass on one rank."""
        return (self.batches_per_pass - 1) * self.batch_size + self.last_batch_size

    def items_per_pass(self, by_batches: bool) -> int:
        """What positions count, examples or batches, of a pass on one rank."""
        return self.batches_per_pass if by_batches else self.pass_length

    def state(self) -> dict[str, int]:
        return asdict(self)


def layout_of(source: Source, replicas: int) -> Layout:
    """Cuts and deals a pass as ``DataLoader`` and ``DistributedSampler`` do."""
    if source.streams:  # it ends where it ends; only its loader's length is known, if any
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


class IndexPipeline:
    """Hands out batch after batch, each with its counts of examples and the seconds that it took.

    Attributes:
        exact: Whether a resumed run finds the same order again.

    Args:
        source: The user's loader.
        choice: The insertion point.
        layout: How a pass is cut and dealt out.
        rank: The share of this rank.
        noise_rank: Tells ranks apart whose shares are the same.
        buffer_size: Most live items.
        factor: Echo factor to begin with.
        seed: Seed of order, draws and augmentation.
        state: ``plan`` and ``order`` to go on from, each None to begin anew.
        position: Where a new plan begins: stream position and batch number.
        worker_init_fn: For the workers.
    """

    def __init__(
        self,
        source: Source,
        choice: Choice,
        layout: Layout,
        *,
        rank: int,
        noise_rank: int,
        buffer_size: int,
        factor: float,
        seed: int,
        state: dict[str, Any],
        position: tuple[int, int],
        worker_init_fn: Any,
    ) -> None:
        by_batches, self._is_live = choice.point.by_batches, choice.point.on_device
        shape = shape_of(source, layout, buffer_size, seed, by_batches)
        order = _order(source, layout, rank, seed, shape.distance, by_batches)
        if state["order"] is not None:
            order.load(state["order"])
        plan = _plan(shape, factor, state["plan"], position)
        self.exact = order.exact
        whole = BatchRequests(plan, order) if by_batches else None
        self._requests = ExampleRequests(plan, order, whole_calls=reads_whole_batches(source, choice)) if whole is None else whole
        # What may draw from the global random states must not do so while the training draws from them too.
        in_thread = source.num_workers > 0 and source.may_run_in_thread
        batches: Iterator[Any] = iter(())
        self._workers = WorkerProcesses()
        self._reader: PassReader | None = None
        if source.rebuilds:
            key = rank_key(seed, noise_rank)
            batches = iter(source.rebuild(self._requests, choice.make_stages, key, worker_init_fn, self._workers))
            if not in_thread:
                batches = PreservingIterator(batches)
            read = RequestedReader(batches).read
        else:
            assert whole is not None
            order.expect(whole.missing)
            read, self._reader = order.read, order
        if whole is not None:
            # What workers send, they have no longer.
            are_owned = source.rebuilds and source.num_workers > 0
            batches = LiveBatchEcho(whole, read, are_owned=are_owned) if self._is_live else BatchEcho(whole, read)
        self._batches: Iterator[Any] | None = Prefetcher(batches, lost=self._workers.lost) if in_thread else batches

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """The next batch, its counts and seconds; None: a pass has ended that has no known length.

        Args:
            delivered: Batches of the run before. Who delivers counts them: an interrupt may come before a batch is handed over.
        """
        assert self._batches is not None
        self._requests.delivered = delivered
        try:
            item: tuple[Any, Report] = next(self._batches)
        except PassOver:
            return None
        if self._is_live:
            use, report = item
            return use.live.use(use.is_last), report  # here, since a batch is prepared where it is used, and not in the thread
        return item

    def change_factor(self, number: int, factor: float) -> None:
        """Lets a factor count from batch ``number`` on."""
        self._requests.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """What a run goes on from after so many batches: those delivered last, or one less."""
        return self._requests.state(delivered)

    def close(self) -> None:
        """Lets go of workers and thread."""
        batches, self._batches = self._batches, None
        if isinstance(batches, Prefetcher):
            batches.close()
        self._workers.end_others()
        if self._reader is not None:
            self._reader.close()


def rank_key(seed: int, noise_rank: int) -> int:
    """Seed of a rank's random numbers in the workers."""
    return mix(seed, _NOISE_SEED, noise_rank)


def lookahead(source: Source, by_batches: bool, largest_factor: float) -> int:
    """Batches after the delivered one that may be planned already, however fast the workers are."""
    if (
        by_batches and not source.rebuilds
    ):  # read when it is asked for; only a batch that was to come when a pass ended is planned
        return int(source.length is None)
    if not source.num_workers:
        return 0
    if not by_batches:
        return source.prefetched_batches + DEPTH
    # Between two batches that are read up to ceil(e) + 1 are delivered, a few more where the buffer is smaller than that.
    uses = math.ceil(largest_factor) + 1 if largest_factor > 1 else 1
    return (source.prefetched_batches + 3) * uses + DEPTH


def shape_of(source: Source, layout: Layout, buffer_size: int, seed: int, by_batches: bool) -> PlanShape:
    """The sizes that the plan of a run works with."""
    if by_batches:
        return PlanShape(
            batch_size=1,
            last_batch_size=1,
            batches_per_pass=max(layout.batches_per_pass, 1),  # 0: unknown, and of no matter here
            workers=1,
            buffer_size=buffer_size,
            seed=seed,
            distinct=False,
        )
    return PlanShape(
        batch_size=layout.batch_size,
        last_batch_size=layout.last_batch_size,
        batches_per_pass=layout.batches_per_pass,
        workers=source.num_workers,
        buffer_size=buffer_size,
        seed=seed,
    )


def _plan(shape: PlanShape, factor: float, state: dict[str, Any] | None, position: tuple[int, int]) -> EchoPlan:
    if state is not None:
        return EchoPlan.from_state(shape, state)
    plan = EchoPlan(shape, factor)
    plan.position, plan.number = position
    return plan


def _order(source: Source, layout: Layout, rank: int, seed: int, distance: int, by_batches: bool) -> Any:
    order = _item_order(source, layout, rank, seed, distance, preserves=by_batches and not source.num_workers)
    if by_batches and source.rebuilds and not source.own_batches:
        return BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass)
    return order


def _item_order(source: Source, layout: Layout, rank: int, seed: int, distance: int, *, preserves: bool) -> Any:
    if not source.rebuilds:
        return PassReader(source.loader, layout.batches_per_pass or None, mix(seed, _PASS_SEED))
    dealt = (layout.length, layout.pass_length, layout.replicas, rank)
    if source.is_sequential:
        return SequentialOrder(*dealt)
    if source.is_shuffled:
        return ShuffledOrder(*dealt, distance, seed=mix(seed, _ORDER_SEED))
    return SamplerOrder(source.sampler, *dealt, distance, seed=mix(seed, _ORDER_SEED), preserves=preserves)
