"""What the reader gets of a loader; what is compared of two trainings' data, and what is not."""

import json
import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_echo.data.randomness import seed_all
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import MOST_BYTES
from lightning_echo.share.same_data import (
    ReplayedSampler,
    Unit,
    difference,
    fingerprint_of,
    in_short,
    loader_of,
    parts_of,
    trained_parts,
    unit_of,
    why_not_elsewhere,
)


class Squares(Dataset):
    def __init__(self, length=20, transform=None):
        self.length, self.transform = length, transform

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        example = torch.tensor(float(index**2)) + torch.rand(())
        return example if self.transform is None else self.transform(example)


def print_for(dataset, **options):
    return fingerprint_of(kind_of(DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})))


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
    "base": (Subset(Squares(40), range(20)), {}, "dataset.length: 20 and 40"),
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


class Batches:
    def __init__(self, batch_size, seed=0):
        self.batch_size, self.seed = batch_size, seed

    def __iter__(self):
        return iter([])


def test_loaders_of_whole_batches_may_differ_in_their_batch_size_but_not_in_what_makes_them():
    one = fingerprint_of(kind_of(Batches(4)))
    assert difference(one, fingerprint_of(kind_of(Batches(8)))) == ""
    assert difference(one, fingerprint_of(kind_of(Batches(4, seed=1)))) == "loader.seed: 0 and 1"

    def of(**options):
        return fingerprint_of(kind_of(DataLoader(TensorDataset(torch.arange(8)), **options)))

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


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class OwnWay(DataLoader):
    def __iter__(self):
        return iter([torch.zeros(2)])


LOADERS = {
    Unit.indexed: [DataLoader(range(8), batch_size=2), DataLoader(range(8), shuffle=True, generator=torch.Generator())],
    Unit.streamed: [DataLoader(Stream(), batch_size=2)],
    Unit.examples_of_batch: [DataLoader(range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 3, False))],
    Unit.batch: [
        DataLoader(Stream(), batch_size=None),
        DataLoader(range(8), batch_size=None),
        OwnWay(range(8)),
        [[0, 1], [2, 3]],
    ],
}


@pytest.mark.parametrize(("unit", "loader"), [(unit, loader) for unit, loaders in LOADERS.items() for loader in loaders])
def test_a_loader_that_is_put_together_again_shares_the_same(unit, loader):
    assert unit_of(kind_of(loader)) is unit
    parts = parts_of(kind_of(loader))
    again = kind_of(loader_of(pickle.loads(pickle.dumps(parts)), seed=1))
    assert unit_of(again) is unit


@pytest.mark.parametrize(("unit", "loader"), [(unit, loader) for unit, loaders in LOADERS.items() for loader in loaders])
def test_workers_on_other_machines_read_examples_by_their_index_only(unit, loader):
    why = why_not_elsewhere(kind_of(loader))
    assert (why == "") is (unit is Unit.indexed)
    assert unit is Unit.indexed or unit.value in why


def test_a_sampler_that_divides_the_data_is_lightnings_only_if_there_are_several_ranks():
    divided = kind_of(DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0)))
    assert [why_not_elsewhere(divided, ranks) for ranks in (1, 2)] == ["its sampler divides the data among ranks itself", ""]


class Remembering(Sampler):
    """Its order depends on how often it was iterated, on two generators, and on the pass that it was told."""

    def __init__(self, dataset):
        self.dataset, self.times, self.told = dataset, 0, []
        self.generator = torch.Generator()

    def __len__(self):
        return len(self.dataset)

    def set_epoch(self, number):
        self.told.append(number)

    def __iter__(self):
        order = torch.randperm(len(self), generator=self.generator).tolist()
        places = random.sample(range(len(self)), len(self))
        yield from (1000 * self.times + 100 * self.told[-1] + order[place] for place in places)
        self.times += 1  # when the pass has ended


def passes_of(sampler, *numbers):
    """The orders of these passes, as the reader asks for them."""
    found = []
    for number in numbers:
        sampler.set_epoch(number)
        seed_all(number)  # of no account
        found.append(list(sampler))
    return found


def test_a_sampler_with_a_memory_has_the_same_pass_wherever_a_reader_begins():
    dataset = range(6)
    in_order = passes_of(ReplayedSampler(Remembering(dataset), dataset, 5), 0, 1, 2, 3)
    assert [each[0] // 1000 for each in in_order] == [0, 1, 2, 3]
    assert in_order[0] != [index - 1100 for index in in_order[1]]
    for number in range(4):
        assert passes_of(ReplayedSampler(Remembering(dataset), dataset, 5), number) == [in_order[number]]
    assert passes_of(ReplayedSampler(Remembering(dataset), dataset, 5), 2, 0, 1, 3) == [in_order[each] for each in (2, 0, 1, 3)]
    one, other = Remembering(dataset), Remembering(dataset)
    other.generator.manual_seed(99)
    assert passes_of(ReplayedSampler(one, dataset, 5), 0) == passes_of(ReplayedSampler(other, dataset, 5), 0)
    assert passes_of(ReplayedSampler(one, dataset, 5), 0) != passes_of(ReplayedSampler(one, dataset, 6), 0)


BASE = Squares()
PARTS = {
    "subset": (Subset(BASE, [3, 1]), {"shuffle": True}),
    "nested": (Subset(Subset(BASE, [9, 3, 1]), [2, 0]), {"shuffle": True}),
    "sampler": (BASE, {"sampler": SubsetRandomSampler([4, 2])}),
    "sampler of a subset": (Subset(BASE, [9, 3, 1]), {"sampler": SubsetRandomSampler([2, 1])}),
}


@pytest.mark.parametrize("name", PARTS)
def test_of_a_part_the_reader_is_sent_the_base_and_reads_all_of_it_in_random_order(name):
    dataset, options = PARTS[name]
    parts = parts_of(kind_of(DataLoader(dataset, 4, **options)))
    assert parts["dataset"] is BASE
    assert type(parts["sampler"]) is RandomSampler
    assert b"Subset" not in pickle.dumps(parts)
    sent = loader_of(pickle.loads(pickle.dumps(parts)), seed=1)
    assert type(sent.dataset) is Squares
    assert sorted(sent.sampler) == list(range(20))


def test_the_data_set_is_not_copied_and_a_generator_of_the_trainings_not_sent():
    dataset = list(range(6))
    replayed = ReplayedSampler(Remembering(dataset), dataset, 5)
    iter(replayed)
    assert replayed._sampler.dataset is dataset
    sampler = RandomSampler(range(8), generator=torch.Generator())
    assert parts_of(kind_of(DataLoader(range(8), sampler=sampler)))["sampler"].generator is None
    assert sampler.generator is not None
