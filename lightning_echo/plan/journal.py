"""The journal of a run on demand: which positions were fresh in each batch, as bytes; and what a replay tells its workers.

Batches on demand depend on time, so they cannot be computed again. All else follows from the seed: given the fresh positions of
each batch, a replay hands out the same batches to the bit.

A journal is a sequence of *frames*. Each has its length and a digest of all bytes up to its end, so a changed byte is noticed.
The frames hold *records*: a `Begin` where workers start with an empty memory, the fresh positions of one batch, a new
``max_factor``, a checksum of indices, and the end of a pipeline. A `Stretch` is a `Begin` with its batches.

Over a stream, positions count the fresh examples in the order in which they were delivered, and a position's index is a digest of
the example. Further records say where the workers found the end of their streams (`Ends`), and where a pass ended.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from lightning_echo.plan.demand import Block, Booked, Dealing
from lightning_echo.plan.order import entry_key

MAGIC = b"lightning_echo journal 1\n"
_SIZE_BYTES, _DIGEST_BYTES, _CHECK_BYTES = 4, 8, 4
_HEAD_BYTES = _SIZE_BYTES + _DIGEST_BYTES  # of a frame: the size of its records, and its digest
# Of a batch: the last one, and its number of runs more.
_BEGIN_TAG, _FACTOR_TAG, _CHECK_TAG, _END_TAG, _ENDS_TAG, _PASS_TAG, _BATCH_TAG = range(7)


class JournalError(ValueError):
    """A journal is damaged, or it is not of this run, or it has ended."""


class Place(NamedTuple):
    """A place in a journal between two frames: the bytes before it, their digest, and how many stretches begin before it."""

    length: int
    digest: str
    begins: int


class Ends(NamedTuple):
    """Which workers have found the end of their streams since the batch before, and with this batch."""

    before: int = 0  # so many of those whose turn it was, one after the other, had nothing for a batch
    with_it: bool = False  # whether the worker of this batch has found it


@dataclass(frozen=True, kw_only=True)
class Begin:
    """Workers begin with an empty memory.

    Attributes:
        number: Number of the first batch.
        booked: What was delivered before.
        max_factor: The bound in force.
        conditions: By name, in plain types: what must be the same for a replay.
        continues: Which stretch of the file the run continues, counted from 0; -1: none.
        passes: Over a stream, how many passes had ended.
    """

    number: int
    booked: Booked
    max_factor: float
    conditions: dict[str, Any]
    continues: int = -1
    passes: int = 0

    @property
    def workers(self) -> int:
        return max(int(self.conditions["workers"]), 1)

    def delivered_as(self, here: Begin) -> bool:
        """Returns whether the same was delivered before."""
        return (self.number, self.booked, self.passes) == (here.number, here.booked, here.passes)

    def differences(self, here: Begin) -> str:
        """Returns what is not the same ``here``, in words; empty if nothing."""
        mine, others = self.conditions, here.conditions
        names = [name for name in {**mine, **others} if mine.get(name) != others.get(name)]
        return ", ".join(f"{name}={mine.get(name)!r} (here {others.get(name)!r})" for name in names)

    def to_json(self) -> bytes:
        booked = [self.booked.frontier, self.booked.runs()]
        fields = [self.number, booked, self.max_factor, self.conditions, self.continues, self.passes]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Begin:
        number, booked, max_factor, conditions, continues, passes = json.loads(text)
        where = {"number": number, "booked": Booked.of(*booked), "passes": passes}
        return cls(**where, max_factor=max_factor, conditions=conditions, continues=continues)


@dataclass
class Stretch:
    """The batches from a `Begin` on, up to the next one."""

    begin: Begin
    _ends: array[int] = field(default_factory=lambda: array("q"))  # of each batch: the number of runs up to its end
    _runs: array[int] = field(default_factory=lambda: array("q"))  # first position and size of each
    _factors: list[tuple[int, float]] = field(default_factory=list)  # from which batch on
    checks: dict[int, int] = field(default_factory=dict)  # of some batches: the `checksum` of all fresh indices up to there
    ends: dict[int, Ends] = field(default_factory=dict)  # of some batches over a stream
    passes: list[int] = field(
        default_factory=list
    )  # over a stream: for each pass that has ended, the number of the batch after it

    @property
    def end(self) -> int:
        """Number of the batch after the last one."""
        return self.begin.number + len(self._ends)

    def fresh_in(self, number: int) -> list[int]:
        """Returns the fresh positions of a batch, ascending."""
        place = number - self.begin.number
        first, end = (self._ends[place - 1] if place else 0), self._ends[place]
        runs = self._runs[2 * first : 2 * end]
        return [at for first, size in zip(runs[::2], runs[1::2], strict=True) for at in range(first, first + size)]

    def fresh_counts(self) -> list[int]:
        """Returns the number of fresh positions in each batch.

        >>> stretch = Stretch(Begin(number=7, booked=Booked(0), max_factor=8.0, conditions={"workers": 1}))
        >>> stretch.add([0, 4])
        >>> stretch.add([])
        >>> stretch.add([4, 1, 8, 2])
        >>> stretch.fresh_counts()
        [4, 0, 3]
        """
        up_to = [0, *accumulate(self._runs[1::2])]
        return [up_to[end] - up_to[begin] for begin, end in pairwise([0, *self._ends])]

    def factor_of(self, number: int) -> float:
        """Returns ``max_factor`` as batch ``number`` had it."""
        return next((factor for since, factor in reversed(self._factors) if since <= number), self.begin.max_factor)

    def is_continued_by(self, begin: Begin) -> bool:
        """Returns whether a run continues after some batch of this stretch, judged by what was delivered until then."""
        place = begin.number - self.begin.number
        if not 0 <= place <= len(self._ends):
            return False
        end = 2 * (self._ends[place - 1] if place else 0)
        runs = zip(self._runs[:end:2], self._runs[1:end:2], strict=True)
        frontier, ahead = self.begin.booked.frontier, set[int]()
        for first, size in sorted([*map(tuple, self.begin.booked.runs()), *runs]):  # a set of all positions would be too large
            if first == frontier:
                frontier += size
            else:
                ahead.update(range(first, first + size))
        return Booked(frontier, frozenset(ahead)) == begin.booked

    def add(self, runs: Iterable[int]) -> None:
        self._runs.extend(runs)
        self._ends.append(len(self._runs) // 2)

    def add_factor(self, factor: float) -> None:
        self._factors.append((self.end, factor))

    @property
    def is_empty(self) -> bool:
        return not self._ends and not self.passes

    def up_to(self, begin: Begin) -> Stretch:
        """Returns the stretch without what was delivered after the place where ``begin`` continues it."""
        ends = self._ends[: begin.number - self.begin.number]
        return replace(
            self,
            _ends=ends,
            _runs=self._runs[: 2 * (ends[-1] if ends else 0)],
            ends={number: found for number, found in self.ends.items() if number < begin.number},
            passes=self.passes[: begin.passes - self.begin.passes],
        )


def checksum(indices: Sequence[Any], before: int = 0) -> int:
    """Returns a checksum of indices, after those of which ``before`` is one. It is not a digest: it notices another order.

    >>> checksum([3, 4]) == checksum([4], checksum([3])), checksum([3, 4]) == checksum([4, 3])
    (True, False)
    """
    for index in indices:
        before = zlib.crc32(repr(index if type(index) is int else _plain(entry_key(index))).encode(), before)
    return before


def _plain(key: Any) -> Any:
    """Returns a value whose ``repr`` is the same in each process."""
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    return key if isinstance(key, int | float | str | bytes | None) else type(key).__qualname__


# ---------------------------------------------------------------------- writing


class Records:
    """Turns what happens in a run into records. A run is written as its distance from the one before it of the same worker."""

    def __init__(self) -> None:
        self._after: list[int] = []  # for each worker: the end of its last run
        self._turn = 0

    def copied(self) -> Records:
        copied = Records()
        copied._after, copied._turn = list(self._after), self._turn
        return copied

    def begin(self, begin: Begin) -> bytes:
        self._after, self._turn = [begin.booked.frontier] * begin.workers, 0
        text = begin.to_json()
        return bytes([_BEGIN_TAG, *_number(len(text))]) + text

    def batch(self, fresh: Sequence[int]) -> list[int]:
        """Returns the record of the next batch as a list of bytes. ``fresh``: its fresh positions, ascending."""
        after, count, last = self._after[self._turn], 0, len(fresh) - 1
        body: list[int] = []
        place = 0
        while place <= last:
            first = fresh[place]
            size = 1
            while place + size <= last and fresh[place + size] == first + size:
                size += 1
            gap = first - after
            code = (gap << 2 if gap >= 0 else (-gap << 2) - 2) | (size > 1)
            body += (code,) if code < 128 else _number(code)
            if size > 1:
                body += _number(size - 2)
            after = first + size
            place += size
            count += 1
        self._after[self._turn] = after
        self._turn = (self._turn + 1) % len(self._after)
        return [*_number(_BATCH_TAG + count), *body]

    @staticmethod
    def factor(max_factor: float) -> bytes:
        text = repr(max_factor).encode()
        return bytes([_FACTOR_TAG, len(text)]) + text

    @staticmethod
    def check(value: int) -> bytes:
        """``value``: the `checksum` of all fresh indices up to the last batch."""
        return bytes([_CHECK_TAG]) + value.to_bytes(_CHECK_BYTES, "little")

    @staticmethod
    def ends(ends: Ends) -> bytes:
        """``ends``: of the next batch."""
        return bytes([_ENDS_TAG, *_number(2 * ends.before + ends.with_it)])

    @staticmethod
    def pass_over() -> bytes:
        return bytes([_PASS_TAG])

    @staticmethod
    def end() -> bytes:
        return bytes([_END_TAG])


def _number(value: int) -> list[int]:
    """Returns a number from 0 on as bytes of seven bits, the lowest first. All but the last have the eighth bit."""
    found = []
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return found


def first_digest() -> bytes:
    return blake2b(MAGIC, digest_size=_DIGEST_BYTES).digest()


def frame(records: bytes, before: bytes) -> tuple[bytes, bytes]:
    """Returns a frame, and its digest. ``before``: the digest of all bytes before it."""
    digest = blake2b(before + records, digest_size=_DIGEST_BYTES).digest()
    return len(records).to_bytes(_SIZE_BYTES, "little") + digest + records, digest


# ---------------------------------------------------------------------- reading


class Journal:
    """What a file holds.

    Attributes:
        stretches: Those of the run that was written last, in their order. Where one ends, the next one continues, unless the data
            or its order has changed. What other resumes had left is not among them.
        places: The ends of the frames, by the number of bytes before it.
        whole: Bytes of the whole frames. The last frame of a killed run may not be whole.
        has_ended: Whether the last pipeline was closed. A killed one was not.
    """

    def __init__(self, data: bytes, name: str) -> None:
        """Reads the bytes of a journal. ``name``: of the file, for messages.

        Raises:
            JournalError: They are not those of a journal, or they were changed.
        """
        self.name = name
        self._all: list[Stretch] = []  # in the order of the file
        self._after: list[int] = []  # for each worker: the end of its last run
        self._next = 0  # the stretch after the one that is repeated
        self.has_ended = False
        if not data.startswith(MAGIC):
            raise JournalError(f"{name} is not a journal of this version of lightning_echo: it begins with {data[:24]!r}")
        digest, at = first_digest(), len(MAGIC)
        self.places = {at: Place(at, digest.hex(), 0)}
        self.whole = at
        while at + _HEAD_BYTES <= len(data):
            first = at + _HEAD_BYTES
            end = first + int.from_bytes(data[at : at + _SIZE_BYTES], "little")
            if end > len(data):
                break
            whole, digest = frame(data[first:end], digest)
            if whole != data[at:end]:
                raise JournalError(
                    f"{name} is damaged: its bytes {at:,} to {end:,} are not those that were written. Use a copy of the file "
                    "as it was"
                )
            self._read(data[first:end])
            self.whole = at = end
            self.places[at] = Place(at, digest.hex(), len(self._all))
        self.stretches = self._last_run()

    def describe(self) -> str:
        """Returns a line about the journal, for people."""
        how = "" if self.has_ended else "; that run was killed, or the file was cut off: the replay ends there"
        return f"Replay: {self.name} has the batches from {self.stretches[0].begin.number:,} to {self.stretches[-1].end:,}{how}"

    def why_over(self, stretch: Stretch) -> str:
        """Returns why there is no batch after a stretch, as an error says it; empty if the next stretch continues it."""
        if stretch is not self.stretches[-1]:
            return ""
        why = "that run ended there" if self.has_ended else "that run was killed, or the file was cut off"
        return f"{self.name} ends before batch {stretch.end:,}: {why}. Train for at most as many steps as it has batches"

    def stretch_of(self, here: Begin) -> Stretch:
        """Returns the stretch that a pipeline repeats which begins ``here``: the next one of those that begin alike.

        Raises:
            JournalError: There is none, or the run is another one.
        """
        alike = [place for place, each in enumerate(self.stretches) if each.begin.number == here.number]
        if not alike:
            begins = ", ".join(f"{each.begin.number:,}" for each in self.stretches) or "none"
            raise JournalError(
                f"a Replay cannot begin at batch {here.number:,}: memory is empty there, and in the run of {self.name} it was "
                f"empty only before these batches: {begins}. Begin at one of them: at the start of the run, or from the "
                "checkpoint from which that run was resumed"
            )
        booked = [place for place in alike if self.stretches[place].begin.delivered_as(here)]
        place = next((place for place in booked if place >= self._next), (booked or alike)[0])
        if differences := self.stretches[place].begin.differences(here):
            raise JournalError(
                f"{self.name} is of another run: {differences}. Replay repeats a run only with the same data and options"
            )
        if not booked:
            raise JournalError(
                f"{self.name} is of another run: before batch {here.number:,}, other examples were delivered. Resume from the "
                "checkpoint from which that run was resumed"
            )
        self._next = place + 1
        return self.stretches[place]

    def _read(self, data: bytes) -> None:
        at = _Cursor(data)
        while at.place < len(data):
            self.has_ended = False
            tag = at.number()
            if tag == _BEGIN_TAG:
                begin = Begin.from_json(at.bytes(at.number()))
                self._all.append(Stretch(begin))
                self._after = [begin.booked.frontier] * begin.workers
                continue
            if tag == _END_TAG:
                self.has_ended = True
                continue
            stretch = self._all[-1]
            if tag == _FACTOR_TAG:
                stretch.add_factor(float(at.bytes(at.number())))
            elif tag == _CHECK_TAG:
                stretch.checks[stretch.end - 1] = int.from_bytes(at.bytes(_CHECK_BYTES), "little")
            elif tag == _ENDS_TAG:
                before, with_it = divmod(at.number(), 2)
                stretch.ends[stretch.end] = Ends(before, bool(with_it))
            elif tag == _PASS_TAG:
                stretch.passes.append(stretch.end)
            else:
                worker = (stretch.end - stretch.begin.number) % len(self._after)
                stretch.add(at.runs(tag - _BATCH_TAG, self._after, worker))

    def can_continue(self, place: int, begin: Begin) -> bool:
        """Returns whether a run can continue the stretch with this number in the file."""
        return 0 <= place < len(self._all) and self._all[place].is_continued_by(begin)

    def _last_run(self) -> list[Stretch]:
        """Returns the stretches of the last run, back from the last one. Each ends where the next one continues."""
        run = self._all[-1:]
        while run and (begin := run[0].begin).continues >= 0:
            before = self._all[begin.continues]
            run.insert(0, before.up_to(begin) if before.is_continued_by(begin) else before)
        return [each for each in run if each is run[-1] or not each.is_empty]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data, self.place = data, 0

    def number(self) -> int:
        value = shift = 0
        while (byte := self._data[self.place]) > 127:
            value |= (byte & 127) << shift
            shift += 7
            self.place += 1
        self.place += 1
        return value | byte << shift

    def bytes(self, size: int) -> bytes:
        self.place += size
        return self._data[self.place - size : self.place]

    def runs(self, count: int, after: list[int], worker: int) -> Iterator[int]:
        end = after[worker]
        for _ in range(count):
            code = self.number()
            gap = -((code + 2) >> 2) if code & 2 else code >> 2
            first, size = end + gap, self.number() + 2 if code & 1 else 1
            yield first
            yield size
            end = first + size
        after[worker] = end


# ---------------------------------------------------------------------- replaying


class ReplayedDealing(Dealing):
    """Deals positions as a journal says, in the order in which the workers need them.

    ``reads_blocks``: whether a data set reads the positions of a block in one call. Then whole blocks are dealt, those of the run
    that is repeated.
    """

    def __init__(self, stretch: Stretch, *, pass_length: int, block: int, window: int, reads_blocks: bool) -> None:
        begin = stretch.begin
        super().__init__(begin.booked, pass_length=pass_length, block=block, workers=begin.workers, window=window)
        self._stretch, self._reads_blocks = stretch, reads_blocks
        self._asked = begin.number  # the batch of the next request
        self._to_tell = [begin.number + worker for worker in range(begin.workers)]  # the next batch of each worker
        self._block_of: dict[int, Block] = {}

    def deal(self, worker: int) -> list[Block]:
        told: list[Block] = []
        number = self._to_tell[worker]
        while number < self._stretch.end and (number <= self._asked or self._open[worker] < self._window):
            for block in self._blocks_of(self._stretch.fresh_in(number)):
                self._tell(worker, block)
                told.append(block)
            number += len(self._open)
        self._to_tell[worker] = number
        self._asked += 1
        return told

    def _blocks_of(self, fresh: list[int]) -> Iterator[Block]:
        if not self._reads_blocks:
            if fresh:
                yield fresh
            return
        for position in fresh:
            if position not in self._worker_of:
                yield self._block_with(position)

    def _block_with(self, position: int) -> Block:
        while position not in self._block_of:
            block = self._next_block()
            self._block_of.update(dict.fromkeys(block, block))
        block = self._block_of[position]
        for each in block:
            del self._block_of[each]
        return block
