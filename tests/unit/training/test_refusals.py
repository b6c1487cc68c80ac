"""A second ``fit`` over the same data, and objects of ``pytorch_lightning``, are refused; the Trainers here only have a state."""

from types import SimpleNamespace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from lightning_echo.training.trainer import is_in_fit, refuse_other_package, refuse_second_fit

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


def of(module, *bases):
    return type("Trainer", bases, {"__module__": module})()


@pytest.mark.parametrize("module", ["pytorch_lightning", "pytorch_lightning.trainer.trainer"])
@pytest.mark.parametrize("is_subclass", [False, True])
def test_what_is_of_it_is_refused_with_both_ways_out(module, is_subclass):
    value = of(module)
    if is_subclass:
        value = of("users.code", type(value))
    message = "^trainer Trainer comes from the separate package pytorch_lightning, .* 'import lightning.pytorch as pl', or pass "
    with pytest.raises(TypeError, match=message):
        refuse_other_package("trainer", value)


@pytest.mark.parametrize("value", [None, 3, of("lightning.pytorch.trainer.trainer"), of("pytorch_lightning_bolts.trainer")])
def test_anything_else_is_let_through(value):
    assert refuse_other_package("trainer", value) is None
