"""The user's loader, looked at once: what kind it is, where it can be echoed, and how it is rebuilt around a plan.

A plain ``DataLoader`` is rebuilt: same data set, same workers, same options, but the batch sampler is the plan's; over a stream,
which has no index, the plan runs in the workers. Anything else that yields batches is iterated as it is, pass after pass, and
only its batches are echoed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo.echoing.dataset import EchoCollate, EchoDataset, ExampleCache
from lightning_echo.echoing.insertion import InsertionPoint
from lightning_echo.echoing.proof import read_plainly
from lightning_echo.echoing.shape import PlanShape
from lightning_echo.echoing.splits import Split, SplitRefused, find_split, make_stages
from lightning_echo.echoing.stages import Stages, WholeDataset
from lightning_echo.echoing.streams import StreamEcho
from lightning_echo.echoing.weight import nbytes

__all__ = ["Choice", "Source", "choose", "reads_whole_batches"]

# What is reused and what is redone where examples are left whole.
_OF_WHOLE = {
    InsertionPoint.after_augmentation: (("load", "augment"), ("collate", "transfer")),
    InsertionPoint.after_batching: (("load", "augment", "collate"), ("transfer",)),
    InsertionPoint.after_transfer: (("load", "augment", "collate", "transfer"), ("on_after_batch_transfer",)),
}


@dataclass(frozen=True)
class Choice:
    """The insertion point that was chosen.

    Attributes:
        point: The point, never ``auto``.
        reason: Why ``auto`` did not take an earlier one; empty if it took the earliest, or was not asked.
        make_stages: Makes the stages in a worker.
        reused: What an echo reuses, for people.
        redone: What each use redoes.
        item_bytes: Estimated memory of a live example, or of a live batch where batches are reused; 0 if unknown.
    """

    point: InsertionPoint
    reason: str
    make_stages: Callable[[Any], Stages]
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    item_bytes: int


class Source:
    """The user's loader, and what it is made of.

    Args:
        loader: A ``DataLoader``, or any iterable of batches.

    Attributes:
        rebuilds: Whether it is a ``DataLoader`` that is rebuilt around a plan of indices.
        streams: Whether it is a ``DataLoader`` that makes batches of a stream's examples.
        length: Batches of a pass; None: a pass ends where its iteration does.

    Raises:
        TypeError: It cannot be iterated, is no training loader at all, or its sampler has no length.
        ValueError: It is empty, or hands batches out in another order than its sampler's.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        if not hasattr(loader, "__iter__"):
            raise TypeError(f"loader must be a DataLoader or another iterable of batches, got {type(loader).__name__}")
        parts = list(loader.values()) if isinstance(loader, dict) else loader if isinstance(loader, list | tuple) else ()
        if isinstance(loader, dict) or hasattr(loader, "flattened") or any(isinstance(part, DataLoader) for part in parts):
            raise TypeError(
                f"loader must be a single loader, got a {type(loader).__name__} of loaders; wrap each of them in an EchoLoader, "
                "or pass a single one"
            )
        if isinstance(loader, Iterator):
            raise TypeError(
                f"loader must be iterable again in every pass, got the iterator {type(loader).__name__}; "
                "pass the object that it was made from"
            )
        makes_batches = _makes_batches_plainly(loader)
        self.streams = makes_batches and isinstance(loader.dataset, IterableDataset)
        self.rebuilds = makes_batches and not self.streams
        self.num_workers: int = getattr(loader, "num_workers", 0)
        if getattr(loader, "in_order", True) is False:
            raise ValueError(
                "loader has in_order=False: batches would arrive in an order that depends on timing, and counts and resuming "
                "could not be exact. Set in_order=True"
            )
        self.length = self._length()
        if self.length == 0:
            raise ValueError("loader is empty: it has no batch (an empty data set, or drop_last=True with too few examples)")

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError) as error:
            if not self.rebuilds:
                return None
            raise TypeError(
                f"loader must have a length, but len({type(self.loader).__name__}) fails: {error}. "
                "Give its sampler (or its data set) a __len__ that says how many indices a pass has"
            ) from None

    @property
    def reads_stream(self) -> bool:
        """Whether a stream is behind it, so that another iteration may have other examples."""
        return any(isinstance(each, IterableDataset) for each in (self.loader, getattr(self.loader, "dataset", None)))

    @property
    def own_batches(self) -> bool:
        """Whether a user's batch sampler decides what makes up a batch."""
        return self.rebuilds and self.loader.batch_size is None

    @property
    def sampler(self) -> Any:
        """What decides the order: the batch sampler where it is the user's own, else the sampler."""
        return self.loader.batch_sampler if self.own_batches else self.loader.sampler

    @property
    def shards_itself(self) -> bool:
        """Whether the sampler already deals its indices out to the ranks."""
        samplers = (self.sampler, getattr(self.sampler, "sampler", None)) if self.rebuilds else (self.loader,)
        return any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers)

    @property
    def is_sequential(self) -> bool:
        return type(self.sampler) is SequentialSampler and self._covers_dataset()

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is what ``DataLoader(shuffle=True)`` makes: ours to draw."""
        sampler = self.sampler
        return (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.generator is self.loader.generator
            and self._covers_dataset()
        )

    @property
    def prefetched_batches(self) -> int:
        """Batches that the workers are asked for ahead."""
        return self.num_workers * (getattr(self.loader, "prefetch_factor", None) or 2) if self.num_workers else 0

    @property
    def prepared_in_workers(self) -> bool:
        """Whether a ``worker_init_fn`` may do what the data set needs before it can be read."""
        return self.num_workers > 0 and self.loader.worker_init_fn is not None

    @property
    def readable_index(self) -> int | None:
        """An index that the plain loader would read, in the state in which the data set is now; None if none is known."""
        if not self.rebuilds or self.own_batches or self.prepared_in_workers:
            return None
        sampler = self.sampler
        if type(sampler) is SubsetRandomSampler:
            return next(iter(sampler.indices), None)
        if type(sampler) in (SequentialSampler, RandomSampler) and self._covers_dataset():
            return 0
        return 0 if type(sampler) is WeightedRandomSampler else None

    def _covers_dataset(self) -> bool:
        return self.sampler.data_source is self.loader.dataset and len(self.sampler) == len(self.loader.dataset)

    def rebuild(self, requests: Any, make_stages: Callable[[Any], Stages], key: int, worker_init_fn: Any) -> DataLoader[Any]:
        """The user's ``DataLoader`` with the plan as its batch sampler.

        Args:
            requests: Batch sampler that yields `Request`.
            make_stages: Makes the stages in a worker.
            key: Seed of this rank's random numbers.
            worker_init_fn: Of the user, or set by Lightning on the `EchoLoader`.
        """
        cache = ExampleCache(self.loader.dataset, make_stages, key, self.loader.collate_fn)
        return self._rebuilt(requests, cache, key, worker_init_fn)

    def rebuild_stream(self, requests: Any, shape: PlanShape, key: int, worker_init_fn: Any) -> DataLoader[Any]:
        """The same for a stream.

        Args:
            requests: Batch sampler that yields `StreamRequest`.
            shape: Sizes of the plan of one worker.
            key: See `rebuild`.
            worker_init_fn: See `rebuild`.
        """
        loader = self.loader
        echo = StreamEcho(loader.dataset, shape, key, loader.collate_fn, drop_last=loader.drop_last)
        return self._rebuilt(requests, echo, key, worker_init_fn)

    def _rebuilt(self, requests: Any, cache: Any, key: int, worker_init_fn: Any) -> DataLoader[Any]:
        loader = self.loader
        options: dict[str, Any] = {
            name: getattr(loader, name) for name in ("num_workers", "pin_memory", "timeout", "multiprocessing_context")
        }
        if self.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
        if getattr(loader, "pin_memory_device", ""):
            options["pin_memory_device"] = loader.pin_memory_device
        generator = loader.generator
        if generator is None:  # else building the iterator would draw from the training process's
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own loader has said it already
            dataset: Any = EchoDataset(cache)
            collate: Any = EchoCollate(loader.collate_fn)
            return DataLoader(
                dataset,
                batch_sampler=requests,
                collate_fn=collate,
                worker_init_fn=worker_init_fn,
                generator=generator,
                **options,
            )


def choose(source: Source, point: InsertionPoint) -> Choice:
    """The insertion point to use: the one asked for if the loader allows it.

    For ``auto`` the earliest that it allows, from ``before_augmentation`` on.

    Raises:
        ValueError: The point asked for is impossible; the message says why and what to do.
    """
    if source.streams:
        return _choose_of_stream(point)
    if not source.rebuilds or source.own_batches:
        reason = _why_batches_only(source)
        if point is InsertionPoint.auto:
            return _whole(source, InsertionPoint.after_batching, reason)
        if not point.by_batches:
            raise ValueError(f"insertion_point={point.value!r} is impossible here: {reason}. Use 'after_batching' or 'auto'")
        return _whole(source, point, "")
    if point is InsertionPoint.after_augmentation or point.by_batches:
        return _whole(source, point, "")
    try:
        split = find_split(source.loader.dataset, _readable_indices(source), raw=point is InsertionPoint.after_read)
    except SplitRefused as refused:
        if point is not InsertionPoint.auto:
            raise ValueError(f"insertion_point={point.value!r} is impossible here: {refused}") from refused
        return _whole(source, InsertionPoint.after_augmentation, refused.reason)
    except Exception as error:
        if point is not InsertionPoint.auto or source.readable_index is not None:
            raise
        how = "without worker_init_fn" if source.prepared_in_workers else "at an index that the sampler may not know"
        reason = f"an example cannot be read {how} ({type(error).__name__}: {error})"
        return _whole(source, InsertionPoint.after_augmentation, reason)
    return _split(split)


def _choose_of_stream(point: InsertionPoint) -> Choice:
    reason = "the data set is a stream, which has no index"
    if point.by_batches:
        return Choice(point, "", WholeDataset, *_OF_WHOLE[point], 0)
    if point not in (InsertionPoint.auto, InsertionPoint.after_augmentation):
        raise ValueError(
            f"insertion_point={point.value!r} is impossible here: {reason}. Use 'after_augmentation', 'after_batching' or 'auto'"
        )
    reason = reason if point is InsertionPoint.auto else ""
    point = InsertionPoint.after_augmentation
    return Choice(point, reason, WholeDataset, *_OF_WHOLE[point], 0)


def _makes_batches_plainly(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def _why_batches_only(source: Source) -> str:
    loader = source.loader
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is an iterable of batches, of which single examples are not known"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None: what it calls an example is opaque"
    if source.rebuilds:
        return "the loader has a batch_sampler of its own, and what makes up a batch is that sampler's decision"
    return f"{type(loader).__name__} has an __iter__ of its own, which a rebuilt loader would not run"


def _readable_indices(source: Source) -> Any:
    """Indices that may be read to look at an example; None: all."""
    if source.is_sequential or source.is_shuffled:
        return None
    indices = source.sampler.indices if type(source.sampler) is SubsetRandomSampler else None
    return indices if isinstance(indices, Sized) and len(indices) else None


def _whole(source: Source, point: InsertionPoint, reason: str) -> Choice:
    reused, redone = _OF_WHOLE[point]
    item_bytes = 0
    if (index := source.readable_index) is not None:
        item_bytes = nbytes(read_plainly(source.loader.dataset, [index]).examples[0])
        if point.by_batches:
            item_bytes *= source.loader.batch_size
    return Choice(point, reason, WholeDataset, reused, redone, item_bytes)


def _split(split: Split) -> Choice:
    return Choice(
        InsertionPoint.after_read if split.raw else InsertionPoint.before_augmentation,
        "",
        partial(make_stages, conventions=split.conventions, raw=split.raw),
        split.reused,
        split.redone,
        split.example_bytes,
    )


def reads_whole_batches(source: Source, choice: Choice) -> bool:
    """Whether the workers read the fresh examples of a batch in one call."""
    return choice.make_stages(source.loader.dataset).load_many is not None
