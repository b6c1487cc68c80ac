"""A loader run alone, part of it at a time, over the same batches of indices: what its workers spend, and how fast it is.

Each pass over a part (parts.py) is a ``DataLoader`` with the user's options, whose data set does that part for the examples of a
batch and says how long it took. Nothing of it draws from the random numbers of this process.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.probing.pages import OpenedFiles
from lightning_echo.analysis.probing.parts import First, Part, Second
from lightning_echo.analysis.probing.transforms import TimedTransforms
from lightning_echo.protecting.weight import nbytes
from lightning_echo.workers.dataset import EchoDataset

__all__ = ["BatchSeconds", "Batches", "FirstBatches", "Pass", "Seen", "counted", "fewest", "iterate", "options_of", "run_pass"]

_MOST_KEPT_BYTES = 2**30

Value = TypeVar("Value")


class BatchSeconds(NamedTuple):
    """What one worker spent on a batch.

    Attributes:
        first: Of the part's first half.
        second: Of its second half; 0 where it has none.
        collate: Making a batch of examples.
        cpu: Processor time of all that.
    """

    first: float
    second: float
    collate: float
    cpu: float


class Seen(NamedTuple):
    """What a worker that looks has seen of a batch; nothing where none looks.

    Attributes:
        files: That it opened.
        transforms: Seconds of each transform, by name.
    """

    files: list[str]
    transforms: dict[str, float]


@dataclass
class Pass:
    """What a pass came to.

    Attributes:
        batches: What workers spent, batch by batch.
        files: Opened by the workers, in the order in which they were met.
        transforms: Seconds of each transform, batch by batch.
        outputs: The batches themselves, where they were asked for.
    """

    batches: list[BatchSeconds] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    transforms: list[dict[str, float]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def of(self, name: str, per: float) -> Spread:
        """Seconds of a part of the work.

        Args:
            name: Of one in `BatchSeconds`.
            per: Examples of a batch, for seconds of each; 1 for those of a batch.
        """
        return Spread.of([getattr(batch, name) / per for batch in counted(self.batches)])

    @property
    def cpu_seconds(self) -> float:
        """Processor time per batch."""
        return fmean(batch.cpu for batch in counted(self.batches))

    @property
    def cpu_share(self) -> float:
        """Share of the workers' time in which a processor is busy."""
        spent = fmean(batch.first + batch.second + batch.collate for batch in counted(self.batches))
        return min(1.0, self.cpu_seconds / spent) if spent else 0.0


def fewest(workers: int) -> int:
    """Batches of a pass that say something: those which workers begin with arrive at once.

    >>> fewest(0), fewest(1), fewest(4)
    (2, 3, 9)
    """
    return max(2, 2 * workers + 1)


def counted(batches: Sequence[Value]) -> Sequence[Value]:
    """Those but the first tenth, in which each worker starts."""
    return batches[max(1, len(batches) // 10) :] or batches


def run_pass(
    loader: DataLoader[Any],
    part: Part,
    batches: Sequence[list[Any]],
    *,
    collates: bool = True,
    keeps: bool = False,
    looks: bool = False,
    workers: int | None = None,
    most_seconds: float = float("inf"),
) -> Pass:
    """Runs one part over batches of indices.

    Args:
        loader: The user's, whose options are taken over.
        part: What is done for each example.
        batches: The indices of each.
        collates: Whether the user's collate function makes batches; else examples are kept in lists.
        keeps: Whether outputs are kept; the pass ends, too, when they take a gibibyte.
        looks: Whether workers say which files they open and what each transform takes; without workers nothing is seen.
        workers: In place of the loader's.
        most_seconds: The pass ends with the first batch after so long, but has `fewest` where there are so many.

    Raises:
        Exception: The data set, or the collate function, raises it.
    """
    made, files, kept_bytes = Pass(), dict[str, None](), 0
    begin = time.perf_counter()
    for batch, spent, seen in iterate(loader, part, batches, collates=collates, looks=looks, workers=workers):
        made.batches.append(BatchSeconds(*spent))
        files.update(dict.fromkeys(seen.files))
        made.transforms.append(seen.transforms)
        if keeps:
            made.outputs.append(batch if collates else pickle.loads(batch))
            kept_bytes += nbytes(batch)
        is_over = time.perf_counter() - begin > most_seconds or kept_bytes > _MOST_KEPT_BYTES
        if is_over and len(made.batches) >= fewest(loader.num_workers if workers is None else workers):
            break
    made.files = list(files)
    return made


def iterate(
    loader: DataLoader[Any],
    part: Part,
    batches: Sequence[list[Any]],
    *,
    collates: bool = True,
    looks: bool = False,
    workers: int | None = None,
) -> Iterator[tuple[Any, BatchSeconds, Seen]]:
    """The batches of a pass, what a worker spent on each, and what it has seen; arguments as in `run_pass`."""
    number = loader.num_workers if workers is None else workers
    probed: Any = EchoDataset(_Probe(loader.dataset, part, looks))  # to a worker_init_fn it looks like the user's
    collate: Any = _Collate(loader.collate_fn if collates else pickle.dumps)  # tensors, too: each would be a shared file
    return iter(
        DataLoader(
            probed,
            batch_sampler=batches,
            collate_fn=collate,
            generator=torch.Generator(),
            **options_of(loader, number),
        )
    )


def options_of(loader: DataLoader[Any], workers: int) -> dict[str, Any]:
    """The options of the user's loader that have nothing to do with order and batches, for so many workers."""
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": loader.pin_memory, "worker_init_fn": loader.worker_init_fn}
    if workers:
        options |= {"timeout": loader.timeout, "multiprocessing_context": loader.multiprocessing_context}
        options["prefetch_factor"] = loader.prefetch_factor or 2
    return options


class Batches:
    """The batches of a pass and nothing else, each time anew: a loader for ``Trainer.fit``.

    Args:
        loader: The user's, whose options are taken over.
        part: What is done for the examples of each.
        indices: Of each batch.
        workers: In place of the loader's.
    """

    def __init__(self, loader: DataLoader[Any], part: Part, indices: Sequence[list[Any]], workers: int | None = None) -> None:
        self.part, self.indices = part, indices
        self._loader, self._workers = loader, workers

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in iterate(self._loader, self.part, self.indices, workers=self._workers))


class FirstBatches:
    """The first batches of a loader, each time anew: what `Batches` is for a loader that cannot be run in parts.

    Args:
        loader: The user's.
        steps: Batches.
    """

    def __init__(self, loader: DataLoader[Any], steps: int) -> None:
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._steps)


class _Probe:
    """Does a part, and times it.

    Args:
        dataset: The user's.
        part: What is done.
        looks: Whether it says what was opened, and what transforms took.
    """

    def __init__(self, dataset: Any, part: Part, looks: bool) -> None:
        self.dataset = dataset
        self._part, self._looks = part, looks
        self._ready: tuple[First, Second | None] | None = None
        self._eyes: tuple[OpenedFiles, TimedTransforms] | None = None

    def fetch(self, indices: list[Any]) -> tuple[list[Any], tuple[float, float, float], Seen]:
        if self._ready is None:
            if get_worker_info() is not None:
                self._begin_in_worker()
            self._ready = self._part(self.dataset)
        (do_first, do_second), clock = self._ready, time.perf_counter
        begin, cpu = clock(), time.process_time()
        examples = do_first(indices)
        middle = end = clock()
        if do_second is not None:
            examples = do_second(indices, examples)
            end = clock()
        return examples, (middle - begin, end - middle, time.process_time() - cpu), self._seen()

    def _begin_in_worker(self) -> None:
        # What the first tensor to be sent imports (torch 2.4: for 0.3 s): else a thread does it, beside the second batch.
        ForkingPickler.dumps(torch.empty(0))
        if self._looks:
            self._eyes = OpenedFiles(), TimedTransforms(self.dataset)

    def _seen(self) -> Seen:
        if self._eyes is None:
            return Seen([], {})
        opened, timed = self._eyes
        return Seen(opened.take(), timed.take())


class _Collate:
    """The user's collate function, timed; plain tuples travel beside the batch."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: tuple[list[Any], tuple[float, float, float], Seen]) -> tuple[Any, BatchSeconds, Seen]:
        examples, (first, second, cpu), seen = fetched
        begin, cpu_begin = time.perf_counter(), time.process_time()
        batch = self._collate_fn(examples)
        return batch, BatchSeconds(first, second, time.perf_counter() - begin, cpu + time.process_time() - cpu_begin), seen
