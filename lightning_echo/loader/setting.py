"""`Setting`: the parts and options of an `EchoLoader`: the user's loader, the insertion point, the buffer size, the ranks.

Two things can change later. The buffer size is an estimate until a run starts, if it depends on the free memory (`BufferSize`).
The insertion point that ``auto`` chose gives way to a later one, if the split of the data set does not hold
(`Setting.leave_split`). The number of ranks and the length of the data set are looked up each time that they are needed, because
a loader is made before a job starts its other processes, and because a data set may grow.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.cache.exchange import Part
from lightning_echo.cache.holding import WHOLE
from lightning_echo.cache.kept import CacheConfig
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.loader.sizing import BufferSize, BufferSizing, Room, room_of_rank
from lightning_echo.loader.state import Conditions, EchoState
from lightning_echo.pipeline.choice import choose, choose_later
from lightning_echo.pipeline.kinds import Indexed, Layout, Opening, kind_of
from lightning_echo.pipeline.pipelines import Launch, Pipeline, rank_key
from lightning_echo.pipeline.requests import tell_pass
from lightning_echo.plan.plan import Reuse
from lightning_echo.ranks import data_parallel, ranks_of_launcher, world
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.same_data import unit_of
from lightning_echo.share.sharing import LoaderSharing, point_of_shared


class Setting:
    """The user's loader, where and how it is echoed, and the consequences of that.

    ``ranks``: the number of ranks and that of this rank; None: ask ``torch.distributed``. The other arguments are those of
    `EchoLoader`.

    Attributes:
        kind: The kind of the user's loader at the insertion point, or, if that shares, of the one that it trains on.
        choice: The insertion point that was chosen, never ``auto``.
        sharing, cache: None if the loader does not share, or has no cache.
    """

    def __init__(
        self,
        loader: Any,
        point: InsertionPoint,
        buffer_size: int | float | str | None,
        factor: float,
        ranks: tuple[int, int] | None,
        epoch_length: str = "fixed",
        cache: CacheConfig | None = None,
        reuse: Reuse = Reuse.each,
        share: ShareConfig | None = None,
    ) -> None:
        self._ranks, self.reuse = ranks, reuse
        self._layout_of_pass: Layout | None = None
        kind, self.sharing = kind_of(loader), None
        if share is not None:
            point = point_of_shared(point, unit_of(kind))
            self.sharing = LoaderSharing(share, kind, has_cache=cache is not None)
            kind = self.sharing.kind()
        self.epoch_length = epoch_length if kind.length is not None else "full_pass"
        if cache is not None and cache.hold == WHOLE and point is InsertionPoint.auto:
            point = earliest(Needs.examples)  # a data set that is held whole does not augment: there is nothing to redo
        if cache is not None:
            kind.check_cache()
        self.choice, self._is_auto = choose(kind, point, cache), point is InsertionPoint.auto
        self.kind = kind.at(self.choice.point)
        self.cache = None
        if cache is not None:
            assert isinstance(kind, Indexed)
            self.cache = LoaderCache(
                cache,
                loader.dataset,
                kind.readable_indices,
                self.choice.split,
                self.choice.make_stages,
                differs_in_workers=kind.prepared_in_workers,
                loader=loader,
                holds=self.choice.holds,
            )
        items = self.kind.expected_items(self.layout())
        sizing = BufferSizing.of(loader, self.choice.item_bytes, self.choice.point, items, reuse, distinct=self.kind.distinct)
        self.buffer = BufferSize(buffer_size, sizing, factor, self.room(ranks_of_launcher()))

    def leave_split(self, reason: str) -> bool:
        """Continues at a later point, at which the data set is not split, if that is possible. Returns whether it is."""
        may_leave = self._is_auto and self.choice.split is not None and self.cache is None and self.sharing is None
        if may_leave:
            self.choice = choose_later(reason)
        return may_leave

    @property
    def has_length(self) -> bool:
        """Whether the length of epochs is known. If not, an epoch ends when a pass ends."""
        return self.kind.has_length(self.epoch_length)

    @property
    def buffer_size(self) -> int:
        return self.buffer.value

    def room(self, ranks: int) -> Room | None:
        """Returns the free memory that this rank, one of ``ranks`` on this node, may count on; None if it is not known."""
        if self.cache is None:
            return room_of_rank(ranks, 0, on_device=self.choice.point.on_device)
        not_cached = None if self.kind.by_batches else self.cache.not_held
        return room_of_rank(ranks, self.cache.memory_to_come, not_cached, on_device=self.choice.point.on_device)

    def keep_buffer_of(self, state: EchoState) -> None:
        """Keeps the buffer size of a state, if the run can then continue exactly and the user asks for no other number."""
        is_alike = not state.conditions._replace(buffer_size=self.buffer_size).differences(self.conditions())
        self.buffer.keep(state.buffer_size if is_alike and state.delivered else None)

    def describe(self, factor: float) -> str:
        """Returns one line about the loader, for people."""
        workers = self.kind.num_workers
        choice, what = self.choice, "batches" if self.kind.by_batches else "examples"
        cached = None if self.cache is None or self.kind.by_batches else self.cache.not_held
        held = self.buffer_size if cached is None else min(cached, self.buffer_size)
        item_bytes = choice.item_bytes
        if self.cache is not None and cached is not None:  # a live example is one that the cache holds
            item_bytes = max(item_bytes, self.cache.more_bytes)
        memory = f", {item_bytes * held / 2**20:.3g} MiB" if item_bytes else ""
        if memory and held < self.buffer_size:
            memory += " in addition to the cache"
        if memory and choice.point.on_device:
            memory += " of device memory"
        return (
            f"{choice.point}, factor {factor:g}: reuse [{', '.join(choice.reused)}], redo [{', '.join(choice.redone)}]; "
            f"{self.buffer_size:,} live {what}{memory}; {workers} worker{'' if workers == 1 else 's'}"
        )

    def remarks(self) -> list[str]:
        """Returns what the user should know of this loader, for people."""
        remarks = []
        if not self.kind.resumes:
            remarks.append(
                "a checkpoint from within a pass cannot be resumed, unless the "
                f"{'loader' if self.kind.stateful is self.kind.loader else 'data set'} has state_dict() and "
                "load_state_dict(state), or the loader is torchdata's StatefulDataLoader"
            )
        if self.choice.caution:
            remarks.append(self.choice.caution)
        if self.buffer.remark:
            remarks.append(self.buffer.remark)
        if not self.has_length:
            remarks.append(f"an epoch ends when {self.kind.pass_ends}")
        if self.kind.hearers():
            remarks.append(
                "set_epoch is told the number of the pass over the data, which only at factor 1 and in whole epochs is the epoch"
            )
        if self.kind.remark:
            remarks.append(self.kind.remark)
        return remarks

    # ------------------------------------------------------------------ ranks, and a pass on this rank

    def rank_of_process(self) -> int:
        """Returns the number of this process, also if all processes get the same data."""
        return world()[1] if world()[0] > 1 or self._ranks is None else self._ranks[1]

    def _noise_rank(self) -> int:
        """Returns a number that is equal for ranks that share the work on the same data: they draw the same random numbers."""
        replicas, rank = data_parallel()
        if (replicas, rank) == world():
            return self.rank_of_process()
        if self._ranks is None and self.kind.deals_out:
            raise RuntimeError(
                f"this EchoLoader would divide its data among {world()[0]} ranks, but the data-parallel dimension of the job's "
                f"device mesh has {replicas}: the other ranks share the work on the same data (tensor parallelism). Use "
                "EchoDataModule or EchoCallback, which ask the Trainer, or "
                f"EchoLoader(..., num_replicas={replicas}, rank={rank}) on this rank"
            )
        return rank

    def layout(self) -> Layout:
        """Returns how a pass is cut into batches and divided among the ranks.

        If its length may follow the number of the pass, this is the pass of the last `tell_pass`.
        """
        return self._layout_of_pass or self.kind.layout(self._shards()[0])

    def tell_pass(self, state: EchoState, *, is_next: bool = False) -> None:
        """Gives the pass of a state (``is_next``: the one after it, if that has begun) to a sampler of the user's.

        The length of that pass may follow its number. Call it while nothing is read.
        """
        items = state.layout.items_per_pass(state.insertion_point.by_batches)
        if items and (hearers := self.kind.hearers()):
            number = -(-state.position // items) if is_next else state.position // items
            with preserved_random_states():  # it may draw or seed; when the pass begins, it is set again in states of its own
                tell_pass(number, *hearers)
            self._layout_of_pass = None
            self._layout_of_pass = self.layout()

    def _shards(self) -> tuple[int, int]:
        return (self._ranks or world()) if self.kind.deals_out else (1, 0)

    def epoch_batches(self, factor: float) -> int:
        """Returns the number of batches in an epoch on this rank. Call it only if `has_length` is true."""
        batches = self.layout().batches_per_pass
        return batches if self.epoch_length == "fixed" else round(factor * batches)

    def items_per_pass(self) -> int:
        return self.kind.items_per_pass(self.layout())

    def conditions(self) -> Conditions:
        """Returns the conditions that must be the same for a run to continue exactly."""
        kind = self.kind
        return Conditions(self.choice.point, self.layout(), kind.state_workers, self.buffer_size, self.reuse, kind.order_by)

    # ------------------------------------------------------------------ running

    def start(self, launch: Launch) -> Pipeline:
        layout = self.layout()
        opening = Opening(
            launch=launch,
            choice=self.choice,
            layout=layout,
            shape=self.kind.shape(layout, self.buffer_size, launch.seed, self.reuse),
            rank=self._shards()[1],
            key=rank_key(launch.seed, self._noise_rank()),
            cache=self.cache,
        )
        return self.kind.open(opening)

    def part_in_cache(self) -> Part:
        """Returns the facts about this rank that the other ranks of a partitioned cache need."""
        assert isinstance(self.kind, Indexed)
        return self.kind.part_in_cache(self.layout(), self._shards())
