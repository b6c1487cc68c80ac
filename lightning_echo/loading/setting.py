"""`Setting`: what an `EchoLoader` stands on and never changes: its source, the insertion point, the buffer size, the ranks.

How many ranks there are is asked for anew each time, since a loader is made before a job has started its other processes.
"""

from __future__ import annotations

from typing import Any

from lightning_echo.fetching.choice import choose
from lightning_echo.fetching.index_pipeline import lookahead, rank_key, start_index_pipeline
from lightning_echo.fetching.layout import Launch, Layout, layout_of, shape_of
from lightning_echo.fetching.pipeline_slot import Pipeline
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.stream_pipeline import start_stream_pipeline
from lightning_echo.insertion import InsertionPoint
from lightning_echo.loading.ranks import data_parallel, world
from lightning_echo.loading.sizing import BufferSizing
from lightning_echo.loading.state import Conditions
from lightning_echo.planning.plan import EchoPlan
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.holders import is_stateful

__all__ = ["Setting"]


class Setting:
    """The user's loader, and where and how it is echoed. All that depends on nothing else is worked out here.

    Args:
        loader: The user's.
        point: The insertion point asked for.
        buffer_size: Most live items; None: chosen.
        factor: The echo factor to begin with.
        ranks: Number of ranks and this one; None: ask ``torch.distributed``.
        epoch_length: ``"fixed"`` or ``"full_pass"``; where passes have no known length it is the latter.

    Attributes:
        source: The loader, looked into.
        choice: The insertion point, resolved.
        buffer_size: Most live items.
        epoch_length: How epochs end.
        warning: What the user should hear of it; empty: nothing.

    Raises:
        ValueError: Something of it is impossible with this loader.
        TypeError: ``loader`` is no loader.
    """

    def __init__(
        self,
        loader: Any,
        point: InsertionPoint,
        buffer_size: int | None,
        factor: float,
        ranks: tuple[int, int] | None,
        epoch_length: str = "fixed",
    ) -> None:
        self._ranks = ranks
        self.source = Source(loader)
        self.epoch_length = epoch_length if self.source.length is not None else "full_pass"
        self.choice = choose(self.source, point)
        self._sizing = BufferSizing.of(loader, self.choice.item_bytes, self.choice.point, self._expected_items())
        if buffer_size is None:
            self.buffer_size, self.warning = self._sizing.default(factor)
            return
        self.buffer_size, self.warning = buffer_size, ""
        self.check_factor(factor)
        self._sizing.check_fits(buffer_size)

    @property
    def by_batches(self) -> bool:
        """Whether batches are the items that are echoed."""
        return self.choice.point.by_batches

    @property
    def by_streams(self) -> bool:
        """Whether the workers plan for themselves what they make of a stream."""
        return self.source.streams and not self.by_batches

    @property
    def resumes(self) -> bool:
        """Whether a run can be gone on with in the middle of a pass.

        By index, by the loader's or the stream's own state, or by reading a pass of known length again.
        """
        source = self.source
        if self.by_streams:
            return is_stateful(source.loader.dataset)
        return source.rebuilds or is_stateful(source.loader) or not (source.length is None or source.reads_stream)

    @property
    def has_length(self) -> bool:
        """Whether epochs have a known length; else they end where passes do."""
        return self.source.length is not None and not (self.by_streams and self.epoch_length == "full_pass")

    def check_factor(self, factor: float) -> None:
        """Refuses a factor that needs a larger buffer.

        Raises:
            ValueError: With the least size.
        """
        self._sizing.check(self.buffer_size, factor)

    def describe(self, factor: float) -> str:
        """All of it in a line, for people."""
        choice, what = self.choice, "batches" if self.by_batches else "examples"
        memory = f", {choice.item_bytes * self.buffer_size / 2**20:.3g} MiB" if choice.item_bytes else ""
        if memory and choice.point.on_device:
            memory += " of device memory"
        return (
            f"{choice.point}, factor {factor:g}: reuse [{', '.join(choice.reused)}], redo [{', '.join(choice.redone)}]; "
            f"{self.buffer_size:,} live {what}{memory}; {self.source.num_workers} workers"
        )

    def remark(self) -> str:
        """What else is worth saying once."""
        remarks = []
        if not self.resumes:
            remarks.append(
                "a checkpoint from within a pass cannot be resumed: that needs state_dict() and load_state_dict(state) of the "
                f"{'data set' if self.by_streams else 'loader'}, or torchdata's StatefulDataLoader"
            )
        if self.choice.caution:
            remarks.append(self.choice.caution)
        if not self.has_length:
            remarks.append(
                "an epoch ends where the loader's pass ends" if self.by_batches else "an epoch ends where the stream ends"
            )
        if self.by_batches and not self.source.rebuilds:
            remarks.append("examples are counted by the leading dimension of a batch's first tensor")
        reason = f" (auto: {self.choice.reason})" if self.choice.reason else ""
        return reason + "".join(f"; {remark}" for remark in remarks)

    # ------------------------------------------------------------------ ranks, and what a pass is on this one

    def rank_of_process(self) -> int:
        """Tells processes apart also where they all have the same shard."""
        return world()[1] if world()[0] > 1 or self._ranks is None else self._ranks[1]

    def _noise_rank(self) -> int:
        """Tells apart whose random numbers are to differ: ranks that share the work on the same data draw the same.

        Raises:
            RuntimeError: The data would be dealt out to them.
        """
        replicas, rank = data_parallel()
        if (replicas, rank) == world():
            return self.rank_of_process()
        if self._ranks is None and self._deals_out:
            raise RuntimeError(
                f"this EchoLoader would deal its data out to {world()[0]} ranks, but the job's device mesh has {replicas} in its "
                "data-parallel dimension: the others share the work on the same data (tensor parallelism). Use EchoDataModule or "
                f"EchoCallback, which ask the Trainer, or EchoLoader(..., num_replicas={replicas}, rank={rank}) on this rank"
            )
        return rank

    @property
    def _deals_out(self) -> bool:
        """Whether ranks get shares of the data here, and not from the loader itself."""
        return self.source.rebuilds and not self.source.shards_itself

    def layout(self) -> Layout:
        """How a pass is cut into batches and dealt out to the ranks."""
        return layout_of(self.source, self._shards()[0])

    def _shards(self) -> tuple[int, int]:
        """Number of shards and the one of this rank."""
        return (self._ranks or world()) if self._deals_out else (1, 0)

    def epoch_batches(self, factor: float) -> int:
        """Batches in an epoch on this rank, where it `has_length`."""
        batches = self.layout().batches_per_pass
        return batches if self.epoch_length == "fixed" else round(factor * batches)

    def passes_in(self, batches: int, factor: float) -> float | None:
        """Passes in the first batches of a run, by a plan like the one that it will have; None over a stream."""
        if self.by_streams or not self.items_per_pass():
            return None
        plan = EchoPlan(shape_of(self.source, self.layout(), self.buffer_size, 0, self.by_batches), factor)
        for _ in range(batches):
            plan.next_batch()
        return plan.position / self.items_per_pass()

    def items_per_pass(self) -> int:
        """Of this rank."""
        return self.layout().items_per_pass(self.by_batches)

    def _expected_items(self) -> int | None:
        """Items that a pass will hold on this rank; None: nobody says. Of a stream by its loader's length."""
        if self.source.length is None:
            return None
        return self.source.length * self.source.loader.batch_size if self.by_streams else self.items_per_pass()

    def conditions(self) -> Conditions:
        """What must be the same for a run to go on exactly."""
        return Conditions(self.choice.point, self.layout(), self.source.num_workers, self.buffer_size)

    # ------------------------------------------------------------------ running

    def lookahead(self, largest_factor: float) -> int:
        """Batches after the delivered one that may be planned already."""
        return lookahead(self.source, self.by_batches, largest_factor)

    def filling_batches(self) -> int:
        """Batches by which the buffer is full."""
        return self.buffer_size if self.by_batches else -(-self.buffer_size // self.layout().batch_size)

    def start(self, launch: Launch) -> Pipeline:
        """Starts a pipeline.

        Raises:
            RuntimeError: The data would be dealt out to ranks that need the same.
        """
        key = rank_key(launch.seed, self._noise_rank())
        if self.by_streams:
            return start_stream_pipeline(self.source, self._shape_of_worker(launch.seed), launch, key=key)
        layout = self.layout()
        shape = shape_of(self.source, layout, self.buffer_size, launch.seed, self.by_batches)
        return start_index_pipeline(self.source, self.choice, layout, shape, launch, rank=self._shards()[1], key=key)

    def _shape_of_worker(self, seed: int) -> PlanShape:
        """Sizes of the plan of one worker over its part of a stream, of which nothing is known beforehand."""
        size = self.source.loader.batch_size
        return PlanShape(
            batch_size=size,
            last_batch_size=size,
            batches_per_pass=1,
            workers=1,
            buffer_size=self.buffer_size // max(self.source.num_workers, 1),
            seed=seed,
            distinct=False,
        )
