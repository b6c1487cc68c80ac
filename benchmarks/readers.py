"""Who reads ahead: the bare ``DataLoader``, ours with reads in flight, and other loaders that read in threads.

All read the same data sets, which know nothing of their reader. Those that start threads in the training's process run in a
process beside it (`beside`), because nobody should fork there.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from slow_server import Fetch
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from workloads import WORKERS, Sleeping

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 2**16  # no run comes to the end of a pass
MANY_WORKERS = 16
_SLOW_IN, _SLOWER = 50, 50  # one read in so many takes so many times as long

# ---------------------------------------------------------------------- data


class HeavyTailed(Sleeping):
    """One read in 50 takes 50 times as long: the same ones each time.

    Args:
        seconds: What the others take.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, LENGTH)
        self._slow = Sleeping(seconds * _SLOWER)

    @property
    def mean_seconds(self) -> float:
        """What a read takes.

        Example:
            >>> round(HeavyTailed(0.01).mean_seconds, 6)
            0.0198
        """
        return self.seconds * (1 + (_SLOWER - 1) / _SLOW_IN)

    def read(self, index: Any) -> Any:
        return super().read(index) if index % _SLOW_IN else self._slow.read(index)


class ServedJpegs(StagedDataset):
    """JPEG files of an HTTP server.

    Args:
        urls: The files, which come again and again.
        fetch: Gets one.
    """

    def __init__(self, urls: list[str], fetch: Fetch) -> None:
        self.urls, self._fetch = urls, fetch

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: int) -> tuple[bytes, int]:
        return self._fetch(self.urls[index % len(self.urls)]), index

    def decode(self, raw: tuple[bytes, int]) -> tuple[torch.Tensor, int]:
        return v2.functional.pil_to_tensor(Image.open(BytesIO(raw[0])).convert("RGB")), raw[1]

    def augment(self, example: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
        return example


_CROPPED = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def local_jpegs(folder: Path) -> ImageFolder:
    """The files of a folder as ImageNet's often are read; they come again and again."""
    files = ImageFolder(str(folder), _CROPPED)
    files.samples = files.imgs = files.samples * (LENGTH // len(files.samples))
    return files


def _cropped(body: bytes) -> torch.Tensor:
    cropped: torch.Tensor = _CROPPED(Image.open(BytesIO(body)).convert("RGB"))
    return cropped


# ---------------------------------------------------------------------- readers


Collate = Callable[[list[Any]], Any]


def bare(workers: int, dataset: Dataset[Any], batch_size: int, collate: Collate = default_collate) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, shuffle=True, num_workers=workers, collate_fn=collate, multiprocessing_context="fork")


def ours(in_flight: int | str, dataset: Dataset[Any], batch_size: int, collate: Collate = default_collate) -> EchoLoader:
    return EchoLoader(bare(WORKERS, dataset, batch_size, collate), 1, seed=0, reads_in_flight=in_flight)


def torchdata_nodes(threads: int, dataset: Any, batch_size: int, collate: Collate = default_collate) -> Any:
    """Each thread reads, decodes and augments an example; the batches are made by one more."""
    nodes = import_module("torchdata.nodes")
    indices = nodes.SamplerWrapper(RandomSampler(dataset))
    examples = nodes.ParallelMapper(indices, dataset.__getitem__, num_workers=threads, method="thread")
    batches = nodes.Mapper(nodes.Batcher(examples, batch_size), collate)
    return nodes.Loader(nodes.Prefetcher(batches, prefetch_factor=2 * WORKERS))


class Grain:
    """Each thread reads, decodes and augments an example; the batches are made where they are asked for.

    Args:
        threads: How many.
        dataset: What they read.
        batch_size: Examples of a batch.
        collate: Makes a batch.
    """

    def __init__(self, threads: int, dataset: Any, batch_size: int, collate: Collate = default_collate) -> None:
        grain = import_module("grain")
        examples = grain.MapDataset.source(dataset).shuffle(seed=0).to_iter_dataset(grain.ReadOptions(num_threads=threads))
        self._batches = examples.batch(batch_size, drop_remainder=True, batch_fn=collate)

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self._batches)
        yield from self._iterator

    def close(self) -> None:
        self._iterator.close()


def litdata_raw(dataset: ImageFolder, batch_size: int, collate: Collate = default_collate) -> DataLoader[Any]:
    """It finds the files itself, and knows no classes."""
    folder = Path(dataset.root)
    raw = import_module("litdata").StreamingRawDataset(str(folder), cache_dir=str(folder.parent / "index"), transform=_cropped)
    return bare(WORKERS, Subset(raw, [*range(len(raw))] * (LENGTH // len(raw))), batch_size, collate)


@dataclass(frozen=True)
class Reader:
    """Who reads.

    Attributes:
        title: As it stands in the table.
        make: Makes its loader, for a data set, a batch size and a function that collates.
        in_flight: Reads at a time.
        packages: What must be installed; its version is that of the first one.
        workers: Processes that read; 0: the training's own.
    """

    title: str
    make: Callable[..., Any]
    in_flight: int | str
    packages: tuple[str, ...] = ()
    workers: int = WORKERS

    @property
    def version(self) -> str:
        """The version of its package; empty if something is not installed."""
        try:
            return [*map(version, self.packages), "-"][0]
        except PackageNotFoundError:
            return ""


def our(in_flight: int | str) -> str:
    """The name of ours with so many reads in flight."""
    return f"ours {in_flight}"


def _threads(title: str, make: Callable[..., Any], package: str, threads: int) -> Reader:
    return Reader(title, partial(make, threads), threads, (package,), workers=0)


THREADS = (16, 64)
PEERS = ("torchdata", "grain")
READERS: dict[str, Reader] = {
    "bare": Reader("bare DataLoader", partial(bare, WORKERS), WORKERS),
    "bare, many": Reader("bare DataLoader", partial(bare, MANY_WORKERS), MANY_WORKERS, workers=MANY_WORKERS),
    **{our(each): Reader("ours", partial(ours, each), each) for each in (1, 4, 16, 64, "auto")},
    **{f"torchdata {each}": _threads("torchdata.nodes", torchdata_nodes, "torchdata", each) for each in THREADS},
    **{f"grain {each}": _threads("grain", Grain, "grain", each) for each in THREADS},
    "litdata": Reader("litdata StreamingRawDataset", litdata_raw, "-", ("litdata", "zstd")),
}


def there(names: list[str]) -> list[str]:
    """Those that are installed."""
    return [name for name in names if READERS[name].version]


@contextmanager
def beside() -> Iterator[Callable[..., float]]:
    """A process beside this one. Yields what measures a reader there if it starts threads, and else here."""
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with ProcessPoolExecutor(1, context, initializer=torch.set_num_threads, initargs=(threads,)) as other:

        def run(measure: Callable[..., float], name: str, *arguments: Any) -> float:
            return measure(name, *arguments) if READERS[name].workers else other.submit(measure, name, *arguments).result()

        yield run


def examples_per_second(name: str, dataset: Any, batch_size: int, seconds: float) -> float:
    """The rate of one run, over so many seconds or a little more; the batches of a quarter of them come first, and do not count.

    Args:
        name: The reader.
        dataset: What it reads.
        batch_size: Examples of a batch.
        seconds: What is timed.
    """
    reader = READERS[name]
    loader = reader.make(dataset, batch_size)
    iterator, at_once = iter(loader), max(reader.workers, 1)
    take(iterator, at_once, seconds / 4)
    start = time.perf_counter()
    batches = take(iterator, at_once, seconds)
    elapsed = time.perf_counter() - start
    del iterator  # ends the workers of a plain loader
    close(loader)
    return batches * batch_size / elapsed


def take(batches: Iterator[Any], at_once: int, seconds: float) -> int:
    """Takes as many as may come at once, again and again, for so long, and twice at least. Returns how many were taken.

    Example:
        >>> take(iter(range(100)), 16, 0)
        32
    """
    end, taken = time.perf_counter() + seconds, 0
    while taken < 2 * at_once or time.perf_counter() < end:
        for _ in range(at_once):
            next(batches)
        taken += at_once
    return taken


def close(loader: Any) -> None:
    """Ends what a loader has started, if it can."""
    if callable(its := getattr(loader, "close", None)):
        its()
