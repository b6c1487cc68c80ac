"""The user's loader, looked at once: what kind it is, and how it is rebuilt around a plan.

A plain ``DataLoader`` is rebuilt: same data set, same workers, same options, but the batch sampler is the plan's; over a stream,
which has no index, the plan runs in the workers. Anything else that yields batches is iterated as it is, pass after pass, and
only its batches are echoed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
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

from lightning_echo.fetching.sampler_order import draws_by_itself
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.shape import PlanShape
from lightning_echo.splitting.stages import Stages
from lightning_echo.workers.dataset import EchoCollate, EchoDataset, ExampleCache, Request
from lightning_echo.workers.streams import StreamEcho, StreamRequest

__all__ = ["Source"]


class Source:
    """The user's loader, and what it is made of.

    Args:
        loader: A ``DataLoader``, or any iterable of batches.

    Attributes:
        rebuilds: Whether it is a ``DataLoader`` that is rebuilt around a plan of indices.
        streams: Whether it is a ``DataLoader`` that makes batches of a stream's examples.

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
        _ = self.length

    @property
    def length(self) -> int | None:
        """Batches of a pass, as it is now; None: a pass ends where its iteration does.

        Raises:
            TypeError: The sampler has no length.
            ValueError: There is no batch.
        """
        try:
            length = len(self.loader)
        except (TypeError, NotImplementedError) as error:
            if not self.rebuilds:
                return None
            raise TypeError(
                f"loader must have a length, but len({type(self.loader).__name__}) fails: {error}. "
                "Give its sampler (or its data set) a __len__ that says how many indices a pass has"
            ) from None
        if not length:
            raise ValueError("loader is empty: it has no batch (an empty data set, or drop_last=True with too few examples)")
        return length

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
    def may_run_in_thread(self) -> bool:
        """Whether batches can be fetched beside the training: nothing of its order draws from the global random states."""
        return self.rebuilds and (self.is_sequential or self.is_shuffled or draws_by_itself(self.sampler))

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

    def rebuild(
        self, requests: Iterable[Request], make_stages: Callable[[Any], Stages], key: int, workers: WorkerProcesses
    ) -> DataLoader[Any]:
        """Returns the user's ``DataLoader``, rebuilt around requests.

        Args:
            requests: The batch sampler.
            make_stages: Makes the stages in a worker.
            key: Seed of this rank's random numbers.
            workers: What the workers run first; notes those that are started.
        """
        cache = ExampleCache(self.loader.dataset, make_stages, key, self.loader.collate_fn)
        return self._rebuilt(requests, cache, key, workers)

    def rebuild_stream(
        self, requests: Iterable[StreamRequest], shape: PlanShape, key: int, workers: WorkerProcesses
    ) -> DataLoader[Any]:
        """Returns the same for a stream.

        Args:
            requests: The batch sampler.
            shape: Sizes of the plan of one worker.
            key: See `rebuild`.
            workers: See `rebuild`.
        """
        loader = self.loader
        context = loader.multiprocessing_context or torch.multiprocessing.get_context()
        turn = context.Lock() if self.num_workers else None
        echo = StreamEcho(loader.dataset, shape, key, loader.collate_fn, drop_last=loader.drop_last, turn=turn)
        return self._rebuilt(requests, echo, key, workers)

    def _rebuilt(self, requests: Iterable[Any], answering: Any, key: int, workers: WorkerProcesses) -> DataLoader[Any]:
        """Returns the user's ``DataLoader`` around what answers requests: same workers, same options."""
        loader = self.loader
        options: dict[str, Any] = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "timeout")}
        if self.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["multiprocessing_context"] = workers.noted_by(loader.multiprocessing_context)
        if getattr(loader, "pin_memory_device", ""):
            options["pin_memory_device"] = loader.pin_memory_device
        generator = loader.generator
        if generator is None:  # else building the iterator would draw from the training process's
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own loader has said it already
            dataset: Any = EchoDataset(answering)
            collate: Any = EchoCollate(loader.collate_fn)
            return DataLoader(
                dataset,
                batch_sampler=requests,
                collate_fn=collate,
                worker_init_fn=workers.worker_init_fn,
                generator=generator,
                **options,
            )


def _makes_batches_plainly(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )
