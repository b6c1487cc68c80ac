"""Trainings on parts of one data set share a reader: each gets its part, all of it, and nothing else."""

import random
import time

import pytest
import torch
from sharing_runs import Numbers, closing, epochs_of, examples, indices, kill_reader, rows, status, together, wait_until
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, WeightedRandomSampler, random_split

from lightning_echo import EchoLoader

LENGTH, FOLDS = 240, 5

pytestmark = pytest.mark.usefixtures("own_folder")


def fold(number):
    """The indices on which the training of a fold trains: all but each fifth one."""
    return [index for index in range(LENGTH) if index % FOLDS != number]


def training_on(dataset, batch_size=16, *, factor=1, sampler=None, workers=1, options=None, **share):
    """An `EchoLoader` over a part."""
    order = {"shuffle": True} if sampler is None else {"sampler": sampler}
    share = {"name": "data", "linger_seconds": 0.5, "window": "1MiB", **share}
    plain = DataLoader(dataset, batch_size, num_workers=workers, **order)
    return EchoLoader(plain, factor, share=share, **{"seed": 0, **(options or {})})


def test_each_fold_gets_its_part_once_in_each_pass_and_nothing_else_whatever_its_batch_size():
    data = Numbers(LENGTH)
    loaders = [training_on(Subset(data, fold(number)), 16 + number, wait_for=FOLDS, workers=2) for number in range(FOLDS)]
    found = together(*(closing(loader, 3) for loader in loaders))
    noise = {}
    for number, epochs in enumerate(found):
        assert len(loaders[number]) == -(-len(fold(number)) // (16 + number))
        for epoch, batches in enumerate(epochs):
            assert sorted(indices(batches)) == fold(number)
            for index, drawn in examples(batches):
                assert noise.setdefault((epoch, index), drawn) == drawn  # the same augmentation for all
    orders = {tuple(indices(batches)) for batches in found[0]}
    assert len(orders) == 3


PARTS = {
    "nested": lambda data: (Subset(Subset(data, range(0, LENGTH, 2)), torch.arange(0, 120, 3)), None, range(0, LENGTH, 6)),
    "sampler": lambda data: (data, SubsetRandomSampler(range(7, 200)), range(7, 200)),
    "sampler of a subset": lambda data: (Subset(data, range(100, 200)), SubsetRandomSampler([0, 99, 5]), [100, 105, 199]),
    "split": lambda data: (
        part := random_split(data, [7, 3, 230], torch.Generator().manual_seed(1))[0],
        None,
        sorted(part.indices),
    ),
    "one example": lambda data: (Subset(data, [17]), None, [17]),
}


@pytest.mark.parametrize("way", PARTS)
def test_however_a_part_is_written_a_training_that_takes_all_shares_with_it(way):
    data = Numbers(LENGTH)
    part, sampler, expected = PARTS[way](data)
    some = training_on(part, 8, sampler=sampler, wait_for=2)
    whole = training_on(data, 10, wait_for=2)
    (first, second), (all_of,) = together(closing(some, 2), closing(whole, 1))
    assert sorted(indices(first)) == sorted(indices(second)) == list(expected)
    assert sorted(indices(all_of)) == list(range(LENGTH))
    drawn = dict(examples(all_of))
    assert all(drawn[index] == noise for index, noise in examples(first))


def test_folds_whose_readers_are_killed_again_and_again_get_their_parts_once_and_nothing_else():
    share = {"window": 2**14, "wait_for": FOLDS, "linger_seconds": 5, "workers": 2}
    data = Numbers(LENGTH, seconds=0.001)
    done, generator = [], random.Random(0)
    loaders = [training_on(Subset(data, fold(number)), 8 + number, **share) for number in range(FOLDS)]

    def killer():
        for _ in range(4):
            before = reached()
            wait_until(lambda: done or reached() > before + 40, "the reader reads on")  # noqa: B023
            if done:
                return
            time.sleep(generator.random() * 0.2)
            kill_reader()

    def reached():
        try:
            return status()["written"]
        except (ConnectionError, FileNotFoundError):
            return -1

    def fold_of(loader):
        run = closing(loader, 5)

        def train():
            try:
                return run()
            finally:
                done.append(loader)

        return train

    *found, _ = together(*map(fold_of, loaders), killer)
    for number, epochs in enumerate(found):
        for batches in epochs:
            assert sorted(indices(batches)) == fold(number)


def test_a_training_that_comes_later_gets_only_its_own_and_from_the_next_pass_on_all_of_it(caplog):
    data = Numbers(LENGTH, seconds=0.001)
    first = training_on(Subset(data, range(120)), 8, window=2**14)
    late = training_on(Subset(data, range(100, 200)), 8, window=2**14)
    patient = training_on(Subset(data, range(150, LENGTH)), 8, window=2**14, join="pass")
    begun = []

    def latecomer(loader, count):
        def run():
            wait_until(lambda: begun, "the first one trains")
            found = epochs_of(loader, count)
            loader.close()
            return found

        return run

    caplog.set_level("INFO", "lightning_echo")
    epochs, later, whole = together(
        closing(first, 6, lambda: (begun.append(1), time.sleep(0.004))), latecomer(late, 3), latecomer(patient, 2)
    )
    for batches in epochs:
        assert sorted(indices(batches)) == list(range(120))
    for batches in later:
        assert len(indices(batches)) == 100
        assert set(indices(batches)) <= set(range(100, 200))
    taken = indices([batch for batches in later for batch in batches])
    assert max(map(taken.count, range(100, 200))) <= 4  # of parts of four passes
    for batches in whole:
        assert sorted(indices(batches)) == list(range(150, LENGTH))
    assert "of the current pass" in caplog.text


@pytest.mark.parametrize("stop_after", [3, 31])
def test_a_fold_that_is_resumed_gets_what_it_would_have_got(stop_after):
    def make():
        return training_on(Subset(Numbers(LENGTH), fold(1)), 8, factor=2, options={"buffer_size": 16})

    loader, found, state = make(), [], None
    for _ in range(2):
        for batch in loader:
            found.append(rows(batch))
            if len(found) == stop_after:
                state = loader.state_dict()
    loader.close()
    again, rest = make(), []
    again.load_state_dict(state)
    while len(rest) < len(found) - stop_after:
        rest += [rows(batch) for batch in again]
    again.close()
    assert rest[: len(found) - stop_after] == found[stop_after:]
    assert {index for batch in found for index, _ in batch} == set(fold(1))


def test_of_a_small_part_no_batch_has_an_example_twice():
    part = random.Random(3).sample(range(1000), 100)
    some = training_on(Subset(Numbers(1000), part), 8, factor=3, options={"buffer_size": 64})
    for batches in epochs_of(some, 60):
        for batch in batches:
            taken = [index for index, _ in batch]
            assert len(set(taken)) == len(taken)
            assert set(taken) <= set(part)
    some.close()


def test_indices_that_are_replaced_between_two_epochs_are_another_part():
    part = Subset(Numbers(LENGTH), list(range(60)))
    some = training_on(part, 8)
    (before,) = epochs_of(some, 1)
    part.indices = list(range(100, 160))
    (after,) = epochs_of(some, 1)
    some.close()
    assert (sorted(indices(before)), sorted(indices(after))) == (list(range(60)), list(range(100, 160)))


@pytest.mark.parametrize("chosen", [[0, 0, 1], [-1, 3, 4]])
def test_what_is_no_part_is_refused_beside_others(chosen):
    data = Numbers(LENGTH)
    whole = training_on(data, 8, linger_seconds=5)
    batches = iter(whole)
    next(batches)
    other = training_on(Subset(data, chosen), 2)
    way = r"is the name of other data: (.|\n)*\n    loader = DataLoader\(torch.utils.data.Subset\(data, indices\), shuffle=True\)"
    with pytest.raises(ValueError, match=way):
        next(iter(other))
    joined = training_on(ConcatDataset([Subset(data, [0, 1]), Subset(data, [5])]), 2)
    with pytest.raises(ValueError, match=way):
        next(iter(joined))
    weighted = training_on(data, 8, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH))
    with pytest.raises(ValueError, match=r"other data: sampler(.|\n)*give them CachedDataset\("):
        next(iter(weighted))
    for loader in (other, joined, weighted, whole):
        loader.close()
