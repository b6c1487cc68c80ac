"""The checks of tests/lint.py can fail."""

import ast
import runpy
from pathlib import Path

import pytest

LINT = runpy.run_path(str(Path(__file__).parents[1] / "lint.py"), run_name="lint")


@pytest.mark.parametrize(
    ("rule", "source", "found"),
    [
        ("without_an_assertion", "def test_it():\n    f()\n", ["test_it"]),
        ("without_an_assertion", "class TestIt:\n    def test_it(self):\n        self.f()\n", ["test_it"]),
        ("without_an_assertion", "def test_it():\n    assert 1\n", []),
        ("without_an_assertion", "def check(x):\n    assert x\ndef again(x):\n    check(x)\ndef test_it():\n    again(1)\n", []),
        ("with_a_silent_end", "def test_it():\n    if x:\n        return\n    assert x\n", ["test_it"]),
    ],
)
def test_a_test_that_shows_nothing_is_seen(rule, source, found):
    assert LINT[rule](ast.parse(source)) == found


def test_an_import_upward_and_a_circle_are_seen():
    assert LINT["upward"]("plan", ast.parse("from lightning_echo.loader.loader import EchoLoader"))
    assert LINT["upward"]("loader", ast.parse("def f():\n    import lightning_echo.callback"))
    assert not LINT["upward"]("callback", ast.parse("from lightning_echo.loader import state"))
    assert LINT["cycle_in"]({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c", "a"]
    assert LINT["cycle_in"]({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert any(LINT["graph_of"](LINT["PACKAGE"] / "pipeline").values()), "it sees imports"


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("wordless", "raise ValueError", "raise Closed()"),
        ("wordless", "raise ValueError()", "raise ValueError('factor is missing')"),
        ("without_value", "raise ValueError('factor must be >= 1')", "raise ValueError(f'factor must be >= 1, got {factor!r}')"),
        ("untidy", "raise ValueError('it is wrong.')", "raise ValueError('it is wrong: Trainer(...) is right')"),
        ("capitalised", "raise ValueError('The factor is wrong')", "raise ValueError('EchoCallback has no factor')"),
        ("without_cause", "raise RuntimeError('reading failed')", "raise RuntimeError(f'reading {path} failed')"),
        ("not_prefixed", "warnings.warn('slow')", "warnings.warn('lightning_echo: slow')"),
        ("not_prefixed", "rank_zero_warn('lightning_echo: lightning_echo: slow')", "rank_zero_warn('lightning_echo: slow')"),
        ("prefixed_in_the_log", "LOGGER.info('lightning_echo: slow')", "LOGGER.info('slow')"),
        ("without_category", "warnings.warn('it is')", "warnings.warn('it is', UserWarning, stacklevel=2)"),
    ],
)
def test_a_message_that_breaks_a_rule_is_seen(rule, bad, good):
    for source, is_bad in ((bad, True), (good, False)):
        (message,) = LINT["messages_of"](ast.parse(source), "it.py")
        assert LINT[rule](message) is is_bad


def test_a_fault_ends_the_program_with_status_1(monkeypatch, capsys):
    def broken():
        yield "a fault"

    monkeypatch.setitem(LINT["main"].__globals__, "CHECKS", [broken])
    assert LINT["main"]([]) == 1
    assert capsys.readouterr().out == "broken: a fault\n1 checks, 1 faults\n"
