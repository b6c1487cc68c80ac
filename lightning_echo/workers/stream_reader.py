"""Reading a stream in one process, pass after pass: told the pass, seeded, and from its own state where it has one.

What a stream is told may be shared by all workers (the epoch of a Hugging Face data set lies in memory that they share), and
setting it may be two steps, not one. So they tell it one after another. It counts when the first example is taken; by then
another worker may have told the same pass again, which changes nothing. Only workers that resume may be in different passes, as
each pulls again what is live: until they have caught up, the first example is taken before the next worker may begin.

The state that a stream has at the end of a pass is loaded before the next one: some yield nothing then, and are iterated once
more, others go on with the next pass by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_echo.protecting.objects import is_stateful
from lightning_echo.protecting.protect import copy_example
from lightning_echo.protecting.seeding import EXAMPLE, Seeding
from lightning_echo.workers.opened import decoded

__all__ = ["StreamReader"]

_END: Any = object()


class StreamReader:
    """Pulls examples from a stream.

    Args:
        dataset: The user's stream.
        seeding: Seeds what is pulled for a batch.
        turn: A lock that all workers share.

    Attributes:
        is_stateful: Whether the stream saves its own state.
        state: That after the last pull, None if it has none.
        number: The pass under way, -1 before the first.
    """

    def __init__(self, dataset: Any, seeding: Seeding, turn: AbstractContextManager[Any]) -> None:
        self._dataset, self._seeding = dataset, seeding
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._turn = turn if callable(self._set_epoch) else nullcontext()
        self.is_stateful = is_stateful(dataset)
        self.state: Any = None
        self.number = -1
        self._iterator: Iterator[Any] = iter(())
        self._first: Any = _END  # taken already when the pass began
        self._loads = False  # whether `state` is to be loaded before the next pull
        self._goal = -1  # up to this pass, other workers may be in another one

    def save_start(self) -> None:
        """Takes the state before anything is read; later ones are taken after each pull."""
        if self.is_stateful:
            self.state = self._dataset.state_dict()

    def resume(self, state: Any, number: int, goal: int) -> None:
        """Goes to where a state was taken, in pass ``number``; None: nothing had been read.

        From there on ``goal``, the pass after the last that was read, is reached.
        """
        self.state, self.number, self._loads, self._goal = state, number, state is not None, goal

    def pull(self, number: int, batch: int, count: int, *, copies: bool = False) -> list[Any]:
        """Pulls examples of a pass for a batch.

        Args:
            number: Of the pass.
            batch: Number of the batch in this worker.
            count: Examples; fewer come when the stream has ended.
            copies: Whether each is copied before the next one is pulled. A stream may use its memory again when it has yielded as
                many as a batch holds, and echoing pulls fewer for each batch.
        """
        self._seeding.seed(EXAMPLE, batch)
        if number != self.number or self._loads:
            self._begin(number, batch)
        examples = self._take(count, copy_example if copies else _itself)
        if self.is_stateful:
            self.state = self._dataset.state_dict()
        return examples

    def _begin(self, number: int, batch: int) -> None:
        with self._turn:
            at_end = self._loads and 0 <= self.number != number
            if self._loads:
                self._tell(self.number)
                self._dataset.load_state_dict(self.state)
            if number != self.number:
                self._tell(number)
            self.number, self._loads = number, False
            if number <= self._goal:
                self._iterate(batch, again=at_end)
                return
        self._iterate(batch)

    def _iterate(self, batch: int, *, again: bool = False) -> None:
        self._iterator = iter(self._dataset)
        self._first = next(self._iterator, _END)
        if self._first is _END:
            self._iterator = iter(())  # one that has ended may begin anew when it is asked again
            if again:
                self._seeding.seed(EXAMPLE, batch)
                self._iterate(batch)

    def _tell(self, number: int) -> None:
        if callable(self._set_epoch) and number >= 0:
            self._set_epoch(number)

    def _take(self, count: int, protected: Callable[[Any], Any]) -> list[Any]:
        """One by one: what takes an iterator calls ``iter`` on it, and streams that are their own iterator begin anew then."""
        examples = [] if self._first is _END else [protected(decoded(self._first))]
        self._first = _END
        while len(examples) < count and (example := next(self._iterator, _END)) is not _END:
            examples.append(protected(decoded(example)))
        return examples


def _itself(example: Any) -> Any:
    return example
