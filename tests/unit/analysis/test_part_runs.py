"""Runs of one part of a loader's work: only that part runs, in the workers, and takes at least the time that it sleeps."""

import multiprocessing
import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_echo import StagedDataset
from lightning_echo.analysis.parts import Batches, first_half, options_of, run_part, whole
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


def loader_of(dataset=None, workers=0, **options):
    return DataLoader(dataset or Sleeping(), batch_size=2, collate_fn=collate, num_workers=workers, **options)


def stages_of(raw):
    split = find_split(Sleeping(), raw=raw)
    return partial(make_stages, conventions=split.conventions, raw=raw)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_of_it_is_what_the_plain_loader_does(workers):
    loader = loader_of(workers=workers)
    made = run_part(loader, whole, BATCHES, keeps_outputs=True)
    assert [batch.tolist() for batch in made.outputs] == [batch.tolist() for batch in loader_of()]
    assert len(made.batches) == 4
    for spent in made.batches:
        assert spent.first.seconds >= 2 * (READ + DECODE + AUGMENT)
        assert (spent.second.seconds, spent.collate.seconds >= COLLATE) == (0, True)
        assert 0 <= spent.all.cpu < spent.all.seconds


def test_reading_alone_neither_decodes_nor_augments_nor_collates():
    loader = loader_of(Sleeping(refused=("decode", "augment")))
    made = run_part(loader, partial(first_half, stages_of(raw=True)), BATCHES, collates=False, keeps_outputs=True)
    assert made.outputs == BATCHES
    assert all(spent.first.seconds >= 2 * READ and spent.collate.seconds < COLLATE for spent in made.batches)


@pytest.mark.parametrize(("workers", "batches"), [(None, 2), (2, 5)])
def test_it_ends_when_its_time_is_up_but_has_a_few_batches_for_each_worker(workers, batches):
    made = run_part(loader_of(), whole, BATCHES * 2, workers=workers, most_seconds=0.0)
    assert len(made.batches) == batches


def test_a_run_ends_when_its_outputs_take_too_much_memory(monkeypatch):
    monkeypatch.setattr("lightning_echo.analysis.parts._MOST_OUTPUT_BYTES", 0)
    assert len(run_part(loader_of(), whole, BATCHES, keeps_outputs=True).outputs) == 2
    assert len(run_part(loader_of(), whole, BATCHES).batches) == 4


def test_batches_are_rebuilt_each_time_with_the_loaders_workers_or_others():
    class Workers(Sleeping):
        def __getitem__(self, index):
            return torch.tensor([index, get_worker_info().num_workers])

    loader = DataLoader(Workers(), batch_size=2, num_workers=1)
    batches = Batches(loader, whole, BATCHES[:2])
    for _ in range(2):
        assert [batch.tolist() for batch in batches] == [[[0, 1], [1, 1]], [[2, 1], [3, 1]]]
    assert len(batches) == 2
    assert [batch.tolist() for batch in Batches(loader, whole, BATCHES[:1], workers=2)] == [[[0, 2], [1, 2]]]


def test_options_of_the_users_workers_are_taken_over():
    waits = {"timeout": 7, "prefetch_factor": 5, "multiprocessing_context": multiprocessing.get_context("spawn")}
    started = []
    loader = loader_of(workers=1, **waits, pin_memory=True, worker_init_fn=started.append)
    for workers, waiting in ((3, waits), (0, {})):
        options = options_of(loader, workers)
        options.pop("worker_init_fn")(workers)
        assert options == {"num_workers": workers, "pin_memory": True, **waiting}
    assert started == [3, 0]
    assert options_of(loader_of(), 2)["prefetch_factor"] == 2  # torch's own


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_are_left_alone_and_what_the_data_set_raises_comes_through(workers):
    class Still(Sleeping):
        def augment(self, example):
            return example

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    run_part(loader_of(Still(), workers), whole, BATCHES)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    with pytest.raises(AssertionError, match="decode ran"):
        run_part(loader_of(Sleeping(refused=("decode",)), workers), whole, BATCHES)
