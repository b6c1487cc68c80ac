"""What is set on the data between two epochs reaches the next one, with and without workers, live examples and a cache."""

import random
import threading

import numpy as np
import pytest
import torch
from loader_cases import workers as processes
from torch.utils.data import DataLoader, Dataset, Subset, WeightedRandomSampler

from lightning_echo import EchoLoader

LENGTH, BATCH_SIZE = 32, 4
CACHE = {"size": "4MiB", "hold": "whole"}


class Curriculum(Dataset):
    """An example is [index, stage, label ...]. Everything in it can be set."""

    def __init__(self):
        self.stage, self.labels = 0, list(range(LENGTH))
        self.array, self.tensor = np.zeros(LENGTH, dtype=np.int64), torch.zeros(LENGTH, dtype=torch.int64)
        self.nested = {"deep": [{"stage": 0}]}

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        numbers = [int(self.array[index]), int(self.tensor[index]), self.nested["deep"][0]["stage"]]
        return torch.tensor([index, self.stage, self.labels[index], *numbers])


CHANGES = {
    "an attribute": lambda data, epoch: setattr(data, "stage", epoch),
    "a label in place": lambda data, epoch: data.labels.__setitem__(7, 1000 + epoch),
    "a number of an array": lambda data, epoch: data.array.__setitem__(7, epoch),
    "a number of a tensor": lambda data, epoch: data.tensor.__setitem__(7, epoch),
    "something deep": lambda data, epoch: data.nested["deep"][0].update(stage=epoch),
}


def plain(data, workers=0, **options):
    return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers, **options)


def echo(data, factor, workers=0, *, loader=None, point="after_augmentation", **options):
    loader = plain(data, workers) if loader is None else loader
    return EchoLoader(loader, factor, insertion_point=point, seed=0, **options)


def examples(loader):
    """The examples of an epoch, in their order."""
    return [tuple(example) for batch in loader for example in batch.tolist()]


def as_read_now(data):
    return {index: tuple(data[index].tolist()) for index in range(LENGTH)}


@pytest.mark.parametrize(
    ("change", "factor", "workers", "cache"),
    [
        ("an attribute", 1, 2, CACHE),
        ("a label in place", 2, 0, CACHE),
        ("a number of an array", 1, 0, None),
        ("a number of a tensor", 2, 2, None),
        ("something deep", 2, 0, None),
    ],
)
def test_every_example_of_an_epoch_is_as_the_data_set_reads_it_then(change, factor, workers, cache):
    data, unchanged = Curriculum(), echo(Curriculum(), factor, cache=cache)
    loader = echo(data, factor, workers, cache=cache)
    for epoch in range(2):
        if epoch:
            CHANGES[change](data, epoch)
        now, found = as_read_now(data), examples(loader)
        assert found == [now[example[0]] for example in found]
        if not workers:  # with workers, others are drawn
            assert [example[0] for example in found] == [example[0] for example in examples(unchanged)]
        if factor == 1:
            assert sorted(found) == sorted(now.values())
    assert loader.counts.delivered == 2 * LENGTH
    loader.close()


def test_indices_of_a_subset_can_be_replaced_under_a_cache():
    data = Subset(Curriculum(), list(range(16)))
    loader = echo(data, 1, 1, cache=CACHE)
    examples(loader)
    held = loader.cache_counts.examples
    for indices in (list(range(16, 32)), np.arange(8, 24), torch.arange(16)):
        data.indices = indices
        found = [example[0] for example in examples(loader)]
        assert sorted(found) == sorted(map(int, indices))
    data.indices = list(range(4, 12))
    with pytest.warns(UserWarning, match="a pass has 8 examples now"):
        assert sorted(example[0] for example in examples(loader)) == list(range(4, 12))
    assert held == 16
    assert loader.cache_counts.examples == LENGTH  # other indices change no example
    loader.close()


class Counting(Curriculum):
    """Changes by being read, in the process that reads."""

    def __init__(self):
        super().__init__()
        self.reads, self.memo, self.last, self.handle = 0, {}, None, None
        self.random, self.generator, self.numpy = random.Random(1), torch.Generator(), np.random.default_rng(3)
        self.shared = torch.zeros(1).share_memory_()

    def __getitem__(self, index):
        self.reads += 1
        self.shared += 1
        self.last = self.memo[index] = super().__getitem__(index)
        self.handle = self.handle or threading.Lock()
        self.random.random(), torch.rand(1, generator=self.generator), self.numpy.random()
        return self.last


def begins_again(loader, epochs=2):
    """Whether new workers are started, or live examples are read again, in so many epochs."""
    before, again = processes(), loader.counts.refetched
    for _ in range(epochs):
        list(loader)
    return loader.counts.refetched > again or bool(processes() - before)


@pytest.mark.parametrize(("factor", "workers"), [(2, 0), (1, 1)])
def test_what_reading_itself_changes_starts_no_workers(factor, workers):
    loader = echo(Counting(), factor, workers)
    list(loader)
    assert not begins_again(loader)
    loader.close()


class Outside(Curriculum):
    """Its labels are in a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def __getitem__(self, index):
        return torch.tensor([index, int(self.path.read_text())])


def test_refresh_lets_the_next_batch_come_from_the_data_as_it_is(tmp_path):
    path = tmp_path / "label"
    path.write_text("1")
    loader = echo(Outside(path), 2, 1, cache=CACHE)
    assert {example[1] for example in examples(loader)} == {1}
    path.write_text("2")
    loader.refresh()
    assert {example[1] for example in examples(loader)} == {2}
    iterator = iter(loader)
    next(iterator)
    path.write_text("3")
    loader.refresh()
    rest = [example[1] for batch in iterator for example in batch.tolist()]
    assert set(rest) == {3}
    assert len(rest) == LENGTH - BATCH_SIZE
    loader.close()


def test_a_run_whose_data_was_changed_resumes_exactly():
    data, other = Curriculum(), Curriculum()
    loader, resumed = (echo(each, 2, 1, buffer_size=16) for each in (data, other))
    list(loader)
    data.stage = other.stage = 1
    iterator = iter(loader)
    next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert examples(resumed) == examples(iterator)
    data.stage = other.stage = 2
    assert examples(resumed) == examples(loader)
    loader.close(), resumed.close()


def test_weights_that_are_replaced_reach_the_next_epoch():
    weights = torch.zeros(LENGTH)
    weights[:8] = 1
    sampler = WeightedRandomSampler(weights, LENGTH)
    data = Curriculum()
    loader = echo(data, 1, loader=DataLoader(data, BATCH_SIZE, sampler=sampler, num_workers=1))
    assert {example[0] for example in examples(loader)} <= set(range(8))
    sampler.weights = weights.flip(0)
    assert {example[0] for example in examples(loader)} <= set(range(24, 32))
    sampler.weights[:] = weights  # in place
    assert {example[0] for example in examples(loader)} <= set(range(8))
    assert not begins_again(loader)
    loader.close()
