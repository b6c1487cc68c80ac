"""What is compared of two trainings' data, and what is not."""

import random
import threading

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


@pytest.mark.parametrize("most_pause", [0.0, 0.001, 0.05, 0.3])
def test_a_thread_that_draws_meanwhile_does_not_make_data_look_like_another(most_pause):
    expected, is_over, drawn = print_for(Squares())["examples"], threading.Event(), []

    def draw():
        pauses = random.Random(0)
        while not is_over.wait(pauses.random() * most_pause):  # as the steps of a training do
            drawn.append(float(torch.rand(())))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        found = {print_for(Squares())["examples"] for _ in range(20)}
    finally:
        is_over.set()
        thread.join()
    assert drawn
    assert found <= {expected, ""}  # "": not compared, since two readings differ


def stream_print(length, batch_size=4):
    class Lines(torch.utils.data.IterableDataset):
        def __init__(self):
            self.length, self.path = length, f"/data/{length}.txt"

        def __iter__(self):
            raise AssertionError("nothing may be read")

    return print_of(Source(DataLoader(Lines(), batch_size=batch_size)))


def test_streams_are_compared_by_their_options_and_nothing_is_read():
    assert difference(stream_print(8), stream_print(8, batch_size=2)) == ""
    said = difference(stream_print(8), stream_print(9))
    assert "Lines(length=8, path='/data/8.txt')" in said
    assert "that of the reader is [DataLoader() over Lines(length=9" in said


def test_loaders_of_whole_batches_may_differ_in_their_batch_size_alone():
    class Batches:
        def __init__(self, batch_size, seed=0):
            self.batch_size, self.seed = batch_size, seed

        def __iter__(self):
            return iter([])

    one = print_of(Source(Batches(4)))
    assert difference(one, print_of(Source(Batches(8)))) == ""
    assert "Batches(seed=0)" in difference(one, print_of(Source(Batches(4, seed=1))))
