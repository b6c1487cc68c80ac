"""Whole batches, used again in the main process: the point ``after_batching``, and the ground of ``after_transfer``.

The plan says for each step which batch is delivered; what is read is kept here while uses are left. A batch is handed out as it
was read, and a copy of it is kept, since the loader may use its memory again. What is kept is handed out as copies, but for the
last use, since the training step may edit what it gets. Copying runs in the prefetching thread where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from numbers import Integral
from typing import Any

import torch

from lightning_echo.fetching.passes import PassOver
from lightning_echo.fetching.requests import BatchRequests
from lightning_echo.protecting.protect import copy_example
from lightning_echo.workers.seconds import Report

__all__ = ["BatchEcho", "RequestedReader", "count_examples"]

_NOTHING_RAN = (0.0, 0.0, 0.0)


class BatchEcho:
    """Iterates over delivered batches, each with its counts of examples and, where it was read, the seconds that it took.

    Args:
        requests: Says which batch is delivered at each step.
        read: Returns the batch at a stream position and its seconds of source, rest and collate, zeros where they are not
            known; asked for the positions to read, in the order of `requests`.
    """

    def __init__(self, requests: BatchRequests, read: Callable[[int], tuple[Any, tuple[float, float, float]]]) -> None:
        self._requests, self._read = requests, read
        self._held: dict[int, tuple[Any, int]] = {}  # with its number of examples

    def __iter__(self) -> BatchEcho:
        return self

    def __next__(self) -> tuple[Any, Report]:
        step = self._requests.step()
        for position in step.forget:
            self._held.pop(position, None)
        if step.read:
            try:
                batch, seconds = self._read(step.position)
            except PassOver:  # what was to be its next batch is the first of the next pass
                self._requests.put_back(step)
                raise
            size = step.size if step.size >= 0 else count_examples(batch)
            handed_out, held = self._first_use(batch, is_last=not step.stays_live)
        else:
            (held, size), seconds = self._held[step.position], _NOTHING_RAN
            handed_out = self._further_use(held, is_last=not step.stays_live)
        if step.stays_live:
            self._held[step.position] = held, size
        else:
            self._held.pop(step.position, None)
        if step.fresh:
            return handed_out, Report(size, 0, 0, *seconds)
        return handed_out, Report(0, size, size if step.read else 0, *seconds)

    def _first_use(self, batch: Any, *, is_last: bool) -> tuple[Any, Any]:
        """What is handed out of a batch that was read, and what is kept of it while uses are left."""
        return batch, None if is_last else copy_example(batch)

    def _further_use(self, held: Any, *, is_last: bool) -> Any:
        """What is handed out of what was kept."""
        return held if is_last else copy_example(held)


class RequestedReader:
    """Reads the batches that were requested of the rebuilt loader, in its order.

    Args:
        batches: Yields (batch, report); let go of with this object (a frame would hold a closure).
    """

    def __init__(self, batches: Iterator[tuple[Any, Report]]) -> None:
        self._batches = batches

    def read(self, position: int) -> tuple[Any, tuple[float, float, float]]:
        """The next batch, which is the one at ``position``, and its seconds."""
        batch, report = next(self._batches)
        return batch, (report.source, report.rest, report.collate)


def count_examples(batch: Any) -> int:
    """Examples in a batch that nothing is known of.

    An object may say it: ``batch_size`` (PyTorch Geometric, DGL, TensorDict), of a graph with several types of nodes the sum over
    those that have one, else ``num_nodes``. Sequences of one length side by side (``zip(*examples)``) have an example each; else
    it is the leading dimension of the first tensor found, or the ``batch_size`` of an object before it, else the length of a
    list, else 1.
    """
    if isinstance(batch, torch.Tensor):  # first, since asking for a Mapping costs more than all the rest
        return len(batch) if batch.ndim else 1
    if _may_say(batch):
        said = _said_by(batch)
        said = _size_in(batch, "num_nodes") if said is None else said
        if said is not None:
            return said
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    is_sequence = isinstance(batch, list | tuple) and len(batch) > 0
    if is_sequence and len(batch) > 1 and all(isinstance(part, list | tuple) and part for part in batch):
        lengths = {len(part) for part in batch}
        if len(lengths) == 1:
            return int(lengths.pop())
    found = _first_size(batch)
    if found is not None:
        return found
    return len(batch) if is_sequence else 1


def _may_say(batch: Any) -> bool:
    return not isinstance(batch, list | tuple | dict | str | bytes | None)


def _said_by(batch: Any) -> int | None:
    """What an object says of the examples in it, if anything."""
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
    """What the first tensor, or object that says its size, counts."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 1
    if isinstance(batch, list | tuple):
        parts: Iterable[Any] = batch
    else:
        if _may_say(batch) and (said := _said_by(batch)) is not None:
            return said
        parts = batch.values() if isinstance(batch, Mapping) else vars(batch).values() if is_dataclass(batch) else ()
    return next((found for part in parts if (found := _first_size(part)) is not None), None)
