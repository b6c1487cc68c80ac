"""The size of the buffer: how many items may be live. The default can fill a batch, and it fits into memory.

If n batches are live, two uses of an example are about n batches apart. With 16 live batches instead of two, a language model
needed 0.69 times the fresh examples to reach its target, and image classification 0.86 times (docs/evidence.md, e = 4).

The default depends on the rule of reuse.

**Each fresh item is used** ``e`` **times** (``reuse="each"``): 16 batches are live, or 4 in device memory, because that is
scarce; at most a quarter of a pass, because more fresh examples are needed to fill the buffer; and at most a tenth of the free
memory.

**Echoes are drawn from all that memory holds** (``reuse="memory"``):

* A tenth of the free memory is filled. This needs no more fresh examples.
* The number of batches is rounded down to a power of two. The free memory differs a little from run to run, and two runs with
  the same seed should have the same batches.
* If it is not known how much memory an item takes, 64 batches are live.
* There is always room for a batch per worker, so any factor that is set later fits.

*Room* is the free memory that a rank may count on: the free memory of the node, without the future part of the node's cache,
divided among the ranks of the node. For items on a device, it is at most the free memory of that device. A live example that
the node's cache has in memory takes nothing of the room. So if there is room for all that the cache will not hold, only the
pass limits the number of live items.

A pass limits how many items can be held, because no index may be held twice. If all of a pass but one batch is live, the next
pass must have the same order. So a default takes half of that. Then the orders of two passes have a correlation of 0.2. With
three quarters it would be 0.6.

Free memory differs from rank to rank and from moment to moment, but the plan must be the same on all ranks. So the size is an
estimate until a run starts. Then all ranks take the smallest size of any rank. A resumed run keeps the size of its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from lightning_echo.data.copies import bytes_from_words, bytes_in_words
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.insertion import InsertionPoint
from lightning_echo.plan.plan import Reuse, smallest_buffer

Asked: TypeAlias = int | float | str | None
"""What a user asks for: items, a share of the free memory, bytes with a unit; None: the default."""

_LEAST_BATCHES_PER_WORKER = 2
_LEAST_BATCHES = 4  # if whole batches are reused
_MOST_OF_A_PASS = 4  # the default takes at most a fourth of a pass, if each fresh item is used e times
_DEFAULT_SHARE = 10  # the default takes at most a tenth of the free memory
_BATCHES_OF_UNKNOWN_SIZE = 64
_MIB, _GIB = 2**20, 2**30


class Room(NamedTuple):
    """The free memory that a rank may count on, in bytes, if ``ranks`` ranks divide that of the node.

    ``not_cached`` is the number of examples of the data set that the node's cache will not hold in the form of a live example.
    None: the cache holds no live examples.
    """

    bytes: int
    ranks: int = 1
    not_cached: int | None = None

    def __str__(self) -> str:
        shared = f" that each of the node's {self.ranks} ranks has" if self.ranks > 1 else ""
        return f"{self.bytes / _GIB:.3g} GiB of free memory{shared}"


def room_of_rank(ranks: int, set_aside: int, not_cached: int | None = None, *, on_device: bool) -> Room | None:
    """Returns the room of a rank; None if the system does not report how much memory is free.

    ``set_aside``: bytes of the node's memory that are free now and will be taken by something else. ``on_device``: whether the
    items are held on the device, and as many on the host.
    """
    host, device = free_memory_bytes(), free_device_bytes() if on_device else None
    found = [] if host is None else [max(host - set_aside, 0) // max(ranks, 1)]
    found += [] if device is None else [device]
    return Room(min(found), ranks, not_cached) if found else None


def free_device_bytes() -> int | None:
    """Returns the free memory of this rank's device, in bytes; None if this process does not use CUDA (yet).

    The question itself would start CUDA in this process. Then a process that is forked later could not use CUDA.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


@dataclass(frozen=True, kw_only=True)
class BufferSizing:
    """The sizes by which the buffer size of a loader is chosen and checked.

    Attributes:
        batch_size: Items in a batch; 1 if whole batches are the items.
        workers: Number of workers with a buffer each; 1 if the main process holds the items.
        item_bytes: Estimated memory of a live item; 0 if it is not known.
        usual: Live items by default, if each fresh item is used ``e`` times and memory is not short.
        unknown: Live items by default, if echoes are drawn from memory and ``item_bytes`` is not known.
        most: The largest number of items that a pass allows; None if its length is not known.
        most_by_default: The largest number of them that a default takes.
    """

    batch_size: int
    workers: int
    item_bytes: int
    by_batches: bool
    usual: int
    unknown: int
    most: int | None
    most_by_default: int | None
    reuse: Reuse

    @classmethod
    def of(
        cls, loader: Any, item_bytes: int, point: InsertionPoint, items_per_pass: int | None, reuse: Reuse, *, distinct: bool
    ) -> BufferSizing:
        """Makes one for a ``DataLoader``, or for any loader whose batches are the items. ``items_per_pass``: on this rank."""
        by_batches = point.by_batches
        batch_size, workers = (1, 1) if by_batches else (loader.batch_size, max(loader.num_workers, 1))
        least = _LEAST_BATCHES if by_batches else _LEAST_BATCHES_PER_WORKER * workers * batch_size
        usual = point.properties.live_batches * batch_size
        most = by_default = items_per_pass
        if items_per_pass is not None:
            usual = min(usual, items_per_pass // _MOST_OF_A_PASS)
            if distinct:
                most = max(items_per_pass - batch_size, 0)
                by_default = most // 2
        return cls(
            batch_size=batch_size,
            workers=workers,
            item_bytes=item_bytes,
            by_batches=by_batches,
            usual=max(least, usual),
            unknown=_BATCHES_OF_UNKNOWN_SIZE * batch_size,
            most=most,
            most_by_default=by_default,
            reuse=reuse,
        )

    @property
    def what(self) -> str:
        return "batches" if self.by_batches else "examples"

    def _least(self, factor: float) -> int:
        return max(smallest_buffer(self.batch_size, max(factor, 2.0), self.workers), 1)

    def size(self, asked: Asked, factor: float, room: Room | None) -> tuple[int, str]:
        """Returns the number of items, and a warning if there is too little memory for a default (otherwise ``""``)."""
        if isinstance(asked, int):  # if a pass is shorter, about half of it is live: see `PlanShape.buffer_in_pass`
            return asked, ""
        if asked is None:
            return self._default_of_each(factor, room) if self.reuse is Reuse.each else (self._from_memory(factor, room), "")
        if isinstance(asked, str):
            asked_bytes = bytes_from_words(asked) or 0
        elif room is not None:
            asked_bytes = int(room.bytes * asked)
        else:
            raise ValueError(
                f"buffer_size={asked!r} is a share of the free memory, which this system does not tell: give a size such as "
                f'"4GiB", or a number of {self.what}'
            )
        if not self.item_bytes:
            raise ValueError(
                f"buffer_size={asked!r} is memory, and how much of it live {self.what} of this loader take is not known: give a "
                f"number of {self.what}"
            )
        fitting = self._fitting(asked_bytes // self.item_bytes, room)
        return fitting if self.most is None else min(fitting, max(self.most, self._least(factor))), ""

    def _default_of_each(self, factor: float, room: Room | None) -> tuple[int, str]:
        size = self.usual
        if room is None or size * self.item_bytes <= room.bytes / _DEFAULT_SHARE:
            return size, ""
        fitting = min(max(int(room.bytes / _DEFAULT_SHARE // self.item_bytes), self._least(factor)), size)
        if fitting == size:
            return size, ""
        return fitting, (
            f"buffer_size is {fitting} instead of {size}: {size} live {self.what} of {self.item_bytes / _MIB:.3g} MiB would "
            f"take more than a tenth of the {room}. Set buffer_size to choose another"
        )

    def _from_memory(self, factor: float, room: Room | None) -> int:
        fitting = self.unknown
        if room is not None and self.item_bytes:
            batches = self._fitting(room.bytes // _DEFAULT_SHARE // self.item_bytes, room) // self.batch_size
            fitting = (1 << batches.bit_length() >> 1) * self.batch_size
        if self.most_by_default is not None:
            fitting = min(fitting, self.most_by_default)
        # A factor may be raised later. Even with the largest one, a batch needs no more echoes than it has items.
        return max(fitting, self._least(factor), self.batch_size * self.workers)

    def _fitting(self, own: int, room: Room | None) -> int:
        """Returns how many items may be live, if a rank has memory for ``own`` of them besides those that its node's cache has.

        Chance decides which items the cache has. So the cache counts only if there is memory for all other items. And a buffer
        that has to be filled first should not be as large as a pass.
        """
        if self.reuse is Reuse.each or room is None or room.not_cached is None or room.not_cached > own:
            return own
        return max(own, self.most or 0)

    def fits(self, size: int, room: Room | None) -> bool:
        not_cached = size if room is None or room.not_cached is None else min(size, room.not_cached)
        return room is None or not_cached * self.item_bytes <= room.bytes


class BufferSize:
    """The buffer size of one loader: an estimate at first, settled when a run starts.

    ``value`` is final if `is_settled`: a number that the user asks for always is. ``warning`` and ``remark`` are messages for the
    user about the estimate, or about a default that could not be chosen by memory; otherwise empty.
    """

    def __init__(self, asked: Asked, sizing: BufferSizing, factor: float, room: Room | None) -> None:
        self._asked, self._sizing = asked, sizing
        self._kept: int | None = None  # the size of a saved run that continues here
        self.is_settled = isinstance(asked, int)
        self.value, self.warning = sizing.size(asked, factor, room)
        self.remark = ""
        if asked is None:
            if sizing.reuse is Reuse.memory and (room is None or not sizing.item_bytes):
                unknown = "how much memory is free" if sizing.item_bytes else f"how much memory live {sizing.what} take"
                self.remark = f"buffer_size is a default that does not follow the memory: {unknown} is not known"
            return
        self.check(factor)
        if isinstance(asked, float):
            return
        free = free_memory_bytes()
        if free is not None and self.value * sizing.item_bytes > free:
            raise ValueError(
                f"buffer_size={asked!r} cannot fit: {self.value} live {sizing.what} of {sizing.item_bytes / _MIB:.3g} MiB need "
                f"more than the {free / _GIB:.3g} GiB of free memory. Use a smaller one, or a later insertion point"
            )

    def check(self, factor: float) -> None:
        """Raises a ValueError if the size cannot fill a batch at this factor."""
        asked, sizing = self._asked, self._sizing
        needed = smallest_buffer(sizing.batch_size, factor, sizing.workers)
        if self.value < needed:
            is_memory = isinstance(asked, float | str)
            in_words = f"{asked!r} ({self.value} live {sizing.what})" if is_memory else str(self.value)
            takes = f" ({bytes_in_words(needed * sizing.item_bytes)})" if is_memory else ""
            raise ValueError(
                f"buffer_size={in_words} is too small for factor={factor:g}: a batch of {sizing.batch_size} needs "
                f"{needed // sizing.workers} live {sizing.what} in each of {sizing.workers} workers. Use at least {needed}"
                f"{takes}, or leave it out"
            )

    def keep(self, size: int | None) -> None:
        """Keeps the size of a saved run, unless the user asks for a number. None: the run need not keep a size any more."""
        if isinstance(self._asked, int):
            return
        self._kept = size
        if size is not None and size != self.value:
            self.value, self.is_settled = size, False

    def settle(self, factor: float, room: Room | None, gathered: Callable[[tuple[int, bool]], list[tuple[int, bool]]]) -> str:
        """Agrees with all other ranks on one size. Returns a message if memory is short and the user does not know it, or "".

        It is the size of the saved run, if all ranks have room for it. Otherwise it is the smallest size that any rank has.
        ``gathered`` returns the values of all ranks.
        """
        before, kept = self.value, self._kept
        mine, warning = (before, "") if room is None else self._sizing.size(self._asked, factor, room)
        told = gathered((mine, kept is not None and self._sizing.fits(kept, room)))
        if kept is not None and all(fits for _, fits in told):
            self.value = kept
        else:
            self.value = min(size for size, _ in told)
            if self._asked is not None:
                self.check(factor)
        self.is_settled = True
        if kept is not None or self._asked is not None or self._sizing.reuse is Reuse.memory or self.value >= before:
            return ""
        less = f"buffer_size is {self.value} instead of {before}: another rank has less free memory"
        return warning if self.value == mine else less
