"""The places of trainings: where each one enters and stands, what the reader keeps for them, and what ranks take together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_echo.share.parts import Bits, Wanted, all_bits, union_of

# ---------------------------------------------------------------------- agreeing
# The ranks of a training must take and miss the same items. A rank asks before it takes a *round*, which has one item for each
# rank. The answer to the first rank that asks is the answer for all. If the round is still in the window, the ranks take it, and
# all rounds up to the end that this rank asked for. These items are held for the other ranks for a moment, even if the reader
# does not wait for this training. If the round is gone, all ranks jump from this round to the same later item. This is pure
# arithmetic.

HOLD_SECONDS = 0.25
"""How long items are held that the ranks have agreed on and not all have taken. A rank that comes later takes other items."""


class Answer(NamedTuple):
    """The answer to a rank. If ``is_jump``, it continues at ``item``; if not, it takes all rounds below ``item``."""

    is_jump: bool
    item: int


class Agreement:
    """The agreement of the ranks of one training."""

    def __init__(self, end: int = 0, jumps: Iterable[tuple[int, int]] = (), held_since: float = 0.0) -> None:
        self.end = end  # the ranks have agreed on all before
        self.jumps = list(jumps)  # (first item of the round, item to continue at), in order
        self._held_since = held_since

    def answer(self, asked: int, end: int, low: int, now: float) -> Answer:
        """Answers a rank that asks for the round that begins with ``asked``, and would take all rounds before ``end`` at once.

        Items below ``low`` may be gone. ``now`` is the time in seconds.

        >>> agreement = Agreement()
        >>> agreement.answer(0, 8, low=0, now=0.0), agreement.answer(4, 12, low=6, now=0.0)  # the other rank: as settled
        (Answer(is_jump=False, item=8), Answer(is_jump=False, item=8))
        >>> agreement.answer(8, 16, low=40, now=1.0), agreement.answer(8, 16, low=44, now=1.0)
        (Answer(is_jump=True, item=40), Answer(is_jump=True, item=40))
        """
        later = [start for start, to in self.jumps if to > asked]
        for start, to in self.jumps:
            if start <= asked < to:
                return Answer(True, to)
        if asked < self.end:
            return Answer(False, min([self.end, *later]))
        if asked < low:
            self.jumps.append((asked, low))
            return Answer(True, low)
        self.end, self._held_since = max(end, asked + 1), now
        return Answer(False, self.end)

    def held_from(self, slowest: int, now: float) -> int | None:
        """Returns the first item that is held, if the slowest of the ranks still needs ``slowest``; None if no item is held."""
        return slowest if slowest < self.end and now - self._held_since < HOLD_SECONDS else None

    def forget(self, slowest: int) -> None:
        """Forgets jumps that all ranks have done, as the slowest of them still needs ``slowest``."""
        self.jumps = [(start, to) for start, to in self.jumps if to > slowest]


# ---------------------------------------------------------------------- trainings
# The places of trainings are pure arithmetic, without sockets and without the window. A place is an item of the reader's stream.
# The *cursor* of a training is the first item that it still needs. The ranks of one training have the same group, enter together,
# and agree on the items to take.


@dataclass
class Training:
    """A training, or one rank of it."""

    pid: int
    label: str
    behind: str
    join: str
    wait_for: int  # trainings that must have come before the reader begins
    wish: int | None  # the item at which it would continue; None: at the start
    goes_on: bool  # whether it had another reader before, which has died
    group: str  # a name, the same for all ranks of a training
    ranks: int
    ranks_here: int = 0  # those that this reader serves, if others are on other nodes, in groups of their own; 0: all
    part: Bits | None = None  # the indices that it takes; None: all
    share: float = 1.0  # of the items that it takes
    lacks_from: int | None = None  # after its reader has died: the first item that any training may lack
    patient_until: float = math.inf  # the time in seconds up to which the reader waits for more trainings
    cursor: int | None = None  # the first item of the window that it still needs; None before it has entered
    entered: int | None = None  # where its cursor was when it entered
    catching_up: int | None = None  # the first item that it still needs of those that are read again for it; None: it has all
    need_nanoseconds: int = 0  # per example, without waiting and without echoing; 0 if not known
    workers: int = 0  # that it would have for itself
    cluster_workers: tuple[int, int] = (0, 0)  # on other machines: at first, and at most
    late: float = 0.0  # it gets what it has missed of a pass, if that is at most this share of it

    @property
    def at(self) -> int | None:
        """The first item that it still needs."""
        return self.cursor if self.catching_up is None else self.catching_up

    @property
    def has_begun(self) -> bool:
        """Whether it has taken items of the window. One that joins at the next pass is ahead of the others, and has not."""
        return self.goes_on or self.cursor != self.entered


class Entry(NamedTuple):
    """The entry of a training at an item, ``place``, after so many other trainings."""

    training: Training
    place: int
    others: int
    is_late: bool  # whether this is another place than it would get alone
    there: int  # the window has all that it takes from this item on. The items from its place up to this one are read again


class Trainings:
    """All trainings of a reader. ``length`` is the items of a pass; 0 if not known: a training then finds the next one itself."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.all: list[Training] = []
        self.agreements: dict[str, Agreement] = {}  # by group

    @property
    def count(self) -> int:
        """Number of trainings. The ranks of a training count as one."""
        return len({training.group for training in self.all})

    @property
    def workers(self) -> int:
        """Number of workers that all ranks would have for themselves."""
        return sum(training.workers for training in self.all)

    @property
    def cluster_workers(self) -> tuple[int, int]:
        """Number of workers on other machines, at first and at most: the largest that a training asks for."""
        low, high = zip(*(training.cluster_workers for training in self.all), strict=True) if self.all else ((0,), (0,))
        return max(low), max(high)

    @property
    def going_on(self) -> int:
        """Number of trainings that had another reader before, which has died."""
        return len({training.group for training in self.all if training.goes_on})

    @property
    def entered(self) -> list[Training]:
        return [training for training in self.all if training.cursor is not None]

    def begin_at(self, now: float) -> int | None:
        """Returns the item to begin with, when no training has entered yet; None while the reader waits for more trainings."""
        ready = self.ready()
        are_few = len({one.group for one in ready}) < max((one.wait_for for one in ready), default=1)
        if are_few and now < min((one.patient_until for one in ready), default=math.inf):
            return None
        going_on = [one for one in ready if one.goes_on]  # they had a reader that has died: new trainings join them
        return min(min(one.wish or 0, one.wish or 0 if one.lacks_from is None else one.lacks_from) for one in going_on or ready)

    def entries(
        self,
        begin: int,
        low: int,
        wanted: Wanted | None = None,
        reach_back: Callable[[int], int] | None = None,
        now: float = 0.0,
    ) -> list[Entry]:
        """Lets the waiting trainings enter, and returns their entries. Items of the window below ``low`` may be overwritten.

        ``wanted`` says from which item on all is read that a training takes, as soon as it is among `entered` or `ready`.
        After a death, ranks agree on what any of them has had of the dead reader's items: ``now`` is the time in seconds.
        ``reach_back`` keeps items of the window from an item on, as many as are still there, and returns the first one. None:
        what a training has missed is not read again for it.
        """
        ready, found = self.ready(), []
        for goes_on in (True, False):  # the trainings of a dead reader enter first, and the others join them
            at_work = self.entered
            others = {training.group for training in at_work}
            fastest = self._fastest(begin)
            entering = [training for training in ready if training.goes_on == goes_on]
            backs = {} if reach_back is None else self._backs(entering, begin, low, wanted, fastest, bool(others))
            if reach_back is not None and backs:  # before any of them enters: the ranks of a training find the same window
                low = reach_back(min(backs.values()))
            several = []
            for training in entering:
                there = low if wanted is None else max(low, wanted.first_for(self.part_of(training), low))
                back = backs.get(id(training))
                place, is_late = (back, False) if back is not None else self._place(training, begin, there, fastest, bool(others))
                several.append(Entry(training, place, len(others - {training.group}), is_late, max(place, there)))
            for group in {one.group for one in entering if goes_on and one.ranks > 1}:
                end = max((one.wish or 0) + 1 for one in entering if one.group == group)
                self.agreements[group] = Agreement(end, held_since=now)
            for entry in several:  # all at once
                entry.training.cursor = entry.training.entered = entry.there
                entry.training.catching_up = entry.place if entry.place < entry.there else None
            for group in {entry.training.group for entry in several if entry.is_late}:
                several = self.jump(several, group)
            found += several
        return found

    def jump(self, entries: Sequence[Entry], group: str) -> list[Entry]:
        """Lets a training enter where all of its ranks find what they need next. Returns all entries."""
        place = max(entry.there for entry in entries if entry.training.group == group)
        found = list(entries)
        for number, entry in enumerate(entries):
            if (training := entry.training).group == group:
                found[number] = entry._replace(place=place, there=place, is_late=True)
                training.cursor, training.entered, training.catching_up = place, place, None
        return found

    def _fastest(self, default: int) -> int:
        """Returns the cursor of the fastest training."""
        begun = [one.cursor for one in self.entered if one.cursor is not None and one.has_begun]
        return max(begun) if begun else min((one.cursor for one in self.entered if one.cursor is not None), default=default)

    def _backs(
        self, entering: list[Training], begin: int, low: int, wanted: Wanted | None, fastest: int, has_others: bool
    ) -> dict[int, int]:
        """Returns, for the trainings that get what they have missed, where they enter. All ranks of one do, or none does."""
        found = {}
        for training in entering:
            there = 0 if wanted is None else wanted.first_for(self.part_of(training), 0)
            back = self._back_to(training, begin, low, there, fastest, has_others)
            if back is not None:
                found[id(training)] = back
        jump = {training.group for training in entering if id(training) not in found}
        return {id(training): found[id(training)] for training in entering if training.group not in jump}

    def _back_to(self, training: Training, begin: int, low: int, there: int, fastest: int, has_others: bool) -> int | None:
        """Returns where a training enters that gets what it has missed: where it stopped, or where the pass begins.

        From item ``there`` on, all is read that it takes. None: it has missed too much, or nothing and comes new, or the reader
        does not wait for it.
        """
        wish = begin if training.wish is None and not has_others else training.wish
        if training.goes_on:
            now, is_asked = low, wish is not None
        else:
            now = max(fastest, low)
            wish = now // self._length * self._length if wish is None and self._length else wish
            is_asked = has_others and training.join == "now" and wish is not None and wish < now
        if not is_asked or wish is None or training.behind != "wait":
            return None
        return wish if max(now, there) - wish <= training.late * self._length else None

    def _place(self, training: Training, begin: int, low: int, fastest: int, has_others: bool) -> tuple[int, bool]:
        wish = begin if training.wish is None and not has_others else training.wish
        if training.goes_on and wish is not None:
            return max(wish, low), wish < low
        if wish is not None and wish >= low and (not has_others or wish <= fastest):
            return wish, False
        is_start = not self._length or begin % self._length == 0  # False if this reader follows one that has died within a pass
        if wish is None and fastest == begin == low and is_start:
            return begin, False  # the other trainings are at the start, too
        place = max(fastest, low)
        if training.join == "pass" and self._length:
            place = -(-place // self._length) * self._length
        return place, True

    def part_of(self, training: Training) -> Bits:
        return all_bits(self._length) if training.part is None else training.part

    def wanted(self) -> Bits | None:
        """Returns what those want that have entered or are ready; None: everything."""
        wanting = [*self.entered, *self.ready()]
        if not self._length or not wanting or any(training.part is None for training in wanting):
            return None
        return union_of([training.part for training in wanting if training.part is not None])

    def taken(self) -> float:
        """Returns how many passes over the data all trainings together take in a pass. The ranks of a training count as one."""
        return sum({training.group: training.share for training in self.all}.values())

    def ready(self) -> list[Training]:
        """The waiting trainings of which all ranks of this node have come."""
        here = Counter(training.group for training in self.all)
        return [
            training
            for training in self.all
            if training.cursor is None and here[training.group] >= (training.ranks_here or training.ranks)
        ]

    def low(self, before: int, now: float) -> int:
        """Returns the item below which the window may be overwritten; never less than ``before``, the last one."""
        waiting = [one for one in self.entered if one.behind == "wait"]
        waited_for = [one.cursor for one in waiting if one.cursor is not None]
        if not any(one.has_begun for one in waiting):
            waited_for.append(max(before, self._fastest(before)))  # it decides if the reader waits for no training
        held = []  # for each training, the first item that its ranks have agreed on and not all have taken
        for group, agreement in list(self.agreements.items()):
            of_ranks = [one.cursor for one in self.entered if one.group == group and one.cursor is not None]
            if not of_ranks:
                del self.agreements[group]
                continue
            agreement.forget(min(of_ranks))
            if (first := agreement.held_from(min(of_ranks), now)) is not None:
                held.append(first)
        return max(before, min([*waited_for, *held]))

    def slowest_need(self) -> int:
        """Returns the time per item, in nanoseconds, of the slowest training that the reader waits for; 0 if not known."""
        return max((int(one.need_nanoseconds * one.share) for one in self.entered if one.behind == "wait"), default=0)

    def slowest(self) -> Training | None:
        """Returns the training that the reader waits for first; None if it waits for none."""
        waited_for = [one for one in self.entered if one.behind == "wait"]
        return min(waited_for, key=lambda one: one.cursor or 0, default=None)
