"""The phases of a stream, the number of their steps, what ranks tell each other, and the state of a process that is put back."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.analysis.phases import StepNumber, gathered, measure_stream, process_state_restored


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(80, 3))


@pytest.mark.parametrize(("workers", "batches"), [(0, 2), (1, 3)])
def test_a_stream_that_is_cut_short_by_its_time_is_not_one_that_has_ended(workers, batches):
    steps, phases = measure_stream(DataLoader(Stream(), 4, num_workers=workers), StepNumber(30, str), 4, 0.0, str)
    assert (steps, len(phases.real)) == (30, batches)


def test_of_one_that_has_ended_there_are_as_many_steps_as_batches_unless_more_are_asked_for():
    with pytest.raises(ValueError, match="steps must be at most 20, the batches of the training loader, got 30"):
        measure_stream(DataLoader(Stream(), 4), StepNumber(30, str), 4, 60.0, str)
    steps, phases = measure_stream(DataLoader(Stream(), 4), StepNumber(None, str), 4, 60.0, str)
    assert (steps, len(phases.real)) == (20, 20)


@pytest.mark.parametrize(("asked", "batches", "steps"), [(None, 2000, 100), (200, 800, 200), (20, 20, 20), (None, 99, 99)])
def test_steps_are_those_asked_for_or_a_hundred_and_fewer_are_told(asked, batches, steps):
    said = []
    assert StepNumber(asked, said.append).within(batches) == steps
    fewer = "99 steps in each phase: the training loader has no more batches"
    assert said == ([fewer] if steps == 99 else [])


@pytest.mark.parametrize(
    ("steps", "batches", "message"),
    [
        (9, 8, "steps must be at most 8, the batches of the training loader, got 9: give fewer steps"),
        (None, 3, "must have at least 4 batches for an analysis, got 3: make batches smaller"),
        (3, 8, "steps must be >= 4, got 3"),
    ],
)
def test_too_many_steps_too_few_and_too_short_loaders_are_refused(steps, batches, message):
    with pytest.raises(ValueError, match=message):
        StepNumber(steps, str).within(batches)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
def test_in_a_process_group_each_rank_has_a_place_and_a_single_process_tells_itself(monkeypatch):
    """Two ranks, of which this process is the second one; the group itself is a fake."""

    def all_gather_object(found, value):
        assert len(found) == 2
        found[:] = ["of rank 0", value]

    assert gathered({"seconds": 3}) == [{"seconds": 3}]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    assert gathered("of rank 1") == ["of rank 0", "of rank 1"]


def drawn():
    return [torch.rand(1).item(), np.random.rand(), random.random()]


def switched():
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return (*algorithms, torch.backends.cudnn.benchmark)


def switch(deterministic, warn_only, benchmark):
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture
def switches():
    """As torch has them, whatever a test does."""
    before = switched()
    yield
    switch(*before)


def draws_and_fails(before):
    drawn()
    switch(*(not each for each in before))
    raise ZeroDivisionError


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("before", [(False, False, False), (True, False, False), (True, True, True)])
def test_random_numbers_and_switches_are_put_back_also_after_an_error(before):
    switch(*before)
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    expected = drawn()
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    with pytest.raises(ZeroDivisionError), process_state_restored():
        draws_and_fails(before)
    assert (drawn(), switched()) == (expected, before)
