"""The kind of a loader that shares: its examples come from the reader, at whatever point they are echoed."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.pipeline.prefetch import DEPTH
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.sharing import (
    LoaderSharing,
    SharedIndexed,
    SharedIndexedBatches,
    SharedOfStream,
    SharedOpaque,
    SharedStreamBatches,
)

EXAMPLES, BATCHES = InsertionPoint.after_augmentation, InsertionPoint.after_batching


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class ToldSampler(list):
    def set_epoch(self, number): ...


LOADERS = {
    "indexed": lambda: DataLoader(range(12), 4, sampler=ToldSampler(range(12)), num_workers=2),
    "own batches": lambda: DataLoader(range(12), batch_sampler=ToldSampler([[0, 1], [2]]), num_workers=2),
    "stream": lambda: DataLoader(Stream(), 4, num_workers=2),
    "iterable": lambda: [torch.zeros(4)] * 3,
}


def shared(name, point):
    sharing = LoaderSharing(ShareConfig("kinds"), kind_of(LOADERS[name]()), has_cache=False)
    return sharing.kind().at(point)


@pytest.mark.parametrize(
    ("name", "point", "kind"),
    [
        ("indexed", EXAMPLES, SharedIndexed),
        ("indexed", BATCHES, SharedIndexedBatches),
        ("own batches", BATCHES, SharedOpaque),
        ("stream", EXAMPLES, SharedOfStream),
        ("stream", BATCHES, SharedStreamBatches),
        ("iterable", BATCHES, SharedOpaque),
    ],
)
def test_each_takes_its_examples_from_the_reader_and_depends_on_no_workers_and_no_sampler_here(name, point, kind):
    found = shared(name, point)
    assert type(found) is kind
    assert (found.state_workers, found.order_by, found.hearers()) == (0, None, ())
    assert found.by_batches is point.by_batches
    assert shared("indexed", EXAMPLES).lookahead(4.0) == DEPTH + 1, "as far as its thread fetches"
