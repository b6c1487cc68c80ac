"""Trainings on different parts of one data set (Joader): which part a training reads, its members, and what the reader reads."""

from __future__ import annotations

import fcntl
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import SubsetRandomSampler

from lightning_echo.data.objects import is_subset
from lightning_echo.pipeline.ahead import AheadOrder
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.plan.order import Order
from lightning_echo.share.window import CHUNK
from lightning_echo.split.staged import inside_named_cut, is_staged, named_cut_over

Bits = npt.NDArray[np.uint8]
"""Which indices of a data set belong to a part: one bit each, eight in a byte, the first one lowest. Bits after the end are 0."""

Numbers = npt.NDArray[np.int64]

# ---------------------------------------------------------------------- parts
# A part is what ``Subset`` (also nested: ``random_split``) or ``SubsetRandomSampler`` chooses of a data set, its *base*, in
# random order. A `StagedDataset.of` around a ``Subset`` is around the base then. The reader reads the base, in a random order of
# its own. A training takes from it the items whose index is in its part. That order, without the other items, is a random order
# of the part.
#
# An index that is chosen twice, or that is negative, is not of a part: the ``Subset`` then is the data, and others have another.


class Part(NamedTuple):
    """The part that a training reads: the base, and its indices there, in any order. The base may grow afterwards."""

    base: Any
    indices: Numbers
    base_length: int

    @classmethod
    def of(cls, base: Any, indices: Numbers) -> Part:
        return cls(base, indices, len(base))

    @property
    def bits(self) -> Bits:
        chosen = np.zeros(self.base_length, np.bool_)
        chosen[self.indices] = True
        return np.packbits(chosen, bitorder="little")


def part_of(kind: Kind) -> Part | None:
    """Returns the part that a loader reads; None if it reads all of its data set, or in an order that is not random."""
    if not isinstance(kind, Indexed):
        return None
    dataset, sampler, chosen = kind.loader.dataset, kind.sampler, None
    is_chosen_by_sampler = type(sampler) is SubsetRandomSampler
    if is_chosen_by_sampler:
        chosen = _numbers(sampler.indices)
    elif not kind.is_shuffled:
        return None
    if is_chosen_by_sampler and not _are_of(chosen, dataset):
        return None
    for subset in _subsets(dataset):
        inside = _numbers(subset.indices)
        if inside is None or len(inside) != len(subset) or not _are_of(inside, subset.dataset):
            return None
        chosen = inside if chosen is None else inside[chosen]
    if chosen is None or not len(chosen) or len(np.unique(chosen)) != len(chosen):
        return None
    return Part.of(base_of(dataset), chosen)


def base_of(dataset: Any) -> Any:
    """Returns the data set under all subsets, with the named cuts that are around them."""
    if _only_chooses(dataset):
        return base_of(dataset.dataset)
    if (inside := inside_named_cut(dataset)) is None or (base := base_of(inside)) is inside:
        return dataset
    return named_cut_over(base, dataset)


def _subsets(dataset: Any) -> Iterator[Any]:
    """Yields the subsets in a data set, from outside to inside. Named cuts pass indices on."""
    while True:
        while (inside := inside_named_cut(dataset)) is not None:
            dataset = inside
        if not _only_chooses(dataset):
            return
        yield dataset
        dataset = dataset.dataset


def _only_chooses(dataset: Any) -> bool:
    return is_subset(dataset) and not is_staged(dataset)


def _numbers(indices: Any) -> Numbers | None:
    """Returns indices as an array; None if they are not integers."""
    found = np.asarray(indices)
    return found.astype(np.int64) if found.ndim == 1 and found.dtype.kind in "iu" else None


def _are_of(indices: Numbers | None, dataset: Any) -> bool:
    """Returns whether there are such indices in a data set."""
    try:
        length = len(dataset)
    except TypeError:
        return False
    return indices is not None and bool(((indices >= 0) & (indices < length)).all())


# ---------------------------------------------------------------------- bits
# A training sends its part to the reader as a memfd that nobody can change any more.

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@contextmanager
def sealed(bits: Bits) -> Iterator[int]:
    """Gives a descriptor of a memfd with these bits."""
    descriptor = os.memfd_create("lightning_echo-part", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(bits.tobytes())
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def bits_in(descriptor: int, length: int) -> Bits:
    """Returns the bits in a memfd, for a data set of ``length``. Raises a ValueError or an OSError if that is something else."""
    if (seals := fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)) & _SEALS != _SEALS:
        raise ValueError(f"a part must be sealed with {_SEALS:#x}, got {seals:#x}")
    size = -(-length // 8)
    if (found := os.fstat(descriptor).st_size) != size:
        raise ValueError(f"a part of {length:,} examples has {size:,} bytes, got {found:,}")
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        bits = np.frombuffer(file.read(), np.uint8)
    if len(bits) != size or (length % 8 and bits[-1] >> length % 8):
        raise ValueError(f"a part has an example that is not among the {length:,}")
    return bits


def count_of(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum()) if hasattr(np, "bitwise_count") else int(np.unpackbits(bits).sum())


def read_in_chunks(count: int, length: int) -> int:
    """Returns how many examples of a pass are read, on average, if so many are wanted, and each chunk is read whole or not."""
    return round(length * (1 - (1 - count / length) ** CHUNK))


def all_bits(length: int) -> Bits:
    return np.packbits(np.ones(length, np.bool_), bitorder="little")


def union_of(parts: Sequence[Bits]) -> Bits:
    found: Bits = np.bitwise_or.reduce(parts)
    return found


def _are_in(bits: Bits | None, indices: Sequence[Any]) -> list[bool]:
    if bits is None:
        return [True] * len(indices)
    at = np.asarray(indices)
    found: list[bool] = (bits[at >> 3] >> (at & 7) & 1).astype(bool).tolist()
    return found


def _has_all(bits: Bits | None, part: Bits) -> bool:
    """Returns whether all of a part is among these bits (None: all are)."""
    return bits is None or not (part & ~bits).any()


# ---------------------------------------------------------------------- members
# The reader and its window count *items* of the base: item ``n`` is slot ``n % length`` of pass ``n // length``. A training only
# counts its *members*: member ``v`` has place ``v % length`` in its own pass. Which item that is follows from the order of the
# base. So plan, ranks, rounds and states count members, and only messages and the window count items.


class Items:
    """The items of a training that takes all: its members are the items."""

    part: Part | None = None
    share = 1.0  # of the items that are members

    def item(self, member: int) -> int:
        """Returns the item of a member."""
        return member

    def member_from(self, item: int) -> int:
        """Returns the first member that is this item or comes after it."""
        return item

    @property
    def distances(self) -> Callable[[int], int] | None:
        """Returns, for a pass, the least number of members between two uses of an index: one there, and one in the pass before.

        None: it is that of the base.
        """
        return None


class _Pass(NamedTuple):
    """The members of a pass: their slots in the pass of the base, and their indices."""

    slots: Numbers
    indices: Numbers


class PartItems(Items):
    """The items of a training that takes a part of the base, which is read in ``order``."""

    _MOST_PASSES = 4  # that are remembered. Two follow each other, and a thread may be at another one

    def __init__(self, part: Part, order: Order) -> None:
        self.part, self._order = part, order
        self._length, self._base_length = len(part.indices), order.length
        self.share = self._length / self._base_length
        self._is_member = np.zeros(self._base_length, np.bool_)
        self._is_member[part.indices] = True
        self._lock = threading.RLock()  # a thread looks for another reader
        self._passes: dict[int, _Pass] = {}
        self._distances: dict[int, int] = {}

    def item(self, member: int) -> int:
        number, place = divmod(member, self._length)
        return number * self._base_length + int(self._pass(number).slots[place])

    def member_from(self, item: int) -> int:
        number, slot = divmod(item, self._base_length)
        return number * self._length + int(np.searchsorted(self._pass(number).slots, slot))

    @property
    def distances(self) -> Callable[[int], int]:
        return self._distance

    def _distance(self, number: int) -> int:
        with self._lock:
            if number not in self._distances:
                before, now, places = self._pass(number - 1), self._pass(number), np.arange(self._length)
                last = np.empty(self._base_length, np.int64)
                last[before.indices] = places - self._length
                self._distances[number] = int((places - last[now.indices]).min())
            return self._distances[number]

    def _pass(self, number: int) -> _Pass:
        with self._lock:
            if number not in self._passes:
                self._order.seek(number * self._base_length)
                indices = np.array(self._order.take(self._base_length), np.int64)
                slots = np.flatnonzero(self._is_member[indices])
                for other in list(self._passes)[: 1 - self._MOST_PASSES]:
                    del self._passes[other]
                self._passes[number] = _Pass(slots, indices[slots])
            return self._passes[number]


def items_of(part: Part | None, order: Callable[[], Order]) -> Items:
    """Returns the items of a training that reads this part (None: all) of what is read in an order."""
    return Items() if part is None else PartItems(part, order())


# ---------------------------------------------------------------------- wanted
# The reader reads what one of its trainings wants. That is settled for each chunk when the chunk is handed to a worker. So a
# training that comes later, and wants more, enters behind the last chunk that was settled without that. Workers do not get the
# chunks in their order.


@dataclass
class _Settled:
    """What was settled for chunks, one after the other in time, of which the last one ends before item ``end``."""

    bits: Bits | None  # None: everything
    end: int


class Wanted:
    """Which indices are read. At the beginning, from item ``begin`` on, everything."""

    def __init__(self, begin: int) -> None:
        self._lock = threading.Lock()  # one thread serves the trainings, and others hand out chunks
        self._first = begin  # what was settled for items before this one is forgotten
        self._settled = [_Settled(None, begin)]  # the last one is for the chunks that come

    def change(self, bits: Bits | None) -> None:
        """Reads these indices (None: everything) of the chunks that are not handed out yet."""
        with self._lock:
            now = self._settled[-1].bits
            if bits is now or (bits is not None and now is not None and np.array_equal(bits, now)):
                return
            self._settled.append(_Settled(bits, self._first))

    def settle(self, end: int, indices: Sequence[Any]) -> list[bool]:
        """Returns which of these indices are read. They are those of a chunk that is handed out, and ends before item ``end``."""
        with self._lock:
            now = self._settled[-1]
            now.end = max(now.end, end)
        return _are_in(now.bits, indices)

    def are_read(self, indices: Sequence[Any]) -> list[bool]:
        """Returns which of these indices are read as of now. Until they are settled, that may change."""
        return _are_in(self._settled[-1].bits, indices)

    def first_for(self, part: Bits, low: int) -> int:
        """Returns the first item from which on all of a part is read. What was settled for items below ``low`` is forgotten."""
        with self._lock:
            *before, now = self._settled
            self._first = max([self._first, *(each.end for each in before if each.end <= low)])
            self._settled = [*(each for each in before if each.end > low), now]
            return max([self._first, *(each.end for each in self._settled if not _has_all(each.bits, part))])


# ---------------------------------------------------------------------- dealing
# The workers of the reader get items in chunks of `CHUNK`. The chunks are cut at multiples of that number, wherever a reader
# begins. So a data set that reads many examples at once (``__getitems__``) always draws the same numbers for them, whichever
# worker gets a chunk. It reads whole chunks, or nothing. A worker that has done a chunk gets the next one that nobody has.


class Chunk(NamedTuple):
    """The items that a worker prepares at once."""

    first: int
    wanted: list[int]  # the items that are prepared. The others are wanted by nobody, or come before the reader's first one
    indices: list[Any]
    ahead: list[Any]  # indices of later chunks of the same worker, which it has not been told yet
    dropped: list[Any]  # indices of this chunk that it was told, and that are not wanted any more

    @property
    def end(self) -> int:
        return self.first + len(self.indices)

    def index_of(self, item: int) -> Any:
        return self.indices[item - self.first]

    def cut(self, most: int) -> list[Chunk]:
        """Returns this chunk in pieces of at most so many items. One worker must get all of them, in this order.

        >>> [(piece.first, piece.wanted, piece.ahead) for piece in Chunk(8, [8, 10, 11], list("abcd"), ["e"], []).cut(2)]
        [(8, [8], ['e']), (10, [10, 11], [])]
        """
        pieces, ahead, dropped = list[Chunk](), self.ahead, self.dropped
        for begin in range(0, len(self.indices), most):
            first, indices = self.first + begin, self.indices[begin : begin + most]
            wanted = [item for item in self.wanted if first <= item < first + len(indices)]
            pieces.append(Chunk(first, wanted, indices, ahead, dropped))
            ahead, dropped = [], []
        return pieces


@dataclass
class _Dealt:
    """A chunk that only one worker gets, and has not got yet."""

    first: int
    indices: list[Any]
    told: list[Any] | None = None  # its indices that the worker was told ahead; None: it was told nothing


class Dealing:
    """Deals chunk after chunk to the workers that ask. The first chunk contains item ``begin``.

    ``chunks_ahead``: the number of its own chunks that a worker is told ahead. Nobody else gets these. ``end``: all items come
    before this one; None: there is no end.
    """

    def __init__(self, order: AheadOrder, wanted: Wanted, begin: int, chunks_ahead: int = 0, end: int | None = None) -> None:
        self._order, self._wanted, self._begin, self._chunks_ahead = order, wanted, begin, chunks_ahead
        self._end = math.inf if end is None else end
        self._first = begin // CHUNK * CHUNK
        self._has_sought, self.is_whole = False, True  # whole: the order has given all that it was asked for
        self._again: deque[_Dealt] = deque()  # chunks that were taken back, which come next
        self._dealt: list[_Dealt] | None = None  # what is dealt in `taking_back`
        self.ending: set[int] = set()  # workers that get no more
        self.lock = threading.RLock()  # nobody else draws random numbers in this process while the order is asked

    @property
    def next_item(self) -> int:
        """The first item that nobody has."""
        return max(self._first, self._begin)

    @property
    def is_over(self) -> bool:
        """Whether all chunks are dealt."""
        return self._first >= self._end

    def chunks_of(self, worker: int) -> Iterator[Chunk]:
        """Yields the chunks of a worker, until it is to end and has all that were dealt to it."""
        mine: deque[_Dealt] = deque()
        while True:
            with self.lock:
                if worker not in self.ending:
                    while self._first < self._end and (
                        not mine or (len(mine) <= self._chunks_ahead and self._order.reaches(self._first + CHUNK - 1))
                    ):
                        mine.append(self._next())
                if not mine:
                    return
                chunk = self._handed_out(mine.popleft(), mine)
            yield chunk

    @contextmanager
    def taking_back(self) -> Iterator[None]:
        """If the block raises an exception, takes back what was dealt in it. No worker may have got that.

        Nobody else is dealt anything meanwhile.
        """
        with self.lock:
            self._dealt = []
            try:
                yield
            except BaseException:
                for each in reversed(self._dealt):
                    self._first = each.first
                    self._again.appendleft(_Dealt(each.first, each.indices))
                raise
            finally:
                self._dealt = None

    def _next(self) -> _Dealt:
        if self._again:
            dealt = self._again.popleft()
        else:
            self.is_whole = False
            if not self._has_sought:  # here, where whoever asks gets the error of a user's sampler
                self._order.seek(self._first)
                self._has_sought = True
            self._order.prune(self._first)
            dealt = _Dealt(self._first, self._order.take(CHUNK))
            self.is_whole = True
        if self._dealt is not None:
            self._dealt.append(dealt)
        self._first = dealt.first + CHUNK
        return dealt

    def _handed_out(self, dealt: _Dealt, later: Iterable[_Dealt]) -> Chunk:
        """Settles what is read of a chunk. Its worker is told what is read of the ``later`` ones, as of now."""
        ahead = list[Any]()
        for each in later:
            if each.told is None:
                each.told = list(compress(each.indices, self._wanted.are_read(each.indices)))
                ahead += each.told
        first, indices, told = dealt.first, dealt.indices, dealt.told or ()
        is_read = self._wanted.settle(first + CHUNK, indices)
        items = [item for item, stays in enumerate(is_read, first) if stays and self._begin <= item < self._end]
        dropped = [index for index, stays in zip(indices, is_read, strict=True) if not stays and index in told]
        return Chunk(first, items, indices, ahead, dropped)
