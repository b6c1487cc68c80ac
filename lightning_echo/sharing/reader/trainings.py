"""The trainings of a reader: where each one stands, where a new one enters, and what may be overwritten.

Pure arithmetic: it knows neither sockets nor the window. A place is an item of the reader's stream; a training's *cursor* is the
first item that it still needs. The ranks of one training come with the same group, and enter together.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Entry", "Training", "Trainings"]


@dataclass
class Training:
    """A training, or one rank of it.

    Attributes:
        pid: Its process.
        label: For people.
        behind: ``"wait"`` or ``"skip"``.
        join: ``"now"`` or ``"pass"``.
        wait_for: The reader begins when so many trainings have come.
        wish: The item that it would go on from; None: from the start.
        goes_on: Whether it was there already, with a reader that has died.
        group: The same for all ranks of a training.
        ranks: Number of them.
        cursor: The first item that it still needs; None before it has entered.
        need_nanoseconds: Time per example that it takes, if it never waited and used each example once; 0 if not known.
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
    cursor: int | None = None
    need_nanoseconds: int = 0


@dataclass(frozen=True)
class Entry:
    """How a training enters.

    Attributes:
        training: The training.
        place: The item that it goes on from.
        others: How many trainings are at work beside it.
        is_late: Whether it gets another place than it would have had alone.
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

    @property
    def count(self) -> int:
        """Number of trainings; the ranks of one count as one."""
        return len({training.group for training in self.all})

    @property
    def entered(self) -> list[Training]:
        """Those that have a place."""
        return [training for training in self.all if training.cursor is not None]

    def begin_at(self) -> int | None:
        """Returns the item to begin with, now that nobody is at work; None while the reader waits for trainings to come."""
        ready = self._ready()
        if len({one.group for one in ready}) < max((one.wait_for for one in ready), default=1):
            return None
        return min(one.wish or 0 for one in ready)

    def entries(self, begin: int, low: int) -> list[Entry]:
        """Returns how those that wait enter, and lets them.

        Args:
            begin: First item of the window.
            low: Items below may be overwritten.
        """
        at_work = self.entered
        others = {training.group for training in at_work}
        fastest = max((one.cursor for one in at_work if one.cursor is not None), default=begin)
        found = []
        for training in self._ready():
            place, is_late = self._place(training, begin, low, fastest, bool(others))
            found.append(Entry(training, place, len(others - {training.group}), is_late))
        for entry in found:
            entry.training.cursor = entry.place
        return found

    def _place(self, training: Training, begin: int, low: int, fastest: int, has_others: bool) -> tuple[int, bool]:
        wish = begin if training.wish is None and not has_others else training.wish
        if wish is not None and wish >= low and (training.goes_on or not has_others or wish <= fastest):
            return wish, False
        is_start = not self._length or begin % self._length == 0  # not so if this reader follows one that has died within a pass
        if wish is None and fastest == begin == low and is_start:
            return begin, False  # the others are at the start, too
        place = max(fastest, low)
        if training.join == "pass" and self._length:
            place = -(-place // self._length) * self._length
        return place, True

    def _ready(self) -> list[Training]:
        """Those that wait, and of which all ranks are there."""
        waiting = [training for training in self.all if training.cursor is None]
        here: dict[str, int] = {}
        for training in self.all:
            here[training.group] = here.get(training.group, 0) + 1
        return [training for training in waiting if here[training.group] >= training.ranks]

    def low(self, before: int) -> int:
        """Returns below which item the window may be overwritten: what all have that are waited for.

        Args:
            before: What it was: it never falls.
        """
        cursors = [(one.behind, one.cursor) for one in self.entered if one.cursor is not None]
        waited_for = [cursor for behind, cursor in cursors if behind == "wait"]
        if waited_for:
            return max(before, min(waited_for))
        return max([before, *(cursor for _, cursor in cursors)])  # nobody waits: the fastest decides

    def slowest_need(self) -> int:
        """Returns the time per example of the slowest training that is waited for, nanoseconds; 0 if none is known."""
        return max((one.need_nanoseconds for one in self.entered if one.behind == "wait"), default=0)

    def slowest(self) -> Training | None:
        """Returns the training that the reader waits for first; None if it waits for none."""
        waited_for = [one for one in self.entered if one.behind == "wait"]
        return min(waited_for, key=lambda one: one.cursor or 0, default=None)
