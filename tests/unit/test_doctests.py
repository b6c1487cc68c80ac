"""The examples in the docstrings run, and every public name has one."""

import doctest
import importlib
import pkgutil

import pytest

import lightning_echo

MODULES = sorted(module.name for module in pkgutil.walk_packages(lightning_echo.__path__, "lightning_echo."))
WITHOUT_EXAMPLE = {"InsertionPoint", "Reason", "EchoStateError"}  # enumerations and an exception: nothing to show


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_name_shows_an_example() -> None:
    public = set(lightning_echo.__all__) - WITHOUT_EXAMPLE
    assert {name for name in public if ">>>" in (getattr(lightning_echo, name).__doc__ or "")} == public
