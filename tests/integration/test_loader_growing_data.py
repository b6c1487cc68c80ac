"""A data set that grows or shrinks in place: the next epoch begins a pass over what it has now, and says so."""

import math
import warnings

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from lightning_echo import EchoLoader


class Growing(Dataset):
    """Its examples are their indices and one draw for each reading."""

    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return torch.tensor(float(index)), torch.rand(())

    def __len__(self):
        return self.length


def shuffled(data, workers=0):
    return DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)


LOADERS = {
    "shuffled": shuffled,
    "shuffled, workers": lambda data: shuffled(data, workers=2),
    "in order": lambda data: DataLoader(data, batch_size=4),
    "own batches": lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)),
    "own sampler": lambda data: DataLoader(data, batch_size=4, sampler=type("Own", (RandomSampler,), {})(data)),
}


def fresh_of(loader, epochs):
    """The indices of the fresh examples of so many epochs: they come first in each batch."""
    return [
        int(index) for _ in range(epochs) for indices, _ in loader for index in indices[: loader.last_batch_counts.fresh].tolist()
    ]


@pytest.mark.grid
@pytest.mark.parametrize("new_length", [36, 20])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_the_next_epoch_begins_a_pass_over_all_that_is_there(name, factor, new_length):
    data, by_batches = Growing(24), name == "own batches"
    point = "auto" if by_batches else "after_augmentation"
    loader = EchoLoader(LOADERS[name](data), factor, insertion_point=point, seed=0)
    fresh_of(loader, 2 * factor - 1)
    passes, data.length = math.ceil(loader.passes), new_length
    items = new_length // 4 if by_batches else new_length
    with pytest.warns(UserWarning, match=f"a pass has {items} (examples|batches) now, and had"):
        fresh = fresh_of(loader, 1)
    assert passes < loader.passes <= passes + 1
    assert len(loader) == new_length // 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh += fresh_of(loader, 2 * factor)
    assert sorted(fresh[:new_length]) == list(range(new_length))
    assert loader.state_dict()["layout"]["length"] == items
    loader.close()


def test_a_list_of_batches_that_grows_is_followed_too():
    batches = [torch.tensor([float(i)]) for i in range(5)]
    loader = EchoLoader(batches, 1, seed=0)
    assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4]
    batches.append(torch.tensor([5.0]))
    with pytest.warns(UserWarning, match="a pass has 6 batches now, and had 5"):
        assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3, 4, 5]
    assert loader.passes == 2


def test_a_state_that_was_saved_then_resumes_exactly():
    def make(length):
        return Growing(length)

    data = make(24)
    options = {"insertion_point": "after_augmentation", "seed": 0, "buffer_size": 8}
    first = EchoLoader(shuffled(data), 2, **options)
    list(first)
    data.length = 36
    iterator = iter(first)
    with pytest.warns(UserWarning, match="a pass has 36 examples now"):
        next(iterator)
    next(iterator)
    state = first.state_dict()
    rest = [*iterator, *first]
    second = EchoLoader(shuffled(make(36)), 2, **options)
    second.load_state_dict(state)
    found = [*second, *second]
    assert all(
        torch.equal(one, other) for left, right in zip(rest, found, strict=True) for one, other in zip(left, right, strict=True)
    )


def test_a_data_set_that_has_become_empty_is_an_error():
    data = Growing(24)
    loader = EchoLoader(shuffled(data), 2, insertion_point="after_augmentation", seed=0)
    list(loader)
    data.length = 0
    with pytest.raises(ValueError, match="loader is empty"):
        list(loader)
