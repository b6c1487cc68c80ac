"""Random numbers and torch's switches are afterwards what they were, also where what changed them failed."""

import random

import numpy as np
import pytest
import torch

from lightning_echo.analysis.phases import process_state_restored


def drawn():
    return [torch.rand(1).item(), np.random.rand(), random.random()]


def fails_when_drawn():
    drawn()
    raise ZeroDivisionError


def test_random_numbers_are_put_back_after_an_error():
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    expected = drawn()
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    with pytest.raises(ZeroDivisionError), process_state_restored():
        fails_when_drawn()
    assert drawn() == expected


@pytest.fixture
def switches():
    """As torch has them, whatever a test does."""
    before = switched()
    yield
    switch(*before)


def switched():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


def switch(deterministic, warn_only, benchmark):
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("before", [(False, False, False), (True, False, False), (True, True, True)])
def test_switches_that_a_trainer_turns_are_turned_back(before):
    switch(*before)
    with process_state_restored():
        switch(not before[0], not before[1], not before[2])
    assert switched() == before
