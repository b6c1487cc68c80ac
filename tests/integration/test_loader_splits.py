"""Splits through the loader: whole batches are read in one call."""

import pytest
import torch
from loader_cases import ReadLog
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_echo import EchoLoader, StagedDataset

LENGTH = 48


class Batched(Dataset):
    """Reads a whole batch in one call, and says with which others an example was read."""

    def __init__(self, log):
        self.log = log

    def __getitems__(self, indices):
        stamp = self.log.add(len(indices))
        return [torch.tensor([index, stamp]) for index in indices]

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __len__(self):
        return LENGTH


@pytest.mark.parametrize(
    ("wrap", "workers"), [(lambda d: Subset(d, range(LENGTH)), 2), (lambda d: StagedDataset.of(d, lambda e: e + 0), 0)]
)
def test_a_data_set_that_reads_whole_batches_gets_the_fresh_examples_of_a_batch_in_one_call(tmp_path, workers, wrap):
    log = ReadLog(tmp_path / "calls")
    dataset = wrap(Batched(log))
    loader = EchoLoader(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers), 2, seed=1)
    at_construction = len(log.entries())
    seen, batches = set(), []
    for _ in range(3):
        for batch in loader:
            stamps = {stamp for _, stamp in batch.tolist()}
            assert len(stamps - seen) == (1 if loader.last_batch_counts.fresh else 0), "one call for all that is fresh"
            seen |= stamps
            batches.append(batch)
    loader.close()
    calls = dict(log.entries()[at_construction:])
    assert sum(calls[stamp] for stamp in seen) == loader.counts.fresh
    assert len(batches) == 18
