"""The pipeline of a training that shares its reading: its own plan and collate function over the reader's examples.

It is an `IndexPipeline` whose data set is the window. It has no workers, and a thread that fetches ahead. A new one begins

* when the run starts. It begins where the run stopped, if the reader can be there, else where the other trainings are.
* when the reader has not waited (``behind="skip"``). It begins at the next batch of which no example was missed. Live examples
  are dropped.

The thread must not draw from the random states of the training. Torch's own collate function draws no random numbers. Any other
collate function runs in the training's thread, and the random states are put back after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, default_collate

from lightning_echo.fetching.choice import Choice
from lightning_echo.fetching.index_pipeline import IndexPipeline, pipeline_over
from lightning_echo.fetching.layout import Launch, Layout, Start
from lightning_echo.fetching.requests import BatchedOrder, BatchRequests, ExampleRequests
from lightning_echo.fetching.source import Source
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.log import LOGGER
from lightning_echo.planning.plan import Plan
from lightning_echo.planning.plans import make_plan, plan_from_state
from lightning_echo.planning.shape import PlanShape
from lightning_echo.sharing.reader.reading import distance_of
from lightning_echo.sharing.taking.attachment import Attachment, Missed
from lightning_echo.sharing.taking.connecting import Place
from lightning_echo.sharing.taking.pace import Pace
from lightning_echo.sharing.taking.shared_order import SharedOrder, item_at, start_at
from lightning_echo.splitting.stages import uncut_stages
from lightning_echo.workers.seconds import Report

__all__ = ["SharedCounts", "SharedExamples", "SharedPipeline", "shared_shape"]


@dataclass
class SharedCounts:
    """Counts of a training that shares.

    Attributes:
        missed: Number of examples that other trainings had and that this rank missed.
    """

    missed: int = 0


class SharedExamples:
    """The reader's stream as a data set of items.

    Args:
        take: Returns the example of an item.
        length: Items of a pass.
    """

    def __init__(self, take: Callable[[int], Any], length: int) -> None:
        self._take, self._length = take, length

    def __getitem__(self, item: int) -> Any:
        return self._take(item)

    def __len__(self) -> int:
        return self._length


def shared_shape(shape: PlanShape, phase: int, layout: Layout) -> PlanShape:
    """Returns the sizes of the plan of a training that shares.

    If a batch must not hold an index twice, the plan has one buffer. The distance that the reader keeps between two uses of an
    index limits its size. If a batch is larger than that distance, it may hold an index twice, because exact counts come first.

    Args:
        shape: Sizes as without sharing.
        phase: See `PlanShape`.
        layout: How the training cuts a pass into batches and divides it among ranks.
    """
    distance = _distance(shape.pass_length, layout)
    if not shape.distinct or shape.batch_size > distance:
        return replace(shape, distinct=False, phase=phase)
    most = max(distance - shape.batch_size, shape.batch_size)
    return replace(shape, workers=0, buffer_size=min(shape.buffer_size, most), most_distance=distance, phase=phase)


def _distance(pass_length: int, layout: Layout) -> int:
    """Returns how many items of a rank the reader keeps between two uses of an index."""
    return min(pass_length // 3, distance_of(layout.length) // layout.replicas)


class SharedPipeline:
    """Yields batch after batch. See `IndexPipeline`.

    Args:
        source: The training's loader.
        choice: The insertion point.
        layout: How the training cuts a pass into batches and divides it among ranks.
        shape: Sizes of the plan, as without sharing.
        launch: How the run begins.
        rank: The number of this rank's share of a pass.
        key: Seed for the random numbers of the collate function.
        name: The name that is shared, for messages.
        attachment: The connection. It is closed with the pipeline.
        counts: The counts, which the pipeline keeps up to date.

    Attributes:
        exact: True, since the order follows from the name.
    """

    exact = True

    def __init__(
        self,
        source: Source,
        choice: Choice,
        layout: Layout,
        shape: PlanShape,
        launch: Launch,
        *,
        rank: int,
        key: int,
        name: str,
        attachment: Attachment,
        counts: SharedCounts,
    ) -> None:
        self._source, self._choice, self._layout, self._shape = source, choice, layout, shape
        self._rank, self._key, self._name = rank, key, name
        self._attachment, self._counts = attachment, counts
        self._in_thread = source.loader.collate_fn is default_collate
        self._factors = [(0, launch.factor)]  # (batch, the factor from that batch on)
        self._phase = 0
        self._pace = Pace(attachment, lambda: 1 / layout.replicas)  # an example of this rank is one item of each rank
        self._apart = layout.batch_size if choice.point.by_batches else _distance(layout.pass_length, layout)
        self._may_repeat = shape.distinct and layout.batch_size > self._apart
        self._say_repeats(launch.factor)
        self._inner = self._enter(launch)

    # ------------------------------------------------------------------ as a pipeline

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the next batch and its report.

        Args:
            delivered: Number of batches of the run before this one.
        """
        self._pace.note_step()
        while True:
            try:
                found = self._inner.next_batch(delivered)
                if found is None:
                    return None
                batch, report = found
                return batch, self._pace.handed_out(report)
            except Missed as missed:
                position = self._first_example(self._inner.state(delivered)["plan"]["position"])
                self._inner.close()
                self._inner = self._skip(position, missed.low, delivered)

    def change_factor(self, number: int, factor: float) -> None:
        """Sets the factor from batch ``number`` on."""
        self._say_repeats(factor)
        self._factors = [change for change in self._factors if change[0] < number] + [(number, factor)]
        self._inner.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        """Returns the state from which a run resumes after ``delivered`` batches."""
        return self._inner.state(delivered)

    def close(self) -> None:
        """Leaves the reader."""
        self._attachment.stop()
        self._inner.close()
        self._attachment.close()

    # ------------------------------------------------------------------ entering

    def _enter(self, launch: Launch) -> IndexPipeline:
        saved = launch.state["plan"]
        if saved is None:
            begin = launch.begin_at
            place = self._attachment.enter(self._item(begin.position) if begin.position else None)
            return self._begin(self._say(place, begin), begin.number)
        self._phase = (launch.state["order"] or {}).get("phase") or 0
        plan = plan_from_state(shared_shape(self._shape, self._phase, self._layout), saved)
        self._factors = [(0, plan.factor), *((number, factor) for number, factor in saved["pending"])]
        wish = self._item(plan.oldest_call)
        place = self._attachment.enter(wish)
        if place.item != wish:
            return self._begin(self._say(place, Start(plan.position, plan.number)), plan.number)
        items = [item for live in plan.live() for item in self._items_of(live.position)]
        self._attachment.keep(items)
        return self._over(plan)

    def _item(self, position: int) -> int:
        """Returns the first item that any rank needs from a position on. It is the same for all ranks."""
        first = self._first_example(position)
        items = [item_at(self._layout, rank, first) for rank in range(self._layout.replicas)]
        return self._attachment.group.round_of(min(items))

    def _first_example(self, position: int) -> int:
        """Returns the position of an item's first example. If whole batches are echoed, the given position counts batches."""
        if not self._choice.point.by_batches:
            return position
        number, batch = divmod(position, self._layout.batches_per_pass)
        return number * self._layout.pass_length + batch * self._layout.batch_size

    def _items_of(self, position: int) -> list[int]:
        """Returns the reader's items of which an item of the plan consists."""
        first = self._first_example(position)
        end = self._first_example(position + 1) if self._choice.point.by_batches else first + 1
        return [item_at(self._layout, self._rank, one) for one in range(first, end)]

    def _say(self, place: Place, wanted: Start) -> Start:
        """Returns where the training begins at its place. If it wanted another place, logs what it misses."""
        start = start_at(self._layout, place.item)
        if place.is_late:
            taken = start.position % self._layout.pass_length
            share = 100 * (1 - taken / self._layout.pass_length)
            at_work = f"{place.others} other training{'s' if place.others > 1 else ''} at work"
            resumed = ", so that it does not go on where it stopped" if wanted.position else ""
            LOGGER.info("share=%r: enters beside %s%s; it gets %.0f %% of this pass", self._name, at_work, resumed, share)
        return start

    def _say_repeats(self, factor: float) -> None:
        """Says, once, that a batch may hold an index twice."""
        if self._may_repeat and factor > 1:
            self._may_repeat = False
            LOGGER.warning(
                "share=%r: with a factor above 1 a batch may hold an index twice, since a batch of %d examples is larger than "
                "the %d that the reader keeps between two uses of an index. Use smaller batches, or a factor of 1",
                self._name,
                self._layout.batch_size,
                self._apart,
            )

    # ------------------------------------------------------------------ beginning

    def _skip(self, position: int, low: int, delivered: int) -> IndexPipeline:
        """Returns the pipeline that goes on after examples that are gone.

        Args:
            position: The position at which the batch begins that lacks examples.
            low: The first item that is still there.
            delivered: Number of batches of the run before that one.
        """
        start = start_at(self._layout, low)
        missed = max(start.position - position, 0)
        self._counts.missed += missed
        if self._attachment.is_waited_for:  # this process was stopped for longer than a new reader waits for old trainings
            LOGGER.warning("share=%r: %d examples were missed, since the reader was replaced meanwhile", self._name, missed)
        return self._begin(start, delivered)

    def _begin(self, start: Start, number: int) -> IndexPipeline:
        """Returns a pipeline without live examples.

        Args:
            start: Its place in the reader's passes, in examples and batches of this training.
            number: Number of its first batch in the run.
        """
        self._phase = (start.number - number) % self._layout.batches_per_pass
        shape = shared_shape(self._shape, self._phase, self._layout)
        now = next(factor for since, factor in reversed(self._factors) if since <= number)
        plan = make_plan(shape, now)
        plan.position, plan.number = (start.number if self._choice.point.by_batches else start.position), number
        for since, factor in self._factors:
            if since > number:
                plan.change_factor(since, factor)
        return self._over(plan)

    def _over(self, plan: Plan) -> IndexPipeline:
        """Returns the pipeline for a plan."""
        layout, loader, point = self._layout, self._source.loader, self._choice.point
        order: Any = SharedOrder(layout, self._rank, self._phase, self._name)
        requests: ExampleRequests | BatchRequests
        if point.by_batches:
            batched = BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass)
            requests = BatchRequests(plan, batched)
        else:
            requests = ExampleRequests(plan, order, whole_calls=False)
        examples: Any = SharedExamples(self._attachment.take, layout.length)
        own = DataLoader(
            examples,
            batch_size=layout.batch_size,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            pin_memory=loader.pin_memory,
        )
        workers = WorkerProcesses()
        rebuilt = Source(own).rebuild(requests, uncut_stages, self._key, workers, is_seeded=not self._in_thread)
        return pipeline_over(
            requests, iter(rebuilt), workers, on_device=point.on_device, in_thread=self._in_thread, are_owned=True
        )
