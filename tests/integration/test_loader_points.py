"""What an echo repeats at each insertion point, how uses are spread, and what is held."""

import math
import weakref
from collections import defaultdict

import pytest
import torch
from loader_cases import LoggedDataset, ReadLog, epochs
from torch.utils.data import DataLoader, Dataset

from lightning_echo import EchoLoader

RULES = ("each", "memory")
in_both_ways = pytest.mark.parametrize(("workers", "reuse"), [(0, "each"), (2, "memory")])


class RandomlyDecoded(LoggedDataset):
    """An example is [index, number of the read, noise of decoding, noise of augmenting]."""

    def decode(self, raw):
        return torch.cat([super().decode(raw), torch.randint(2**40, (1,))])


def delivered(tmp_path, point, workers, reuse, factor=4, count=3):
    dataset = (RandomlyDecoded if point == "after_read" else LoggedDataset)(40, ReadLog(tmp_path / "reads"))
    plain = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=workers)
    loader = EchoLoader(plain, factor, insertion_point=point, reuse=reuse, seed=2)
    return [batch.tolist() for epoch in epochs(loader, count) for batch in epoch]


def check_most_uses(uses, factor, reuse):
    """By the rule "each" the factor, rounded up; by "memory" chance decides, and among dozens some are drawn more often."""
    assert max(uses) == math.ceil(factor) if reuse == "each" else max(uses) > math.ceil(factor)


@in_both_ways
@pytest.mark.parametrize("point", ["after_read", "before_augmentation", "after_augmentation"])
def test_uses_share_what_was_read_and_differ_by_what_comes_after_the_point(tmp_path, point, workers, reuse):
    uses = defaultdict(list)  # of each read
    for batch in delivered(tmp_path, point, workers, reuse):
        for index, read, *noises in batch:
            uses[read].append((index, *noises))
    check_most_uses(map(len, uses.values()), 4, reuse)
    assert {len({index for index, *_ in several}) for several in uses.values()} == {1}
    if point == "after_augmentation":
        assert {len(set(several)) for several in uses.values()} == {1}
    every = [use for several in uses.values() for use in several]
    for place in range(1, len(every[0])):
        drawn = {use[place] for use in every}
        assert len(drawn) == (len(uses) if point == "after_augmentation" else len(every)), "no two draws are the same"


@in_both_ways
@pytest.mark.parametrize("factor", [2, 2.5])
def test_after_batching_batches_repeat_whole_and_evenly_interleaved(tmp_path, workers, factor, reuse):
    batches = delivered(tmp_path, "after_batching", workers, reuse, factor, count=10)
    first_use, uses = {}, defaultdict(int)
    for number, batch in enumerate(batches):
        key = tuple(map(tuple, batch))
        first_use.setdefault(key, number)
        uses[key] += 1
    check_most_uses(uses.values(), factor, reuse)
    assert len({example[1] for key in first_use for example in key}) == 8 * len(first_use), "batches share no read"
    gaps = [b - a for a, b in zip(list(first_use.values()), list(first_use.values())[1:], strict=False)]
    steady = gaps[4:]  # by the rule "each" the buffer of four batches is filled by then
    assert set(steady) <= {math.floor(factor), math.ceil(factor)}, "between fresh batches always as many echoes"


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
