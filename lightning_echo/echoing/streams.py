"""Echoing a stream inside the workers: plan, buffer and stream side by side in each of them.

A stream has no index that could be asked for again, and only who reads it knows when it ends. So each worker runs an `EchoPlan`
of its own: a batch is planned, so many fresh examples are pulled from the stream, the others are live ones. The main process only
says which pass is meant and which factor counts (`StreamRequest`). The worker answers with the batch, its counts and a
`StreamNote`: whether its stream has ended, and the state to go on from. As with a plain ``DataLoader``, a worker whose stream
has ended waits for the others (answers without a batch); then all begin their streams anew. What is live lives on.

Where the stream has ``state_dict`` and ``load_state_dict``, a state is taken after every batch. What is live has come before: the
worker remembers the state before the oldest live example and what was pulled since, and a resumed worker pulls the same again.

Random numbers: one seed for what is pulled for a batch, one for collating it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lightning_echo.echoing.dataset import copies_by_itself, note
from lightning_echo.echoing.hashing import mix
from lightning_echo.echoing.opened import decoded
from lightning_echo.echoing.passes import is_stateful
from lightning_echo.echoing.plan import EchoPlan, PlannedBatch
from lightning_echo.echoing.protect import copy_example
from lightning_echo.echoing.seconds import Report
from lightning_echo.echoing.seeding import BATCH, EXAMPLE, Seeding
from lightning_echo.echoing.shape import PlanShape

__all__ = ["StreamEcho", "StreamNote", "StreamRequest"]

_NOTHING: Report = (0, 0, 0, 0.0, 0.0, 0.0)
_END: Any = object()


class StreamRequest(NamedTuple):
    """What a worker is asked for, one batch.

    Attributes:
        number: Of the pass, from 0; -1: nothing is wanted, but it is this worker's turn.
        factor: The echo factor that counts.
        resume: What the worker goes on from: a state that came with a `StreamNote`, or, where nothing is live any more, how many
            batches it has made before. None: it goes on by itself.
    """

    number: int
    factor: float
    resume: bytes | int | None = None


class StreamNote(NamedTuple):
    """What a worker says beside a batch.

    Attributes:
        worker: Which one it is.
        ended: Whether its stream has ended.
        state: What it would go on from; None where the stream has no state.
    """

    worker: int
    ended: bool
    state: bytes | None


class _Pulled(NamedTuple):
    """What was pulled from the stream for one batch, and what it can be pulled again from."""

    position: int  # of the first example in the worker's fresh stream
    wanted: int  # examples
    batch: int  # number of the batch in the worker
    number: int  # of the pass
    state: Any  # the stream's before; None: it had not begun
    state_number: int  # the pass that this state is of


class StreamEcho:
    """Answers requests in one process.

    Args:
        dataset: The user's stream.
        shape: Sizes of one worker's plan, and the seed of its draws.
        key: Seed of this rank's random numbers.
        collate_fn: The user's, see `ExampleCache`.
        drop_last: Whether a batch is left out for which the stream has too few examples.
    """

    def __init__(self, dataset: Any, shape: PlanShape, key: int, collate_fn: Any, *, drop_last: bool) -> None:
        self.dataset = dataset
        self._shape, self._key, self._drop_last = shape, key, drop_last
        self._protect = not copies_by_itself(collate_fn)
        self._worker = -1  # which one is only known in it
        self._iterator: Iterator[Any] | None = None
        self._first: Any = _END  # already taken from the iterator
        self._number = self._ended = -1  # the pass under way, and the last one that has ended here
        self._held: dict[int, Any] = {}
        self._pulled: deque[_Pulled] = deque()  # from the oldest with a live example on
        self._state: Any = None  # the stream's after the last pull
        self._refetched = 0  # since the last batch

    def fetch(self, request: StreamRequest) -> tuple[list[Any] | None, Report, StreamNote]:
        """The examples of a batch, None if there is none; its counts and seconds (none of collate); the note."""
        if self._worker < 0:
            self._begin()
        if request.resume is not None:
            self._resume(request.resume)
        if request.number <= self._ended:
            return None, _NOTHING, self._note()
        plan, started = self._plan, perf_counter()
        if request.factor != plan.factor:
            plan.change_factor(plan.number, request.factor)
        wanted = plan.wanted_fresh()
        fresh = self._pull(plan.position, wanted, plan.number, request.number)
        pulled = perf_counter()
        if len(fresh) < wanted:
            self._ended = request.number
            if not fresh or self._drop_last:
                return None, _NOTHING, self._note()
        batch = plan.next_batch(missing=wanted - len(fresh))
        examples = self._hand_out(batch, fresh)
        answer = self._note()
        self._seeding.seed(BATCH, batch.number)
        refetched, self._refetched = self._refetched, 0
        counts = (batch.fresh, len(examples) - batch.fresh, refetched)
        return examples, (*counts, pulled - started, perf_counter() - pulled, 0.0), answer

    def _begin(self) -> None:
        """In a worker, ``worker_init_fn`` has run; without workers this is the training process."""
        info = get_worker_info()
        self._worker = 0 if info is None else info.id
        self._shape = replace(self._shape, seed=mix(self._shape.seed, self._worker))
        self._plan = EchoPlan(self._shape, 1.0)
        self._seeding = Seeding(self.dataset, mix(self._key, self._worker))
        self._is_stateful = is_stateful(self.dataset)
        if (
            self._is_stateful and info is None
        ):  # a worker begins with the data set as it was, this process with what is left of it
            self._state = self.dataset.state_dict()

    def _hand_out(self, batch: PlannedBatch, fresh: list[Any]) -> list[Any]:
        held, examples = self._held, []
        for position in batch.forget:
            held.pop(position, None)
        for position, example, is_kept in zip(
            batch.positions, chain(fresh, [_END] * len(batch.positions)), batch.kept, strict=False
        ):
            if example is _END:
                example = held[position] if is_kept else held.pop(position)
            elif is_kept:
                held[position] = example
            examples.append(copy_example(example) if is_kept and self._protect else example)
        return examples

    # ------------------------------------------------------------------ the stream

    def _pull(self, position: int, count: int, batch: int, number: int) -> list[Any]:
        """Up to ``count`` examples of a pass; fewer when the stream has ended."""
        if not count:
            return []
        if self._is_stateful:
            self._pulled.append(_Pulled(position, count, batch, number, self._state, self._number))
        self._seeding.seed(EXAMPLE, batch)
        try:
            if number != self._number:
                self._begin_pass(number, batch)
            elif self._iterator is None:  # its own state was loaded
                self._iterator = iter(self.dataset)
            examples = self._take(count)
        except Exception as error:
            note(error, f"(reading the stream in pass {number}, worker {self._worker})")
            raise
        if self._is_stateful:
            self._state = self.dataset.state_dict()
        return examples

    def _take(self, count: int) -> list[Any]:
        """One by one: what takes an iterator calls ``iter`` on it, and streams that are their own iterator begin anew then."""
        assert self._iterator is not None
        examples = [] if self._first is _END else [self._first]
        self._first = _END
        while len(examples) < count and (example := next(self._iterator, _END)) is not _END:
            examples.append(decoded(example))
        return examples

    def _begin_pass(self, number: int, batch: int) -> None:
        resumed = self._iterator is None and self._number >= 0
        self._tell_pass(number)
        self._iterator = iter(self.dataset)
        if not resumed:
            return
        # The state that was loaded is that of a stream that has ended: some yield nothing then, others go on by themselves.
        self._first = next(self._iterator, _END)
        if self._first is not _END:
            return
        self._seeding.seed(EXAMPLE, batch)
        self._iterator = iter(self.dataset)

    def _tell_pass(self, number: int) -> None:
        self._number = number
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(number)

    # ------------------------------------------------------------------ state

    def _note(self) -> StreamNote:
        return StreamNote(self._worker, self._ended >= self._number, self._pack() if self._is_stateful else None)

    def _pack(self) -> bytes:
        pulled, oldest = self._pulled, next(iter(self._held), self._plan.position)
        while len(pulled) > 1 and pulled[1].position <= oldest:
            pulled.popleft()
        if pulled and not self._held:
            pulled.clear()
        stream, number = (pulled[0].state, pulled[0].state_number) if pulled else (self._state, self._number)
        state = {
            "plan": self._plan.state(),
            "ended": self._ended,
            "stream": stream,
            "stream_pass": number,
            "pulled": [list(pull[:4]) for pull in pulled],
        }
        return pickle.dumps(state)

    def _resume(self, resume: bytes | int) -> None:
        if isinstance(resume, int):
            self._plan.number = resume
            return
        state = pickle.loads(resume)
        self._plan, self._ended = EchoPlan.from_state(self._shape, state["plan"]), state["ended"]
        if state["stream_pass"] >= 0:
            self._tell_pass(state["stream_pass"])
        self._state = state["stream"]
        if self._state is not None:
            self.dataset.load_state_dict(self._state)
        live = {item.position for item in self._plan.live()}
        for position, count, batch, number in state["pulled"]:
            examples = self._pull(position, count, batch, number)
            self._refetched += len(examples)
            self._held.update((at, example) for at, example in enumerate(examples, position) if at in live)
