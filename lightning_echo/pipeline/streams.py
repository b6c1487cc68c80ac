"""Echoes a stream inside the workers. Each worker has a plan, a buffer and its part of the stream."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from lightning_echo.data.copies import copy_example
from lightning_echo.data.objects import is_stateful
from lightning_echo.data.randomness import BATCH, EXAMPLE, Seeding
from lightning_echo.pipeline.worker import Report, add_note, copies_by_itself
from lightning_echo.plan.memory import make_plan, plan_from_state
from lightning_echo.plan.plan import PlanShape, mix
from lightning_echo.split.staged import decoded

# ---------------------------------------------------------------------- stream reader
# The stream's ``set_epoch`` may write to memory that all workers share (the epoch of a Hugging Face data set), and setting it may
# take two steps. So the workers call it one after another. A stream reads that number when its first example is taken. Another
# worker may have set the same pass again before that, which changes nothing. But workers that resume may be in different passes,
# because each of them pulls its live examples again. Until a worker has reached the pass of the run, it takes the first example
# of a pass before another worker may set a pass.
#
# The state that a stream has at the end of a pass is loaded before the next pass. Some streams then yield nothing, and are
# iterated once more. Others continue with the next pass on their own.

END: Any = object()
"""Stands for an example where the stream has ended."""


class StreamReader:
    """Pulls examples from a stream, pass after pass. ``turn`` is a lock that all workers share."""

    def __init__(self, dataset: Any, seeding: Seeding, turn: AbstractContextManager[Any]) -> None:
        self._dataset, self._seeding = dataset, seeding
        self._set_epoch = getattr(dataset, "set_epoch", None)
        self._turn = turn if callable(self._set_epoch) else nullcontext()
        self.is_stateful = is_stateful(dataset)
        self.state: Any = None  # the stream's state after the last pull; None if it saves none
        self.pass_number = -1  # the present pass; -1 before the first one
        self._iterator: Iterator[Any] = iter(())
        self._first: Any = END  # an example that was taken when the pass began
        self._must_load = False  # whether `state` must be loaded before the next pull
        self._goal = -1  # up to and including this pass, other workers may be in another one

    def resume(self, state: Any, pass_number: int, goal: int) -> None:
        """Goes to the place at which a state (None: nothing had been read) was taken in a pass.

        ``goal`` is the pass after the last one that was read. From there on, all workers are in the same pass.
        """
        self.state, self.pass_number, self._must_load, self._goal = state, pass_number, state is not None, goal

    def pull(self, pass_number: int, batch: int, count: int, *, copies: bool = False) -> list[Any]:
        """Pulls ``count`` examples of a pass for a batch of this worker; fewer when the stream has ended.

        ``copies`` is as in `pull_next`.
        """
        self.begin(pass_number, batch)
        examples: list[Any] = []
        while len(examples) < count and (example := self.pull_next(copies=copies)) is not END:
            examples.append(example)
        self.note_state()
        return examples

    def begin(self, pass_number: int, batch: int) -> None:
        """Begins to pull examples of a pass for a batch of this worker."""
        self._seeding.seed(EXAMPLE, batch)
        if pass_number != self.pass_number or self._must_load:
            self._begin(pass_number, batch)

    def pull_next(self, *, copies: bool = False) -> Any:
        """Returns the next example; `END` if the stream has ended. It may not be called after that, before another pass.

        ``copies``: whether the example is copied before the next one is pulled. A stream may use its memory again after it has
        yielded the examples of a batch, and echoing pulls fewer examples for each batch.
        """
        example, self._first = self._first, END
        if example is END:
            # `islice` and similar functions call `iter` on the iterator, and a stream that is its own iterator then begins again.
            example = next(self._iterator, END)
            if example is END:
                return END
        return copy_example(decoded(example)) if copies else decoded(example)

    def note_state(self) -> None:
        """Notes the stream's state after the pulls for a batch, if it saves one."""
        if self.is_stateful:
            self.state = self._dataset.state_dict()

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
        self._first = next(self._iterator, END)
        if self._first is END:
            self._iterator = iter(())  # an iterator that has ended may begin again when it is asked again
            if again:
                self._seeding.seed(EXAMPLE, batch)
                self._iterate(batch)

    def _tell(self, pass_number: int) -> None:
        if callable(self._set_epoch) and pass_number >= 0:
            self._set_epoch(pass_number)


# ---------------------------------------------------------------------- streams
# An example of a stream cannot be asked for again by an index, and only the process that reads the stream learns when it ends. So
# each worker runs a plan of its own: it plans a batch, pulls its fresh examples from its part of the stream, and takes the others
# from its live examples. The main process only sends the pass and the factor (`StreamRequest`). The worker answers with the
# batch, its report and a `StreamNote`: whether its stream has ended, and the state for resuming. As with a plain ``DataLoader``,
# a worker whose stream has ended waits for the others (it answers without a batch). Then all begin their streams again. Live
# examples stay live.
#
# If the stream has ``state_dict`` and ``load_state_dict``, a state is taken after every batch. Live examples were pulled before
# it. So the worker remembers the state before the oldest live example and the pulls since, and a resumed worker repeats them.
#
# Random numbers: there is one seed for pulling the examples of a batch, and one for collating it.

NOTHING_MADE = Report()


class Pulls(NamedTuple):
    """What a worker pulls for a request, as a journal says."""

    fresh: int | None  # so many examples for a batch; None: all that are left, which make up no batch
    ends: bool  # whether the stream ends behind them


class StreamRequest(NamedTuple):
    """A request to a worker for one batch."""

    pass_number: int  # from 0. -1: no batch is wanted, but it is this worker's turn
    factor: float  # the echo factor to use
    # Where the worker continues after a resume: a state that came with a `StreamNote`, or, if no example is live any more, the
    # number of batches that the worker made before. None: this is not a resume.
    resume: bytes | int | None = None
    number: int = -1  # of the request in the run
    pulls: Pulls | None = None  # what a replay pulls; None: what there is


class StreamNote(NamedTuple):
    """A worker's note next to a batch: its number, whether its stream has ended, and the state for resuming, if it saves one."""

    worker: int
    ended: bool
    state: bytes | None
    digest: str = ""  # of the last example that was pulled for the batch, if there is a journal


class _Pulled(NamedTuple):
    """One pull from the stream, for one batch, and the state from which it can be repeated."""

    position: int  # of the first example in the worker's fresh stream
    wanted: int  # how many examples were asked for
    batch: int  # number of the batch in the worker
    pass_number: int  # the pass from which they were pulled
    state: Any  # the stream's state before the pull, in pass `state_pass`; None: the stream had not begun
    state_pass: int


class StreamEcho:
    """Answers requests in one process.

    ``shape`` has the sizes of one worker's plan, and the seed of its draws; ``key`` is the seed of this rank's random numbers.
    ``drop_last``: whether a batch is left out if the stream has too few examples for it. ``turn`` is as in `StreamReader`; None:
    there is only one process.
    """

    def __init__(
        self,
        dataset: Any,
        shape: PlanShape,
        key: int,
        collate_fn: Any,
        *,
        drop_last: bool,
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self._shape, self._key, self._drop_last, self._turn = shape, key, drop_last, turn or nullcontext()
        self._copies_uses = not copies_by_itself(collate_fn)
        self._worker = -1  # the number is only known in the worker itself
        self._ended = -1  # the last pass that has ended here
        self._pass = -1  # the present pass
        self._in_pass = 0  # how many examples of it were pulled here; -1: it is not known
        self._held: dict[int, Any] = {}
        self._pulled: deque[_Pulled] = deque()  # the pulls, from the oldest one with a live example on
        self._refetched = 0  # examples that were read again since the last batch

    def fetch(self, request: StreamRequest) -> tuple[list[Any] | None, Report, StreamNote]:
        """Returns the examples of a batch (None: there is no batch), its report without the seconds of collate, and the note."""
        if self._worker < 0:
            self._begin()
        if request.resume is not None:
            self._resume(request.resume)
        if request.pass_number <= self._ended:
            return None, NOTHING_MADE, self._note()
        self._reach(request.pass_number)
        plan, started = self._plan, perf_counter()
        if request.factor != plan.factor:
            plan.change_factor(plan.number, request.factor)
        wanted = plan.wanted_fresh()
        fresh = self._pull(plan.position, wanted, plan.number, request.pass_number)
        pulled = perf_counter()
        if self._in_pass >= 0:
            self._in_pass += len(fresh)
        if len(fresh) < wanted:
            self._ended = request.pass_number
            if not fresh or self._drop_last:
                return None, NOTHING_MADE, self._note()
        batch = plan.next_batch(missing=wanted - len(fresh))
        held, examples = self._held, []
        for position in batch.forget:
            held.pop(position, None)
        for i, (position, stays) in enumerate(zip(batch.positions, batch.stays_live, strict=True)):
            example = fresh[i] if i < len(fresh) else held.pop(position)
            if stays:
                held[position] = example
            examples.append(copy_example(example) if stays and self._copies_uses else example)
        answer = self._note()
        self._seeding.seed(BATCH, batch.number)
        refetched, self._refetched = self._refetched, 0
        counts = (batch.fresh, len(examples) - batch.fresh, refetched)
        return examples, Report(*counts, pulled - started, perf_counter() - pulled), answer

    def _begin(self) -> None:
        """Begins, at the first request, when ``worker_init_fn`` has run. Without workers, this is the training process."""
        info = get_worker_info()
        self._worker = 0 if info is None else info.id
        self._shape = replace(self._shape, seed=mix(self._shape.seed, self._worker))
        self._begin_planning()
        self._seeding = Seeding(self.dataset, mix(self._key, self._worker))
        self._reader = StreamReader(self.dataset, self._seeding, self._turn)
        if info is None and self._reader.is_stateful:  # a worker gets the data set as it was; this process has used it already
            self._reader.state = self.dataset.state_dict()

    def _begin_planning(self) -> None:
        self._plan = make_plan(self._shape, 1.0)

    def _reach(self, pass_number: int) -> None:
        """Begins to count the examples of a pass, if it is not the present one."""
        if pass_number != self._pass:
            self._pass, self._in_pass = pass_number, 0

    def _pull(self, position: int, count: int, batch: int, pass_number: int) -> list[Any]:
        reader = self._reader
        if not count:
            return []
        if reader.is_stateful:
            self._pulled.append(_Pulled(position, count, batch, pass_number, reader.state, reader.pass_number))
        try:
            return reader.pull(pass_number, batch, count, copies=self._plan.factor > 1)
        except Exception as error:
            self._note_place(error, pass_number)
            raise

    def _note_place(self, error: Exception, pass_number: int) -> None:
        add_note(error, f"(reading the stream in pass {pass_number}, worker {self._worker})")

    # ------------------------------------------------------------------ state

    def _note(self) -> StreamNote:
        """Returns the note, with the worker's state if the stream has one. Forgets the pulls before the oldest live example."""
        pulled, reader = self._pulled, self._reader
        has_ended = self._ended >= self._pass  # the reader may be in the pass before: the first batch of one may need no example
        if not reader.is_stateful:
            return StreamNote(self._worker, has_ended, None)
        oldest = min(self._held, default=self._plan.position)
        while len(pulled) > 1 and pulled[1].position <= oldest:
            pulled.popleft()
        if pulled and not self._held:
            pulled.clear()
        stream, stream_pass = (pulled[0].state, pulled[0].state_pass) if pulled else (reader.state, reader.pass_number)
        state = {
            "plan": self._plan.state(),
            "ended": self._ended,
            "stream": stream,
            "stream_pass": stream_pass,
            "pulled": [[each.position, each.wanted, each.batch, each.pass_number] for each in pulled],
            "in_pass": None if self._in_pass < 0 else self._in_pass,
        }
        return StreamNote(self._worker, has_ended, pickle.dumps(state))

    def _resume(self, resume: bytes | int) -> None:
        if isinstance(resume, int):
            self._plan.number = resume
            return
        state = pickle.loads(resume)
        self._plan, self._ended = plan_from_state(self._shape, state["plan"]), state["ended"]
        last_pass = max((pass_number for *_, pass_number in state["pulled"]), default=state["stream_pass"])
        in_pass = state.get("in_pass")
        self._pass, self._in_pass = last_pass, -1 if in_pass is None else in_pass
        self._reader.resume(state["stream"], state["stream_pass"], last_pass + 1)
        live = {item.position for item in self._plan.live()}
        for position, count, batch, pass_number in state["pulled"]:
            examples = self._pull(position, count, batch, pass_number)
            self._refetched += len(examples)
            self._held.update((at, example) for at, example in enumerate(examples, position) if at in live)
