"""What is compared of two trainings' data, and what is not."""

import json
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import MOST_BYTES
from lightning_echo.share.same_data import difference, in_short, print_of, trained_parts


class Squares(Dataset):
    def __init__(self, length=20, transform=None):
        self.length, self.transform = length, transform

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        example = torch.tensor(float(index**2)) + torch.rand(())
        return example if self.transform is None else self.transform(example)


def print_for(dataset, **options):
    return print_of(kind_of(DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})))


def double(example):
    return example * 2


RANDOM = "torch.utils.data.sampler.RandomSampler"
OTHERS = {
    "training's own": (Squares(), {"batch_size": 2, "drop_last": True, "num_workers": 2, "collate_fn": list}, ""),
    "length": (Squares(21), {}, "dataset.length: 20 and 21"),
    "call": (Squares(transform=double), {}, "dataset.transform: None and function double"),
    "shuffle": (Squares(), {"shuffle": False}, f"sampler: {RANDOM} and torch.utils.data.sampler.SequentialSampler"),
    "other source": (
        *(Squares(), {"shuffle": None, "sampler": RandomSampler(range(20))}),
        "sampler.data_source: the same as dataset and range(0, 20)",
    ),
    "weights": (Squares(), {"shuffle": None, "sampler": WeightedRandomSampler([1.0] * 20, 20)}, "sampler: "),
    "subset": (Subset(Squares(40), range(20)), {}, "dataset: test_same_data.Squares and torch.utils.data.dataset.Subset"),
}


@pytest.fixture(scope="module")
def expected():
    return print_for(Squares())


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_is_told_apart_and_what_belongs_to_a_training_is_not_compared(name, expected):
    dataset, options, said = OTHERS[name]
    found = difference(expected, print_for(dataset, **options))
    assert found.startswith(said)
    assert (found == "") is (said == "")


class Files(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return int((self.folder / f"{index}.txt").read_text())


def test_files_that_were_edited_are_told_apart(tmp_path):
    for index in range(30):
        (tmp_path / f"{index}.txt").write_text(str(index))
    before = print_for(Files(tmp_path))
    assert [name for name in before if name.startswith("example")] == [f"example {n}" for n in (0, 4, 8, 12, 16, 20, 24, 29)]
    (tmp_path / "16.txt").write_text("7")
    assert difference(before, print_for(Files(tmp_path))) == "example 16 is another one, read under the same seeds"


class Noisy(Squares):
    """Has a generator of its own, which nobody has seeded."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng()

    def __getitem__(self, index):
        return super().__getitem__(index) + self.rng.random()


class Counting(Squares):
    calls = 0

    def __getitem__(self, index):
        self.calls += 1
        return self.calls


@pytest.mark.parametrize("make", [Noisy, Counting])
def test_examples_that_are_others_each_time_are_not_compared(make):
    dataset = make()
    one, other = print_for(dataset), print_for(make())
    assert not [name for name in one if name.startswith("example")]
    assert difference(one, other) == ""
    assert getattr(dataset, "calls", 0) == 0, "nothing is read in the process of the training"


def test_the_number_of_threads_changes_no_example():
    class Sums(Squares):
        def __getitem__(self, index):
            return torch.randn(1_000_003).sum()

    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            found.append(print_for(Sums()))
    finally:
        torch.set_num_threads(threads)
    assert [name for name in found[0] if name.startswith("example")]
    assert difference(*found) == ""


def test_a_thread_that_draws_meanwhile_changes_no_example_and_reading_them_no_random_state(expected):
    is_over, drawn, state = threading.Event(), [], torch.get_rng_state()
    assert print_for(Squares()) == expected
    assert torch.equal(torch.get_rng_state(), state)

    def draw():
        while not is_over.wait(0.001):  # as the steps of a training do
            drawn.append(float(torch.rand(())))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        found = [print_for(Squares()) for _ in range(2)]
    finally:
        is_over.set()
        thread.join()
    assert drawn
    assert found == [expected] * 2


def stream_print(length, batch_size=4, ignore=()):
    class Lines(IterableDataset):
        def __init__(self):
            self.length, self.path = length, f"/data/{length}.txt"

        def __iter__(self):
            raise AssertionError("nothing may be read")

    return print_of(kind_of(DataLoader(Lines(), batch_size=batch_size)), ignore)


def test_streams_are_compared_by_their_attributes_and_nothing_is_read():
    assert difference(stream_print(8), stream_print(8, batch_size=2)) == ""
    assert difference(stream_print(8), stream_print(9)) == "dataset.length: 8 and 9"
    assert difference(stream_print(8, ignore=["length", "path"]), stream_print(9)) == ""


class Batches:
    def __init__(self, batch_size, seed=0):
        self.batch_size, self.seed = batch_size, seed

    def __iter__(self):
        return iter([])


def test_loaders_of_whole_batches_may_differ_in_their_batch_size_but_not_in_what_makes_them():
    one = print_of(kind_of(Batches(4)))
    assert difference(one, print_of(kind_of(Batches(8)))) == ""
    assert difference(one, print_of(kind_of(Batches(4, seed=1)))) == "loader.seed: 0 and 1"

    def of(**options):
        return print_of(kind_of(DataLoader(TensorDataset(torch.arange(8)), **options)))

    batches = [BatchSampler(SequentialSampler(range(8)), size, False) for size in (2, 4)]
    whole = {"sampler": batches[1], "batch_size": None}
    assert "collate_fn: " in difference(of(collate_fn=list, **whole), of(collate_fn=tuple, **whole))
    assert "batch_sampler.batch_size: 2 and 4" in difference(*(of(batch_sampler=each) for each in batches))


def test_weights_that_are_trained_are_named():
    model = torch.nn.Linear(2, 2)
    names = [f"dataset.transform._parameters['{name}']" for name in ("weight", "bias")]
    assert trained_parts(print_for(Squares(transform=model))) == names
    assert trained_parts(print_for(Squares(transform=model.requires_grad_(False)))) == []


def test_a_print_that_is_too_long_for_a_message_is_compared_as_a_whole():
    long = {"data set": "x", **{f"dataset.a{number}": "y" * 50 for number in range(5000)}}
    assert len(json.dumps(in_short(long))) < MOST_BYTES - 10_000
    assert difference(in_short(long), in_short(long)) == ""
    last = in_short({**long, "dataset.a4999": "z"})
    assert difference(in_short(long), last) == "something that is too long to be named"
    assert difference(in_short(long), in_short({**long, "dataset.a1": "z"})) == f"dataset.a1: {'y' * 50} and z"
