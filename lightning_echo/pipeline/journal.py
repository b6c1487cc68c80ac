"""The file of a journal: `JournalFile` writes that of a run on demand, and `Replay` names the folder of one that is repeated.

The thread that fetches notes a batch some time after it was delivered (`JournalFile.deliver`, `JournalFile.note`). Bytes are
collected and written every few batches, when a state is saved, and at the end. So a killed run loses the last few batches, and no
checkpoint is later than its journal.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lightning_echo.plan.journal import (
    MAGIC,
    Begin,
    Ends,
    Journal,
    JournalError,
    Place,
    Records,
    Stretch,
    checksum,
    first_digest,
    frame,
)

REPLAY = "replay:"  # in a configuration, before the folder
NO_ENDS = Ends()
_BATCHES_PER_FRAME = 64
FILE_NAME = "echo_journal"


@dataclass(frozen=True)
class Replay:
    """Repeats a run on demand to the bit: ``factor=Replay("lightning_logs/version_3")``.

    The order of the data, the fresh examples of each batch, the echoes and their augmentation are those of that run. Reads may
    take as long as they like. In a configuration, ``"replay:lightning_logs/version_3"`` is the same.

    Args:
        path: The folder of the run's journal: its log directory, or the argument ``journal`` of its `EchoLoader`.

    Raises:
        TypeError: ``path`` is not a path.
        ValueError: ``path`` is empty.

    Example:
        >>> str(Replay("runs/7")), Replay.of("replay:runs/7"), Replay.of("demand")
        ('replay:runs/7', Replay(path='runs/7'), None)
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", check_folder("Replay's path", self.path))

    @classmethod
    def of(cls, factor: Any) -> Replay | None:
        """Returns what a factor says to repeat; None if it says something else."""
        if isinstance(factor, str) and factor.startswith(REPLAY):
            return cls(factor[len(REPLAY) :])
        return factor if isinstance(factor, Replay) else None

    def __str__(self) -> str:
        return REPLAY + self.path


def check_folder(argument: str, path: Any) -> str:
    """Returns the path of a folder as a string."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument} must be the path of a folder, got {path!r}: give a string such as 'runs/1'")
    found = os.fspath(path)
    if not isinstance(found, str) or not found:
        raise ValueError(f"{argument} must be the path of a folder, got {found!r}: give a string such as 'runs/1'")
    return found


def journal_path(folder: str, name: str, rank: int) -> str:
    """Returns the path of a rank's journal in a folder. ``name``: of the loader among several; empty if it is the only one.

    >>> journal_path("runs", "", 0), journal_path("runs", "text/en", 1)
    ('runs/echo_journal_rank0.bin', 'runs/echo_journal_text-en_rank1.bin')
    """
    of_loader = f"_{name.replace('/', '-')}" if name else ""
    return os.path.join(folder, f"{FILE_NAME}{of_loader}_rank{rank}.bin")


def read_journal(path: str) -> Journal:
    """Reads a journal that is to be repeated.

    Raises:
        JournalError: There is none, or it is damaged.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise JournalError(
            f"no journal is at {path} ({error.strerror}), so that Replay has no run to repeat. Give the log directory of a run "
            "on demand, or the argument journal of its EchoLoader"
        ) from error
    journal = Journal(data, path)
    if not journal.stretches:
        raise JournalError(f"{path} has no batches: its run was killed before the first one. Repeat another run")
    return journal


class FreshCounts(NamedTuple):
    """How much was fresh in each batch of a run, in the journals of all ranks that a folder has."""

    first: int  # number of the first batch
    counts: list[int]
    ranks: int
    are_batches: bool  # whether whole batches are counted; else examples


_MOST_BYTES = 16 * 2**20  # of all journals of a run: some million batches, which are read in seconds


def fresh_counts(folder: str) -> FreshCounts:
    """Reads how much was fresh in each batch of a run on demand, of a single loader.

    Raises:
        JournalError: There is no journal, a journal is damaged, or the journals are so large that reading would take long.
        OSError: A journal cannot be read.
    """
    paths: list[str] = []
    while os.path.isfile(path := journal_path(folder, "", len(paths))):  # and no pipe, which would have to be waited for
        paths.append(path)
    if not paths:
        raise JournalError(f"{journal_path(folder, '', 0)} is not there")
    size = sum(map(os.path.getsize, paths))
    if size > _MOST_BYTES:
        raise JournalError(f"{paths[0]} has {size / 2**20:,.0f} MiB with those of other ranks: more than {_MOST_BYTES >> 20}")
    journals = [read_journal(path) for path in paths]
    first = journals[0].stretches[0].begin
    of_ranks = [_counts_from(first.number, journal.stretches) for journal in journals]
    counts = [sum(of_batch) for of_batch in zip_longest(*of_ranks, fillvalue=0)]
    return FreshCounts(first.number, counts, len(paths), "batches_held" in first.conditions)


def _counts_from(first: int, stretches: Sequence[Stretch]) -> list[int]:
    """Returns the counts of all batches from number ``first`` on. A batch that no stretch has counts 0."""
    counts: list[int] = []
    for stretch in stretches:
        place = stretch.begin.number - first
        del counts[max(place, 0) :]
        counts += [0] * (place - len(counts))
        counts += stretch.fresh_counts()[max(-place, 0) :]
    return counts


class Written(NamedTuple):
    """A journal up to a `Place`, as a checkpoint names it. ``digest``: empty if it is not known, as that of another rank."""

    path: str
    length: int
    digest: str
    begins: int


class StretchOver(RuntimeError):
    """A replay has come to where memory was empty: its workers must be started again."""


class Repeated:
    """The batches of a `Stretch`, which a replay repeats from ``begin`` on."""

    what, how = "another order", "indices. Give the loader the sampler, and the state of its generator, that it had in that run"

    def __init__(self, journal: Journal, begin: Begin) -> None:
        self._journal, self.stretch = journal, journal.stretch_of(begin)
        self._checksum = 0  # of all fresh indices so far

    def is_echo(self, number: int) -> bool:
        """Returns whether batch ``number`` has nothing fresh. False also after the last batch."""
        return number < self.stretch.end and not self.stretch.fresh_in(number)

    def over_at(self, number: int) -> Exception | None:
        """Returns why batch ``number`` is not in the stretch; None if it is."""
        if number < self.stretch.end:
            return None
        why = self._journal.why_over(self.stretch)
        return JournalError(why) if why else StretchOver()

    def changed_at(self, number: int, indices: Sequence[Any]) -> Exception | None:
        """Returns why batch ``number``, the next one, is not that of the run; None if it is. ``indices``: of its fresh items."""
        self._checksum = checksum(indices, self._checksum)
        if self._checksum == self.stretch.checks.get(number, self._checksum):
            return None
        return JournalError(
            f"{self._journal.name} is of a run with {self.what}: in batch {number:,} or shortly before it, that had other "
            f"{self.how}"
        )


def begin_journal(journal: JournalFile | None, repeated: Journal | None, begin: Begin) -> Repeated | None:
    """Notes in a journal that workers begin. Returns what a replay repeats from there on; None: it is not a replay.

    Raises:
        JournalError: The run that is repeated has not begun there, or it is another one.
    """
    found = None if repeated is None else Repeated(repeated, begin)
    if journal is not None:
        journal.begin(begin)
    return found


@dataclass
class _Noted:
    """Where a journal's last batch has left it."""

    records: Records
    factor: float = 0.0
    checksum: int = 0  # of all fresh indices since a `Begin`
    is_first: bool = True  # whether the next batch is the first one after a `Begin`
    next: int = 0  # its number, if batches are noted by number

    def copied(self) -> _Noted:
        return replace(self, records=self.records.copied())


class JournalFile:
    """Writes the journal of a run, from pipeline to pipeline. It never raises: a training must not fail because of a journal.

    Args:
        path: The path of the file. If a journal of another run is there, it is renamed.
        before: What this run has written so far, and where. It is copied if it is at another path.
        say: Warns the user.
    """

    def __init__(self, path: str, before: Written | None, say: Callable[[str], None]) -> None:
        self.path, self._before, self._say = path, before, say
        self._lock = threading.RLock()  # a thread that fetches notes batches, and the one that trains asks what is written
        self._noted = _Noted(Records())
        self._file: BinaryIO | None = None  # None: closed, or it could not be written
        self._digest = first_digest()
        self._length = 0
        self._begins = 0  # so many stretches begin in the file
        self._pending = bytearray()
        self._batches = 0  # in `_pending`
        self._delivered: deque[tuple[Any, ...] | None] = deque()  # and not noted: batches, see `book`; None: a pass has ended

    def begin(self, begin: Begin) -> None:
        """Notes that workers begin with an empty memory."""
        with self._lock:
            self.close()
            try:
                begin = self._open(begin)
            except OSError as error:
                self._give_up(error)
                return
            self._noted = _Noted(Records(), begin.max_factor, next=begin.number)
            self._pending += self._noted.records.begin(begin)
            self._begins += 1
            self._flush()

    def deliver(self, fresh: Sequence[int], indices: Sequence[Any], max_factor: float, ends: Ends = NO_ENDS) -> None:
        """Lets `note` note the next batch, see `book`. The training calls this: it takes no time."""
        self._delivered.append((fresh, indices, max_factor, ends))

    def pass_over(self) -> None:
        """Lets `note` note that a pass over a stream has ended."""
        self._delivered.append(None)

    def note(self) -> None:
        """Notes what was delivered. A thread that fetches calls this."""
        with self._lock:
            while self._delivered:
                if (batch := self._delivered.popleft()) is not None:
                    self.book(*batch)
                elif self._file is not None:
                    self._pending += self._noted.records.pass_over()

    def book(
        self, fresh: Sequence[int], indices: Sequence[Any], max_factor: float, ends: Ends = NO_ENDS, number: int = -1
    ) -> None:
        """Notes the next batch: its fresh positions, ascending, with their indices, and the bound that it was made with.

        ``number``: if it is given, the batch is noted once, although the call may be interrupted and repeated.
        """
        with self._lock:
            before, after = self._noted, self._noted.copied()
            if self._file is None or 0 <= number < before.next:
                return
            found = b"" if ends == NO_ENDS else after.records.ends(ends)
            if max_factor != before.factor:
                found += after.records.factor(max_factor)
            found += bytes(after.records.batch(fresh))
            after.checksum = checksum(indices, before.checksum)
            if before.is_first:
                found += after.records.check(after.checksum)
            after.factor, after.is_first, after.next = max_factor, False, number + 1
            # In one line, which calls nothing: no signal handler comes between. One before it may have written what was pending.
            self._pending, self._batches, self._noted = self._pending + found, self._batches + 1, after
            if self._batches == _BATCHES_PER_FRAME:
                self._flush()

    def written(self) -> Written | None:
        """Writes all that was noted. Returns what the file holds; None if there is none."""
        with self._lock:
            self.note()
            self._flush()
            return self._before

    def close(self) -> None:
        with self._lock:
            self.note()
            if self._file is None:
                return
            self._flush(self._noted.records.end())
            if self._file is not None:
                with suppress(OSError):  # all bytes were written
                    self._file.close()
                self._file = None

    def _open(self, begin: Begin) -> Begin:
        """Opens the file where the run continues it. Returns ``begin`` with the stretch that it continues."""
        path, before = self.path, self._before
        is_same = before is not None and os.path.abspath(before.path) == os.path.abspath(path)
        if before is not None and is_same and before.length == self._length == os.path.getsize(path):
            kept: Place | None = Place(before.length, before.digest, before.begins)  # as this object has left it
        else:
            kept = None if before is None else _kept(before, begin, whole=is_same)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.exists(path) and not (is_same and kept):
            self._say(f"the journal of an earlier run is now {_renamed(path)}")
        if kept is None:
            if before is not None:
                self._say(
                    f"{before.path} is not the journal of this run up to its checkpoint: the new one begins at batch "
                    f"{begin.number:,}. So Replay can repeat this run from its checkpoint, but not from its start"
                )
            self._file = Path(path).open("xb")  # noqa: SIM115 - closed by `close`
            self._length, self._digest, self._begins = 0, first_digest(), 0
            self._write(MAGIC)
            return begin
        assert before is not None
        if not is_same:
            shutil.copyfile(before.path, path)
        self._file = Path(path).open("r+b")  # noqa: SIM115
        self._file.truncate(kept.length)
        self._file.seek(kept.length)
        self._length, self._digest, self._begins = kept.length, bytes.fromhex(kept.digest), kept.begins
        return replace(begin, continues=before.begins - 1)

    def _flush(self, last: bytes = b"") -> None:
        """Writes a frame of all that was noted, with a ``last`` record."""
        if self._file is None or not (self._pending or last):
            return
        if self._batches:
            self._pending += self._noted.records.check(self._noted.checksum)
        self._pending += last
        found, self._digest = frame(bytes(self._pending), self._digest)
        self._pending.clear()
        self._batches = 0
        try:
            self._write(found)
        except OSError as error:
            self._give_up(error)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self._file.flush()
        self._length += len(data)
        self._before = Written(os.path.abspath(self.path), self._length, self._digest.hex(), self._begins)

    def _give_up(self, error: OSError) -> None:
        self._say(f"the journal {self.path} cannot be written ({error}): Replay can repeat this run only up to here")
        self._before, self._file = None, None


class RunJournal:
    """The journals of a run, however often it is stopped: the one that it writes, and the one of the run that it repeats.

    ``folder``: where the run is written down; None: nowhere.
    """

    def __init__(self) -> None:
        self.folder: str | None = None
        self.forget()

    def forget(self) -> None:
        """Begins again, as at the start of a run."""
        self.file: JournalFile | None = None
        self._written: Written | None = None  # by the run so far, as a loaded state says
        self.repeated: Journal | None = None

    def repeat(self, replay: Replay, name: str, rank: int) -> Journal:
        """Reads the journal of the run that is repeated."""
        self.repeated = read_journal(journal_path(replay.path, name, rank))
        return self.repeated

    def open(self, name: str, rank: int, say: Callable[[str], None]) -> None:
        """Prepares the file that the run writes next, see `journal_path` and `JournalFile`."""
        if self.folder is None:
            self.continue_at(None)  # what was written is not that of the run any more
            return
        path = journal_path(self.folder, name, rank)
        if self.file is None or self.file.path != path:
            before = self.written()
            if before is not None and rank:  # a state is that of rank 0
                before = Written(journal_path(os.path.dirname(before.path), name, rank), 0, "", before.begins)
            self.file = JournalFile(path, before, say)

    def written(self) -> Written | None:
        """Returns what the run has written so far, and writes all that was noted; None: nothing."""
        return self._written if self.file is None else self.file.written()

    def continue_at(self, written: Written | None) -> None:
        """Continues a run that has written so much."""
        self.file, self._written = None, written

    def follow(self, before: RunJournal) -> None:
        """Continues the run of another loader."""
        self.continue_at(before.written())
        self.repeated, self.folder = before.repeated, self.folder or before.folder

    def __getstate__(self) -> dict[str, Any]:
        """Returns it for another process, which does not write to the file of this one."""
        return {**vars(self), "file": None, "_written": self.written()}


def _kept(before: Written, begin: Begin, *, whole: bool) -> Place | None:
    """Returns up to where a file is the journal of this run; None if it is not. ``whole``: also what follows ``before``.

    What follows was written by a process that was killed later than the checkpoint. The file keeps it, and a reader drops it.
    """
    try:
        with open(before.path, "rb") as file:
            journal = Journal(file.read(), before.path)
    except (OSError, JournalError):
        return None
    place = Place(before.length, before.digest, before.begins)
    is_of_run = journal.places.get(before.length) == place if before.digest else journal.can_continue(before.begins - 1, begin)
    if not is_of_run:
        return None
    return journal.places[journal.whole] if whole or not before.digest else place


def _renamed(path: str) -> str:
    """Gives the file at a path another name, and returns that."""
    number = next(number for number in count(1) if not os.path.exists(f"{path}.{number}"))
    os.rename(path, f"{path}.{number}")
    return f"{path}.{number}"
