"""The package itself: its map names every folder, its names can be imported."""

import re

import pytest
from test_layering import LEVELS

import lightning_echo


def test_the_map_in_the_docstring_names_all_folders_and_files_in_the_order_of_their_imports():
    _, _, after = lightning_echo.__doc__.partition("The folders and files.")
    names = re.findall(r"^    (\w+)(?:/|\.py) ", after, flags=re.MULTILINE)
    assert tuple(names) == LEVELS


@pytest.mark.parametrize("name", lightning_echo.__all__)
def test_each_public_name_can_be_imported(name):
    assert getattr(lightning_echo, name).__name__ == name


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="module 'lightning_echo' has no attribute 'EchoLoaderr'"):
        _ = lightning_echo.EchoLoaderr
