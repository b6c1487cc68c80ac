"""What is compared of two trainings' data, and what is not."""

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, WeightedRandomSampler

from lightning_echo.fetching.source import Source
from lightning_echo.sharing.same_data import difference, print_of


class Squares(torch.utils.data.Dataset):
    def __init__(self, length=20, transform=None):
        self.length, self.transform = length, transform

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        example = torch.tensor(float(index**2)) + torch.rand(())
        return example if self.transform is None else self.transform(example)


def print_for(dataset, **options):
    return print_of(Source(DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})))


@pytest.mark.parametrize("options", [{"batch_size": 2}, {"drop_last": True}, {"num_workers": 2}, {"collate_fn": list}])
def test_what_belongs_to_a_training_is_not_compared(options):
    assert difference(print_for(Squares()), print_for(Squares(), **options)) == ""


def double(example):
    return example * 2


@pytest.mark.parametrize(
    ("other", "options", "said"),
    [
        (Squares(21), {}, "its data set is .*20.* and that of the reader is .*21"),
        (Subset(Squares(40), range(20)), {}, "its data set is"),
        (Squares(transform=double), {}, "its examples are others"),
        (Squares(), {"shuffle": False}, r"its sampler is \[RandomSampler.*SequentialSampler"),
        (
            Squares(),
            {"shuffle": None, "sampler": RandomSampler(range(20), replacement=True)},
            r"its sampler is .*replacement=False.*replacement=True",
        ),
        (Squares(), {"shuffle": None, "sampler": WeightedRandomSampler([1.0] * 20, 20)}, "its sampler is"),
    ],
    ids=["length", "subset", "transform", "shuffle", "replacement", "weighted"],
)
def test_other_data_is_told_apart(other, options, said):
    with pytest.raises(AssertionError, match=said):
        assert difference(print_for(Squares()), print_for(other, **options)) == "", difference(
            print_for(Squares()), print_for(other, **options)
        )


def test_examples_that_are_others_each_time_are_not_compared():
    class Counting(Squares):
        calls = 0

        def __getitem__(self, index):
            Counting.calls += 1
            return Counting.calls

    assert print_for(Counting())["examples"] == ""
    assert difference(print_for(Counting()), print_for(Counting())) == ""


def test_reading_them_changes_no_random_state():
    state = torch.get_rng_state()
    print_for(TensorDataset(torch.arange(8)))
    assert torch.equal(torch.get_rng_state(), state)
