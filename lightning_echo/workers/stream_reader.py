"""Reads a stream in one process, pass after pass: tells it the pass, seeds it, and loads its state if it has one.

The number of the pass that a stream is told may lie in memory that all workers share (the epoch of a Hugging Face data set), and
setting it may take two steps. So the workers tell the stream one after another. A stream reads that number when its first example
is taken. Another worker may have told it the same pass again before that, which changes nothing. But workers that resume may be
in different passes, because each of them pulls its live examples again. Until a worker has reached the pass of the run, it takes
the first example of a pass before another worker may tell the stream a pass.

The state that a stream has at the end of a pass is loaded before the next pass. Some streams then yield nothing, and are iterated
once more. Others go on with the next pass on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_echo.protecting.objects import is_stateful
from lightning_echo.protecting.protect import copy_example
from lightning_echo.protecting.seeding import EXAMPLE, Seeding
from lightning_echo.splitting.decoding import decoded

__all__ = ["StreamReader"]

_END: Any = object()


class StreamReader:
    """Pulls examples from a stream.

    Args:
        dataset: The user's stream.
        seeding: Seeds the random states before examples of a batch are pulled.
        turn: A lock that all workers share.

    Attributes:
        is_stateful: Whether the stream saves its own state.
        state: The stream's state after the last pull; None if it saves none.
        pass_number: The present pass; -1 before the first one.
    """

    def __init__(self, dataset: Any, seeding: Seeding, turn: AbstractContextManager[Any]) -> None:
        self._dataset, self._seeding = dataset, seeding
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._turn = turn if callable(self._set_epoch) else nullcontext()
        self.is_stateful = is_stateful(dataset)
        self.state: Any = None
        self.pass_number = -1
        self._iterator: Iterator[Any] = iter(())
        self._first: Any = _END  # an example that was taken when the pass began
        self._must_load = False  # whether `state` must be loaded before the next pull
        self._goal = -1  # up to and including this pass, other workers may be in another one

    def save_start(self) -> None:
        """Takes the stream's state before anything is read. Later states are taken after each pull."""
        if self.is_stateful:
            self.state = self._dataset.state_dict()

    def resume(self, state: Any, pass_number: int, goal: int) -> None:
        """Goes to the place at which a state was taken.

        Args:
            state: The stream's state; None: nothing had been read.
            pass_number: The pass in which the state was taken.
            goal: The pass after the last one that was read. From there on, all workers are in the same pass.
        """
        self.state, self.pass_number, self._must_load, self._goal = state, pass_number, state is not None, goal

    def pull(self, pass_number: int, batch: int, count: int, *, copies: bool = False) -> list[Any]:
        """Pulls examples of a pass for a batch.

        Args:
            pass_number: The pass.
            batch: Number of the batch in this worker.
            count: Number of examples. Fewer are returned when the stream has ended.
            copies: Whether each example is copied before the next one is pulled. A stream may use its memory again after it has
                yielded the examples of a batch, and echoing pulls fewer examples for each batch.
        """
        self._seeding.seed(EXAMPLE, batch)
        if pass_number != self.pass_number or self._must_load:
            self._begin(pass_number, batch)
        examples = self._take(count, copy_example if copies else _unchanged)
        if self.is_stateful:
            self.state = self._dataset.state_dict()
        return examples

    def _begin(self, pass_number: int, batch: int) -> None:
        with self._turn:
            at_end = self._must_load and 0 <= self.pass_number != pass_number
            if self._must_load:
                self._tell(self.pass_number)
                self._dataset.load_state_dict(self.state)
            if pass_number != self.pass_number:
                self._tell(pass_number)
            self.pass_number, self._must_load = pass_number, False
            if pass_number <= self._goal:
                self._iterate(batch, again=at_end)
                return
        self._iterate(batch)

    def _iterate(self, batch: int, *, again: bool = False) -> None:
        """Begins to iterate, and once more if ``again`` and the stream yields nothing."""
        self._iterator = iter(self._dataset)
        self._first = next(self._iterator, _END)
        if self._first is _END:
            self._iterator = iter(())  # an iterator that has ended may begin anew when it is asked again
            if again:
                self._seeding.seed(EXAMPLE, batch)
                self._iterate(batch)

    def _tell(self, pass_number: int) -> None:
        if callable(self._set_epoch) and pass_number >= 0:
            self._set_epoch(pass_number)

    def _take(self, count: int, protected: Callable[[Any], Any]) -> list[Any]:
        """Returns the next examples, taken one by one.

        ``islice`` and similar functions call ``iter`` on the iterator, and a stream that is its own iterator then begins anew.
        """
        examples = [] if self._first is _END else [protected(decoded(self._first))]
        self._first = _END
        while len(examples) < count and (example := next(self._iterator, _END)) is not _END:
            examples.append(protected(decoded(example)))
        return examples


def _unchanged(example: Any) -> Any:
    return example
