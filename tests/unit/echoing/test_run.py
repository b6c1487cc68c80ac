"""How a pass is cut and dealt out, compared with torch's own sampler and loader."""

import pytest
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_echo.echoing.run import layout_of
from lightning_echo.echoing.source import Source


class Sized(Dataset):
    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        return index

    def __len__(self):
        return self.length


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 13, 43])
def test_the_layout_of_a_pass_is_what_a_loader_with_a_distributed_sampler_delivers(length, drop_last, replicas):
    sampler = DistributedSampler(range(length), num_replicas=replicas, rank=0, shuffle=False)
    sizes = [len(batch) for batch in DataLoader(Sized(length), batch_size=6, sampler=sampler, drop_last=drop_last)]
    if not DataLoader(Sized(length), batch_size=6, drop_last=drop_last) or not sizes:
        return  # refused, or a rank without a batch
    layout = layout_of(Source(DataLoader(Sized(length), batch_size=6, drop_last=drop_last)), replicas)
    assert layout.batches_per_pass == len(sizes)
    assert (layout.batch_size, layout.last_batch_size) == (6, sizes[-1])
    assert (layout.kept, layout.length, layout.replicas) == (sum(sizes), length, replicas)
