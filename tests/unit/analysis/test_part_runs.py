"""Runs of one part of a loader's work: only that part runs, in the workers, and takes at least the time that it sleeps."""

import multiprocessing
import random
import sys
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_echo import StagedDataset
from lightning_echo.analysis.parts import Batches, FirstBatches, both_halves, first_half, options_of, run_part, second_half, whole
from lightning_echo.split.prove import find_split, make_stages

READ, DECODE, AUGMENT, COLLATE = 0.004, 0.003, 0.002, 0.01
BATCHES = [[0, 1], [2, 3], [4, 5], [6, 7]]


class Sleeping(StagedDataset):
    """Each stage takes its time; ``refused`` must not run."""

    def __init__(self, refused=()):
        self.refused = refused

    def __len__(self):
        return 8

    def read(self, index):
        return self._do("read", READ, index)

    def decode(self, raw):
        return self._do("decode", DECODE, torch.tensor([float(raw)]))

    def augment(self, example):
        return self._do("augment", AUGMENT, example + torch.randint(0, 1, (1,)))

    def _do(self, name, seconds, result):
        assert name not in self.refused, f"{name} ran"
        time.sleep(seconds)
        return result


def collate(examples):
    time.sleep(COLLATE)
    return torch.cat(examples)


def loader_of(dataset, workers, **options):
    return DataLoader(dataset, batch_size=2, collate_fn=collate, num_workers=workers, **options)


def stages_of(raw):
    split = find_split(Sleeping(), raw=raw)
    return partial(make_stages, conventions=split.conventions, raw=raw)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_all_of_it_is_what_the_plain_loader_does(workers):
    loader = loader_of(Sleeping(), workers)
    made = run_part(loader, whole, BATCHES, keeps_outputs=True)
    assert [batch.tolist() for batch in made.outputs] == [batch.tolist() for batch in loader]
    assert len(made.batches) == 4
    for spent in made.batches:
        assert spent.first >= 2 * (READ + DECODE + AUGMENT)
        assert (spent.second, spent.collate >= COLLATE) == (0, True)
        assert 0 <= spent.cpu < spent.first + spent.collate


def test_the_halves_are_timed_apart():
    made = run_part(loader_of(Sleeping(), 1), partial(both_halves, stages_of(raw=False)), BATCHES)
    assert all(spent.first >= 2 * (READ + DECODE) and spent.second >= 2 * AUGMENT for spent in made.batches)
    made = run_part(loader_of(Sleeping(), 1), partial(both_halves, stages_of(raw=True)), BATCHES)
    assert all(spent.first >= 2 * READ and spent.second >= 2 * (DECODE + AUGMENT) for spent in made.batches)


class CountsModules(Sleeping):
    """An example is how many modules of torch its process has."""

    def read(self, index):
        return sum(name.startswith("torch") for name in sys.modules)


def test_what_a_worker_imports_to_send_tensors_takes_no_time_from_batches():
    fresh = loader_of(CountsModules(), 1, multiprocessing_context="spawn")
    modules = torch.cat(run_part(fresh, whole, BATCHES * 2, keeps_outputs=True).outputs).tolist()
    assert len(set(modules)) == 1


def test_reading_alone_neither_decodes_nor_augments_nor_collates():
    loader = loader_of(Sleeping(refused=("decode", "augment")), 2)
    made = run_part(loader, partial(first_half, stages_of(raw=True)), BATCHES, collates=False, keeps_outputs=True)
    assert made.outputs == BATCHES
    assert all(spent.first >= 2 * READ and spent.collate < COLLATE for spent in made.batches)


def test_an_item_in_memory_is_not_read():
    loader = loader_of(Sleeping(refused=("read",)), 2)
    raw = {index: 10 * index for index in range(8)}
    made = run_part(loader, partial(second_half, stages_of(raw=True), raw), BATCHES, keeps_outputs=True)
    assert [batch.tolist() for batch in made.outputs] == [[0, 10], [20, 30], [40, 50], [60, 70]]
    assert all(spent.first >= 2 * (DECODE + AUGMENT) for spent in made.batches)


def test_items_in_memory_are_not_edited():
    class Edits(Sleeping):
        def decode(self, raw):
            return torch.tensor([float(raw.pop())])

    loader = loader_of(Edits(), 0)
    part = partial(second_half, partial(make_stages, conventions=None, raw=True), {index: [index] for index in range(8)})
    for _ in range(2):
        assert run_part(loader, part, BATCHES, keeps_outputs=True).outputs[1].tolist() == [2, 3]


def test_an_item_that_is_not_in_memory_is_loaded():
    loader = loader_of(Sleeping(), 1)
    made = run_part(loader, partial(second_half, stages_of(raw=True), {1: 10, 4: 40}), BATCHES, keeps_outputs=True)
    assert [batch.tolist() for batch in made.outputs] == [[0, 10], [2, 3], [40, 5], [6, 7]]


def test_it_ends_when_its_time_is_up_but_has_two_batches():
    made = run_part(loader_of(Sleeping(), 0), whole, BATCHES, most_seconds=0.0)
    assert len(made.batches) == 2


def test_other_workers_than_the_loaders_begin_with_as_many_batches_as_they_are():
    made = run_part(loader_of(Sleeping(), 0), whole, BATCHES * 2, workers=2, most_seconds=0.0)
    assert len(made.batches) == 5


def test_a_run_ends_when_its_outputs_take_too_much_memory(monkeypatch):
    monkeypatch.setattr("lightning_echo.analysis.parts._MOST_OUTPUT_BYTES", 0)
    loader = loader_of(Sleeping(), 0)
    assert len(run_part(loader, whole, BATCHES, keeps_outputs=True).outputs) == 2
    assert len(run_part(loader, whole, BATCHES).batches) == 4


def test_a_data_set_that_reads_whole_batches_is_asked_for_them():
    class Whole(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise AssertionError("one by one")

        def __getitems__(self, indices):
            return [torch.tensor([float(index)]) for index in indices]

    loader = loader_of(Whole(), 1)
    assert run_part(loader, whole, BATCHES, keeps_outputs=True).outputs[1].tolist() == [2, 3]
    loader = loader_of(StagedDataset.of(Whole(), augment=torch.neg), 1)
    make = partial(make_stages, conventions=None)
    assert run_part(loader, partial(first_half, make), BATCHES, keeps_outputs=True).outputs[1].tolist() == [2, 3]
    assert run_part(loader, partial(both_halves, make), BATCHES, keeps_outputs=True).outputs[1].tolist() == [-2, -3]


def test_batches_are_made_anew_each_time_with_the_loaders_workers_or_others():
    class Workers(Sleeping):
        def __getitem__(self, index):
            return torch.tensor([index, get_worker_info().num_workers])

    loader = DataLoader(Workers(), batch_size=2, num_workers=1)
    batches = Batches(loader, whole, BATCHES[:2])
    for _ in range(2):
        assert [batch.tolist() for batch in batches] == [[[0, 1], [1, 1]], [[2, 1], [3, 1]]]
    assert len(batches) == 2
    assert [batch.tolist() for batch in Batches(loader, whole, BATCHES[:1], workers=2)] == [[[0, 2], [1, 2]]]


def test_the_first_batches_of_a_stream_are_its_first_each_time():
    batches = FirstBatches(DataLoader(Sleeping(), batch_size=2, collate_fn=collate), 3)
    assert len(batches) == 3
    for _ in range(2):
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


def test_workers_may_be_others_and_what_they_open_is_noted(tmp_path):
    class Files(Sleeping):
        def read(self, index):
            assert get_worker_info().num_workers == 1
            return int((tmp_path / str(index)).read_text())

    for index in range(8):
        (tmp_path / str(index)).write_text(str(index))
    made = run_part(loader_of(Files(), 0), whole, BATCHES, workers=1, observes=True)
    assert made.files == [str(tmp_path / str(index)) for index in range(8)]
    assert run_part(loader_of(Files(), 0), whole, BATCHES, workers=1).files == []


def test_options_of_the_users_workers_are_taken_over():
    waits = {"timeout": 7, "prefetch_factor": 5, "multiprocessing_context": multiprocessing.get_context("spawn")}
    started = []
    loader = loader_of(Sleeping(), 1, **waits, pin_memory=True, worker_init_fn=started.append)
    for workers, waiting in ((3, waits), (0, {})):
        options = options_of(loader, workers)
        options.pop("worker_init_fn")(workers)
        assert options == {"num_workers": workers, "pin_memory": True, **waiting}
    assert started == [3, 0]
    without = loader_of(Sleeping(), 0)
    assert options_of(without, 2)["prefetch_factor"] == 2  # torch's own


def test_a_worker_init_fn_sees_the_users_data_set():
    class Prepared(Sleeping):
        def read(self, index):
            return index + self.offset

    def prepare(worker):
        get_worker_info().dataset.offset = 100

    loader = DataLoader(Prepared(), batch_size=2, collate_fn=collate, num_workers=1, worker_init_fn=prepare)
    made = run_part(loader, whole, BATCHES, keeps_outputs=True)
    assert made.outputs[0].tolist() == [100, 101]


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_of_this_process_are_left_alone(workers):
    class Still(Sleeping):
        def augment(self, example):
            return example

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    run_part(loader_of(Still(), workers), whole, BATCHES)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


def test_what_the_data_set_raises_comes_through():
    with pytest.raises(AssertionError, match="decode ran"):
        run_part(loader_of(Sleeping(refused=("decode",)), 1), whole, BATCHES)
