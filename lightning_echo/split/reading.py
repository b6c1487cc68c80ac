"""What of a data set threads may run ahead of time, and how an example is made of it when its turn comes.

A worker that reads one example after the other waits for each of them. Threads can wait for many at once. But the threads of a
process take turns in computing, so threads should only wait::

    =========  =====================================================  =========================================================
    `Part`     threads run                                            the worker's own thread runs
    =========  =====================================================  =========================================================
    ``raw``    ``read(index)``, or read a torchvision folder's file   decoding, and all that follows
    ``files``  read the example's file, so that the system caches it  everything, as without threads
    ``whole``  ``load`` or ``__getitem__``                            augmentation, if the data set is split
    =========  =====================================================  =========================================================

Only two of these run nothing of the user's code in a thread, and so may be used without being asked for: the files of
torchvision's own folders, and ``files``. All others need a number of reads from the user, or a data set that says
``reads_concurrently = True``.

`find_part` tries it on examples, in a process that ends afterwards: threads must read the same as one thread alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_echo.data.copies import copy_example, nbytes
from lightning_echo.data.difference import difference
from lightning_echo.data.randomness import preserved_random_states, quick_states
from lightning_echo.split.describe import (
    Convention,
    Description,
    Role,
    SplitRefused,
    data_sets_inside,
    describe,
    leaves,
    pass_on,
    pruned,
)
from lightning_echo.split.prove import (
    Split,
    check_deterministic,
    find_split,
    has_length,
    make_decoding,
    make_stages,
    prove_decoding,
    seeded,
    seeded_copy,
)
from lightning_echo.split.staged import AugmentedDataset, Load, StagedDataset, batched, read_batch, sample_places

SAYS_SO = "reads_concurrently"
"""A data set whose attribute of this name is True says that threads may read its examples at the same time."""

AUTO_IN_FLIGHT = "auto"
MOST_IN_FLIGHT = 4096

# Where data sets hold the paths of their files: one entry for each example, a path or a sequence that begins with one.
_FILE_LISTS = ("samples", "imgs", "images", "image_paths", "paths", "files", "_image_files", "_images")
_TRYING_THREADS, _TRYING_SECONDS = 8, 0.2
_PIECE_BYTES, _MOST_TIMES_TRIED = 2**18, 4  # of a file, so many times the largest that was tried is read at most
# Others may run code of the user's, such as a path that downloads its file.
_PLAIN_LISTS, _PLAIN_PATHS = (list, tuple, range, np.ndarray, torch.Tensor), (str, np.str_, type(Path()))
_BETWEEN_THREADS_SECONDS = 1e-5  # so short that two threads that disturb each other are likely to do so


class Part(str, Enum):
    """What threads run ahead of time; see above."""

    raw = "reading"
    files = "reading files into the page cache"
    whole = "loading"


class Reads(NamedTuple):
    """The functions that a worker runs for one data set."""

    read: Callable[[], Load]  # makes the function that a thread calls with an index. Each thread has one of its own
    finish: Callable[[Any, Any], Any] | None  # turns an index and what was read into the example. None: it is read by itself


@dataclass(frozen=True)
class ReadPart:
    """What threads may read of a data set. It consists of plain values, so that it can be sent to workers.

    ``is_ours``: whether nothing of the user's code runs in a thread. ``item_bytes``: memory of the largest item that was tried.
    ``raw`` is where the data set is cut after reading, for `Part.raw`.
    """

    part: Part
    is_ours: bool
    item_bytes: int
    raw: Split | None = None

    @property
    def takes_memory(self) -> bool:
        """Whether what is read ahead is kept in the worker's own memory."""
        return self.part is not Part.files

    def make(self, dataset: Any, until: Split | None) -> Reads:
        """Returns the functions for ``dataset``, without reading. ``until``: where an example is cut; None: it is read whole."""
        if self.part is Part.files:
            return Reads(lambda: _file_reader(dataset, self.item_bytes * _MOST_TIMES_TRIED), None)
        if self.part is Part.whole:
            if until is None:
                return Reads(lambda: dataset.__getitem__, _as_it_is)
            # Each thread has stages of its own: a check of the split notes the calls of one read at a time.
            return Reads(lambda: make_stages(dataset, until.conventions, raw=until.raw).load, _as_it_is)
        assert self.raw is not None
        if until is None:
            made = make_stages(dataset, self.raw.conventions, raw=True)
        elif until.raw:
            made = make_stages(dataset, until.conventions, raw=True)
            return Reads(lambda: made.load, _as_it_is)
        else:
            made = make_decoding(dataset, self.raw, until)
        return Reads(lambda: made.load, made.augment)

    def raise_for_file(self, dataset: Any, index: Any) -> None:
        """Raises the error of a damaged file of a torchvision folder as its own loader raises it; nothing if there is none."""
        if (find := file_of(dataset)) is not None:
            sys.modules["torchvision.datasets.folder"].default_loader(find(index))


def _as_it_is(index: Any, item: Any) -> Any:
    return item


def find_part(
    dataset: Any, indices: Sequence[Any] | None, cuts: Sequence[Split | None], asked: int | str, workers: int
) -> ReadPart | str:
    """Returns what threads may read, or why nothing. It reads examples: call it in a process that ends afterwards.

    ``cuts`` are those at which examples may be asked for (None: whole). ``asked`` is the user's number of reads, or ``"auto"``.
    """
    description = describe(dataset)
    name, says_so = _name_of(description), _says_so(dataset)
    passes_on = _passes_on_safely(dataset, description)
    if batched(dataset) is not None:
        return f"{name} has a __getitems__ of its own, which reads the examples of a batch in one call"
    may_run_users_code = asked != AUTO_IN_FLIGHT or says_so
    why_not_raw = _why_not_raw(description, dataset, cuts)
    try:
        if not why_not_raw:
            parts = leaves(pruned(description, raw=True))
            is_ours = passes_on and all(Convention.folder in leaf.raw_conventions[:1] for leaf in parts)
            if not (is_ours or may_run_users_code):
                if None in cuts:  # any other cut is proved: what is loaded draws no random numbers
                    _raw_split(dataset, indices, cuts)
                return (
                    f"read of {name} is code of the user's: set {SAYS_SO} = True in its class, or give a number of "
                    "reads_in_flight, if threads may run it at the same time"
                )
            return _raw_part(dataset, indices, cuts, is_ours=is_ours)
        if not workers:
            return f"{why_not_raw}; with num_workers=0, only such reading may run in threads: set num_workers"
        if not says_so and passes_on and (largest := _largest_file(dataset, indices)):
            return ReadPart(Part.files, is_ours=True, item_bytes=largest)
        if None in cuts:
            _check_drawn_nothing(dataset, indices)
        if not may_run_users_code:
            return f"{why_not_raw}. If threads may load its examples at the same time, set {SAYS_SO} = True in its class"
        return _whole_part(dataset, indices, cuts)
    except SplitRefused as refused:
        return refused.reason


def may_be_on(dataset: Any) -> bool:
    """Returns whether ``"auto"`` may find something that threads may read. It reads nothing."""
    if _says_so(dataset):
        return True
    description = describe(dataset)
    return not description.is_stream and (not _why_not_raw(description, dataset, []) or file_of(dataset) is not None)


def _says_so(dataset: Any) -> bool:
    """Returns whether all data sets that read examples say that threads may do so at the same time."""
    if getattr(dataset, SAYS_SO, False) is True:
        return True
    description = describe(dataset)
    inside = data_sets_inside(dataset, description.role)
    return bool(inside) and all(map(_says_so, inside))


def _name_of(description: Description) -> str:
    return leaves(description)[0].name


def _passes_on_safely(dataset: Any, description: Description) -> bool:
    """Whether no code of the user's runs where an index is passed on to a data set inside."""
    if description.role is Role.subset and type(dataset.indices) not in _PLAIN_LISTS:
        return False
    inside = zip(data_sets_inside(dataset, description.role), description.inside, strict=False)
    return all(_passes_on_safely(held, part) for held, part in inside)


def _why_not_raw(description: Description, dataset: Any, cuts: Sequence[Split | None]) -> str:
    """Returns why reading cannot be told apart from the rest; empty if it can."""
    for leaf in leaves(pruned(description, raw=True)):
        if not leaf.raw_conventions:
            return f"{leaf.name} has no read(index) and decode(raw), and {leaf.why_no_folder}"
    if None in cuts and not all(_is_read_by_stages(each) for each in _readers(dataset, pruned(description, raw=True))):
        return (
            f"whole examples are asked for, and __getitem__ of {_name_of(description)} may do something else than its read, "
            "decode and augment"
        )
    return ""


def _readers(dataset: Any, description: Description) -> Iterator[Any]:
    inside = list(zip(data_sets_inside(dataset, description.role), description.inside, strict=False))
    if not inside:
        yield dataset
    for held, part in inside:
        yield from _readers(held, part)


def _is_read_by_stages(dataset: Any) -> bool:
    """Whether ``__getitem__`` is known to be ``read``, ``decode`` and ``augment``: a folder's, or that of `StagedDataset`."""
    if not isinstance(dataset, StagedDataset):
        return Convention.folder in describe(dataset).raw_conventions[:1]
    kind = type(dataset)
    if kind is AugmentedDataset:
        return True
    return kind.__getitem__ is StagedDataset.__getitem__ and kind.load is StagedDataset.load


# ---------------------------------------------------------------------- trying it


def _raw_split(dataset: Any, indices: Sequence[Any] | None, cuts: Sequence[Split | None]) -> Split:
    return next((cut for cut in cuts if cut is not None and cut.raw), None) or find_split(dataset, indices, raw=True)


def _raw_part(dataset: Any, indices: Sequence[Any] | None, cuts: Sequence[Split | None], *, is_ours: bool) -> ReadPart:
    found = _raw_split(dataset, indices, cuts)
    for cut in cuts:
        if cut is not None and not cut.raw:
            prove_decoding(dataset, found, cut, indices)
    part = ReadPart(Part.raw, is_ours, found.example_bytes, found)
    largest = 0 if is_ours else _tried_in_threads(dataset, part, found, indices)
    return ReadPart(Part.raw, is_ours, max(found.example_bytes, largest), found)


def _check_drawn_nothing(dataset: Any, indices: Sequence[Any] | None) -> None:
    """Raises `SplitRefused` if whole examples have random numbers."""
    tried = _some_indices(dataset, indices)
    try:
        check_deterministic(dataset, [tried[0], tried[-1]])
    except SplitRefused as refused:
        raise SplitRefused(
            f"{refused.reason}, so that threads would draw its random numbers in another order. Split the data set with "
            "read, decode and augment (StagedDataset), so that threads run only read"
        ) from refused


def _whole_part(dataset: Any, indices: Sequence[Any] | None, cuts: Sequence[Split | None]) -> ReadPart:
    part = ReadPart(Part.whole, False, 0)
    largest = max(_tried_in_threads(dataset, part, cut, indices) for cut in cuts)
    return ReadPart(Part.whole, False, largest)


def _tried_in_threads(dataset: Any, part: ReadPart, until: Split | None, indices: Sequence[Any] | None) -> int:
    """Lets several threads read examples. Raises `SplitRefused` if one of them reads another example than one thread alone does.

    Returns the bytes of the largest item.
    """
    tried = _some_indices(dataset, indices)
    with seeded():
        alone = part.make(seeded_copy(dataset), until).read()
        kept: list[tuple[Any, Any, Any]] = []  # index, what was read, and a copy of it
        for index in tried:
            try:
                item = alone(index)
            except Exception:  # of a damaged example, which is one without threads, too
                continue
            kept.append((index, item, copy_example(item)))
        tried = [index for index, _, _ in kept]
        if not tried:
            raise SplitRefused("none of the examples that were tried can be read")
        for index, item, expected_item in kept:
            if (where := difference(expected_item, item, takes_apart=True)) is not None:
                raise SplitRefused(
                    f"what was read for dataset[{index}] changes when the next example is read ({where}): it is read into the "
                    "same memory. Return a copy"
                )
        expected = [expected_item for _, _, expected_item in kept]
        make, states = part.make(seeded_copy(dataset), until).read, quick_states()

        def compare(first: int) -> None:
            read, ends = make(), monotonic() + _TRYING_SECONDS
            for number in count(first):
                if monotonic() > ends and number >= first + len(tried):
                    break
                index, before = tried[number % len(tried)], expected[number % len(tried)]
                try:
                    found = copy_example(read(index))
                except Exception as error:  # the user's own code
                    raise SplitRefused(
                        f"reading dataset[{index}] in a thread raised {type(error).__name__}: {error}. What a data set opens may "
                        "belong to one thread (a connection of sqlite3): open it in each thread, by threading.local"
                    ) from error
                if (where := difference(before, found)) is not None:
                    raise SplitRefused(
                        f"dataset[{index}] is another example when threads read at the same time ({where}): they may share a "
                        "file and its place in it, or a buffer. Open the file in each thread, by threading.local, or use "
                        "os.pread"
                    )

        with _often_interrupted(), ThreadPoolExecutor(_TRYING_THREADS) as pool:
            for done in [pool.submit(compare, first) for first in range(_TRYING_THREADS)]:
                done.result()
            if states != quick_states():
                raise SplitRefused("reading draws random numbers, and threads would draw them in another order each time")
    return max(map(nbytes, expected))


def _some_indices(dataset: Any, indices: Sequence[Any] | None) -> list[Any]:
    if indices is not None:
        return [indices[place] for place in sample_places(len(indices))]
    return sample_places(len(dataset)) if has_length(dataset) else [0]


@contextmanager
def _often_interrupted() -> Iterator[None]:
    """Lets threads take turns as often as possible, without limiting what they compute."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(_BETWEEN_THREADS_SECONDS)
    try:
        with preserved_random_states():
            yield
    finally:
        sys.setswitchinterval(before)
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------- files
# A data set that decodes its files by itself (a ``loader`` of the user's, a list of paths) cannot be cut after reading. But if a
# thread reads the file shortly before, the system has it in its page cache, and the data set's own read does not wait. A wrong
# guess about the file costs one useless read.


def file_of(dataset: Any) -> Callable[[Any], Any] | None:
    """Returns the function that finds the file of an example, or None if it is not known for all data sets inside."""
    description = describe(dataset)
    lists = {}
    for reader in _readers(dataset, description):
        paths = next((paths for name in _FILE_LISTS if _has_paths(paths := getattr(reader, name, None), reader)), None)
        if paths is None:
            return None
        lists[id(reader)] = paths

    def find(index: Any) -> Any:
        held, part = dataset, description
        while part.role is not Role.reader:
            number, index = pass_on(held, part.role, index)
            held, part = data_sets_inside(held, part.role)[number], part.inside[number]
        return _path_in(lists[id(held)][index])

    return find


def _largest_file(dataset: Any, indices: Sequence[Any] | None) -> int:
    """Returns the bytes of the largest file that was tried; 0 if there are no files, or the data set reads only parts of them."""
    find, tried = file_of(dataset), _some_indices(dataset, indices)
    if find is None or not all(os.path.isfile(find(index)) for index in tried):
        return 0
    with seeded():
        before = _bytes_read()
        read_batch(seeded_copy(dataset), tried[:1])
        read = _bytes_read() - before
    is_read_whole = 2 * read >= os.path.getsize(find(tried[0])) > 0
    return max(os.path.getsize(find(index)) for index in tried) if is_read_whole else 0


def _bytes_read() -> int:
    """Returns the bytes that this process has read so far; 0 if the system does not count them."""
    try:
        with open("/proc/self/io") as counts:
            return int(next(counts).split()[1])
    except OSError:
        return 0


def _has_paths(paths: Any, dataset: Any) -> bool:
    if type(paths) not in _PLAIN_LISTS or not len(paths) or not has_length(dataset) or len(paths) != len(dataset):
        return False
    return all(type(_path_in(entry)) in _PLAIN_PATHS for entry in (paths[0], paths[-1]))


def _path_in(entry: Any) -> Any:
    return entry[0] if type(entry) in (tuple, list) and entry else entry


def _file_reader(dataset: Any, most_bytes: int) -> Load:
    find, piece = file_of(dataset), bytearray(_PIECE_BYTES)

    def warm(index: Any) -> None:
        path: Any = None if find is None else find(index)
        if type(path) in _PLAIN_PATHS:
            left = most_bytes
            with suppress(OSError), open(path, "rb", buffering=0) as file:  # the data set finds out by itself
                while left > 0 and (read := file.readinto(piece)):
                    left -= read

    return warm
