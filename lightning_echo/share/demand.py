"""Echo on demand for a training that shares: it takes the reader's items that are there, and echoes for the rest.

The rule, and what decides when a batch is due, are those of ``pipeline/demand.py``. A thread of the training takes the part of
its only worker. Instead of a pool of reads, it has the window (`ItemsThere`). Items are taken in their order, so the place of the
run is one number. A training that is faster than the reader, or than a peer that the reader waits for, echoes meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.pipeline.demand import DemandPipeline, DemandRequests, Waiting, window_of
from lightning_echo.pipeline.demand_worker import DemandExamples, Words
from lightning_echo.pipeline.pipelines import rebuilt_loader
from lightning_echo.pipeline.prefetch import DEPTH, WorkerProcesses
from lightning_echo.pipeline.reads import NOTHING_READ
from lightning_echo.plan.demand import Booked, Dealing, DemandRule
from lightning_echo.plan.plan import PlanShape
from lightning_echo.share.attachment import Attachment
from lightning_echo.split.staged import Stages, uncut_stages

_IN_ORDER = 2**62  # examples that may overtake another one: never so many, so that none must come next


class ItemsThere:
    """The reader's items that this training has not taken. It takes the place of a `ReadPool` that threads fill.

    ``waits`` returns whether the training waits just now.
    """

    def __init__(self, attachment: Attachment, waits: Callable[[], bool]) -> None:
        self._attachment, self._waits, self._coming = attachment, waits, deque[int]()

    def foresee(self, items: Sequence[int]) -> None:
        self._coming.extend(items)

    @property
    def has_arrived(self) -> bool:
        """Whether the next item is there."""
        return bool(self._coming) and self._attachment.has(self._coming[0])

    def next_read(self, within: float, only: Any = NOTHING_READ) -> Any:
        """Returns the next item if it is there; after a moment, `NOTHING_READ`. Raises what `Attachment.take` raises."""
        del within, only  # the attachment waits for a moment of its own; items come in their order
        if not self._coming:
            sleep(0.001)
            return NOTHING_READ
        return self._coming.popleft() if self._attachment.arrives(self._coming[0], waits=self._waits()) else NOTHING_READ

    def mean_in_flight(self) -> float:
        return 0.0

    def take_note(self) -> str:
        return ""


class SharedDemandExamples(DemandExamples):
    """Answers requests in a thread of the training. Its data set is the window."""

    waiting: Waiting

    def _begin(self) -> Stages:
        stages = super()._begin()
        pool: Any = ItemsThere(self.dataset.attachment, lambda: self.waiting.since is not None)
        self._pool = pool
        return stages


@dataclass
class WaitingForItem(Waiting):
    """A training that waits for the reader's next item."""

    name: str = ""

    def _what(self) -> str:
        return f"the next example of share={self.name!r}"

    def _why(self) -> str:
        return (
            f"{self._what()} is not there yet. What memory holds bridges max_factor uses, while the reader reads or waits for a "
            "slower training"
        )


def shared_on_demand(
    loader: DataLoader[Any],
    shape: PlanShape,
    order: Any,
    key: int,
    *,
    position: int,
    number: int,
    factors: list[tuple[int, float]],
    in_thread: bool,
    say: Callable[[str], None],
    name: str,
) -> DemandPipeline:
    """Returns the pipeline that begins at a position with batch ``number`` of the run.

    ``loader`` is over the window, without workers. ``factors``: (from which batch on, ``max_factor``), ascending. ``in_thread``:
    whether a thread may take items and collate them.
    """
    dealing = Dealing(
        Booked(position),
        pass_length=shape.pass_length,
        block=shape.batch_size,
        workers=1,
        window=window_of(shape.batch_size, 0, 1, 0),
    )
    requests = DemandRequests(dealing, order, workers=1, number=number, size_of=shape.size_of, factors=factors)
    words, processes = Words(loader), WorkerProcesses()
    examples = SharedDemandExamples(
        loader.dataset,
        uncut_stages,
        key,
        loader.collate_fn,
        is_seeded=not in_thread,
        counted=loader.dataset,
        words=words,
        rule=DemandRule(key, factors[0][1], min(shape.buffer_size, shape.pass_length)),
        most_overtaking=_IN_ORDER,
    )
    examples.waiting = waiting = WaitingForItem(requests, processes, loader.dataset, 0.0, say, words, name=name)
    return DemandPipeline(
        requests,
        iter(rebuilt_loader(loader, requests, examples, key, processes)),
        words,
        processes,
        waiting,
        in_thread=in_thread,
        most_lead=DEPTH if in_thread else 0,
        read_at_once=1,
        pools=None,
    )
