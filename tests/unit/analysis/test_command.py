"""The Trainer of ``python train.py analyze``: the same class, and able to analyze. The command itself: test_cli_analyze."""

import inspect

import lightning.pytorch as pl

from lightning_echo.analysis.command import Analyzes, analyzing


class Own(pl.Trainer):
    """A Trainer of the user's."""


def test_the_class_is_called_as_before():
    made = analyzing(Own)
    assert issubclass(made, Own)
    assert issubclass(made, Analyzes)
    assert (made.__name__, made.__module__, made.__doc__) == ("Own", Own.__module__, "A Trainer of the user's.")


def test_a_class_that_can_analyze_is_left_as_it_is():
    made = analyzing(Own)
    assert analyzing(made) is made


def test_its_options_are_those_of_the_users_class():
    assert inspect.signature(analyzing(Own)) == inspect.signature(Own)
