"""Whole batches, used again: on the host (``after_batching``) or on the device (``after_transfer``).

The plan says for each step which batch is delivered. A batch that was read is held here while it has uses left:

* **On the host.** The first use is the batch as it was read, and a copy is held, because the loader may use its memory again.
  Each further use is a copy of the held batch, because the training step may edit what it gets. The last use is the held batch
  itself. If there is a thread that fetches ahead, it does the copying.
* **On the device.** The training gets a `BatchUse` instead of a batch. It contains a `LiveBatch`, the same one for all its uses,
  and also the host batch until that is prepared. At the transfer it becomes a batch::

      BatchUse --prepare--> the host batch, changed once    on_before_batch_transfer
               --transfer-> the device batch, moved once    transfer_batch_to_device
               ----------> aliases of it, for each use      on_after_batch_transfer, then the step

  After the last use, nothing here refers to the `LiveBatch`, and its device memory is free.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import get_sharing_strategy

from lightning_echo.fetching.passes import PassOver
from lightning_echo.fetching.requests import BatchRequests
from lightning_echo.protecting.aliases import LentBatch, rebuild, separate, tensors_in
from lightning_echo.protecting.protect import copy_example
from lightning_echo.workers.seconds import Report

__all__ = ["BatchEcho", "BatchUse", "LiveBatch", "LiveBatchEcho", "RequestedReader", "UseToCome", "count_examples", "size_of"]

Read = Callable[[int], tuple[Any, Report]]

_DESCRIPTORS_SHARE = 4  # live batches keep at most a fourth of the files open that a process may have open


class BatchEcho:
    """Yields delivered batches, each with its report: its counts of examples and, if it was read, the seconds that reading took.

    Args:
        requests: Says which batch is delivered at each step.
        read: Returns the batch at a stream position, and a report with the seconds that reading took (zeros if not known). It is
            called with the positions to read, in the order of ``requests``.
    """

    def __init__(self, requests: BatchRequests, read: Read) -> None:
        self._requests, self._read = requests, read
        self._held: dict[int, tuple[Any, int]] = {}  # by position: what is held of a batch, and its number of examples

    def __iter__(self) -> BatchEcho:
        return self

    def __next__(self) -> tuple[Any, Report]:
        step = self._requests.step()
        for position in step.forget:
            self._held.pop(position, None)
        if step.is_read:
            try:
                batch, cost = self._read(step.position)
            except PassOver:  # the batch of this step is the first one of the next pass
                self._requests.put_back(step)
                raise
            size = step.size if step.size >= 0 else count_examples(batch)
            handed_out, held = self._first_use(batch, is_last=not step.stays_live)
            fresh, echoed, refetched = (size, 0, 0) if step.is_fresh else (0, size, size)
            lookups = (cost.hits, cost.misses, cost.received) if step.is_fresh else (0, 0, 0)
            report = Report(fresh, echoed, refetched, cost.source, cost.rest, cost.collate, cost.note, *lookups, cost.waited)
        else:
            held, size = self._held[step.position]
            handed_out, report = self._further_use(held, is_last=not step.stays_live), Report(0, size)
        if step.stays_live:
            self._held[step.position] = held, size
        else:
            self._held.pop(step.position, None)
        return handed_out, report

    def _first_use(self, batch: Any, *, is_last: bool) -> tuple[Any, Any]:
        """Returns the first use of a batch that was read, and what to hold for its further uses."""
        return batch, None if is_last else copy_example(batch)

    def _further_use(self, held: Any, *, is_last: bool) -> Any:
        """Returns a further use, made from what is held."""
        return held if is_last else copy_example(held)


class LiveBatchEcho(BatchEcho):
    """Yields a `UseToCome` for each use of a live batch on the device. The rest is as in `BatchEcho`.

    Args:
        requests: As in `BatchEcho`.
        read: As in `BatchEcho`.
        are_owned: Whether no other code uses the memory of the batches that are read. Then they are not copied, unless they would
            keep too many files open.
    """

    def __init__(self, requests: BatchRequests, read: Read, *, are_owned: bool = False) -> None:
        super().__init__(requests, read)
        self._are_owned = are_owned

    def _first_use(self, batch: Any, *, is_last: bool) -> tuple[UseToCome, LiveBatch]:
        is_held_as_it_is = is_last or (self._are_owned and self._descriptors_suffice(batch))
        live = LiveBatch(batch if is_held_as_it_is else copy_example(batch))
        return UseToCome(live, is_last), live

    def _descriptors_suffice(self, batch: Any) -> bool:
        """Returns whether one more batch like this may be held as it came from a worker: with an open file for each tensor."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most == resource.RLIM_INFINITY or get_sharing_strategy() != "file_descriptor":  # type: ignore[no-untyped-call]
            return True
        return (len(self._held) + 1) * sum(map(_is_shared, tensors_in(batch))) <= most // _DESCRIPTORS_SHARE

    def _further_use(self, held: LiveBatch, *, is_last: bool) -> UseToCome:
        return UseToCome(held, is_last)


def _is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of the host is in memory that it shares with another process."""
    try:
        return tensor.device.type == "cpu" and bool(tensor.is_shared())  # type: ignore[no-untyped-call]
    except Exception:  # a class without memory of its own
        return False


class RequestedReader:
    """Reads the requested batches from the rebuilt loader, in its order.

    It is an object and not a function: a function would keep the iterator in its closure as long as a frame refers to it.

    Args:
        batches: Yields (batch, report).
    """

    def __init__(self, batches: Iterator[tuple[Any, Report]]) -> None:
        self._batches = batches

    def read(self, position: int) -> tuple[Any, Report]:
        """Returns the next batch, which is the one at ``position``, and its report."""
        return next(self._batches)


# ---------------------------------------------------------------------- on the device


class UseToCome:
    """A use of a live batch that was fetched ahead.

    After the training has got the use, the thread that fetches still refers to this object for a while. So this object drops its
    reference to the batch at that time. After the last use of a batch, its device memory is then free as soon as the step has
    dropped it.

    Args:
        live: The batch.
        is_last: Whether this is the last use of the batch.
    """

    __slots__ = ("_is_last", "_live")

    def __init__(self, live: LiveBatch, is_last: bool) -> None:
        self._live: LiveBatch | None = live
        self._is_last = is_last

    def hand_out(self) -> BatchUse:
        """Returns the use. It may be called only once."""
        live, self._live = self._live, None
        assert live is not None
        return live.use(self._is_last)


class BatchUse(NamedTuple):
    """One use of a live batch.

    It is a named tuple, because a precision plugin of Lightning's converts the tensors in what the loader yields. The plugin
    rebuilds tuples, and so finds the host batch. It does not look into a `LiveBatch`.

    Attributes:
        live: The batch.
        host: The batch as it was read; None after the live batch is prepared.
        is_last: Whether this is the last use of the batch.
    """

    live: LiveBatch
    host: Any
    is_last: bool


class LiveBatch:
    """A live batch: first on the host and, from its transfer on, on the device.

    Args:
        host: The batch as it was read.

    Example:
        >>> live = LiveBatch([1.0])
        >>> for is_last in (False, True):
        ...     use = live.use(is_last)
        ...     live.prepare(use.host, lambda batch: [*batch, 2.0])
        ...     print(use.host, live.transfer(tuple, is_last=use.is_last))
        [1.0] (1.0, 2.0)
        None (1.0, 2.0)
    """

    __slots__ = ("_device", "_host", "_is_prepared")

    def __init__(self, host: Any) -> None:
        self._host, self._is_prepared = host, False
        self._device: LentBatch | None = None

    def use(self, is_last: bool) -> BatchUse:
        """Returns a use for the training. Call this when the training gets the use.

        If the training does not use it, the host batch is not lost: the next use contains it.

        Args:
            is_last: Whether this is the last use of the batch.
        """
        return BatchUse(self, None if self._is_prepared else self._host, is_last)

    def prepare(self, host: Any, change: Callable[[Any], Any]) -> None:
        """Applies ``change`` to the host batch, at the first use only.

        Args:
            host: The host batch of the `BatchUse`.
            change: Gets the host batch, and returns the batch to transfer.
        """
        if not self._is_prepared:
            self._host, self._is_prepared = change(host), True

    @property
    def nbytes(self) -> int:
        """Memory on the device, in bytes."""
        return 0 if self._device is None else self._device.nbytes

    def let_go_if_edited(self) -> bool:
        """Drops a device batch that was edited in place, so that the next `transfer` moves the host batch again.

        Returns:
            Whether it was edited.
        """
        is_edited = self._device is not None and self._device.is_edited()
        if is_edited:
            self._device = None
        return is_edited

    def transfer(self, move: Callable[[Any], Any], *, is_last: bool) -> Any:
        """Returns the batch on the device.

        Args:
            move: Transfers a host batch. It is called only if there is no device batch yet.
            is_last: Whether this is the last use. Then nothing is kept.
        """
        host, device = self._host, self._device
        if is_last:
            self._host = self._device = None
            return move(host) if device is None else device.batch
        if device is None:
            device = self._device = LentBatch(move(rebuild(host)))
            self._host = separate(host, device)  # if the device is the host, an edit would reach both batches
        return device.hand_out()


# ---------------------------------------------------------------------- counting


def count_examples(batch: Any) -> int:
    """Returns the number of examples in a batch of unknown form, see `size_of`. A batch that cannot be asked is one example."""
    size = size_of(batch)
    return 1 if size is None else size


def size_of(batch: Any) -> int | None:
    """Returns the number of examples in a batch of unknown form; None if the batch raises an error when it is asked.

    Counting may end no training. The first of these rules that fits decides:

    1. For a tensor, it is the size of the first dimension.
    2. An object may have the number as ``batch_size`` (PyTorch Geometric, DGL, TensorDict; for a graph with several types of
       nodes, the sum over the types that have one), else as ``num_nodes``.
    3. Several lists or tuples of the same length, side by side (``zip(*examples)``), have one example at each place.
    4. In a mapping, the lists and tuples say it if all have one length, and a tensor has it, too: what cannot be stacked is
       listed once per example, while a tensor of boxes has a row for each box (Ultralytics).
    5. The first tensor inside counts as in rule 1, or an object before it that has a ``batch_size``.
    6. For a list or tuple, it is the length.
    7. Anything else is one example.
    """
    try:
        return _size_of(batch)
    except Exception:  # the batch's own code: a property, a lazy member, a mapping
        return None


def _size_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):  # first, since asking for a Mapping costs more than all the rest
        return len(batch) if batch.ndim else 1
    if _may_state(batch):
        stated = _stated_by(batch)
        stated = _size_in(batch, "num_nodes") if stated is None else stated
        if stated is not None:
            return stated
    if isinstance(batch, Mapping):
        batch = list(batch.values())
        if (listed := _listed_in(batch)) is not None:
            return listed
    is_sequence = isinstance(batch, list | tuple) and len(batch) > 0
    if is_sequence and len(batch) > 1 and all(isinstance(part, list | tuple) and part for part in batch):
        lengths = {len(part) for part in batch}
        if len(lengths) == 1:
            return int(lengths.pop())
    found = _first_size(batch)
    if found is not None:
        return found
    return len(batch) if is_sequence else 1


def _listed_in(members: list[Any]) -> int | None:
    """Returns the common length of the lists and tuples, if a tensor has as many rows; None if not."""
    lengths = {len(member) for member in members if isinstance(member, list | tuple)}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    return length if any(isinstance(member, torch.Tensor) and member.shape[:1] == (length,) for member in members) else None


def _may_state(batch: Any) -> bool:
    return not isinstance(batch, list | tuple | dict | str | bytes | None)


def _stated_by(batch: Any) -> int | None:
    """Returns the number of examples that an object says that it has; None if it says none."""
    if (size := _size_in(batch, "batch_size")) is not None:
        return size
    stores = getattr(batch, "node_stores", None)  # of a graph with nodes of several types
    if isinstance(stores, list):
        sizes = [size for store in stores if (size := _size_in(store, "batch_size")) is not None]
        if sizes:
            return sum(sizes)
    return None


def _size_in(batch: Any, name: str) -> int | None:
    value = getattr(batch, name, None)
    if isinstance(value, torch.Size):
        return value[0] if value else None
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _first_size(batch: Any) -> int | None:
    """Returns the number of examples by the first tensor, or the first object that states it; None if there is neither."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, list | tuple):
        parts: Iterable[Any] = batch
    else:
        if _may_state(batch) and (stated := _stated_by(batch)) is not None:
            return stated
        parts = batch.values() if isinstance(batch, Mapping) else _fields_of(batch)
    return next((found for part in parts if (found := _first_size(part)) is not None), None)


def _fields_of(batch: Any) -> list[Any]:
    """Returns the fields of an instance of a dataclass, also of one with slots; of other objects, nothing."""
    if not is_dataclass(batch) or isinstance(batch, type):
        return []
    held = getattr(batch, "__dict__", {})
    slots = [each.name for each in fields(batch) if each.name not in held and hasattr(batch, each.name)]
    return [*held.values(), *(getattr(batch, name) for name in slots)]
