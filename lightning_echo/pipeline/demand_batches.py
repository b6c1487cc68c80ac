"""Echo on demand of whole batches: the training gets the next batch if it has arrived, else a copy of one that memory holds.

The rebuilt loader makes the batches of the plain loader, in their order. Two threads of the main process work for the training:

* One fetches batches, a few ahead of the training. It copies each of them for memory before the training gets it, since a
  training may edit its batch in place (`Keeping`).
* The other one makes the copy that an echo is, while the step before it runs. It does so only if no batch has arrived when that
  step begins (`Copier`). So while the source keeps up, it does nothing.

The rule is that of examples (`DemandRule`), for one worker and batches of one item. It decides here, when the training asks. The
batches that were delivered are a number: nothing overtakes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

from lightning_echo.data.copies import copy_example
from lightning_echo.pipeline.demand import CLOSE_READ_SECONDS, Waiting, conditions_of, factors_of
from lightning_echo.pipeline.demand_worker import Words
from lightning_echo.pipeline.journal import JournalFile, Repeated, begin_journal
from lightning_echo.pipeline.pipelines import Opening, Pipeline, Start
from lightning_echo.pipeline.prefetch import NOTHING_YET, Prefetcher, WorkerProcesses
from lightning_echo.pipeline.reads import Pools
from lightning_echo.pipeline.requests import BatchRequests
from lightning_echo.pipeline.worker import LiveExamples, Report
from lightning_echo.plan.demand import Arrived, Booked, DemandRule
from lightning_echo.plan.journal import Begin
from lightning_echo.plan.memory import make_plan
from lightning_echo.plan.plan import Plan, Reuse, mix
from lightning_echo.split.staged import Load, Stages

_LOOK_SECONDS = 0.001  # a training that waits for a copy looks so often whether a fresh batch has arrived
_WAIT_SECONDS = 0.3  # a training that waits for a fresh batch alone looks so often whether that can still come
_NOT_KEPT: Any = object()


# ---------------------------------------------------------------------- in a worker


class EndingExamples(LiveExamples):
    """Reads the examples of a batch, but no further one once the loader is closed. Nobody waits for the batch then."""

    def __init__(self, *args: Any, words: Words, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._words = words

    def _begin(self) -> Stages:
        stages = super()._begin()
        stages.load_through(self._unless_closed)
        return stages

    def _unless_closed(self, load: Load) -> Load:
        def load_unless_closed(index: Any) -> Any:
            if self._words.is_closed:
                raise RuntimeError("the loader was closed while a batch was read")
            return load(index)

        return load_unless_closed


# ---------------------------------------------------------------------- in threads of the main process


class Fetched(NamedTuple):
    """A batch that was fetched, its report, the copy for memory (`_NOT_KEPT`: none was needed then), and its indices."""

    batch: Any
    report: Report
    kept: Any
    indices: Any


class Held(NamedTuple):
    """A batch that memory holds, and its number of examples."""

    batch: Any
    size: int


class Keeping(Iterator[Fetched]):
    """Yields the batches of a rebuilt loader, each with its copy for memory. It runs in the thread that fetches.

    ``dropped``: what memory no longer holds. This thread frees it: a large batch takes milliseconds. It also writes the
    ``journal``, if there is one.
    """

    def __init__(
        self, requests: BatchRequests, batches: Iterator[Any], rule: DemandRule, dropped: list[Held], journal: JournalFile | None
    ) -> None:
        self._requests, self._batches, self._rule, self._dropped = requests, batches, rule, dropped
        self._journal = journal

    def __next__(self) -> Fetched:
        self._dropped.clear()
        if self._journal is not None:
            self._journal.note()
        step = self._requests.step()  # raises the error because of which no further batch could be requested
        batch, report = next(self._batches)
        return Fetched(batch, report, copy_example(batch) if self._rule.keeps else _NOT_KEPT, step.indices)


class Copier:
    """Makes the copy that an echo is, in a thread of its own. That thread also frees the copies."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "lightning_echo-copy")
        self._last: deque[Any] = deque(maxlen=2)
        self._begun: tuple[int, Future[Any]] | None = None  # number of a batch, and the copy that it may be

    def copy_for(self, number: int, held: Held) -> Future[Any]:
        """Returns the copy of a held batch that batch ``number`` may be. The first call for this number begins it."""
        if self._begun is None or self._begun[0] != number:
            self._begun = number, self._thread.submit(self._copy, held.batch)
        return self._begun[1]

    def close(self) -> None:
        self._begun = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _copy(self, batch: Any) -> Any:
        copied = copy_example(batch)
        self._last.append(copied)
        return copied


# ---------------------------------------------------------------------- in the thread of the training


@dataclass
class WaitingForBatch(Waiting):
    """A training that waits for the next batch. ``requests`` are `BatchRequests`."""

    requests: Any
    pools: Pools | None = None

    def _why(self) -> str:
        return f"{self._what()} is not read yet. What memory holds bridges a stall for max_factor uses"

    def _what(self) -> str:
        number, batch = divmod(self.requests.delivered, self.requests.plan.shape.batches_per_pass)
        reads = "" if self.pools is None else self.pools.who_waits()
        return f"batch {batch:,} of pass {number:,}{f' ({reads})' if reads else ''}"


class DemandBatches:
    """Yields batch after batch, each with its `Report`, as `DemandPipeline` does for examples.

    Args:
        requests: The plan of what is read: each batch once.
        batches: Those of the rebuilt loader.
        begin_at: Number of the next batch in the run, and how many batches were read and delivered before it.
        factors: (From which batch on, ``max_factor``), ascending. The first one is in force.
        journal: Where it is written down which batches were fresh.
        repeated: What a replay repeats.
    """

    def __init__(
        self,
        requests: BatchRequests,
        batches: Iterator[Any],
        words: Words,
        workers: WorkerProcesses,
        waiting: WaitingForBatch,
        rule: DemandRule,
        *,
        begin_at: Start,
        factors: list[tuple[int, float]],
        journal: JournalFile | None = None,
        repeated: Repeated | None = None,
    ) -> None:
        self._requests, self._words, self._workers = requests, words, workers
        self._journal, self._repeated = journal, repeated
        self._waiting, self._rule = waiting, rule
        self._dropped: list[Held] = []
        keeping = Keeping(requests, batches, rule, self._dropped, journal)
        self._arriving: Prefetcher | None = Prefetcher(keeping, lost=waiting.lost)
        self._copier = Copier()
        self._memory: dict[Hashable, Held] = {}  # by position
        self._factors = factors
        # (Number of a batch, how many fresh batches were delivered before it): the next one, and those of which `state` is asked.
        self._fresh_before: deque[tuple[int, int]] = deque([(begin_at.number, begin_at.position)], maxlen=4)
        self.exact = requests.order.exact

    def next_batch(self, delivered: int) -> tuple[Any, Report] | None:
        assert self._arriving is not None
        self._rule.set_factor(self._bound_of(delivered))
        self._requests.delivered = self._fresh_before[-1][1]
        self._waiting.since = perf_counter()
        try:
            next_of = self._next if self._repeated is None else self._next_as_before
            item = next_of(delivered, self._arriving)
        finally:
            self._waiting.since = None
        self._waiting.has_begun = True
        if not self._arriving.has_arrived:
            self._begin_echo(delivered + 1)
        return item

    def _next(self, delivered: int, arriving: Prefetcher) -> tuple[Any, Report]:
        fetched = arriving.next_within(0)
        while fetched is NOTHING_YET:
            copy = self._begin_echo(delivered)
            if copy is not None and copy.done():
                return self._echo(delivered, copy)
            fetched = arriving.next_within(_WAIT_SECONDS if copy is None else _LOOK_SECONDS)
        return self._fresh(delivered, fetched)

    def _next_as_before(self, delivered: int, arriving: Prefetcher) -> tuple[Any, Report]:
        """Returns the batch that a journal says, however long its read takes."""
        assert self._repeated is not None
        if (failure := self._repeated.over_at(delivered)) is not None:
            raise failure
        if (copy := self._begin_echo(delivered)) is not None:
            return self._echo(delivered, copy)
        while (fetched := arriving.next_within(_WAIT_SECONDS)) is NOTHING_YET:
            pass
        if (failure := self._repeated.changed_at(delivered, [fetched.indices])) is not None:
            raise failure
        return self._fresh(delivered, fetched)

    def _begin_echo(self, number: int) -> Future[Any] | None:
        """Returns the copy that is batch ``number`` if no fresh one arrives; None if that may not be an echo."""
        if not (self._rule.may_hand_out(1, []) if self._repeated is None else self._repeated.is_echo(number)):
            return None
        (position,) = self._rule.draw(number, 1)
        return self._copier.copy_for(number, self._memory[position])

    def _echo(self, delivered: int, copy: Future[Any]) -> tuple[Any, Report]:
        batch = copy.result()
        (position,) = self._rule.hand_out(delivered, 1, []).echoes
        if self._journal is not None:
            self._journal.deliver([], [], self._bound_of(delivered))
        self._fresh_before.append((delivered + 1, self._requests.delivered))
        return batch, Report(0, self._memory[position].size)

    def _fresh(self, delivered: int, fetched: Fetched) -> tuple[Any, Report]:
        batch, report, kept, indices = fetched
        position = self._requests.delivered
        if self._rule.keeps:  # it may keep batches only since this one was fetched
            self._memory[position] = Held(copy_example(batch) if kept is _NOT_KEPT else kept, report.fresh)
        for oldest in self._rule.hand_out(delivered, 1, [Arrived(position, position, 0)]).forget:
            if oldest in self._memory:
                self._dropped.append(self._memory.pop(oldest))
        if self._journal is not None:
            self._journal.deliver([position], [indices], self._bound_of(delivered))
        self._fresh_before.append((delivered + 1, position + 1))
        return batch, report

    def change_factor(self, number: int, factor: float) -> None:
        """Sets ``max_factor`` from batch ``number`` on, instead of all changes that were to come from that batch on."""
        self._factors = [*(each for each in self._factors if each[0] < number), (number, factor)]

    def _bound_of(self, number: int) -> float:
        return self._factor_of(number) if self._repeated is None else self._repeated.stretch.factor_of(number)

    def _factor_of(self, number: int) -> float:
        return next(factor for since, factor in reversed(self._factors) if since <= number)

    def state(self, delivered: int) -> dict[str, Any]:
        fresh = self.position(delivered)
        demand = {
            "number": delivered,
            "frontier": fresh,
            "ahead": [],
            "max_factor": self._factor_of(delivered),
            "pending": [[since, factor] for since, factor in self._factors if since > delivered],
        }
        return {"plan": None, "order": self._requests.state(fresh)["order"], "demand": demand}

    def position(self, delivered: int) -> int:
        return dict(self._fresh_before)[delivered]

    def close(self) -> None:
        self._words.close()
        self._copier.close()
        if self._waiting.pools is not None:
            self._waiting.pools.close()
        arriving, self._arriving = self._arriving, None
        if arriving is not None and not arriving.close(CLOSE_READ_SECONDS):
            self._workers.end()  # one of them is in a read of the user's
        self._workers.end_others()
        if self._journal is not None:
            self._journal.close()


# ---------------------------------------------------------------------- how it starts


def plan_of_reads(opening: Opening) -> Plan:
    """Returns a plan in which each batch is read once, from the first one that was not delivered on demand."""
    plan = make_plan(replace(opening.shape, buffer_size=1, reuse=Reuse.each), 1.0)
    plan.position = plan.number = _begin_of(opening).position
    return plan


def _begin_of(opening: Opening) -> Start:
    """Returns where a run on demand over whole batches begins: its position is the number of those that were delivered fresh."""
    saved = opening.launch.state.get("demand")
    return opening.launch.begin_at if saved is None else Start(saved["frontier"], saved["number"])


def repeated_batches(opening: Opening, workers: int) -> Repeated | None:
    """Notes in the journal that a run over whole batches begins. Returns what a replay repeats, see `begin_journal`."""
    launch, start, saved = opening.launch, _begin_of(opening), opening.launch.state.get("demand")
    begin = Begin(
        number=start.number,
        booked=Booked(start.position),
        max_factor=launch.factor if saved is None else saved["max_factor"],
        conditions=conditions_of(opening, workers, batches_held=_most_held(opening)),
    )
    return begin_journal(launch.journal, launch.repeated, begin)


def _most_held(opening: Opening) -> int:
    return min(opening.shape.buffer_size, opening.shape.batches_per_pass)


def batches_on_demand(
    loader: Any,
    opening: Opening,
    requests: BatchRequests,
    batches: Iterator[Any],
    words: Words,
    workers: WorkerProcesses,
    pools: Pools | None,
    repeated: Repeated | None,
) -> Pipeline:
    """Returns a `DemandBatches`."""
    launch, shape = opening.launch, opening.shape
    saved = launch.state.get("demand")
    return DemandBatches(
        requests,
        batches,
        words,
        workers,
        WaitingForBatch(requests, workers, loader.dataset, loader.timeout, opening.say, pools=pools),
        DemandRule(mix(shape.seed, opening.rank), launch.factor, _most_held(opening)),
        begin_at=_begin_of(opening),
        factors=factors_of(saved, launch.factor),
        journal=launch.journal,
        repeated=repeated,
    )
