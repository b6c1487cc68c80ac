"""Trainings on parts of one data set share a reader: each gets its part, all of it, and nothing else."""

import os
import random
import re
import signal
import time
from contextlib import suppress

import pytest
import torch
from sharing_runs import (
    Deadly,
    Numbers,
    closing,
    epochs_of,
    examples,
    in_process,
    indices,
    kill_reader,
    rows,
    status,
    together,
    wait_until,
)
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, WeightedRandomSampler, random_split

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.share.process import ReaderError

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


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("seconds", 0.001, r"dataset.seconds: 0.0 and 0.001"), ("length", LENGTH + 40, r"dataset.length: 240 and 280")],
)
@pytest.mark.parametrize("on_a_part", [True, False], ids=["part", "all"])
def test_data_that_a_training_has_changed_since_it_began_are_never_those_of_the_next_reader(name, value, message, on_a_part):
    """The base may grow, and the part keep its length: the next reader would number other examples."""
    data = Numbers(LENGTH)
    loader = training_on(Subset(data, fold(0)) if on_a_part else data, window="16KiB")
    batches = iter(loader)
    found = rows(next(batches))
    setattr(data, name, value)
    kill_reader()
    with pytest.raises(ReaderError, match=f"has died, and another one would read other data: {message}"):
        found.extend(example for batch in batches for example in rows(batch))
    assert 0 < len(found) < LENGTH // 2
    setattr(data, name, vars(Numbers(LENGTH))[name])  # the data as they were
    loader.close()


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


def negated(example):
    return {**example, "noise": -example["noise"] - torch.rand(())}


def test_a_fold_inside_a_named_cut_shares_with_a_training_that_cuts_all_of_the_data():
    """The reader gets the data set without the fold, in the same cut."""
    data = Numbers(LENGTH)
    some = training_on(StagedDataset.of(Subset(data, fold(1)), augment=negated), 8, wait_for=2)
    whole = training_on(StagedDataset.of(data, augment=negated), 10, wait_for=2)
    (first, second), (all_of,) = together(closing(some, 2), closing(whole, 1))
    assert sorted(indices(first)) == sorted(indices(second)) == fold(1)
    drawn = dict(examples(all_of))
    assert sorted(drawn) == list(range(LENGTH))
    assert all(drawn[index] == noise < 0 for index, noise in examples(first))


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_example_that_kills_its_reader_ends_the_trainings_that_take_it_and_no_other_one():
    """The fold without it continues: the third reader may read it once more, until it is known that nobody wants it."""
    at = 70
    data = Deadly(LENGTH, at)
    first, second, whole = fold(at % FOLDS), fold(1), range(LENGTH)
    loaders = [training_on(Subset(data, part), 8, wait_for=3, workers=2, window=2**14) for part in (first, second, whole)]

    def ends(loader):
        def run():
            with pytest.raises(ReaderError, match=r"has died twice at item \d+ .*is killed by signal: Killed"):
                epochs_of(loader, 2)
            loader.close()

        return run

    epochs, *_ = together(closing(loaders[0], 3), *map(ends, loaders[1:]))
    assert [sorted(indices(batches)) for batches in epochs] == [first] * 3


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
    of_first_pass = next(
        count
        for count in range(101)
        if all(sorted(taken[begin : begin + 100]) == list(range(100, 200)) for begin in (count, count + 100))
    )
    for batches in whole:
        assert sorted(indices(batches)) == list(range(150, LENGTH))
    said = set(map(int, re.findall(r"this run sees (\d+)% of the current pass", caplog.text)))
    assert said == {of_first_pass, 100}, "the patient one gets all of the pass for which it waits"


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


class Files(Numbers):
    """A list of files of its own for each training, as a fold is often written."""

    def __init__(self, names):
        super().__init__(len(names))
        self.names = names


def test_a_list_of_files_for_each_fold_is_refused_with_what_to_write_instead():
    names = [f"{number}.jpg" for number in range(40)]
    first, other = training_on(Files(names[:30]), 8, linger_seconds=5), training_on(Files(names[10:]), 8)
    batches = iter(first)
    next(batches)
    with pytest.raises(
        ValueError, match=r"other data: (.|\n)*\n    data = Images\(all_files, transform\)\n    loader = DataLoader\("
    ):
        next(iter(other))
    other.close()
    first.close()


@pytest.mark.parametrize(("size", "pace", "level"), [(24, "0.10", "WARNING"), (192, "0.80", "INFO")])
def test_the_pace_of_a_part_is_said_and_below_a_half_it_is_a_warning(size, pace, level, caplog):
    caplog.set_level("INFO", logger="lightning_echo")
    data = Numbers(LENGTH)
    some = training_on(Subset(data, range(size)), 8, wait_for=2)
    together(closing(some, 1), closing(training_on(data, 8, wait_for=2), 1))
    # It is said again if the other training has left before.
    said = next(one for one in caplog.records if "of the examples that are read" in one.getMessage())
    assert said.levelname == level
    assert f"takes {size} of the 240 examples of a pass, and the reader reads 240 for all: it gets {pace} of" in said.getMessage()


class Counted(Numbers):
    """Notes each read in a file, one byte each."""

    def __init__(self, length, path):
        super().__init__(length)
        self.path = str(path)

    def __getitem__(self, index):
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, b"x")
        os.close(descriptor)
        return super().__getitem__(index)


@pytest.mark.slow
def test_five_folds_side_by_side_read_the_data_once_in_each_of_their_passes(tmp_path):
    path, passes = tmp_path / "reads", 10
    data = Counted(LENGTH * 2, path)
    parts = [[index for index in range(LENGTH * 2) if index % FOLDS != number] for number in range(FOLDS)]
    loaders = [training_on(Subset(data, part), 16, wait_for=FOLDS, window=2**12) for part in parts]
    found = together(*(closing(loader, passes) for loader in loaders))
    for part, epochs in zip(parts, found, strict=True):
        assert all(sorted(indices(batches)) == part for batches in epochs)
    compared = 2 * FOLDS * 8  # examples that are compared, by each training, twice each
    assert (path.stat().st_size - compared) / (passes * len(data)) < 1.1


def test_what_no_training_wants_is_not_read(tmp_path):
    path = tmp_path / "reads"
    data = Counted(LENGTH * 4, path)
    some = training_on(Subset(data, range(96)), 16, window=2**12)
    assert all(sorted(indices(batches)) == list(range(96)) for batches in epochs_of(some, 5))
    some.close()
    assert path.stat().st_size - 16 < 96 * 6 + 64


class Together(Numbers):
    """Reads many examples in one call, whose noise depends on how many are read."""

    def __getitems__(self, chosen):
        drawn = torch.rand(len(chosen))
        return [{**self[index], "noise": noise} for index, noise in zip(chosen, drawn, strict=True)]


class CountedTogether(Together):
    """Notes how many examples each call reads, in a file."""

    def __init__(self, length, path):
        super().__init__(length)
        self.path = str(path)

    def __getitems__(self, chosen):
        with open(self.path, "a") as file:
            file.write(f"{len(chosen)}\n")
        return super().__getitems__(chosen)


def test_of_data_that_is_read_in_whole_chunks_the_pace_is_that_of_what_is_really_read(tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_echo")
    size, passes = 24, 60
    some = training_on(Subset(CountedTogether(LENGTH, tmp_path / "reads"), range(size)), 8, window=2**12)
    assert all(sorted(indices(batches)) == list(range(size)) for batches in epochs_of(some, passes))
    some.close()
    really = sum(map(int, (tmp_path / "reads").read_text().split())) / passes
    (said,) = [one for one in caplog.records if "of the examples that are read" in one.getMessage()]
    found = re.search(
        r"the reader reads (\d+) for all: it gets ([\d.]+) of the examples that are read\. Alone", said.getMessage()
    )
    assert float(found[1]) == pytest.approx(really, rel=0.1)
    assert float(found[2]) == pytest.approx(size / really, rel=0.1)


def test_data_that_reads_many_examples_in_one_call_has_the_same_noise_whoever_is_there():
    def passes_of(*parts):
        loaders = [training_on(Subset(Together(LENGTH), part), 16, wait_for=len(parts), linger_seconds=0) for part in parts]
        return [[dict(examples(batches)) for batches in epochs] for epochs in together(*(closing(each, 2) for each in loaders))]

    (alone,) = passes_of(fold(0))
    beside, other = passes_of(fold(0), fold(1))
    assert alone == beside
    for epoch, epoch_of_other in zip(beside, other, strict=True):
        assert sorted(epoch) == fold(0)
        assert all(epoch[index] == noise for index, noise in epoch_of_other.items() if index in epoch)


def trains_on(connection, part, options):
    """A training in a process of its own, which says each index that it gets."""
    loader = training_on(Subset(Numbers(LENGTH, seconds=0.0005), part), 8, **options)
    for _ in range(10**9):
        for batch in loader:
            connection.send(batch["index"].tolist())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_while_readers_and_trainings_die_and_come_at_random_nobody_gets_what_is_not_in_its_part():
    """Two trainings get exactly their parts. Beside them others come and are killed, and so are the readers."""
    generator = random.Random(1)
    share = {"window": 2**14, "linger_seconds": 5, "wait_for": 2, "workers": 2}
    lasting = [training_on(Subset(Numbers(LENGTH, seconds=0.0005), fold(number)), 8 + number, **share) for number in range(2)]
    over, batches_had = [], []

    def train(loader):
        def run():
            epochs = []
            try:
                while not over:
                    epochs += epochs_of(loader, 1, lambda: batches_had.append(loader))
            finally:
                loader.close()
            return epochs

        return run

    def disturb():
        try:
            for _ in range(8):
                part = sorted(generator.sample(range(LENGTH), generator.randrange(1, LENGTH)))
                with in_process(trains_on, part, {**share, "wait_for": 1}) as (process, other):
                    time.sleep(generator.random() * 0.6)
                    if generator.random() < 0.6:
                        with suppress(ConnectionError, FileNotFoundError, TimeoutError):
                            kill_reader()
                    time.sleep(generator.random() * 0.6)
                    os.kill(process.pid, signal.SIGKILL)
                    process.join()
                    before = len(batches_had)
                    wait_until(lambda: len(batches_had) > before + 60, "the lasting ones go on")  # noqa: B023
                    with suppress(EOFError):
                        while other.poll():
                            assert set(other.recv()) <= set(part)
        finally:
            over.append(True)

    *found, _ = together(*map(train, lasting), disturb)
    for number, epochs in enumerate(found):
        assert len(epochs) > 5
        for batches in epochs:
            assert sorted(indices(batches)) == fold(number)
