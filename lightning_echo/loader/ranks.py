"""Where each rank of a job is on demand: each leaves its place in the job's store, and a checkpoint has all of them.

Each rank has as many fresh examples as its own source delivers, and Lightning saves the state of rank 0 alone. So after each
batch a rank leaves its `Place` in the store of ``torch.distributed``, and overwrites that of `KEPT` batches ago. Writing does not
wait for an answer. A rank that saves a state reads the places of the same batch there. No other rank has to help, so a rank that
saves alone, after an exception, has them, too. The place of another batch is never taken for the one that is asked for. If a rank
has not come there in time, its last place before is saved, with the number of its batch: a resumed run reads again what that rank
has delivered since then, and says so. Nobody waits for a store that did not answer, until it answers again (`JobStore`).
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import torch

from lightning_echo.cache.node_cache import gathered, is_distributed
from lightning_echo.loader.resuming import keeps_arrangement, order_to_go_on, other_order_of, where_to_go_on, why_next_pass
from lightning_echo.loader.setting import Setting
from lightning_echo.loader.state import DemandState, EarlierPlaces, EchoCounts, EchoState, Place, Run
from lightning_echo.pipeline.pipelines import Layout, Start
from lightning_echo.plan.demand import Booked

KEPT = 16  # places of each rank, that of its last batch and of those before
MOST_SECONDS = 4.0  # that a state waits for the places of other ranks
_ANSWER_SECONDS = 0.8  # after that, in which the store must have answered
_LOOK_SECONDS = 0.005
_READ_AGAIN = ": what was delivered there since then is read again"


class JobStore:
    """The job's store, as all loaders of this process share it: whether it answers, and how long states wait for other ranks.

    States that are saved between two batches are those of one checkpoint. Together they wait as long as one. Who trains or saves
    does not ask a store that was lost. Where an epoch begins, a thread asks whether it answers again.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self.why_lost = ""  # empty: it answers, as far as is known
        self._until: float | None = None  # until when the states of this checkpoint wait; None: none has begun to
        self._asking: Thread | None = None

    @property
    def until(self) -> float:
        """The time until which a state waits for the places of other ranks."""
        if self._until is None:
            self._until = perf_counter() + MOST_SECONDS
        return self._until

    def go_on(self) -> None:
        """Notes that the training has got a batch: the next state is of another checkpoint."""
        self._until = None

    def lose(self, why: str = "") -> None:
        self.why_lost = self.why_lost or f"the job's store does not answer{why and f' ({why})'}"

    def ask_again(self, key: str, say: Callable[[str], None]) -> None:
        """Lets a thread find out whether a store that was lost answers again. ``key``: one that is there."""
        if self.why_lost and (self._asking is None or not self._asking.is_alive()):
            self._asking = Thread(target=self._ask, args=(key, say), daemon=True, name="lightning_echo store")
            self._asking.start()

    def _ask(self, key: str, say: Callable[[str], None]) -> None:
        asked = perf_counter()
        try:
            self.store.get(key)
        except RuntimeError:  # as all errors of a store
            return
        if perf_counter() - asked < _ANSWER_SECONDS:
            self.why_lost = ""
            say("the job's store answers again: from here on, a checkpoint has the places of all ranks")


_job: JobStore | None = None


def job_store() -> JobStore:
    """Returns the store of the job of ``torch.distributed``, the same object for all loaders."""
    global _job
    distributed: Any = torch.distributed
    store = distributed.distributed_c10d._get_default_store()
    if _job is None or _job.store is not store:
        _job = JobStore(store)
    return _job


class RankPlaces:
    """The places of all ranks of a job.

    Args:
        rank: The number of this rank.
        places: The places of all ranks where the run begins, or continues.
        job: The job's store; None if there is none: then the places of other ranks are not known.
        names: Under which each rank leaves its places there, in this run alone, see `prepare`.
    """

    def __init__(self, rank: int, places: Sequence[Place], job: JobStore | None = None, names: Sequence[str] = ()) -> None:
        self._rank, self._job, self._names = rank, job, names
        self._start, self._known = tuple(places), list(places)
        self._collected_after = -1  # batches: a checkpoint may save the state of a loader twice, and says once who is late
        self._is_job = job is not None or is_distributed()
        self._not_erased: set[int] = set()  # batches after which a place was taken back, and stands in the store

    @classmethod
    def join(cls, ranks: int, rank: int, own: Place) -> RankPlaces:
        """Makes one for a run that begins or continues at a place. All ranks of a job must call this together.

        ``ranks``: their number, if they are not a job of ``torch.distributed``: then a rank knows nothing of the others.
        """
        if not is_distributed():
            return cls(rank, [own if each == rank else Place(0, 0, (), 0, 0) for each in range(ranks)])
        job = job_store()
        name = f"lightning_echo/{secrets.token_hex(8)}"  # an earlier run of this job had batches of the same numbers
        prepare(job.store, name)
        names, places = zip(*gathered((name, own)), strict=True)
        return cls(rank, places, job, names)

    @property
    def slowest(self) -> int:
        """A position that every rank has reached."""
        return min(place.frontier for place in self._known)

    def leave(self, number: int, booked: Booked, counts: EchoCounts) -> None:
        """Lets other ranks know the place of this one after ``number`` batches."""
        for stale in tuple(self._not_erased - {number}):
            self.take_back(stale)
        if self._write(number, to_bytes(number, booked, counts)):
            self._not_erased.discard(number)
        if self._job is not None:
            self._job.go_on()

    def take_back(self, number: int) -> None:
        """Erases the place after ``number`` batches: the last of them did not reach the training.

        If the store does not answer, that is done when it answers again.
        """
        self._not_erased.add(number)
        if self._write(number, b""):
            self._not_erased.discard(number)

    def ask_again(self, say: Callable[[str], None]) -> None:
        """Finds out, in a thread, whether a store that did not answer does so again, and says so."""
        if self._job is not None:
            self._job.ask_again(_key(self._names[self._rank], 0), say)

    def _write(self, number: int, value: bytes) -> bool:
        """Returns whether it was written."""
        if self._job is None or self._job.why_lost:
            return self._job is None
        try:
            self._job.store.set(_key(self._names[self._rank], number), value)
        except RuntimeError as error:  # as all errors of a store
            self._job.lose(str(error))
        return not self._job.why_lost

    def collect(self, own: Place, say: Callable[[str], None]) -> tuple[Place, ...]:
        """Returns the place of each rank after ``own.number`` batches, or its last one before that is known, and says so.

        All states of a checkpoint together wait for less than 5 s, also if the store does not answer.
        """
        found, job = {self._rank: own}, self._job
        if job is not None and not job.why_lost:
            until = job.until
            thread = Thread(target=self._look, args=(own.number, found, until), daemon=True, name="lightning_echo places")
            thread.start()
            thread.join(max(until - perf_counter(), 0.0) + _ANSWER_SECONDS)
            if thread.is_alive():
                job.lose()
        for rank, start in enumerate(self._start):
            # The state may be of fewer batches than the one before, so what is known may be of too many.
            of_rank = [start, self._known[rank], found.get(rank, start)]
            self._known[rank] = max((each for each in of_rank if each.number <= own.number), key=lambda each: each.number)
        if self._is_job and own.number != self._collected_after and (late := late_ranks(self._known, own.number)):
            why = "this job has no store" if job is None else job.why_lost or "it has not come so far, or is far ahead"
            say(f"{late} ({why}): a run that resumes from this state reads again what was delivered there since then")
        self._collected_after = own.number
        return tuple(self._known)

    def _look(self, number: int, found: dict[int, Place], until: float) -> None:
        """Reads places until all are those after ``number`` batches. The last ones before stand for those that do not come."""
        missing = [rank for rank, start in enumerate(self._start) if rank != self._rank and start.number != number]
        assert self._job is not None
        try:
            while True:
                read = self._read([(rank, number) for rank in missing])
                found |= {rank: place for rank, place in zip(missing, read, strict=True) if place and place.number == number}
                missing = [rank for rank in missing if rank not in found]
                if not missing or perf_counter() > until:
                    break
                sleep(_LOOK_SECONDS)
            for rank in missing:
                of_rank = self._read([(rank, each) for each in range(number - KEPT + 1, number)])
                before = [place for place in of_rank if place and place.number < number]
                if before:
                    found[rank] = max(before, key=lambda place: place.number)
        except RuntimeError as error:
            self._job.lose(str(error))

    def _read(self, asked: Sequence[tuple[int, int]]) -> list[Place | None]:
        """Returns what stands where places of these ranks and numbers stand."""
        keys = [_key(self._names[rank], number) for rank, number in asked]
        if self._job is None or self._job.why_lost or not keys:
            return [None] * len(keys)
        store = self._job.store
        values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        return [from_bytes(value) for value in values]


def prepare(store: Any, name: str) -> None:
    """Makes all keys of a rank, before others read them: to get one that is not there would wait for it."""
    for number in range(KEPT if store is not None else 0):
        store.set(_key(name, number), b"")


def _key(name: str, number: int) -> str:
    return f"{name}/{number % KEPT}"


def to_bytes(number: int, booked: Booked, counts: EchoCounts) -> bytes:
    """Returns a place in the form that takes least time to write.

    >>> from_bytes(to_bytes(3, Booked(8, frozenset({10, 11})), EchoCounts(10, 14)))
    Place(number=3, frontier=8, ahead=(Run(first=10, size=2),), fresh=10, echoed=14)
    """
    return array("q", (number, booked.frontier, counts.fresh, counts.echoed, *booked.ahead)).tobytes()


def from_bytes(value: bytes) -> Place | None:
    """Inverts `to_bytes`. None: it was taken back."""
    if not value:
        return None
    number, frontier, fresh, echoed, *ahead = array("q", value)
    return Place(number, frontier, tuple(Run(*run) for run in Booked(frontier, frozenset(ahead)).runs()), fresh, echoed)


# ---------------------------------------------------------------------- resuming


def continued_on_demand(state: EchoState, setting: Setting) -> tuple[EchoState, int | None, str]:
    """Returns the state from which a run on demand starts on this rank, and a message for the user, which may be empty.

    Between them: the number of batches after which an epoch begins. None: the run continues at its place of the epoch.
    """
    layout, before, demand = setting.layout(), state.layout, state.demand
    is_same_order = not other_order_of(state, setting)
    is_same_pass = before.length == layout.length and is_same_order
    changed = f"the state was saved with {state.conditions.differences(setting.conditions())}: the run continues "
    is_same_unit = state.insertion_point.by_batches is setting.kind.by_batches
    if before == layout and is_same_order and is_same_unit:
        if demand is None:
            assert state.plan is not None
            begin_at = Start(state.plan.position, state.plan.number)
            message = "the state was saved with a constant factor: the run continues on demand, with an empty memory"
            return replace(state, plan=None, begin_at=begin_at), None, message
        ranks, rank = setting.place_of_rank()
        demand = replace(
            demand,
            earlier=_not_over(demand.earlier or (), demand.slowest // before.items_per_pass(setting.kind.by_batches)) or None,
        )
        late = late_ranks(demand.ranks or (), demand.number, None if setting.is_job else rank)
        return replace(state, demand=demand_of_rank(demand, ranks, rank)), None, f"{late}{_READ_AGAIN}" if late else ""
    if (
        is_same_pass
        and demand is not None
        and is_same_unit
        and not setting.kind.by_batches
        and (shared := shared_out(state, layout)) is not None
    ):
        late = late_ranks(demand.ranks or (), demand.number)
        message = (
            f"{changed}with what no rank had delivered and leaves nothing out, but its batches are not those of the run that was "
            "saved"
        )
        return replace(state, demand=shared), shared.number, f"{message}; {late}{_READ_AGAIN}" if late else message
    begin_at = where_to_go_on(state, layout, setting.kind.by_batches)
    order = order_to_go_on(state, layout, begin_at) if is_same_pass else None
    message = why_next_pass(state, setting)
    if is_same_pass:
        message = f"{changed}at the same place of the pass and leaves nothing out; examples that had come early may come again"
    return replace(state, plan=None, demand=None, order=order, begin_at=begin_at), begin_at.number, message


def late_ranks(places: Sequence[Place], number: int, of: int | None = None) -> str:
    """Returns whose place after ``number`` batches is not among the places, in words. ``of``: the only rank to look at.

    >>> late_ranks([Place(9, 8, (), 8, 28), Place(7, 4, (), 4, 24), Place(9, 5, (), 5, 31)], 9)
    'the place of rank 1 (known after batch 7) is not known after batch 9'
    """
    late = [
        f"{rank} (known after batch {place.number})"
        for rank, place in enumerate(places)
        if place.number < number and of in (None, rank)
    ]
    whose = f"rank{'s' if len(late) > 1 else ''} {', '.join(late)}"
    return f"the place of {whose} is not known after batch {number}" if late else ""


def shared_out(state: EchoState, now: Layout) -> DemandState | None:
    """Returns the state with which other ranks continue: what was delivered stays delivered. None: that is not possible.

    The ranks had the slots of a pass in turn, as ``plan/order.py`` says. Each new rank asks of each of its slots whether the rank
    that had it before had delivered it.
    """
    before = state.layout
    if state.demand is None or not keeps_arrangement(state, now):
        return None
    demand, places = state.demand, state.demand.ranks or (own_place(state, state.counts),)
    if len(places) != before.replicas:
        return None  # the ranks shared the data in a way of their own
    last = EarlierPlaces(before.replicas, before.pass_length, places)
    number, position = divmod(demand.slowest, before.pass_length)
    frontier = number * now.pass_length + min(position * before.replicas // now.replicas, now.pass_length)
    earlier = _not_over((*(demand.earlier or ()), last), number)
    # A batch delivers at most so many. Up to the end of its pass, the state takes all as if they were delivered.
    most = max((each.passes for each in earlier), default=number) * now.pass_length
    batches = max(demand.number, -(-most // now.batch_size))
    fresh, echoed = (sum(column) for column in list(zip(*places, strict=True))[3:])
    ranks = tuple(
        Place(batches, frontier, (), _part(fresh, now.replicas, rank), _part(echoed, now.replicas, rank))
        for rank in range(now.replicas)
    )
    return DemandState(
        number=batches,
        frontier=frontier,
        ahead=(),
        max_factor=demand.max_factor,
        pending=demand.pending,
        ranks=ranks if len(ranks) > 1 else None,
        earlier=earlier or None,
    )


def _not_over(earlier: Sequence[EarlierPlaces], number: int) -> tuple[EarlierPlaces, ...]:
    """Returns those that had delivered something of pass ``number``, or of a later one."""
    return tuple(each for each in earlier if each.passes > number)


def _part(total: int, ranks: int, rank: int) -> int:
    return total // ranks + (rank < total % ranks)


# ---------------------------------------------------------------------- a place and a state


def own_place(state: EchoState, counts: EchoCounts) -> Place:
    """Returns the place of this rank in a state of its own."""
    demand, begin_at = state.demand, state.begin_at
    if demand is None:
        return Place(begin_at.number, begin_at.position, (), counts.fresh, counts.echoed)
    return Place(demand.number, demand.frontier, demand.ahead, counts.fresh, counts.echoed)


def demand_of_rank(demand: DemandState, ranks: int, rank: int) -> DemandState:
    """Returns the state with the place of one rank, whichever rank has saved it."""
    if demand.ranks is None:
        return demand
    if len(demand.ranks) != ranks:
        return replace(demand, frontier=demand.slowest, ahead=())  # the ranks share the data in a way of their own
    _, frontier, ahead, *_ = demand.ranks[rank]
    return replace(demand, frontier=frontier, ahead=ahead)


def counts_of_rank(state: EchoState, ranks: int, rank: int) -> EchoCounts:
    """Returns the counts from which a rank continues. If the number of ranks has changed, they share what all had together."""
    places = None if state.demand is None else state.demand.ranks
    if places is None:
        return state.counts
    fresh, echoed = (sum(column) for column in list(zip(*places, strict=True))[3:])
    if len(places) == ranks:
        fresh, echoed = places[rank][3:]
        return EchoCounts(fresh, echoed, state.counts.refetched)
    return EchoCounts(_part(fresh, ranks, rank), _part(echoed, ranks, rank))
