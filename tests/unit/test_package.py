"""The package itself: its map names every folder, its names can be imported, its messages are seen."""

import re
import subprocess
import sys

import pytest
from test_layering import LEVELS

import lightning_echo


def run(program):
    """Runs a program in a process of its own; returns what it has written to stderr."""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return result.stderr


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


def test_what_was_chosen_is_seen_in_a_default_run():
    program = "import logging, lightning_echo; logging.getLogger('lightning_echo.any').info('chosen')"
    assert run(program) == "chosen\n"


def test_a_program_that_has_set_logging_up_itself_sees_messages_once_and_in_its_own_way():
    program = """
import logging
logging.basicConfig(format="mine: %(message)s", level=logging.INFO)
import lightning_echo
logging.getLogger("lightning_echo.any").info("chosen")
"""
    assert run(program) == "mine: chosen\n"
