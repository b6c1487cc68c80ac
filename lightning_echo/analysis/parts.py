"""The parts of a loader's work, each run alone: the files that it reads, its transforms, its stages."""

from __future__ import annotations

import os
import pickle
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_echo.analysis.measured import ProcessorTime, Spread
from lightning_echo.analysis.prefetch import period_of
from lightning_echo.cache.arena import Arena
from lightning_echo.cache.reads import ExampleStore
from lightning_echo.data.copies import copy_example, nbytes
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.pipeline.choice import choose
from lightning_echo.pipeline.kinds import Indexed, Kind, OwnBatches, kind_of
from lightning_echo.pipeline.pipelines import Choice
from lightning_echo.pipeline.reads import BusyTime
from lightning_echo.pipeline.worker import EchoDataset, InitThatSaysWhy
from lightning_echo.split.prove import Split, find_split, make_stages
from lightning_echo.split.reading import ReadPart, find_part
from lightning_echo.split.staged import Stages, batched

# ---------------------------------------------------------------------- files
# The files that workers read, and how to make the next read come from the storage again.
#
# ``posix_fadvise(DONTNEED)`` drops a file's pages from the page cache, without root. A file that Python does not open (but a
# database, or a C library as a memory map) is not noticed here. A network file system may have its own cache.

_LARGE_BYTES = 2**24
_NOT_DATA = ("/proc/", "/sys/", "/dev/", os.path.join(sys.prefix, ""), os.path.join(sys.base_prefix, "lib", ""))


class OpenedFiles:
    """Notes which regular files this process opens for reading. Use it only in a worker that ends with the phase.

    An audit hook cannot be removed, so it must not be set in a process that continues afterwards.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        sys.addaudithook(self._note)

    def take(self) -> list[str]:
        paths, self._paths = self._paths, {}
        return [path for path in paths if _is_data(path)]

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(args[0], str | bytes | os.PathLike):
            return
        mode, flags = args[1], args[2]
        if isinstance(mode, str):
            reads = not set(mode) & set("wax+")
        else:
            reads = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) == 0
        if reads:
            self._paths[os.path.abspath(os.fsdecode(args[0]))] = None


def drop_pages(paths: Iterable[str]) -> int:
    """Drops the files' pages from the page cache. Returns the number of files dropped; 0 if the system cannot do it."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    dropped = 0
    for path in paths:
        try:
            with open(path, "rb", buffering=0) as file:
                os.fsync(file)  # pages that are not written yet would stay in memory; a file that was only read has none
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:  # the file is gone, may no longer be read, or its file system cannot drop pages
            continue
        dropped += 1
    return dropped


def hold_data(paths: Sequence[str], batches: int) -> bool:
    """Whether these files hold the data set, not only labels or settings: a file for each batch, or large files."""
    return len(paths) >= batches or sum(map(_size_of, paths)) >= _LARGE_BYTES


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # the file is gone
        return 0


def _is_data(path: str) -> bool:
    """Whether the path is a regular file, and not one of Python's own."""
    if path.endswith((".py", ".pyc", ".so")) or path.startswith(_NOT_DATA):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


# ---------------------------------------------------------------------- stopwatch


class Spent(NamedTuple):
    """The wall time of some work, its processor time, and how long its thread waited for a processor."""

    seconds: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0

    @property
    def undelayed(self) -> float:
        """The wall time without the waiting for a processor.

        The clocks are read one after the other, and a thread may have to wait just then. So the difference may be less than the
        processor time, which it never is.
        """
        return min(self.seconds, max(self.cpu, self.seconds - self.queued))

    def plus(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.cpu + other.cpu, self.queued + other.queued)


def mean_of(spent: Sequence[Spent], per: float) -> ProcessorTime:
    """Returns the mean of what batches spent, per example if ``per`` is the batch size."""
    cpu, undelayed = fmean(each.cpu for each in spent), fmean(each.undelayed for each in spent)
    return ProcessorTime(max(0.0, cpu / per), max(0.0, undelayed / per))


class StopWatch:
    """Measures the work of one thread. All threads of the process count in its processor time."""

    def __init__(self) -> None:
        self._busy = BusyTime()
        weakref.finalize(self, self._busy.close)

    def begin(self) -> Spent:
        """Returns a moment, for `since`."""
        queued, cpu = self._busy.queued_seconds(), time.process_time()
        return Spent(time.perf_counter(), cpu, queued)

    def since(self, moment: Spent) -> Spent:
        seconds, cpu = time.perf_counter() - moment.seconds, time.process_time() - moment.cpu
        return Spent(seconds, cpu, self._busy.queued_seconds() - moment.queued)


# ---------------------------------------------------------------------- transforms
# Times each transform in a ``Compose``: its members are replaced by timed ones, in a worker's own copy of the data set.
#
# A ``Compose`` is found by the name of its class, in the attributes of the data set. This covers both versions of torchvision,
# and others that hold their members in ``transforms``.

_DEPTH = 8  # largest depth of objects in objects
_MOST_MEMBERS = 64  # an object with more members is not searched


class TimedTransforms:
    """Times the transforms of a data set. It changes the data set, so use it only in a worker."""

    def __init__(self, dataset: Any) -> None:
        self._spent: dict[str, Spent] = {}
        self._watch = StopWatch()
        for compose in list(_composes(dataset, set(), _DEPTH)):
            members = [self._timed(member) for member in compose.transforms]
            compose.transforms = type(compose.transforms)(members)

    def take(self) -> dict[str, Spent]:
        """Returns what each transform has spent since the last call, by its name, in the order of the pipeline."""
        taken = dict(self._spent)
        self._spent.update(dict.fromkeys(taken, Spent()))
        return taken

    def _timed(self, transform: Any) -> Any:
        if _is_compose(transform):
            return transform  # its members are timed instead
        named = transform if hasattr(transform, "__name__") else type(transform)
        name = base = str(named.__name__)
        number = 1
        while name in self._spent:  # a second transform of this name
            number += 1
            name = f"{base} ({number})"
        self._spent[name] = Spent()
        return _Timed(transform, name, self._spent, self._watch)


class _Timed:
    def __init__(self, transform: Any, name: str, spent: dict[str, Spent], watch: StopWatch) -> None:
        self._transform, self._name, self._spent, self._watch = transform, name, spent, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = self._watch.begin()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self._spent[self._name] = self._spent[self._name].plus(self._watch.since(begin))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def _composes(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yields each ``Compose`` that a value refers to, outer ones first."""
    if depth < 0 or id(value) in seen or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return
    seen.add(id(value))
    if _is_compose(value):
        yield value
    inside = value if isinstance(value, dict | list | tuple) else getattr(value, "__dict__", {})
    members = list(inside.values() if isinstance(inside, dict) else inside)
    if len(members) <= _MOST_MEMBERS:
        for each in members:
            yield from _composes(each, seen, depth - 1)


def _is_compose(value: Any) -> bool:
    named = any(kind.__name__ == "Compose" for kind in type(value).__mro__)
    return named and isinstance(getattr(value, "transforms", None), list | tuple)


# ---------------------------------------------------------------------- parts
# The parts of a loader's work that can run alone: those that data echoing cuts a data set into (split/prove.py).
#
# A worker calls a `Part` once, with its own data set, and gets `Halves`: the first half of a batch's work (indices -> values)
# and, if it is timed separately, the second half (indices and these values -> examples).

_MOST_CACHED_BYTES = 2**30
_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError)

FirstHalf = Callable[[list[Any]], list[Any]]
SecondHalf = Callable[[list[Any], list[Any]], list[Any]]
MakeStages = Callable[[Any], Stages]


class Halves(NamedTuple):
    first: FirstHalf
    second: SecondHalf | None = None


Part = Callable[[Any], Halves]


class Cuts(NamedTuple):
    """What makes the stages of each possible cut of a data set (None: no such cut), and the insertion points, earliest first.

    ``reading`` is what threads may read ahead, or why nothing. ``until`` is where the examples are cut that they read; None: they
    are read whole.
    """

    after_reading: MakeStages | None
    before_augmenting: MakeStages | None
    points: tuple[str, ...]
    reading: ReadPart | str = ""
    until: Split | None = None


def whole(dataset: Any) -> Halves:
    """Returns the part that does all of the loader's work for examples."""
    return Halves(batched(dataset) or (lambda indices: [dataset[index] for index in indices]))


def both_halves(make_stages: MakeStages, dataset: Any) -> Halves:
    """Returns the part that does everything, divided at a cut: before it and after it."""
    stages = make_stages(dataset)
    return Halves(_load_many(stages), lambda indices, items: list(map(stages.augment, indices, items)))


def first_half(make_stages: MakeStages, dataset: Any) -> Halves:
    """Returns the part before a cut alone."""
    return Halves(_load_many(make_stages(dataset)))


def second_half(make_stages: MakeStages, items: Mapping[Any, Any], dataset: Any) -> Halves:
    """Returns the part after a cut alone. ``items`` has results of the part before it, by index; a missing item is loaded."""
    stages = make_stages(dataset)

    def prepare(index: Any) -> Any:
        return stages.augment(index, copy_example(items[index]) if index in items else stages.load(index))

    return Halves(lambda indices: list(map(prepare, indices)))


def in_threads(part: ReadPart, until: Split | None, threads: int, dataset: Any) -> Halves:
    """Returns the part that reads ahead: so many threads read the examples of a batch, and what they read is dropped."""
    make, own = part.make(dataset, until).read, threading.local()
    begin = torch.set_num_threads if get_worker_info() is not None else int  # it counts for each thread by itself
    pool = ThreadPoolExecutor(threads, initializer=begin, initargs=(1,))

    def read(index: Any) -> None:
        if not hasattr(own, "load"):
            own.load = make()
        own.load(index)

    def read_all(indices: list[Any]) -> list[Any]:
        for _ in pool.map(read, indices):
            pass
        return []

    return Halves(read_all)


class InCache(NamedTuple):
    """The cost of an example in a cache: its bytes, and the seconds of looking it up."""

    bytes: float
    hit_seconds: float


def in_cache(cuts_to_hold: Mapping[str, MakeStages], dataset: Any) -> Halves:
    """Returns the part that puts examples into a cache, and yields what each costs there, by the form in which it is held."""
    loads = {hold: _load_many(make_stages(dataset)) for hold, make_stages in cuts_to_hold.items()}

    def put_and_get(indices: list[Any]) -> list[Any]:
        found = {hold: _put_and_get(load(indices)) for hold, load in loads.items()}
        return [{hold: costs[number] for hold, costs in found.items() if costs} for number in range(len(indices))]

    return Halves(put_and_get)


def _put_and_get(examples: list[Any]) -> list[InCache]:
    arena, costs = Arena.create(keys=len(examples), budget_bytes=_MOST_CACHED_BYTES), list[InCache]()
    store = ExampleStore(arena)
    for key, example in enumerate(examples):
        before = arena.counts.bytes
        try:
            is_held = store.put(key, example)
        except _NOT_PICKLED:
            return []
        if not is_held:
            return []
        begin = time.perf_counter()
        store.get(key)
        costs.append(InCache(arena.counts.bytes - before, time.perf_counter() - begin))
    return costs


def _load_many(stages: Stages) -> FirstHalf:
    return stages.load_many or (lambda indices: list(map(stages.load, indices)))


def cuts(loader: DataLoader[Any], asked: int | str = 1) -> Cuts:
    """Returns the possible cuts of the loader's data set. Examples are read in another process.

    ``asked`` is the number of reads in flight that the user asks for, or ``"auto"``; 1: what threads may read is not looked at.
    """
    kind = kind_of(loader)
    found = read_elsewhere(loader, _cuts_there, loader, asked) if isinstance(kind, Indexed) else _cuts_there(None, loader)
    if not isinstance(found, NotRead):
        return found
    possible = points_from(Needs.batches if isinstance(kind, OwnBatches) else Needs.examples)
    return Cuts(None, None, tuple(point.value for point in possible))


def _cuts_there(dataset: Any, loader: DataLoader[Any], asked: int | str = 1) -> Cuts:
    kind = kind_of(loader)
    chosen = choose(kind, InsertionPoint.auto)
    found = _stages_there(kind, chosen)
    if asked == 1 or not isinstance(kind, Indexed):
        return found
    try:
        reading = find_part(dataset, kind.readable_indices, [chosen.split], asked, kind.num_workers)
    except Exception as error:  # of the user's code; the first run will show it
        reading = f"reading an example raised {type(error).__name__}: {error}"
    return found._replace(reading=reading, until=chosen.split)


def _stages_there(kind: Kind, chosen: Choice) -> Cuts:
    needs = chosen.point.properties.needs
    points = tuple(point.value for point in points_from(needs))
    if isinstance(kind, OwnBatches):  # whole batches are echoed, and yet each example is read by its index
        return Cuts(_split(kind, raw=True), _split(kind, raw=False), points)
    before_augmenting = chosen.make_stages if needs is Needs.split else None
    try:
        of_raw_items = choose(kind, earliest(Needs.raw_items))
    except Exception:  # it cannot be cut after reading; or it cannot be read, which the first run will show
        return Cuts(None, before_augmenting, points)
    return Cuts(of_raw_items.make_stages, before_augmenting, (of_raw_items.point.value, *points))


def _split(kind: Kind, *, raw: bool) -> MakeStages | None:
    """Returns the maker of the stages of a cut, wherever the loader is echoed; None if there is no such cut."""
    try:
        split = find_split(kind.loader.dataset, kind.readable_indices, raw=raw)
    except Exception:  # it is refused; or the data set cannot be read by the integers that it was tried with
        return None
    return partial(make_stages, conventions=split.conventions, raw=raw)


# ---------------------------------------------------------------------- part runs
# Runs a loader alone, one part of its work at a time, to measure its workers' time for a batch.
#
# Each run of a part is a ``DataLoader`` with the user's options. Its data set does that part for the examples of a batch, and
# measures the time. Nothing here draws from the random numbers of this process.

_MOST_OUTPUT_BYTES = 2**30

Value = TypeVar("Value")


class BatchSeconds(NamedTuple):
    """What one worker spent on each part of a batch; nothing on ``second`` without that half."""

    first: Spent
    second: Spent
    collate: Spent

    @property
    def all(self) -> Spent:
        return self.first.plus(self.second).plus(self.collate)


class Seen(NamedTuple):
    """The files that a worker opened for a batch, and what each transform spent; empty if the worker does not observe."""

    files: list[str]
    transforms: dict[str, Spent]


@dataclass
class PartRun:
    """The measures of a run of a part, batch by batch; ``files`` are in the order of opening; ``outputs``, if asked for."""

    batches: list[BatchSeconds] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    transforms: list[dict[str, Spent]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def of(self, name: str, per: float) -> Spread:
        """Returns the seconds of a field of `BatchSeconds`: per example if ``per`` is the batch size, per batch if it is 1."""
        seconds = [getattr(batch, name).seconds / per for batch in counted(self.batches)]
        return Spread.of(seconds, period_of(self.batch_seconds, len(seconds)))

    def processor(self, name: str, per: float) -> ProcessorTime:
        """Returns the mean processor time of a field of `BatchSeconds`, as `of` returns the wall time."""
        return mean_of([getattr(batch, name) for batch in counted(self.batches)], per)

    @property
    def batch_seconds(self) -> list[float]:
        """The seconds of each batch that counts."""
        return [batch.all.seconds for batch in counted(self.batches)]

    @property
    def cpu_seconds(self) -> float:
        return fmean(batch.all.cpu for batch in counted(self.batches))

    @property
    def cpu_share(self) -> float:
        spent = fmean(self.batch_seconds)
        return min(1.0, self.cpu_seconds / spent) if spent else 0.0


def fewest_batches(workers: int) -> int:
    """Returns the number of batches that a run needs: the first batches of all workers arrive at the same time.

    >>> fewest_batches(0), fewest_batches(1), fewest_batches(4)
    (2, 3, 9)
    """
    return max(2, 2 * workers + 1)


def counted(batches: Sequence[Value]) -> Sequence[Value]:
    """Returns the batches that count: all but the first tenth, in which the workers start."""
    return batches[max(1, len(batches) // 10) :] or batches


def run_part(
    loader: DataLoader[Any],
    part: Part,
    batches: Sequence[list[Any]],
    *,
    collates: bool = True,
    keeps_outputs: bool = False,
    observes: bool = False,
    workers: int | None = None,
    most_seconds: float = float("inf"),
    look: Callable[[], None] = lambda: None,
) -> PartRun:
    """Runs one part over batches of indices, with the user's loader's options. Errors of the data set pass through.

    With ``observes``, workers note which files they open and how long each transform takes. The run ends with the first batch
    after ``most_seconds``, or when the outputs that it keeps take a gibibyte, but not before `fewest_batches`. ``look`` is called
    after each batch, while the workers are alive.
    """
    run, files, output_bytes = PartRun(), dict[str, None](), 0
    begin = time.perf_counter()
    for batch, spent, seen in iterate(loader, part, batches, collates=collates, observes=observes, workers=workers):
        look()
        run.batches.append(spent)
        files.update(dict.fromkeys(seen.files))
        run.transforms.append(seen.transforms)
        if keeps_outputs:
            run.outputs.append(batch if collates else pickle.loads(batch))
            output_bytes += nbytes(batch)
        is_over = time.perf_counter() - begin > most_seconds or output_bytes > _MOST_OUTPUT_BYTES
        if is_over and len(run.batches) >= fewest_batches(loader.num_workers if workers is None else workers):
            break
    run.files = list(files)
    return run


def iterate(
    loader: DataLoader[Any],
    part: Part,
    batches: Sequence[list[Any]],
    *,
    collates: bool = True,
    observes: bool = False,
    workers: int | None = None,
    **changes: Any,
) -> Iterator[tuple[Any, BatchSeconds, Seen]]:
    """Yields each batch, with the time spent on it. ``changes`` are options of the ``DataLoader`` in place of the user's."""
    number = loader.num_workers if workers is None else workers
    probed: Any = EchoDataset(_Probe(loader.dataset, part, observes))  # to a worker_init_fn, it looks like the user's data set
    collate: Any = partial(_collated, loader.collate_fn if collates else pickle.dumps)  # bytes: a tensor would be a shared file
    options = {**options_of(loader, number), **changes}
    return iter(DataLoader(probed, batch_sampler=batches, collate_fn=collate, generator=torch.Generator(), **options))


def options_of(loader: DataLoader[Any], workers: int) -> dict[str, Any]:
    """Returns the options of the user's loader for this number of workers, without those for order and batches."""
    init = InitThatSaysWhy(loader.worker_init_fn)
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": loader.pin_memory, "worker_init_fn": init}
    if workers:
        options |= {"timeout": loader.timeout, "multiprocessing_context": loader.multiprocessing_context}
        options["prefetch_factor"] = loader.prefetch_factor or 2
    return options


class Batches:
    """A loader for ``Trainer.fit`` that yields the same batches in each epoch, with the user's loader's options.

    ``changes`` are options in place of the user's.
    """

    def __init__(
        self, loader: DataLoader[Any], part: Part, indices: Sequence[list[Any]], workers: int | None = None, **changes: Any
    ) -> None:
        self._loader, self.part, self.indices, self._workers, self._changes = loader, part, indices, workers, changes

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        run = iterate(self._loader, self.part, self.indices, workers=self._workers, **self._changes)
        return (batch for batch, _, _ in run)


class FirstBatches:
    """The first batches of a loader, in each epoch: `Batches` for a loader that cannot be run in parts."""

    def __init__(self, loader: DataLoader[Any], steps: int) -> None:
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._steps)


class _Probe:
    """Does a part in a worker, and times it. With ``observes``, it notes opened files and the seconds of transforms."""

    def __init__(self, dataset: Any, part: Part, observes: bool) -> None:
        self.dataset = dataset
        self._part, self._observes = part, observes
        self._halves: Halves | None = None
        self._opened: OpenedFiles | None = None
        self._timed: TimedTransforms | None = None
        self._watch: StopWatch | None = None

    def fetch(self, indices: list[Any]) -> tuple[list[Any], BatchSeconds, Seen]:
        if self._halves is None or self._watch is None:
            if get_worker_info() is not None:
                # Does the imports of the first tensor to be sent (0.3 s with torch 2.4). Otherwise a thread does them, during
                # the second batch.
                ForkingPickler.dumps(torch.empty(0))
                if self._observes:
                    self._opened, self._timed = OpenedFiles(), TimedTransforms(self.dataset)
            self._halves, self._watch = self._part(self.dataset), StopWatch()
        halves, watch = self._halves, self._watch
        begin = watch.begin()
        examples = halves.first(indices)
        first, second = watch.since(begin), Spent()
        if halves.second is not None:
            begin = watch.begin()
            examples = halves.second(indices, examples)
            second = watch.since(begin)
        spent = BatchSeconds(first, second, Spent())
        if self._opened is None or self._timed is None:
            return examples, spent, Seen([], {})
        return examples, spent, Seen(self._opened.take(), self._timed.take())


def _collated(collate_fn: Callable[[list[Any]], Any], fetched: tuple[list[Any], BatchSeconds, Seen]) -> tuple[Any, ...]:
    """Calls the user's collate function, and times it. Plain tuples travel next to the batch."""
    examples, spent, seen = fetched
    watch = StopWatch()
    begin = watch.begin()
    batch = collate_fn(examples)
    return batch, spent._replace(collate=watch.since(begin)), seen
