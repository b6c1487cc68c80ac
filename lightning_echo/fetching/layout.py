"""The values with which a pipeline is started: how a pass is cut into batches, the sizes of the plan, and where the plan begins.

Nothing is started or read here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lightning_echo.fetching.source import Source
from lightning_echo.planning.shape import PlanShape, Reuse

__all__ = ["Launch", "Layout", "Start", "layout_of", "shape_of", "shape_of_stream_worker"]


@dataclass(frozen=True)
class Layout:
    """How a pass is cut into batches and divided among the ranks. A state can only be resumed exactly under the same layout.

    Items are examples. They are batches if only whole batches are known: with a user's batch sampler, or with a loader that is
    not a plain ``DataLoader``.

    Attributes:
        length: Number of items in a pass, over all ranks. For a stream, number of batches, if the loader has a length.
        replicas: Number of ranks among which the pass is divided.
        batch_size: Number of items in a full batch on a rank.
        last_batch_size: Number of items in the last batch of a pass.
        batches_per_pass: Number of batches in a pass on a rank, as with the plain loader; 0 if the loader has no length.
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
    """Returns the sizes of one worker's plan, for its part of a stream. The length of that part is not known.

    Args:
        source: A stream's loader.
        buffer_size: Largest number of live examples in all workers together.
        seed: Seed of the draws.
        reuse: The rule of reuse.
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
    """Where a new plan begins.

    Attributes:
        position: Stream position of its first fresh item.
        number: Number of its first batch in the run.
    """

    position: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a run gives to the pipeline that it starts.

    Attributes:
        seed: Seed of the run. The seeds of order, draws and augmentation are derived from it.
        factor: Echo factor of a new plan.
        state: State of the pipeline before, see `RestartablePipeline.state`: ``plan``, ``order`` and ``stream``. A part that is
            None begins anew, and so does ``stream`` if it is missing.
        begin_at: Where a new plan begins. Over a stream, its ``number`` is used with a state, too.
        worker_init_fn: The function that each worker runs first: the user's, or the one that Lightning has set on the
            `EchoLoader`.
    """

    seed: int
    factor: float
    state: dict[str, Any]
    begin_at: Start
    worker_init_fn: Any
