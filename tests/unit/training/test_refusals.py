"""A second ``fit`` over the same data is refused; the Trainers here only have a state."""

from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_echo.training.trainer import is_in_fit, refuse_second_fit

STATES = [(fn, status) for fn in TrainerFn for status in TrainerStatus]


def trainer(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING):
    return SimpleNamespace(state=SimpleNamespace(fn=fn, status=status))


@pytest.mark.parametrize(("fn", "status"), STATES)
def test_a_fit_is_under_way_while_it_runs(fn, status):
    assert is_in_fit(trainer(fn, status)) is (fn == "fit" and status == "running")


def test_two_fits_over_the_same_are_refused_with_the_ways_out():
    message = "^the data is in use by another Trainer, .* of its own, or let one fit end before the next begins$"
    with pytest.raises(MisconfigurationException, match=message):
        refuse_second_fit("the data", trainer(), trainer())
