"""The work of the workers: look up an example, or read it; measured, and with errors in a form that can be sent."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from time import monotonic, perf_counter, sleep
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_echo.cache.reads import CachedReads, Caching, Lookups
from lightning_echo.data.copies import copy_example
from lightning_echo.data.randomness import BATCH, EXAMPLE, NoSeeding, Seeding
from lightning_echo.pipeline.reads import Abandoned, ReadAhead, ReadPool
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.staged import LoadMany, Stages, add_decoding, examples_in, unchanged

# ---------------------------------------------------------------------- errors
# torch sends the class of an exception by its name. A class that is found under no name (made in a function; or a class of the
# script, in a process that did not start with the script) cannot be sent. Then the queue drops the exception: an epoch of a
# stream is cut without a word, and any other epoch waits forever.


def sendable(error: Exception) -> Exception:
    """Returns the exception. If its class cannot be sent, returns one of the nearest class that can, which names the first.

    >>> class NotThere(LookupError):
    ...     pass
    >>> NotThere.__qualname__ = "load.<locals>.NotThere"
    >>> type(sendable(NotThere("a.png"))).__name__, type(sendable(KeyError("a"))).__name__
    ('LookupError', 'KeyError')
    """
    kind = type(error)
    nearest: type[Exception] = next(base for base in kind.__mro__ if _is_found(base))
    if nearest is kind:
        return error
    message = f"{kind.__module__}.{kind.__qualname__}: {error}"
    try:
        return nearest(message)
    except Exception:  # a class of the user's, or of Python's, that wants other arguments than a message
        return RuntimeError(message)


def _is_found(kind: type) -> bool:
    """Whether another process finds a class by its name."""
    try:
        pickle.dumps(kind)
    except Exception:  # pickle's error depends on the reason, and on the version of Python
        return False
    return True


def raise_sendable(error: Exception) -> NoReturn:
    """Raises the exception again, in a worker as `sendable` returns it."""
    other = error if get_worker_info() is None else sendable(error)
    if other is error:
        raise error
    raise other from error


# A killed training breaks the connections over which its workers hand out tensors. ``multiprocessing`` prints a traceback then,
# in a plain loader's worker, too. It says nothing of the user's program, so a worker of ours does not print it.

_ORPHANED_SECONDS = (
    10.0  # after its connections have broken, the process of the training ends within this time, on a busy host, too
)
_BETWEEN_LOOKS_SECONDS = 0.005


def hide_end_of_training() -> None:
    """Lets this worker print no error of a connection that has broken because the process of the training has ended."""
    parent, show = os.getppid(), sys.excepthook

    def show_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ConnectionError | EOFError):
            until = monotonic() + _ORPHANED_SECONDS
            while os.getppid() == parent and monotonic() < until:
                sleep(_BETWEEN_LOOKS_SECONDS)
            if os.getppid() != parent:
                return
        show(kind, error, trace)

    sys.excepthook = show_others


class InitThatSaysWhy:
    """A ``worker_init_fn`` whose exception arrives in the main process. It runs where torch's worker has the user's data set."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        fetcher = getattr(getattr(info, "dataset", None), "__dict__", {}).get("_echo_fetcher")
        if fetcher is not None:  # an EchoDataset: the user's code may ask for the class of its own data set
            object.__setattr__(info, "dataset", fetcher.dataset)
        hide_end_of_training()
        try:
            if self._users is not None:
                self._users(worker)
        except Exception as error:
            raise_sendable(error)


def add_note(error: Exception, note: str) -> None:
    """Adds a note to an exception that names its example. Its type and message stay."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]} {note}", *error.args[1:])


# ---------------------------------------------------------------------- seconds
# The host's seconds, measured where the work is done, and sent together with the batches.
#
# * ``source`` is the work before the insertion point, once per fresh example.
# * ``rest`` is the work after it in the workers, once per use: augmentation, copies, lookups.
# * ``collate`` is the work of making a batch from examples, once per batch.
#
# If whole batches are reused, all three come before the insertion point, once per fresh batch.


class Report(NamedTuple):
    """The cost of a batch, sent with it. A named tuple, because ``pin_memory`` rebuilds tuples, but not dataclasses."""

    fresh: int = 0
    echoed: int = 0
    refetched: int = 0  # number of examples that were read again, see `EchoCounts`
    source: float = 0.0
    rest: float = 0.0
    collate: float = 0.0
    note: str = ""  # a warning for the user; mostly empty
    hits: int = 0  # number of fresh examples that the cache held
    misses: int = 0  # number of fresh examples that a cache did not hold
    received: int = 0  # number of hits that came from other nodes
    waited: float = 0.0  # seconds of `source` in which a worker waited for examples of other nodes
    in_flight: float = 0.0  # reads under way in the worker, on average since its last batch; 0 if threads read nothing there


@dataclass
class StageSeconds:
    """Seconds that workers have spent on the batches delivered so far on this rank, added up over workers.

    ``source`` was spent on ``examples`` (fresh ones, and those that were read again), ``rest`` and ``collate`` on ``batches``. If
    whole batches are reused, ``batches`` are those that were read.
    """

    source: float = 0.0
    rest: float = 0.0
    collate: float = 0.0
    examples: int = 0
    batches: int = 0
    in_flight: float = 0.0  # reads under way in the batch's worker, on average, added up over batches

    def __sub__(self, earlier: StageSeconds) -> StageSeconds:
        return StageSeconds(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


# ---------------------------------------------------------------------- dataset
# The batch sampler in the main process sends a `Request`. `LiveExamples` answers it with the examples of the batch. It reads an
# example at its first use, and keeps it for as long as the plan requires. For data that is read by index, the plan decides
# (``plan/plan.py``), and the request passes this on. After a resume, an example may be live but not held. Then `LiveExamples`
# reads it again, under the same seeds. So this can make training slower, but not wrong. If the cache of the node has an example
# in memory, it is not kept here a second time.
#
# `EchoDataset` takes the place of the user's data set in the inner ``DataLoader``. Attributes that are read from it or set on it
# are those of the user's data set. In a worker, ``get_worker_info().dataset`` is the user's data set itself. The stages are made
# at the first request of a process, from the data set as it is then.
#
# The cache keeps copies, which are made when the examples are read: a data set may use the memory of a returned example again, or
# return a small part of something large.
#
# Random numbers:
#
# * A batch has one seed if no example of it is used again.
# * Any other batch has one seed for the stage that runs for each use. If the data set is not split, each example also has a seed
#   for the stage that is reused, so that a resumed run can rebuild any live example. If the data set is split, that stage draws
#   no random numbers (``split/check.py``).

NO_LOOKUPS = Lookups()
_IN_CACHE = object()  # stands for a live example that the cache of the node has in memory, where it stays
_COPIED_TYPES = {torch.Tensor, np.ndarray, (np.bool_, np.number, np.object_), float, int, str, bytes}  # by default_collate


class RepeatedCall(NamedTuple):
    """A call of a data set that reads whole batches, to be repeated because some of its examples are live but not held."""

    first: int  # position of its first example
    indices: list[Any]  # of all its examples
    live: list[int]  # the live positions


class Request(NamedTuple):
    """A request to a worker for one batch."""

    number: int  # the batch's number in the plan, from which its seed is made
    positions: Sequence[int]  # of the examples in the fresh stream, the fresh ones first
    fresh: int  # how many of them are fresh
    indices: list[Any]  # the examples' indices in the user's data set
    stays_live: bytes  # one byte per example, 1 if it is still live after this batch: the worker keeps it
    forget: tuple[int, ...] = ()  # positions that are no longer live: the worker drops them without another use
    rebuild: tuple[RepeatedCall, ...] = ()  # calls to repeat for this batch
    ahead: tuple[Any, ...] = ()  # indices that this worker is going to read later, see ``pipeline/ahead.py``
    drop: tuple[Any, ...] = ()  # those that it was told before and is not going to read
    round: int = -1  # number of the round in which nodes exchange what is needed for this batch; -1: they exchange nothing


NOT_PLANNED = Request(-1, (), 0, [], b"")
"""Stands for a batch that could not be planned. It is answered by None twice, so that the batches before it are not lost."""


class HasLookups(Protocol):
    """Counts how often fresh examples were in a cache."""

    @property
    def lookups(self) -> Lookups:
        """The hits and misses so far."""


class LiveExamples:
    """Answers requests in one process.

    ``key`` is the seed of this rank's random numbers. ``caching`` is the cache through which examples are read; None: only live
    examples are held. ``is_seeded``: whether the global random states are seeded before examples are read. It is False in a
    thread next to the training, where nothing is drawn: the training draws from these states. ``reading``: what threads read
    ahead; None: nothing. ``counted``: what counts lookups where the data set itself has a cache, of another process.
    """

    def __init__(
        self,
        dataset: Any,
        make_stages: Callable[[Any], Stages],
        key: int,
        collate_fn: Any,
        caching: Caching | None = None,
        reading: ReadAhead | None = None,
        *,
        is_seeded: bool = True,
        counted: HasLookups | None = None,
    ) -> None:
        self.dataset, self._caching, self._is_seeded = dataset, caching, is_seeded
        self._counted: HasLookups | None = counted if caching is None else caching.store
        self._make_stages, self._key = make_stages, key
        self._collate_fn = collate_fn
        self._stages: Stages | None = None
        self._watched: WatchedStages | None = None  # the same, where the data set was split
        self._cached: CachedReads | None = None
        self._reading = reading
        self._pool: ReadPool | None = None
        self._held: dict[int, Any] = {}
        self._source_seconds = 0.0  # of the present batch

    def fetch(self, request: Request) -> tuple[Any, Report | None]:
        """Returns the examples of a batch, and its report without the seconds of collate. None twice for `NOT_PLANNED`.

        If no example is used again and the data set is not split, the examples are the result of its ``__getitems__``, in any
        form.
        """
        if request.number < 0:
            return None, None
        try:
            return self._answer(self._stages or self._begin(), request)
        except Abandoned as abandoned:
            raise abandoned.error from None

    def _answer(self, stages: Stages, request: Request) -> tuple[Any, Report]:
        started, self._source_seconds = perf_counter(), 0.0
        before = NO_LOOKUPS if self._counted is None else self._counted.lookups
        others = None if self._caching is None else self._caching.others
        if others is not None:
            others.begin(request.round)
        for position in request.forget:
            self._held.pop(position, None)
        if self._pool is not None:
            self._pool.begin(self._to_read(request), request.ahead, request.drop)
        if request.fresh == len(request.indices) and 1 not in request.stays_live:
            examples, refetched = self._read_once(stages, request), 0
        else:
            examples, refetched = self._reuse(stages, request)
        source, note = self._source_seconds, ""
        if self._watched is not None:
            note, self._watched.note = self._watched.note, ""
        rest = perf_counter() - started - source
        report = Report(request.fresh, len(request.indices) - request.fresh, refetched, source, rest, note=note)
        if self._pool is not None:
            report = report._replace(in_flight=self._pool.mean_in_flight(), note=note or self._pool.take_note())
        if self._counted is None:
            return examples, report
        now = self._counted.lookups
        if self._cached is not None:
            report = report._replace(note=report.note or self._cached.take_note())
        if others is not None:
            others.end()
            report = report._replace(received=others.received, waited=others.waited)
        return examples, report._replace(hits=now.hits - before.hits, misses=now.misses - before.misses)

    def _begin(self) -> Stages:
        """Makes the stages, at the first request: in a worker, ``worker_init_fn`` has run by then."""
        stages = at_cut = self._make_stages(self.dataset)
        add_decoding(stages)
        self._watched = stages if isinstance(stages, WatchedStages) else None
        if self._caching is not None:
            if self._watched is not None:
                self._watched.may_fail = False  # the examples in the cache were cut there
            self._cached = CachedReads(self._caching, self.dataset, stages)
            at_cut, stages = self._cached.held_stages, self._cached.stages
        if self._reading is not None:
            held = () if self._cached is None else (self._cached.holds,)
            self._pool = ReadPool(self._reading, self.dataset, at_cut, *held)
        self._stages = stages
        self._copies_uses = bool(stages.redone) or not copies_by_itself(self._collate_fn)
        self._seeding = Seeding(self.dataset, self._key) if self._is_seeded else NoSeeding()
        return stages

    def _to_read(self, request: Request) -> list[Any]:
        """Returns the indices that a batch reads: those of fresh examples, after those that are live but not held."""
        positions, indices, fresh = request.positions, request.indices, request.fresh
        if fresh == len(indices) or len(positions) < len(indices):  # the second: a whole batch has one position
            return indices
        not_held = [indices[i] for i in range(fresh, len(positions)) if positions[i] not in self._held]
        return [*not_held, *indices[:fresh]]

    def _read_once(self, stages: Stages, request: Request) -> Any:
        """Returns a batch with no example that is used again. It is read as the plain loader reads it, under one seed."""
        self._look_up(request.indices, are_fresh=True)
        self._seeding.seed(BATCH, request.number)
        if stages.load_many is not None:
            read = self._read_many(stages.load_many, request.indices)
            if stages.augment is unchanged:
                return read
            return self._augment(stages, request.indices, examples_in(read, request.indices))
        load, augment = stages.load, None if stages.augment is unchanged else stages.augment
        examples = []
        seconds, started = 0.0, perf_counter()
        try:
            for index in request.indices:
                example = load(index)
                if augment:
                    loaded = perf_counter()
                    example = augment(index, example)
                    seconds, started = seconds + loaded - started, perf_counter()
                examples.append(example)
        except Exception as error:
            add_note(error, f"(reading example {request.indices[len(examples)]!r} of the data set)")
            raise
        self._source_seconds += seconds if augment else perf_counter() - started
        return examples

    def _reuse(self, stages: Stages, request: Request) -> tuple[list[Any], int]:
        """Returns a batch with examples that are used again, and how many examples were read again for it."""
        held, positions, indices = self._held, request.positions, request.indices
        watched = self._watched if self._cached is None else None  # a cache watches its reads itself
        examples: list[Any] = [None] * len(positions)
        not_held: list[int] = []  # live, but held nowhere
        for i in range(request.fresh, len(positions)):  # echoes come first: their last uses make room for fresh examples
            stays = request.stays_live[i]
            if positions[i] not in held:
                not_held.append(i)
                continue
            example = held[positions[i]] if stays else held.pop(positions[i])
            examples[i] = self._use_of(indices[i], example, is_last=not stays)
        if watched is not None:
            watched.begin()
        loaded, refetched = self._load_not_held(stages, request, not_held)
        if watched is not None and watched.must_repeat():
            loaded, _ = self._load_not_held(stages, request, not_held)
        for i in chain(range(request.fresh), not_held):
            example = examples[i] = loaded.pop(positions[i])
            if request.stays_live[i]:
                self._hold(positions[i], indices[i], example)
        for first, call, _ in request.rebuild if loaded else ():
            for position, index in enumerate(call, first):
                if position in loaded:
                    self._hold(position, index, loaded.pop(position))
        if watched is not None:
            watched.end()
        self._seeding.seed(BATCH, request.number)
        return examples if stages.augment is unchanged else self._augment(stages, indices, examples), refetched

    def _hold(self, position: int, index: Any, example: Any) -> None:
        """Holds a copy of an example, since the data set may use its memory again. If the cache has it in memory, notes that."""
        self._held[position] = self._kept(index, example)

    def _kept(self, index: Any, example: Any) -> Any:
        is_cached = self._cached is not None and self._cached.has_in_memory(index)
        return _IN_CACHE if is_cached else copy_example(example)

    def _use_of(self, index: Any, kept: Any, *, is_last: bool = False) -> Any:
        """Returns an example for one use of what `_kept` has returned."""
        if kept is _IN_CACHE:
            assert self._cached is not None
            return self._cached.again(index)
        return kept if is_last or not self._copies_uses else copy_example(kept)

    def _load_not_held(self, stages: Stages, request: Request, not_held: list[int]) -> tuple[dict[int, Any], int]:
        """Returns the examples of a batch that are not held, by position, and how many of them were read again."""
        loaded: dict[int, Any] = {}
        refetched = 0
        for first, indices, live in request.rebuild:
            self._look_up(indices, are_fresh=False)
            again = self._load_call(stages, first, indices)
            # Copies, since the data set may read the next batch into the same memory.
            loaded.update((position, copy_example(again[position - first])) for position in live)
            refetched += len(indices)
        for i in not_held:
            if request.positions[i] not in loaded:
                self._look_up([request.indices[i]], are_fresh=False)
                example = self._load(stages, request.positions[i], request.indices[i])
                # The next lookup may read into the same memory.
                loaded[request.positions[i]] = example if self._cached is None else copy_example(example)
                refetched += 1
        fresh = request.positions[: request.fresh]
        self._look_up(request.indices[: request.fresh], are_fresh=True)
        if stages.load_many is not None and request.fresh:
            loaded.update(zip(fresh, self._load_call(stages, fresh[0], request.indices[: request.fresh]), strict=True))
        else:
            for position, index in zip(fresh, request.indices, strict=False):
                loaded[position] = self._load(stages, position, index)
        return loaded, refetched

    def _look_up(self, indices: list[Any], *, are_fresh: bool) -> None:
        """Looks up in the cache, if there is one, the examples that are loaded next."""
        if self._cached is not None and indices:
            started = perf_counter()
            try:
                self._cached.look_up(indices, are_fresh=are_fresh)
            except Exception as error:
                if reading := self._cached.reading:
                    add_note(error, f"({reading})")
                raise
            self._source_seconds += perf_counter() - started

    def _load(self, stages: Stages, position: int, index: Any) -> Any:
        started = perf_counter()
        if self._watched is None:  # so that the example is the same when it is read again; a split data set draws nothing here
            self._seeding.seed(EXAMPLE, position)
        try:
            example = stages.load(index)
        except Exception as error:
            add_note(error, f"(reading example {index!r} of the data set)")
            raise
        self._source_seconds += perf_counter() - started
        return example

    def _load_call(self, stages: Stages, position: int, indices: list[Any]) -> list[Any]:
        """Returns examples that are read in one call. ``position`` is that of the first."""
        assert stages.load_many is not None  # only a data set that reads whole batches has calls to repeat
        if self._watched is None:  # as in `_load`
            self._seeding.seed(EXAMPLE, position)
        return examples_in(self._read_many(stages.load_many, indices), indices)

    def _read_many(self, load_many: LoadMany, indices: list[Any]) -> Any:
        started = perf_counter()
        try:
            read = load_many(indices)
        except Exception as error:
            add_note(error, f"(reading examples {indices!r} of the data set in one call)")
            raise
        self._source_seconds += perf_counter() - started
        return read

    def _augment(self, stages: Stages, indices: list[Any], examples: list[Any]) -> list[Any]:
        result: list[Any] = []
        try:
            for index, example in zip(indices, examples, strict=True):
                result.append(stages.augment(index, example))
        except Exception as error:
            add_note(error, f"({stages.redoing} example {indices[len(result)]!r} of the data set)")
            raise
        return result


class Fetcher(Protocol):
    """Answers requests in one process: an `LiveExamples` or a `StreamEcho`. ``dataset`` is the user's."""

    dataset: Any

    def fetch(self, request: Any) -> tuple[Any, ...]:
        """Returns the examples of a batch (None: there is no batch), its `Report`, and further parts that are sent with it."""


class EchoDataset:
    """The data set of the inner ``DataLoader``. To all other code it looks like the user's own."""

    _echo_fetcher: Fetcher

    def __init__(self, fetcher: Fetcher) -> None:
        self.__dict__["_echo_fetcher"] = fetcher

    def __getitems__(self, request: Any) -> tuple[Any, ...]:
        try:
            return self._echo_fetcher.fetch(request)
        except StopIteration as error:  # it must not be passed on, because it would silently end the epoch
            raise RuntimeError("the data set raised StopIteration while an example was read") from error
        except Exception as error:
            raise_sendable(error)

    def __getitem__(self, index: Any) -> Any:
        return self._echo_fetcher.dataset[index]

    def __len__(self) -> int:
        return len(self._echo_fetcher.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_echo_fetcher" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # it is not set yet during unpickling
        return getattr(self._echo_fetcher.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._echo_fetcher.dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return EchoDataset, (self._echo_fetcher,)


class EchoCollate:
    """Calls the user's collate function, unless there are no examples. Passes everything else that was fetched on."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: tuple[Any, ...]) -> tuple[Any, ...]:
        examples, report, *beside = fetched
        if examples is None:
            return None, report, *beside
        started = perf_counter()
        try:
            batch = self._collate_fn(examples)
        except Exception as error:
            raise_sendable(error)
        return batch, report._replace(collate=perf_counter() - started), *beside


def copies_by_itself(collate_fn: Any) -> bool:
    """Returns whether a collate function is known to copy its input, so that an edit of the batch changes no example."""
    return collate_fn is default_collate and default_collate_fn_map.keys() <= _COPIED_TYPES
