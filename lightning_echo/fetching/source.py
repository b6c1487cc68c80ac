"""The user's loader: what kind it is, and how it is rebuilt around a plan.

A plain ``DataLoader`` is rebuilt: same data set, same workers, same options, but the plan is its batch sampler. Over a stream,
which has no index, the plan runs in the workers. Anything else that yields batches is iterated as it is, pass after pass, and
only its batches are echoed.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NoReturn

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    IterDataPipe,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_echo.caching.cached_reads import Caching
from lightning_echo.caching.records.own_changes import changed_by_reading
from lightning_echo.fetching.sampler_order import draws_by_itself, sampler_in_words
from lightning_echo.fetching.worker_processes import WorkerProcesses
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.objects import is_stateful
from lightning_echo.splitting.stages import Stages
from lightning_echo.workers.dataset import EchoCollate, EchoDataset, ExampleCache, Request
from lightning_echo.workers.streams import StreamEcho, StreamRequest

__all__ = ["PlainAttributes", "Source"]

_ONLY_SHUFFLE = ("torch", "lightning", "pytorch_lightning")  # packages


class Source:
    """The user's loader and its parts.

    Args:
        loader: A ``DataLoader``, or any iterable of batches.

    Attributes:
        loader: The user's loader.
        rebuilds: Whether it is a ``DataLoader`` that is rebuilt around a plan of indices.
        streams: Whether it is a ``DataLoader`` that makes batches from a stream's examples.
        num_workers: Number of its worker processes; 0 if it has no such attribute.

    Raises:
        TypeError: The loader cannot be iterated, or only once; it is a collection of loaders; or its sampler has no length.
        ValueError: The loader is empty, or yields batches in another order than its sampler's.
    """

    def __init__(self, loader: Any) -> None:
        _check_kind(loader)
        self.loader = loader
        makes_batches = _makes_batches_plainly(loader)
        self.streams = makes_batches and isinstance(loader.dataset, IterableDataset)
        self.rebuilds = makes_batches and not self.streams
        self.num_workers: int = getattr(loader, "num_workers", 0)
        if getattr(loader, "in_order", True) is False:
            raise ValueError(
                "loader has in_order=False: batches would arrive in an order that depends on timing, and counts and resuming "
                "could not be exact. Set in_order=True"
            )
        _length_of(loader, is_needed=self.rebuilds)

    @property
    def length(self) -> int | None:
        """Present number of batches in a pass; None if a pass ends where its iteration ends.

        Raises:
            TypeError: The sampler has no length.
            ValueError: There is no batch.
        """
        return _length_of(self.loader, is_needed=self.rebuilds)

    @property
    def reads_stream(self) -> bool:
        """Whether another iteration may have other examples.

        It may if the loader reads a stream, is its own iterator, or has a loader of accelerate around torchdata's, whose first
        iteration draws its order otherwise than later ones.
        """
        loader = self.loader
        if isinstance(loader, Iterator) or is_stateful(getattr(loader, "base_dataloader", None)):
            return True
        return any(isinstance(each, IterableDataset) for each in (loader, getattr(loader, "dataset", None)))

    @property
    def own_batches(self) -> bool:
        """Whether a batch sampler of the user's decides what is in a batch."""
        return self.rebuilds and self.loader.batch_size is None

    @property
    def sampler(self) -> Any:
        """What decides the order: the batch sampler if it is the user's own, else the sampler."""
        return self.loader.batch_sampler if self.own_batches else self.loader.sampler

    @property
    def shards_itself(self) -> bool:
        """Whether the sampler itself divides its indices among the ranks."""
        samplers = (self.sampler, getattr(self.sampler, "sampler", None)) if self.rebuilds else (self.loader,)
        return any(hasattr(sampler, "num_replicas") and hasattr(sampler, "rank") for sampler in samplers)

    def hearers(self) -> tuple[Any, ...]:
        """Returns what has a ``set_epoch`` of the user's, which is told the pass. Its order, and its length, may follow that.

        The ``set_epoch`` of torch's and Lightning's own samplers only makes another shuffle.
        """
        if self.streams:
            return ()
        loader = self.loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        told = {id(each): each for each in (loader, getattr(loader, "sampler", None), batch_sampler)}
        told.update({id(inner): inner for inner in (getattr(batch_sampler, "sampler", None),)})
        return tuple(
            each
            for each in told.values()
            if callable(getattr(each, "set_epoch", None)) and type(each).__module__.partition(".")[0] not in _ONLY_SHUFFLE
        )

    @property
    def is_sequential(self) -> bool:
        """Whether the order is that of the data set."""
        return type(self.sampler) is SequentialSampler and self._covers_dataset()

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is what ``DataLoader(shuffle=True)`` makes. Then the package draws it, and not the sampler."""
        sampler = self.sampler
        return (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.generator is self.loader.generator
            and self._covers_dataset()
        )

    @property
    def order_by(self) -> str | None:
        """What decides the order, in words; None if that is the loader's own affair."""
        if not self.rebuilds:
            return None
        if self.is_sequential or self.is_shuffled:
            return "shuffle=True" if self.is_shuffled else "shuffle=False"
        return sampler_in_words(self.sampler)

    def watched_parts(self) -> dict[str, Any]:
        """Returns what decides the examples, by name, and what a plain loader's next epoch would see; empty if nothing."""
        has_lasting_workers = self.num_workers > 0 and getattr(self.loader, "persistent_workers", False)
        # A stream that is read in this process changes by being read.
        if has_lasting_workers or not (self.rebuilds or (self.streams and self.num_workers)):
            return {}
        return {"dataset": self.loader.dataset, "collate_fn": self.loader.collate_fn}

    def watched_sampler(self) -> dict[str, Any]:
        """Returns the sampler if it is one of torch's: the user's own may change by itself, and others draw nothing."""
        is_torchs = self.rebuilds and not (self.is_sequential or self.is_shuffled) and draws_by_itself(self.sampler)
        return {"sampler": self.sampler} if is_torchs else {}

    def changed_by_reading(self) -> set[str]:
        """Returns the paths of what reading itself changes in the data set, such as a counter of reads. See `watched_parts`."""
        return changed_by_reading(self.loader, _dataset_alone, (), self.readable_indices) if self.rebuilds else set()

    @property
    def may_run_in_thread(self) -> bool:
        """Whether a thread may fetch batches beside the training, since their order does not use the global random states."""
        return self.rebuilds and (self.is_sequential or self.is_shuffled or draws_by_itself(self.sampler))

    @property
    def prefetched_batches(self) -> int:
        """How many batches the workers prepare ahead."""
        return self.num_workers * (getattr(self.loader, "prefetch_factor", None) or 2) if self.num_workers else 0

    @property
    def prepared_in_workers(self) -> bool:
        """Whether a ``worker_init_fn`` may change the data set in each worker."""
        return self.num_workers > 0 and self.loader.worker_init_fn is not None

    @property
    def readable_index(self) -> int | None:
        """An index that the plain loader would read; None if no such index is known."""
        if not self.rebuilds or self.own_batches:
            return None
        sampler = self.sampler
        if type(sampler) is SubsetRandomSampler:
            return next(iter(sampler.indices), None)
        if type(sampler) in (SequentialSampler, RandomSampler) and self._covers_dataset():
            return 0
        return 0 if type(sampler) is WeightedRandomSampler else None

    @property
    def readable_indices(self) -> Any:
        """The indices that may be read to look at an example; None if all may be read."""
        indices = self.sampler.indices if type(self.sampler) is SubsetRandomSampler else None
        return indices if isinstance(indices, Sized) and len(indices) else None

    def _covers_dataset(self) -> bool:
        """Whether the sampler was made over this data set, and yields as many indices as that has."""
        return self.sampler.data_source is self.loader.dataset and len(self.sampler) == len(self.loader.dataset)

    def rebuild(
        self,
        requests: Iterable[Request],
        make_stages: Callable[[Any], Stages],
        key: int,
        workers: WorkerProcesses,
        caching: Caching | None = None,
        *,
        is_seeded: bool = True,
    ) -> DataLoader[Any]:
        """Returns the user's ``DataLoader``, rebuilt around requests.

        Args:
            requests: The batch sampler.
            make_stages: Makes the stages in a worker.
            key: Seed of this rank's random numbers.
            workers: Has the function that the workers run first, and notes the processes that are started.
            caching: The cache through which examples are read; None: there is no cache.
            is_seeded: As in `ExampleCache`.
        """
        cache = ExampleCache(self.loader.dataset, make_stages, key, self.loader.collate_fn, caching, is_seeded=is_seeded)
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
        """Returns the user's ``DataLoader``, rebuilt with the same workers and options, and a data set that answers requests."""
        loader = self.loader
        options: dict[str, Any] = {name: getattr(loader, name) for name in ("num_workers", "pin_memory", "timeout")}
        if self.num_workers:
            options["prefetch_factor"] = loader.prefetch_factor
            options["multiprocessing_context"] = workers.noted_by(loader.multiprocessing_context)
        if getattr(loader, "pin_memory_device", ""):
            options["pin_memory_device"] = loader.pin_memory_device
        generator = loader.generator
        if generator is None:  # without a generator, making the iterator would draw from the random state of the training
            generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user's own loader has given the same warnings already
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


class PlainAttributes:
    """Gives other code the attributes of the loader inside, if that loader has them.

    Only those from which nobody builds another loader: that loader would train without echoing, and nothing would say so.

    Attributes:
        loader: The plain loader.
    """

    loader: Any

    @property
    def dataset(self) -> Any:
        """The data set of the loader inside. A stream must be read from there: ``.loader.dataset``.

        Raises:
            AttributeError: The loader inside has no data set, or it is a stream.
        """
        dataset = self.loader.dataset
        if isinstance(dataset, IterableDataset):
            self._refuse("dataset")
        return dataset

    @property
    def batch_size(self) -> Any:
        """The batch size of the loader inside: the number of examples, or None if it has a ``batch_sampler`` of its own."""
        return self.loader.batch_size

    @property
    def collate_fn(self) -> Any:
        """The collate function of the loader inside."""
        return self.loader.collate_fn

    @property
    def drop_last(self) -> Any:
        """Whether the loader inside leaves out a last batch that is not full."""
        return self.loader.drop_last

    @property
    def sampler(self) -> NoReturn:
        """Not there: Lightning would tell epochs to it behind the plan, and others would build a plain loader from it.

        Raises:
            AttributeError: Always.
        """
        self._refuse("sampler")

    def _refuse(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{type(self).__name__} has no {name!r}, since a loader that is built from it would not echo. If a Trainer of "
            "transformers resumes here, set ignore_data_skip=True and load the state of the EchoLoader instead. Otherwise ask "
            f"the plain loader: its .loader.{name}"
        )


def _check_kind(loader: Any) -> None:
    """Raises a TypeError if this is not a single loader that can be iterated again and again."""
    kind = type(loader).__name__
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"loader must be a DataLoader or another iterable of batches, got {kind}")
    is_sequence_of_loaders = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
    if isinstance(loader, dict) or is_sequence_of_loaders or hasattr(loader, "flattened"):  # the last: a CombinedLoader
        raise TypeError(
            f"loader must be a single loader, got a {kind} of loaders; wrap each of them in an EchoLoader, or pass a single one"
        )
    if isinstance(loader, Iterator) and _cannot_begin_again(type(loader)):
        raise TypeError(
            f"loader must be iterable again in every pass, got the iterator {kind}; pass the object that it was made from"
        )


def _cannot_begin_again(kind: type) -> bool:
    """Returns whether an iterator of this class is known to end after one pass: generators and what Python and torch make.

    Others may begin again in their ``__iter__``. If they do not, the second pass shows it.
    """
    begin = inspect.getattr_static(kind, "__iter__")
    return not inspect.isfunction(begin) or begin.__module__.startswith("torch.")


def _makes_batches_plainly(loader: Any) -> bool:
    """Whether this is a ``DataLoader`` that makes batches of examples, and is iterated as torch iterates it.

    Data pipes are iterated as they are: torch divides them among its workers only if they are the data set of its loader.
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterDataPipe)
        and loader.batch_sampler is not None
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader)._get_iterator is DataLoader._get_iterator
    )


def _length_of(loader: Any, *, is_needed: bool) -> int | None:
    """Returns the number of batches of a loader; None if it has no length, and needs none.

    Raises:
        TypeError: It has no length, and needs one.
        ValueError: There is no batch.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError) as error:
        if not is_needed:
            return None
        raise TypeError(
            f"loader must have a length, but len({type(loader).__name__}) fails: {error}. "
            "Give its sampler (or its data set) a __len__ that says how many indices a pass has"
        ) from None
    if not length:
        raise ValueError(
            "loader is empty: it has no batch (an empty data set, or drop_last=True with too few examples). "
            "Give its data set examples, or set drop_last=False"
        )
    return length


def _dataset_alone(dataset: Any) -> dict[str, Any]:
    return {"dataset": dataset}
