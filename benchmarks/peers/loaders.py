"""What is compared: each peer used as its documentation shows, with the same data, workers, batch size and echo factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from workloads import BATCH_SIZE, WORKERS, Sleeping

from lightning_echo import EchoDataModule, EchoLoader

FACTOR, SEED = 4, 7
LIVE_BATCHES = 16  # our default where each fresh example is used e times; tf.data's buffer gets memory for as many examples
AS_THE_PEERS: dict[str, Any] = {"reuse": "each", "epoch_length": "full_pass", "seed": SEED}
_BATCHES_AHEAD = 2 * WORKERS  # as many as a DataLoader's workers prepare


def bare(data: Sleeping) -> DataLoader[Any]:
    return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=WORKERS)


class Repeated:
    """Every batch several times, as people write it."""

    def __init__(self, loader: Any, times: int) -> None:
        self.loader, self.times = loader, times

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            for _ in range(self.times):
                yield batch


def naive_repeat(data: Sleeping) -> Repeated:
    return Repeated(bare(data), FACTOR)


def timm_repeated_augmentation(data: Sleeping) -> DataLoader[Any]:
    """The sampler asks for the ranks itself, and needs ``torch.distributed`` or both numbers."""
    from timm.data.distributed_sampler import RepeatAugSampler

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = {} if distributed else {"num_replicas": 1, "rank": 0}
    sampler = RepeatAugSampler(data, num_repeats=FACTOR, **ranks)
    return DataLoader(data, BATCH_SIZE, sampler=sampler, num_workers=WORKERS)


def monai_thread_loader(data: Sleeping) -> Any:
    from monai.data import ThreadDataLoader

    return ThreadDataLoader(data, repeats=FACTOR, batch_size=BATCH_SIZE, shuffle=True, num_workers=WORKERS)


class TensorflowBatches:
    """Batches of ``tf.data`` as tensors of torch, and the length that it says it has."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        for arrays in self.dataset.as_numpy_iterator():
            yield [torch.tensor(array) for array in arrays]


def tf_data(data: Sleeping) -> TensorflowBatches:
    """Example echoing as in the paper, over the same data set: what reads in parallel is Python."""
    import numpy as np
    import tensorflow as tf

    def read(index: Any) -> Any:
        image, label = data[int(index)]
        return image.numpy(), np.int64(label)

    def load(index: Any) -> Any:
        image, label = tf.numpy_function(read, [index], (tf.uint8, tf.int64))
        return tf.ensure_shape(image, (3, 32, 32)), tf.ensure_shape(label, ())

    indices = tf.data.Dataset.range(len(data)).shuffle(len(data), seed=SEED)
    return TensorflowBatches(_echoed_by_tensorflow(indices.map(load, num_parallel_calls=WORKERS)))


def tf_data_native(data: Sleeping) -> TensorflowBatches:
    """The same over a source that sleeps in TensorFlow's own code, where no Python is in the way; its reads cannot be counted."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops.testing import sleep

    def reader(number: Any) -> Any:
        indices = tf.data.Dataset.range(number, len(data), WORKERS).apply(sleep(round(data.seconds * 1e6)))
        return indices.map(lambda index: (tf.zeros((3, 32, 32), tf.uint8), index))

    fresh = tf.data.Dataset.range(WORKERS).interleave(reader, cycle_length=WORKERS, num_parallel_calls=WORKERS)
    return TensorflowBatches(_echoed_by_tensorflow(fresh))


def _echoed_by_tensorflow(fresh: Any) -> Any:
    """The paper's two lines. The buffer counts uses, ours examples: it gets the factor times ours, which is the same memory."""
    import tensorflow as tf

    echoed = fresh.flat_map(lambda *example: tf.data.Dataset.from_tensors(example).repeat(FACTOR))
    return echoed.shuffle(FACTOR * LIVE_BATCHES * BATCH_SIZE, seed=SEED).batch(BATCH_SIZE).prefetch(_BATCHES_AHEAD)


def ours(point: str, data: Sleeping) -> EchoLoader:
    return EchoLoader(bare(data), FACTOR, insertion_point=point, **AS_THE_PEERS)


class Asked(pl.LightningDataModule):
    """A data module that makes its loader when it is asked for it: on the rank, with the process group at hand."""

    def __init__(self, make: Callable[[Any], Any], data: Sleeping) -> None:
        super().__init__()
        self.make, self.data = make, data

    def train_dataloader(self) -> Any:
        return self.make(self.data)


def our_module(point: str, data: Sleeping) -> EchoDataModule:
    return EchoDataModule(Asked(bare, data), FACTOR, insertion_point=point, **AS_THE_PEERS)


@dataclass(frozen=True)
class Peer:
    """One of those that are compared.

    Attributes:
        title: In tables.
        loader: Makes the loader.
        packages: The package that it comes from, under the names that it is distributed as.
        factor: Uses of each read example.
        epoch_passes: Passes over the data, of ``factor`` uses per example, that an epoch has by its documentation.
        module: Makes the data module for a Trainer; None: one that hands out the loader.
        trainer: Options of the Trainer that its documentation asks for.
        ours: Name of that of ours which reuses at the same place; of ours itself empty.
        live_batches: Batches of examples that may have uses left at the end of an epoch.
        own_process: Whether it starts threads, beside which nobody should fork.
        only_speed: Whether its reads cannot be counted.
    """

    title: str
    loader: Callable[[Sleeping], Any]
    packages: tuple[str, ...] = ("torch",)
    factor: int = FACTOR
    epoch_passes: float = 1.0
    module: Callable[[Sleeping], pl.LightningDataModule] | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    ours: str = ""
    live_batches: int = 0
    own_process: bool = False
    only_speed: bool = False

    @property
    def version(self) -> str:
        """Package and version; empty if it is not installed."""
        for package in self.packages:
            try:
                return f"{package} {version(package)}"
            except PackageNotFoundError:
                continue
        return ""

    def data_module(self, data: Sleeping) -> pl.LightningDataModule:
        return self.module(data) if self.module else Asked(self.loader, data)


def _our(point: str) -> Peer:
    options: dict[str, Any] = {"module": partial(our_module, point), "live_batches": LIVE_BATCHES}
    return Peer(f"ours, {point}", partial(ours, point), ("lightning-echo",), **options)


def _tensorflow(title: str, loader: Callable[[Sleeping], Any], **options: Any) -> Peer:
    return Peer(title, loader, ("tensorflow-cpu", "tensorflow"), ours="after_augmentation", own_process=True, **options)


# In the order of the tables; those that start threads last, so that nobody forks beside them.
OURS = ("before_augmentation", "after_augmentation", "after_batching")
PEERS: dict[str, Peer] = {
    **{point: _our(point) for point in OURS},
    "bare": Peer("bare DataLoader", bare, factor=1, ours="before_augmentation"),
    "naive": Peer("naive repeat of batches", naive_repeat, ours="after_batching"),
    "timm": Peer(
        "timm RepeatAugSampler",
        timm_repeated_augmentation,
        ("timm",),
        epoch_passes=1 / FACTOR,
        trainer={"use_distributed_sampler": False},  # it deals out to the ranks itself
        ours="before_augmentation",
    ),
    "monai": Peer("MONAI ThreadDataLoader", monai_thread_loader, ("monai",), ours="after_batching"),
    "tf_data": _tensorflow("tf.data, Python reads", tf_data),
    "tf_native": _tensorflow("tf.data, TensorFlow reads", tf_data_native, only_speed=True),
}
