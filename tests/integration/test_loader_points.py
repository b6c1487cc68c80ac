"""What is held while examples are echoed."""

import weakref

import pytest
from loader_cases import epochs
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader

RULES = ("each", "memory")


LIVE = weakref.WeakSet()  # in each process, the examples that were read or copied there and are still held


class Tracked:
    def __init__(self, index):
        self.index = index
        LIVE.add(self)

    def __deepcopy__(self, memo):
        return Tracked(self.index)


class TrackedDataset(Dataset):
    def __getitem__(self, index):
        return Tracked(index)

    def __len__(self):
        return 200


def count_held(examples):
    """How many examples the process holds beside those that are handed out for good."""
    return len(LIVE) - sum(example in LIVE for example in examples)


@pytest.mark.grid
@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("factor", [1, 1.5, 8])
@pytest.mark.parametrize("workers", [0, 2])
def test_never_more_examples_are_held_than_the_buffer_allows_and_none_that_are_used_up(workers, factor, reuse):
    plain = DataLoader(TrackedDataset(), batch_size=8, shuffle=True, num_workers=workers, collate_fn=count_held)
    loader = EchoLoader(plain, factor, insertion_point="after_augmentation", reuse=reuse, seed=1, buffer_size=24)
    held = [held for epoch in epochs(loader, 4) for held in epoch]
    share = 24 // max(workers, 1)
    assert max(held) <= share
    assert max(held) > share // 4 if factor > 1.5 else True
    loader.factor = 1
    held = [held for epoch in epochs(loader, 2) for held in epoch]
    assert held[12:] == [0] * 38, "at factor 1 nothing is held"
