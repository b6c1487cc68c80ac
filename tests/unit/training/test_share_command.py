"""What a reader by hand shows: one text in the place of the other on a terminal."""

import io

import pytest

from lightning_echo import cli as share_command
from lightning_echo.cli import shown_in_place

CURSOR_UP = "\x1b[1A"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_text_takes_the_place_of_the_one_before(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    with shown_in_place() as show:
        show("sweep: 10 examples/s\n  a.py: pass 1")
        show("sweep: 20 examples/s\n  a.py: pass 2")
    written = terminal.getvalue()
    assert CURSOR_UP in written[written.index("pass 1") : written.index("pass 2")]


@pytest.mark.parametrize(("is_terminal", "has_rich"), [(False, True), (True, False)])
def test_elsewhere_they_follow_each_other(monkeypatch, is_terminal, has_rich):
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(share_command, "find_spec", lambda name: has_rich or None)
    with shown_in_place() as show:
        show("one")
        show("two")
    assert stream.getvalue() == "one\ntwo\n"
