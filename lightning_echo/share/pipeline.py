"""The pipeline of a training that shares its reading: its own plan and collate function over the reader's examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_echo.cache.node_cache import gathered
from lightning_echo.cache.reads import Lookups
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.demand import DemandPipeline, DemandRequests, Waiting, factors_of, window_of
from lightning_echo.pipeline.demand_worker import DemandExamples, Words
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.pipeline.pipelines import Launch, Layout, Opening, Pipeline, Start, pipeline_over, rebuilt_loader
from lightning_echo.pipeline.prefetch import DEPTH, WorkerProcesses
from lightning_echo.pipeline.reads import NOTHING_READ
from lightning_echo.pipeline.requests import BatchedOrder, BatchRequests, ExampleRequests
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.demand import Booked, Dealing, DemandRule
from lightning_echo.plan.memory import make_plan, plan_from_state
from lightning_echo.plan.plan import Plan, PlanShape
from lightning_echo.share.attachment import Attachment, Missed
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.connecting import Place
from lightning_echo.share.parts import Items
from lightning_echo.share.process import ReaderError
from lightning_echo.share.reading import distance_of
from lightning_echo.split.staged import Stages, uncut_stages

# ---------------------------------------------------------------------- pace
# Each training reports to the reader how long it is busy with an example, without its waiting. The others decide on their factors
# by this time. So two controllers do not drive each other's factors up.

_STEPS = 15  # the time of a step is the median of so many steps


class PacedPipeline:
    """The pipeline of a training that takes the reader's items, measured. It owns the attachment. See `IndexPipeline`.

    ``examples_of_item`` returns the number of examples in an item of the reader, for all ranks together.
    """

    def __init__(self, inner: Pipeline, attachment: Attachment, examples_of_item: Callable[[], float]) -> None:
        self._inner, self._attachment, self._examples_of_item = inner, attachment, examples_of_item
        self._handed_out: tuple[float, float] | None = None  # the time of the last batch, and how many items it had
        self._busy_nanoseconds: deque[int] = deque(maxlen=_STEPS)
        self.exact = inner.exact

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        """Returns the next batch and its report. ``delivered`` counts the batches of the run before it.

        In place of the time that this training waited for fresh examples, the report has the time between two fresh examples. No
        factor follows from the waiting, because that depends on what is prepared by then. What counts is how fast examples can
        come: as fast as the reader prepares them, or as fast as a slower training takes them for which the reader waits. For that
        training, its time without waiting and without echoing counts. So the slower of two trainings sees a faster one, whatever
        factor the faster one has.
        """
        if self._handed_out is not None:
            began, items = self._handed_out
            self._busy_nanoseconds.append(int((perf_counter() - began) * 1e9 / items))
            # the median of a few, since validation may come between two batches
            self._attachment.need_nanoseconds = int(median_low(self._busy_nanoseconds))
        found = self._next(delivered)
        if found is None:
            return None
        batch, report = found
        per_item = self._examples_of_item()
        self._handed_out = perf_counter(), max(report.fresh + report.echoed, 1) / per_item
        if report.fresh:
            report = report._replace(source=report.fresh / per_item * self._attachment.seconds_per_example)
        return batch, report

    def _next(self, delivered: int) -> tuple[Any, Report] | None:
        return self._inner.next_batch(delivered)

    def change_factor(self, number: int, factor: float) -> None:
        self._inner.change_factor(number, factor)

    def state(self, delivered: int) -> dict[str, Any]:
        return self._inner.state(delivered)

    def position(self, delivered: int) -> int | None:
        return self._inner.position(delivered)

    def close(self) -> None:
        self._attachment.is_stopped = True
        self._inner.close()
        self._attachment.close()


# ---------------------------------------------------------------------- rows
# Whole batches, cut for a training with another batch size: the rows of each leaf, from the first on. A leaf is a tensor, an
# array, or a list or tuple of plain values (as torch's collate function makes of strings). All leaves of a batch must have the
# same number of rows.

_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def rows_of(batch: Any) -> int:
    """Returns the number of rows. Raises a ValueError if the leaves have different numbers of rows, or one has no rows."""
    found = set()
    for leaf in _leaves(batch):
        has_rows = bool(leaf.ndim) if isinstance(leaf, torch.Tensor | np.ndarray) else isinstance(leaf, list | tuple)
        found.add(len(leaf) if has_rows else None)
    if len(found) != 1 or None in found:
        counts = ", ".join(sorted(map(str, found))) or "none"
        raise ValueError(
            f"a shared batch cannot be cut for another batch size: its leaves must have one number of rows, got {counts}. Give "
            "the loader of each training the batch size of the others"
        )
    return int(found.pop() or 0)


def cut(batch: Any, start: int, stop: int) -> Any:
    """Returns some rows of a batch."""
    return _mapped(lambda leaf: leaf[start:stop], batch)


def joined(parts: Sequence[Any]) -> Any:
    """Returns the rows of batches one after the other, as one batch."""
    return parts[0] if len(parts) == 1 else _mapped(_join, *parts)


def _join(*leaves: Any) -> Any:
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(leaves)
    if isinstance(first, np.ndarray):
        return np.concatenate(leaves)
    return type(first)(value for leaf in leaves for value in leaf)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    return not isinstance(value, list | tuple) or (
        not hasattr(value, "_fields") and bool(value) and all(isinstance(part, _PLAIN) for part in value)
    )


def _leaves(batch: Any) -> list[Any]:
    if _is_leaf(batch):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch
    return [leaf for part in parts for leaf in _leaves(part)]


def _mapped(function: Callable[..., Any], *batches: Any) -> Any:
    """Returns the result of a function for each leaf, in containers like those of the first batch."""
    first = batches[0]
    if _is_leaf(first):
        return function(*batches)
    if isinstance(first, dict):
        return {key: _mapped(function, *(batch[key] for batch in batches)) for key in first}
    parts = [_mapped(function, *several) for several in zip(*batches, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


# ---------------------------------------------------------------------- shared order
# A training counts the members of its part (`Items` in ``parts.py``), which are all items of the reader if it takes all. A pass
# has ``length`` of them. Slot ``s`` of pass ``q`` is member ``q * length + s``. Of the ``ranks`` ranks of a
# training, rank ``r`` takes the slots ``r``, ``r + ranks`` ... . The training's own pass is as long as that of its plain loader:
# ``drop_last`` leaves out the last items, and a slot after the end repeats the rank's item before it. So the item follows from
# the position alone, wherever a training enters, and nothing must be remembered.


def item_at(layout: Layout, rank: int, position: int) -> int:
    """Returns the member at a position of a training, on the rank with this share of a pass.

    >>> layout = Layout(length=7, replicas=2, batch_size=2, last_batch_size=2, batches_per_pass=2)
    >>> [item_at(layout, 1, position) for position in range(5)]
    [1, 3, 5, 5, 8]
    """
    number, offset = divmod(position, layout.pass_length)
    slot = offset * layout.replicas + rank
    if slot >= layout.length:
        slot = slot - layout.replicas if slot >= layout.replicas else slot % layout.length
    return number * layout.length + slot


def start_at(layout: Layout, item: int) -> Start:
    """Returns where a training begins that may have all members from ``item`` on: at the start of one of its batches.

    >>> layout = Layout(length=10, replicas=1, batch_size=4, last_batch_size=2, batches_per_pass=3)
    >>> start_at(layout, 0), start_at(layout, 5), start_at(layout, 9)
    (Start(position=0, number=0), Start(position=8, number=2), Start(position=10, number=3))
    """
    number, slot = divmod(item, layout.length)
    batch = -(-slot // (layout.batch_size * layout.replicas))
    if batch >= layout.batches_per_pass:
        number, batch = number + 1, 0
    return Start(number * layout.pass_length + batch * layout.batch_size, number * layout.batches_per_pass + batch)


class SharedOrder:
    """The order of a training that shares: item after item of the reader's stream. See also `Order`.

    ``phase`` is the number of batches of the pass before batch 0 of the run. It is not 0 if the training entered within a pass.
    """

    exact = True

    def __init__(self, layout: Layout, rank: int, phase: int, name: str) -> None:
        self._layout, self._rank, self._phase, self._name = layout, rank, phase, name
        self.pass_length = layout.pass_length
        self.position = 0

    def begin_spreading(self) -> None:
        """Does nothing: the reader's passes are spread from the beginning."""

    def take(self, count: int) -> list[Any]:
        first = self.position
        self.position += count
        return [item_at(self._layout, self._rank, position) for position in range(first, first + count)]

    def seek(self, position: int) -> None:
        self.position = position

    def state(self, position: int) -> dict[str, Any]:
        del position
        return {"phase": self._phase, "share": self._name}

    def prune(self, position: int) -> None:
        """Does nothing: nothing is remembered."""


# ---------------------------------------------------------------------- shared pipeline
# It is an `IndexPipeline` whose data set is the window. It has no workers, and a thread that fetches ahead. A new one begins
#
# * when the run starts. It begins where the run stopped, if the reader can be there, else where the other trainings are.
# * when the reader has not waited (``behind="skip"``). It begins at the next batch of which no example was missed. Live examples
#   are dropped.
#
# The thread must not draw from the random states of the training. Torch's own collate function draws no random numbers. Any other
# collate function runs in the training's thread, and the random states are restored after it.


@dataclass(eq=False)
class SharedExamples:
    """The reader's stream as a data set of items."""

    attachment: Attachment
    length: int

    def __getitem__(self, item: int) -> Any:
        return self.attachment.take(item)

    def __len__(self) -> int:
        return self.length

    @property
    def lookups(self) -> Lookups:
        return self.attachment.lookups


def shared_shape(shape: PlanShape, phase: int, layout: Layout, items: Items) -> PlanShape:
    """Returns the sizes of the plan of a training that shares, from those without sharing.

    If a batch must not hold an index twice, the plan has one buffer, no larger than the distance that the reader keeps between
    two uses of an index. A batch that is larger than that distance may hold an index twice, because exact counts come first.
    """
    distance = distance_in(layout, items)
    if not shape.distinct or shape.batch_size > distance:
        return replace(shape, distinct=False, phase=phase)
    most = max(distance - shape.batch_size, shape.batch_size)
    distances = None if items.distances is None else partial(distance_in, layout, items)
    size = min(shape.buffer_size, most)
    return replace(shape, workers=0, buffer_size=size, most_distance=distance, distances=distances, phase=phase)


def distance_in(layout: Layout, items: Items, number: int = 1) -> int:
    """Returns how many positions of a rank are at least between two uses of an index: one in this pass, and one in that before.

    If the training takes a part, there are more in one pass than in another. Without a number, it is that of pass 1.
    """
    members = distance_of(layout.length) if items.distances is None else items.distances(number)
    dropped = max(layout.length - layout.pass_length * layout.replicas, 0)  # at the end of a pass, by ``drop_last``
    return max(min(layout.pass_length // 3, (members - dropped) // layout.replicas), 0)


class SharedPipeline(PacedPipeline):
    """Yields batch after batch of the training's own plan, and counts the examples that are missed. See `IndexPipeline`."""

    def __init__(self, config: ShareConfig, kind: Kind, opening: Opening, attachment: Attachment) -> None:
        launch, choice, layout, shape = opening.launch, opening.choice, opening.layout, opening.shape
        self._config, self._kind, self._choice, self._layout, self._shape = config, kind, choice, layout, shape
        self._rank, self._key, self._attachment = opening.rank, opening.key, attachment
        self._on_demand, self._say_to_user = opening.on_demand, opening.say
        self._in_thread = kind.loader.collate_fn is default_collate
        self._factors = [(0, launch.factor)]  # (batch, the factor from that batch on)
        self._phase = 0
        self._apart = layout.batch_size if choice.point.by_batches else distance_in(layout, attachment.items)
        self._may_repeat = shape.distinct and layout.batch_size > self._apart
        self._say_repeats(launch.factor)
        # an example of this rank is one item of each rank
        super().__init__(self._enter(launch), attachment, lambda: 1 / layout.replicas)

    def _next(self, delivered: int) -> tuple[Any, Report] | None:
        while True:
            try:
                return self._inner.next_batch(delivered)
            except Missed as missed:
                state = self._inner.state(delivered)
                position = state["demand"]["frontier"] if self._on_demand else self._first_example(state["plan"]["position"])
                self._inner.close()
                start = start_at(self._layout, missed.low)  # the first batch of which nothing is gone
                count = max(start.position - position, 0)
                self._attachment.note_missed(count)
                if self._config.behind == "wait":  # this process was stopped for longer than a new reader waits for old trainings
                    name = self._config.name
                    LOGGER.warning("share=%r: %d examples were missed, since the reader was replaced meanwhile", name, count)
                self._inner = self._begin(start, delivered)

    def change_factor(self, number: int, factor: float) -> None:
        self._say_repeats(factor)
        self._factors = [change for change in self._factors if change[0] < number] + [(number, factor)]
        self._inner.change_factor(number, factor)

    # ------------------------------------------------------------------ entering

    def _enter(self, launch: Launch) -> Pipeline:
        saved = launch.state["plan"]
        if (demand := launch.state.get("demand")) is not None:
            self._phase = (launch.state["order"] or {}).get("phase") or 0
            self._factors = factors_of(demand, launch.factor)
            return self._begin_on_demand(Start(demand["frontier"], demand["number"]))
        if saved is None:
            begin = launch.begin_at
            place = self._entered(self._item(begin.position) if begin.position else None)
            return self._begin(self._say(place, begin), begin.number)
        self._phase = (launch.state["order"] or {}).get("phase") or 0
        plan = plan_from_state(shared_shape(self._shape, self._phase, self._layout, self._attachment.items), saved)
        self._factors = [(0, plan.factor), *((number, factor) for number, factor in saved["pending"])]
        wish = self._item(plan.oldest_call)
        place = self._entered(wish)
        if place.item != wish:
            return self._begin(self._say(place, Start(plan.position, plan.number)), plan.number)
        self._say_again(place)
        items = []
        for live in plan.live():
            first = self._first_example(live.position)
            end = self._first_example(live.position + 1) if self._choice.point.by_batches else first + 1
            items += [item_at(self._layout, self._rank, position) for position in range(first, end)]
        self._attachment.keep(items)
        return self._over(plan)

    def _entered(self, wish: int | None) -> Place:
        """Enters. Ranks on several nodes, each with a reader of its own, begin where all of them can."""
        attachment = self._attachment
        if not attachment.group.elsewhere:
            return attachment.enter(wish)
        place, failure = None, None
        try:
            place = attachment.enter(wish)
        except Exception as error:  # of any kind: the other ranks wait to hear of it
            failure = error
        of_ranks: list[tuple[int, str]] = gathered((-1 if place is None else place.item, str(failure or "")))
        if failure is not None:
            raise failure
        if other := next((text for item, text in of_ranks if item < 0), ""):
            raise ReaderError(f"share={self._config.name!r}: another rank could not attach to its reader: {other}")
        assert place is not None
        if (latest := max(item for item, _ in of_ranks)) > place.item:
            attachment.begin_at(latest)
            place = place._replace(item=latest, there=latest, is_late=True)
        return place

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

    def _say(self, place: Place, wanted: Start) -> Start:
        """Returns where the training begins at its place. If it wanted another place, logs what it misses."""
        start = start_at(self._layout, place.item)
        if place.is_late:
            taken = start.position % self._layout.pass_length
            share = 100 * (1 - taken / self._layout.pass_length)
            running = f"{place.others} running training{'s' if place.others > 1 else ''}"
            resumed = ", so this run does not continue where it stopped" if wanted.position else ""
            name = self._config.name
            LOGGER.info("share=%r: joined %s mid-pass%s; this run sees %.0f%% of the current pass", name, running, resumed, share)
        self._say_again(place)
        return start

    def _say_again(self, place: Place) -> None:
        """Says what is read again for this training, if anything is."""
        if (count := place.there - place.item) > 0:
            LOGGER.info(
                "share=%r: this training comes late, and misses nothing: it gets %s examples first that the window does not "
                "have, from the reader's cache or read again. The others wait for it as soon as they are a window ahead",
                self._config.name,
                f"{count:,}",
            )

    def _say_repeats(self, factor: float) -> None:
        """Warns, once, that a batch may hold an index twice, or that nothing is echoed on demand, so that none does."""
        if self._may_repeat and factor > 1:
            self._may_repeat = False
            LOGGER.warning(
                "share=%r: %s, since a batch of %d examples is larger than the %d that the reader keeps between two uses of an "
                "index. Use smaller batches, or a factor of 1",
                self._config.name,
                "nothing is echoed" if self._on_demand else "with a factor above 1 a batch may hold an index twice",
                self._layout.batch_size,
                self._apart,
            )

    # ------------------------------------------------------------------ beginning

    def _begin_on_demand(self, saved: Start) -> Pipeline:
        """Returns the pipeline that continues at the position of a state, if the reader can be there, with an empty memory."""
        wish = self._item(saved.position)
        place = self._entered(wish)
        if place.item == wish:
            self._say_again(place)
            return self._over_items(saved.position, saved.number)
        return self._begin(self._say(place, saved), saved.number)

    def _begin(self, start: Start, number: int) -> Pipeline:
        """Returns a pipeline without live examples that begins at this place with batch ``number`` of the run."""
        self._phase = (start.number - number) % self._layout.batches_per_pass
        if self._on_demand:
            return self._over_items(start.position, number)
        shape = shared_shape(self._shape, self._phase, self._layout, self._attachment.items)
        now = next(factor for since, factor in reversed(self._factors) if since <= number)
        plan = make_plan(shape, now)
        plan.position, plan.number = (start.number if self._choice.point.by_batches else start.position), number
        for since, factor in self._factors:
            if since > number:
                plan.change_factor(since, factor)
        return self._over(plan)

    def _over_items(self, position: int, number: int) -> Pipeline:
        """Returns the pipeline that echoes on demand from a position on, which is batch ``number`` of the run."""
        factors = [change for change in self._factors if change[0] > number]
        now = next(factor for since, factor in reversed(self._factors) if since <= number)
        shape = shared_shape(self._shape, self._phase, self._layout, self._attachment.items)
        return shared_on_demand(
            self._loader(),
            # What memory holds is nearer than the reader's distance between two uses of an index: none is twice in a batch.
            shape if shape.distinct else replace(shape, buffer_size=0),
            SharedOrder(self._layout, self._rank, self._phase, self._config.name),
            self._key,
            position=position,
            number=number,
            factors=[(number, now), *factors],
            in_thread=self._in_thread,
            say=self._say_to_user,
            name=self._config.name,
        )

    def _loader(self) -> DataLoader[Any]:
        """Returns a loader over the window, with the options of the training's own."""
        loader = self._kind.loader
        examples: Any = SharedExamples(self._attachment, self._layout.length)
        return DataLoader(
            examples,
            batch_size=self._layout.batch_size,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            pin_memory=loader.pin_memory,
        )

    def _over(self, plan: Plan) -> Pipeline:
        layout, point = self._layout, self._choice.point
        order: Any = SharedOrder(layout, self._rank, self._phase, self._config.name)
        requests: ExampleRequests | BatchRequests
        if point.by_batches:
            batched = BatchedOrder(order, layout.batch_size, layout.last_batch_size, layout.batches_per_pass)
            requests = BatchRequests(plan, batched)
        else:
            requests = ExampleRequests(plan, order, whole_calls=False)
        own: Any = self._loader()
        workers = WorkerProcesses()
        rebuilt = Indexed(own).rebuild(
            requests, uncut_stages, self._key, workers, is_seeded=not self._in_thread, counted=own.dataset
        )
        return pipeline_over(
            requests, iter(rebuilt), workers, on_device=point.on_device, in_thread=self._in_thread, are_owned=True
        )


# ---------------------------------------------------------------------- on demand
# Echo on demand takes the reader's items that are there, and echoes for the rest.
#
# The rule, and what decides when a batch is due, are those of ``pipeline/demand.py``. A thread of the training takes the part
# of its only worker. Instead of a pool of reads, it has the window (`ItemsThere`). Items are taken in their order, so the place
# of the run is one number. A training that is faster than the reader, or than a peer that the reader waits for, echoes
# meanwhile.

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
