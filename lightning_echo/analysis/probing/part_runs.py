"""Runs a loader alone, one part of its work at a time, to measure the time of its workers for a batch.

Each run of a part (parts.py) is a ``DataLoader`` with the user's options. Its data set does that part for the examples of a
batch, and measures how long it takes. Nothing here draws from the random numbers of this process.
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
from lightning_echo.analysis.probing.files import OpenedFiles
from lightning_echo.analysis.probing.parts import Halves, Part
from lightning_echo.analysis.probing.transforms import TimedTransforms
from lightning_echo.protecting.memory import nbytes
from lightning_echo.workers.dataset import EchoDataset
from lightning_echo.workers.errors import InitThatSaysWhy

__all__ = [
    "BatchSeconds",
    "Batches",
    "FirstBatches",
    "PartRun",
    "Seen",
    "counted",
    "fewest_batches",
    "iterate",
    "options_of",
    "run_part",
]

_MOST_OUTPUT_BYTES = 2**30

Value = TypeVar("Value")


class BatchSeconds(NamedTuple):
    """The seconds that one worker spent on a batch.

    Attributes:
        first: Seconds for the part's first half.
        second: Seconds for its second half; 0 if it has none.
        collate: Seconds for making a batch from the examples.
        cpu: Processor time, in seconds, of all that.
    """

    first: float
    second: float
    collate: float
    cpu: float


class Seen(NamedTuple):
    """What a worker has seen while it made a batch; empty if the worker does not observe.

    Attributes:
        files: The files that it opened.
        transforms: Seconds of each transform, by name.
    """

    files: list[str]
    transforms: dict[str, float]


@dataclass
class PartRun:
    """What a run of a part has measured.

    Attributes:
        batches: The seconds that the workers spent, batch by batch.
        files: Files that the workers opened, in the order in which they were opened.
        transforms: Seconds of each transform, batch by batch.
        outputs: The batches themselves, if they were asked for.
    """

    batches: list[BatchSeconds] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    transforms: list[dict[str, float]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def of(self, name: str, per: float) -> Spread:
        """Returns the seconds of one piece of the work.

        Args:
            name: Name of a field of `BatchSeconds`.
            per: Number of examples in a batch, for the seconds per example; 1 for the seconds per batch.
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


def fewest_batches(workers: int) -> int:
    """Returns the number of batches that a run needs: the first batches of all workers arrive at the same time.

    >>> fewest_batches(0), fewest_batches(1), fewest_batches(4)
    (2, 3, 9)
    """
    return max(2, 2 * workers + 1)


def counted(batches: Sequence[Value]) -> Sequence[Value]:
    """Returns the batches that count: all but the first tenth, in which the workers start."""
    return batches[max(1, len(batches) // 10) :] or batches


def run_part(
    loader: DataLoader[Any],
    part: Part,
    batches: Sequence[list[Any]],
    *,
    collates: bool = True,
    keeps_outputs: bool = False,
    observes: bool = False,
    workers: int | None = None,
    most_seconds: float = float("inf"),
) -> PartRun:
    """Runs one part over batches of indices.

    Args:
        loader: The user's loader, whose options are used.
        part: The work for each example.
        batches: The indices of each batch.
        collates: Whether the user's collate function makes batches; otherwise the output is a list of examples.
        keeps_outputs: Whether to keep the outputs. The run then also ends when they take a gibibyte.
        observes: Whether workers note which files they open and how long each transform takes. Without workers nothing is noted.
        workers: Number of workers; None: that of the loader.
        most_seconds: The run ends with the first batch after this time, but not before `fewest_batches`.

    Raises:
        Exception: The data set, or the collate function, raises it.
    """
    run, files, output_bytes = PartRun(), dict[str, None](), 0
    begin = time.perf_counter()
    for batch, spent, seen in iterate(loader, part, batches, collates=collates, observes=observes, workers=workers):
        run.batches.append(BatchSeconds(*spent))
        files.update(dict.fromkeys(seen.files))
        run.transforms.append(seen.transforms)
        if keeps_outputs:
            run.outputs.append(batch if collates else pickle.loads(batch))
            output_bytes += nbytes(batch)
        is_over = time.perf_counter() - begin > most_seconds or output_bytes > _MOST_OUTPUT_BYTES
        if is_over and len(run.batches) >= fewest_batches(loader.num_workers if workers is None else workers):
            break
    run.files = list(files)
    return run


def iterate(
    loader: DataLoader[Any],
    part: Part,
    batches: Sequence[list[Any]],
    *,
    collates: bool = True,
    observes: bool = False,
    workers: int | None = None,
) -> Iterator[tuple[Any, BatchSeconds, Seen]]:
    """Yields each batch, its `BatchSeconds`, and what the worker has seen. The arguments are those of `run_part`."""
    number = loader.num_workers if workers is None else workers
    probed: Any = EchoDataset(_Probe(loader.dataset, part, observes))  # to a worker_init_fn, it looks like the user's data set
    collate: Any = _Collate(loader.collate_fn if collates else pickle.dumps)  # bytes: each tensor would be a shared file
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
    """Returns the options of the user's loader for this number of workers, without those for order and batches."""
    init = InitThatSaysWhy(loader.worker_init_fn)
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": loader.pin_memory, "worker_init_fn": init}
    if workers:
        options |= {"timeout": loader.timeout, "multiprocessing_context": loader.multiprocessing_context}
        options["prefetch_factor"] = loader.prefetch_factor or 2
    return options


class Batches:
    """A loader for ``Trainer.fit`` that yields the same batches in each epoch.

    Args:
        loader: The user's loader, whose options are used.
        part: The work for the examples of a batch.
        indices: The indices of each batch.
        workers: Number of workers; None: that of the loader.
    """

    def __init__(self, loader: DataLoader[Any], part: Part, indices: Sequence[list[Any]], workers: int | None = None) -> None:
        self.part, self.indices = part, indices
        self._loader, self._workers = loader, workers

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in iterate(self._loader, self.part, self.indices, workers=self._workers))


class FirstBatches:
    """The first batches of a loader, in each epoch: `Batches` for a loader that cannot be run in parts.

    Args:
        loader: The user's loader.
        steps: Number of batches.
    """

    def __init__(self, loader: DataLoader[Any], steps: int) -> None:
        self._loader, self._steps = loader, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._steps)


class _Probe:
    """Does a part in a worker, and times it.

    Args:
        dataset: The user's data set.
        part: The work.
        observes: Whether to note which files are opened, and how long transforms take.
    """

    def __init__(self, dataset: Any, part: Part, observes: bool) -> None:
        self.dataset = dataset
        self._part, self._observes = part, observes
        self._halves: Halves | None = None
        self._opened: OpenedFiles | None = None
        self._timed: TimedTransforms | None = None

    def fetch(self, indices: list[Any]) -> tuple[list[Any], BatchSeconds, Seen]:
        if self._halves is None:
            if get_worker_info() is not None:
                self._begin_in_worker()
            self._halves = self._part(self.dataset)
        halves, clock = self._halves, time.perf_counter
        begin, cpu = clock(), time.process_time()
        examples = halves.first(indices)
        middle = end = clock()
        if halves.second is not None:
            examples = halves.second(indices, examples)
            end = clock()
        return examples, BatchSeconds(middle - begin, end - middle, 0.0, time.process_time() - cpu), self._seen()

    def _begin_in_worker(self) -> None:
        # Does the imports of the first tensor to be sent (0.3 s with torch 2.4). Otherwise a thread does them, during the second
        # batch.
        ForkingPickler.dumps(torch.empty(0))
        if self._observes:
            self._opened, self._timed = OpenedFiles(), TimedTransforms(self.dataset)

    def _seen(self) -> Seen:
        if self._opened is None or self._timed is None:
            return Seen([], {})
        return Seen(self._opened.take(), self._timed.take())


class _Collate:
    """Calls the user's collate function, and times it. Plain tuples travel beside the batch."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: tuple[list[Any], BatchSeconds, Seen]) -> tuple[Any, BatchSeconds, Seen]:
        examples, spent, seen = fetched
        begin, cpu = time.perf_counter(), time.process_time()
        batch = self._collate_fn(examples)
        spent = spent._replace(collate=time.perf_counter() - begin, cpu=spent.cpu + time.process_time() - cpu)
        return batch, spent, seen
