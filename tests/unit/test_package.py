"""The package itself: its names can be imported, each has an example, and the examples in the docstrings run."""

import doctest
import importlib
import pkgutil

import pytest

import lightning_echo

MODULES = sorted(module.name for module in pkgutil.walk_packages(lightning_echo.__path__, "lightning_echo."))
WITHOUT_EXAMPLE = {"InsertionPoint", "Reason", "EchoStateError"}  # enumerations and an exception: nothing to show


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("name", lightning_echo.__all__)
def test_each_public_name_can_be_imported_and_shows_an_example(name):
    found = getattr(lightning_echo, name)
    assert found.__name__ == name
    assert name in WITHOUT_EXAMPLE or ">>>" in found.__doc__


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'lightning_echo' has no attribute 'EchoLoaderr'"):
        _ = lightning_echo.EchoLoaderr
