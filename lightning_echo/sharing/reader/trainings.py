"""The trainings of a reader: where each one stands, where a new one enters, and what may be overwritten.

This is pure arithmetic, without sockets and without the window. A place is an item of the reader's stream. The *cursor* of a
training is the first item that it still needs. The ranks of one training have the same group, enter together, and agree on what
they take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lightning_echo.sharing.reader.agreeing import Agreement, Answer

__all__ = ["Entry", "Training", "Trainings"]


@dataclass
class Training:
    """A training, or one rank of it.

    Attributes:
        pid: Its process.
        label: For people.
        behind: ``"wait"`` or ``"skip"``.
        join: ``"now"`` or ``"pass"``.
        wait_for: Number of trainings that must have come before the reader begins.
        wish: The item at which it would go on; None: at the start.
        goes_on: Whether it had another reader before, which has died.
        group: A name, the same for all ranks of a training.
        ranks: Number of ranks of the training.
        patient_until: The time in seconds up to which the reader waits for more trainings.
        cursor: The first item that it still needs; None before it has entered.
        need_nanoseconds: Time per example that it takes, without waiting and without echoing; 0 if not known.
    """

    pid: int
    label: str
    behind: str
    join: str
    wait_for: int
    wish: int | None
    goes_on: bool
    group: str
    ranks: int
    patient_until: float = math.inf
    cursor: int | None = None
    need_nanoseconds: int = 0


class Entry(NamedTuple):
    """How a training enters.

    Attributes:
        training: The training.
        place: The item at which it goes on.
        others: How many other trainings have entered before.
        is_late: Whether it gets another place than it would get alone.
    """

    training: Training
    place: int
    others: int
    is_late: bool


class Trainings:
    """All trainings of a reader.

    Args:
        length: Items of a pass; 0 if it is not known. Then a training finds the next pass by itself.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.all: list[Training] = []
        self._agreements: dict[str, Agreement] = {}  # by group

    @property
    def count(self) -> int:
        """Number of trainings. The ranks of a training count as one."""
        return len({training.group for training in self.all})

    @property
    def going_on(self) -> int:
        """Number of trainings that had another reader before, which has died."""
        return len({training.group for training in self.all if training.goes_on})

    @property
    def entered(self) -> list[Training]:
        """The trainings that have a place."""
        return [training for training in self.all if training.cursor is not None]

    def begin_at(self, now: float) -> int | None:
        """Returns the item to begin with, when no training has entered yet; None while the reader waits for more trainings.

        Args:
            now: The time in seconds.
        """
        ready = self._ready()
        are_few = len({one.group for one in ready}) < max((one.wait_for for one in ready), default=1)
        if are_few and now < min((one.patient_until for one in ready), default=math.inf):
            return None
        going_on = [one for one in ready if one.goes_on]  # they had a reader that has died: new trainings join them
        return min(one.wish or 0 for one in going_on or ready)

    @property
    def any_goes_on(self) -> bool:
        """Whether a training is here that had another reader before, which has died."""
        return any(one.goes_on for one in self._ready())

    @property
    def join(self) -> str:
        """Where the waiting trainings enter: ``"pass"`` if one of them asks for it, else ``"now"``."""
        return "pass" if any(one.join == "pass" for one in self._ready()) else "now"

    def entries(self, begin: int, low: int) -> list[Entry]:
        """Lets the waiting trainings enter, and returns how each of them does.

        Args:
            begin: First item of the window.
            low: Items below this one may be overwritten.
        """
        ready = self._ready()
        going_on = [one for one in ready if one.goes_on]  # they enter first, and the others join them
        return [
            *self._entries_of(going_on, begin, low),
            *self._entries_of([one for one in ready if not one.goes_on], begin, low),
        ]

    def _entries_of(self, ready: list[Training], begin: int, low: int) -> list[Entry]:
        """Lets these trainings enter, all at once, and returns how each of them does."""
        at_work = self.entered
        others = {training.group for training in at_work}
        fastest = max((one.cursor for one in at_work if one.cursor is not None), default=begin)
        found = []
        for training in ready:
            place, is_late = self._place(training, begin, low, fastest, bool(others))
            found.append(Entry(training, place, len(others - {training.group}), is_late))
        for entry in found:
            entry.training.cursor = entry.place
        return found

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

    def _ready(self) -> list[Training]:
        """The waiting trainings of which all ranks have come."""
        waiting = [training for training in self.all if training.cursor is None]
        here: dict[str, int] = {}
        for training in self.all:
            here[training.group] = here.get(training.group, 0) + 1
        return [training for training in waiting if here[training.group] >= training.ranks]

    def low(self, before: int, now: float) -> int:
        """Returns the item below which the window may be overwritten: all trainings that the reader waits for have those items.

        Args:
            before: The last value. The result is never smaller.
            now: The time in seconds.
        """
        cursors = [(one.behind, one.cursor) for one in self.entered if one.cursor is not None]
        waited_for = [cursor for behind, cursor in cursors if behind == "wait"]
        fastest = max([before, *(cursor for _, cursor in cursors)])  # it decides if the reader waits for no training
        return max(before, min([*(waited_for or [fastest]), *self._held(now)]))

    def _held(self, now: float) -> list[int]:
        """Returns, for each training, the first item that its ranks have agreed on and not all have taken."""
        held = []
        for group, agreement in list(self._agreements.items()):
            cursors = [one.cursor for one in self.entered if one.group == group and one.cursor is not None]
            if not cursors:
                del self._agreements[group]
                continue
            agreement.forget(min(cursors))
            if (first := agreement.held_from(min(cursors), now)) is not None:
                held.append(first)
        return held

    def answer(self, training: Training, asked: int, end: int, low: int, now: float) -> Answer:
        """Answers a rank that asks what all ranks of its training take, see `Agreement.answer`."""
        return self._agreements.setdefault(training.group, Agreement()).answer(asked, end, low, now)

    def slowest_need(self) -> int:
        """Returns the time per example, in nanoseconds, of the slowest training that the reader waits for; 0 if not known."""
        return max((one.need_nanoseconds for one in self.entered if one.behind == "wait"), default=0)

    def slowest(self) -> Training | None:
        """Returns the training that the reader waits for first; None if it waits for none."""
        waited_for = [one for one in self.entered if one.behind == "wait"]
        return min(waited_for, key=lambda one: one.cursor or 0, default=None)
