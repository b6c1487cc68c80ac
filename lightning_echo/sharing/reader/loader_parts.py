"""The parts of a loader that a reader needs, taken from the training's loader and put together again in the reader.

What is shared depends on the loader (`unit_of`):

* Data that is read by index: examples. Each reader has them in the same order, and can begin at any item.
* A stream: examples, in the order in which the workers yield them. A reader can only begin at the start of a pass.
* A loader with a batch sampler of its own: the examples of each batch. Each training collates them itself.
* Any other loader, which makes its batches itself: whole batches.

These options are not among the parts:

* batch size, collate function and ``drop_last``, if the reader makes no batches,
* pinning,
* ``timeout``, since the workers wait for trainings.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_echo.fetching.sampler_order import draws_by_itself, tell_pass
from lightning_echo.fetching.source import Source
from lightning_echo.planning.hashing import mix
from lightning_echo.protecting.randomness import seed_all
from lightning_echo.sharing.window import CHUNK

__all__ = ["ReplayedSampler", "Unit", "loader_of", "parts_of", "unit_of"]


class Unit(Enum):
    """What an item of the reader's stream is."""

    indexed = "an example that is read by its index"
    streamed = "an example of a stream"
    examples_of_batch = "the examples of a batch"
    batch = "a batch"

    @property
    def is_replayed(self) -> bool:
        """Whether each reader gives the same item at the same place."""
        return self is Unit.indexed

    @property
    def is_of_batch(self) -> bool:
        """Whether an item is a whole batch, or all examples of one."""
        return self in (Unit.examples_of_batch, Unit.batch)


def unit_of(source: Source) -> Unit:
    """Returns what an item of such a loader is."""
    if source.streams:
        return Unit.streamed
    if source.own_batches:
        return Unit.examples_of_batch
    return Unit.indexed if source.rebuilds else Unit.batch


def parts_of(source: Source) -> dict[str, Any]:
    """Returns the parts of a training's loader."""
    loader, unit = source.loader, unit_of(source)
    if unit is Unit.batch and not _is_plain(loader):
        return {"loader": loader}
    context = loader.multiprocessing_context
    parts = {
        "dataset": loader.dataset,
        "num_workers": max(loader.num_workers, 1),
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": None if context is None else context.get_start_method(),
    }
    if unit is Unit.indexed:
        parts["sampler"] = _without_generator(source.sampler)
    elif unit is Unit.examples_of_batch:
        parts["batch_sampler"] = source.sampler
    elif unit is Unit.batch:
        sampler = None if source.reads_stream else loader.sampler
        parts |= {"batch_size": None, "sampler": sampler, "collate_fn": loader.collate_fn, "generator": loader.generator}
    return parts


def loader_of(parts: dict[str, Any], seed: int) -> Any:
    """Returns a loader of these parts.

    Args:
        parts: See `parts_of`.
        seed: Seed for the random numbers of the sampler.
    """
    if "loader" in parts:
        return parts["loader"]
    if "batch_size" in parts or "batch_sampler" in parts:
        return DataLoader(**parts)
    sampler = parts.get("sampler")  # none for a stream
    if sampler is not None and not draws_by_itself(sampler):
        sampler = ReplayedSampler(sampler, parts["dataset"], seed)
    return DataLoader(**{**parts, "sampler": sampler, "batch_size": CHUNK})


def _is_plain(loader: Any) -> bool:
    """Whether this is torch's own ``DataLoader`` without batches, so that another one with the same options does the same."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def _without_generator(sampler: Any) -> Any:
    """Returns a copy of torch's sampler without its generator. The reader gives it a generator that follows from the name."""
    copied = copy.copy(sampler)
    if draws_by_itself(sampler) and getattr(copied, "generator", None) is not None:
        copied.generator = None
    return copied


class ReplayedSampler:
    """A sampler of the user's. Each reader gets the same order for each pass, even if the sampler remembers earlier passes.

    A training sends a sampler that was not iterated yet. If a pass begins that does not follow the one before, the sampler starts
    anew and yields all passes before it. This reads no data.

    Args:
        sampler: The user's sampler.
        dataset: The data set that the sampler refers to, which need not be copied.
        seed: Seed for the random numbers of the sampler.
    """

    def __init__(self, sampler: Any, dataset: Any, seed: int) -> None:
        self._untouched, self._dataset, self._seed = sampler, dataset, seed
        self._sampler: Any = None
        self._number = self._next = 0

    def __len__(self) -> int:
        return len(self._untouched)

    def set_epoch(self, number: int) -> None:
        """Sets the number of the pass that begins next."""
        self._number = number

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is None or self._next != self._number:
            self._sampler = copy.deepcopy(self._untouched, {id(self._dataset): self._dataset})
            generator = getattr(self._sampler, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(mix(self._seed, 0))
            for number in range(self._number):
                deque(islice(self._begin(number), 2 * len(self)), maxlen=0)  # more items than it has, so that its iteration ends
        self._next = self._number + 1
        return self._begin(self._number)

    def _begin(self, number: int) -> Iterator[Any]:
        seed_all(mix(self._seed, number))
        tell_pass(number, self._sampler)
        return iter(self._sampler)
