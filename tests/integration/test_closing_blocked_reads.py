"""A loader that is closed while a worker is in a read that blocks ends that worker, soon on demand, later otherwise."""

import time

import pytest
import torch
from loader_cases import nothing_left_behind, until, workers
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo import EchoLoader
from lightning_echo.pipeline.pipelines import StreamPipeline
from lightning_echo.pipeline.prefetch import Prefetcher

BLOCKS_AT, BLOCKS_SECONDS = 10, 60  # in the third batch, which the thread that fetches waits for


class Blocking(Dataset):
    def __init__(self, file):
        self.file = file

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index == BLOCKS_AT:
            self.file.touch()
            time.sleep(BLOCKS_SECONDS)
        return torch.tensor([index])


class BlockingStream(IterableDataset):
    def __init__(self, file):
        self.data = Blocking(file)

    def __iter__(self):
        return (self.data[index] for index in range(1000))


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("factor", ["demand", 1])
@pytest.mark.parametrize(
    ("kind", "point"),
    [(Blocking, "after_augmentation"), (Blocking, "after_batching"), (BlockingStream, "after_augmentation")],
    ids=["examples", "whole batches", "a stream"],
)
def test_a_worker_in_a_read_that_blocks_ends_with_the_loader(tmp_path, monkeypatch, kind, point, factor):
    if factor != "demand":  # a worker of a constant factor is given ten seconds to make its batch
        for method in (Prefetcher.close, StreamPipeline.close):
            monkeypatch.setattr(method, "__defaults__", (2.0,))
    file, before = tmp_path / "blocks", workers()
    loader = EchoLoader(DataLoader(kind(file), 4, num_workers=1), factor, insertion_point=point, seed=0)
    with nothing_left_behind():
        batches = iter(loader)
        for _ in range(2):
            next(batches)
        assert until(file.exists)
        started = time.perf_counter()
        loader.close()
        assert until(lambda: workers() == before)
        assert time.perf_counter() - started < 6
