"""The reference pages name what is in the package: all of it, and nothing else."""

from __future__ import annotations

import ast
import json
import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from inspect import Parameter, signature
from pathlib import Path

import pytest

import lightning_echo
from lightning_echo import Decision, EchoCallback, MetricGuard, Observation, Reason, StallAnalysis, TargetIdle
from lightning_echo.__main__ import _parser
from lightning_echo.analysis.command import Analyzes
from lightning_echo.analysis.result import _VERSION as analysis_version
from lightning_echo.cli import Shares
from lightning_echo.config import EchoOptions
from lightning_echo.doctor.command import Examines
from lightning_echo.doctor.machine import as_document, ok
from lightning_echo.loader.state import STATE_VERSION, EchoState
from lightning_echo.measure.summary import LOGGED, VERSION, EpochReport, FactorUse, RunSummary
from lightning_echo.training.counts import CacheUse

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_echo"


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text()


def section_of(name: str, title: str) -> str:
    return page(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


def told_options(section: str) -> dict[str, str]:
    """The second cell of each row of a section's table, by the first one."""
    return {name: said.strip(" `") for name, said in re.findall(r"^\| `([^`]+)` \|(.*?)\|", section, re.MULTILINE)}


def plain(default: object) -> str:
    """A default as it is typed on a command line."""
    return f"{default:g}" if isinstance(default, float) else str(default).lower() if isinstance(default, bool) else str(default)


# ------------------------------------------------------------------ metrics.md, controllers.md


def test_the_metrics_page_and_the_callbacks_table_have_each_key_that_is_logged() -> None:
    keys = {f"echo/{name}" for name in LOGGED}
    of_a_cache = CacheUse(1.0, 2, 3, 4, True, "raw", received=1.0).logged()
    of_a_part = {f"echo/<name>/{name}" for name in ("factor", "fresh_examples", "echoed_examples", "passes", *of_a_cache)}
    rows = [line for line in page("metrics").splitlines() if line.startswith("| ")]
    told = {key for row in rows for key in re.findall(r"`(echo/[^`]+)`", row.split("|")[1])}
    assert told == keys | of_a_part | {"echo/summary", "echo/run"}  # the last two are a text and a picture
    assert set(re.findall(r"^ *``(echo/\w+)`` ", EchoCallback.__doc__ or "", re.MULTILINE)) == keys
    for key in ("echo/factor", "echo/fresh_examples", "echo/echoed_examples"):  # logged within epochs, too
        assert [row.split("|")[-2].strip() for row in rows if row.startswith(f"| `{key}` ")] == ["steps"]


def test_the_controllers_page_has_each_field_and_each_reason() -> None:
    for kind in (Observation, Decision):
        section = page("controllers").split(f": {kind.__name__}\n")[1].split("\n#")[0].split("These are")[0]
        told = re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)
        assert told == sorted((field.name for field in fields(kind)), key=section.index)
    section = page("controllers").split("| reason | meaning |")[1]
    assert re.findall(r"^\| `(\w+)` ", section, re.MULTILINE) == [reason.value for reason in Reason]


@pytest.mark.parametrize("controller", [TargetIdle, MetricGuard])
def test_the_controllers_page_has_each_option_with_its_default(controller: type) -> None:
    told = told_options(section_of("controllers", controller.__name__))
    defaults = {name: option.default for name, option in signature(controller).parameters.items()}
    assert list(told) == list(defaults)
    for name, default in defaults.items():
        assert told[name] == "" if default is Parameter.empty else literal_eval(told[name]) == default


# ------------------------------------------------------------------ command_line.md


def test_the_page_has_each_command_and_its_arguments() -> None:
    commands = next(action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    assert re.findall(r"^## lightning-echo (\w+)$", page("command_line"), re.MULTILINE) == sorted(commands)
    assert sorted(commands) == ["compare", "doctor", "report", "run", "shared"]
    for name, parser in commands.items():
        actions = [action for action in parser._actions if action.dest != "help"]
        expected = {" ".join([*action.option_strings[:1], *([action.metavar] if action.metavar else [])]) for action in actions}
        assert set(told_options(section_of("command_line", f"lightning-echo {name}"))) == expected


def test_the_page_has_each_option_of_the_group_echo_with_its_default() -> None:
    told = told_options(section_of("command_line", "EchoCLI: the group echo"))
    assert set(told) == {f"--echo.{field.name}" for field in fields(EchoOptions)}
    for field in fields(EchoOptions):
        said = told[f"--echo.{field.name}"]
        assert said.startswith(("none", "chosen", "that of")) if field.default is None else said == plain(field.default)


@pytest.mark.parametrize(
    ("title", "method"), [("analyze", Analyzes.analyze), ("share", Shares.share), ("doctor", Examines.doctor)]
)
def test_the_page_has_each_option_of_a_subcommand_with_its_default(title: str, method: Callable[..., None]) -> None:
    told = told_options(section_of("command_line", f"EchoCLI: {title}"))
    left_out = {"self", "model", "datamodule", "ckpt_path", "weights_only"}  # Lightning's own, or without an effect
    options = {name: option for name, option in signature(method).parameters.items() if name not in left_out}
    assert list(told) == [f"--{name}" for name in options]
    for name, option in options.items():
        assert option.default in (None, "") or told[f"--{name}"] == plain(option.default)


def test_the_page_has_each_environment_variable() -> None:
    told = re.findall(r"^\| `(LIGHTNING_ECHO_\w+)`", page("command_line"), re.MULTILINE)
    used = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"LIGHTNING_ECHO_[A-Z_]+", path.read_text())}
    assert set(told) == used


# ------------------------------------------------------------------ messages.md


@cache
def nodes_of_the_package() -> dict[str, list[ast.AST]]:
    return {str(path.relative_to(PACKAGE)): list(ast.walk(ast.parse(path.read_text()))) for path in PACKAGE.rglob("*.py")}


def text_of(node: ast.expr) -> str:
    """A text of the source, with an ellipsis in the place of each field."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else "…"


def test_each_message_that_is_told_is_still_said_like_this() -> None:
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    texts = "\n".join(text_of(node) for nodes in nodes_of_the_package().values() for node in nodes if isinstance(node, kinds))
    texts = re.sub("…+", "…", re.sub(r"%[rsd]", "…", texts))
    quoted = re.findall(r"^`([^`]+)`\n: ", page("messages"), re.MULTILINE)
    assert len(quoted) == len(set(quoted)) > 40
    assert [message for message in quoted if message not in texts] == []


# ------------------------------------------------------------------ file_formats.md


def told_fields(start: str) -> list[str]:
    """The names in the first cells of the first table after a text of the page."""
    table = page("file_formats").split(start)[1].split("| --- |")[1].split("\n\n")[0]
    first_cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("|")]
    return [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]


def names_of(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def test_the_fields_and_the_versions_of_the_formats_are_told() -> None:
    assert told_fields("## echo_summary.json") == ["version", *names_of(RunSummary)]
    assert told_fields("Each object of `decisions`:") == names_of(FactorUse)
    assert set(told_fields("Each object of `reports`")) == set(names_of(EpochReport)) - set(LOGGED)
    assert told_fields("## analysis.json") == ["lightning_echo_analysis", *names_of(StallAnalysis), "advice"]
    assert sorted(told_fields("The fields of the state of an `EchoLoader`")) == sorted(names_of(EchoState))
    document = json.loads(as_document([ok("cores", "2 cores.")]))
    assert told_fields("## The doctor's document") == list(document)
    assert told_fields("Each object of `findings`:") == list(document["findings"][0])
    for version in (
        f"| `version` | {VERSION} |",
        f"| `lightning_echo_analysis` | the version of the format: {analysis_version} |",
        f"state of an `EchoLoader`, version {STATE_VERSION}:",
    ):
        assert version in page("file_formats")


# ------------------------------------------------------------------ api.md, the glossary, and the names in docstrings


def test_the_page_has_each_public_name_once() -> None:
    listed = re.findall(r"^   ([A-Za-z]\w+)$", page("api"), re.MULTILINE)
    assert sorted(listed) == sorted(lightning_echo.__all__)


def names_of_the_package() -> set[str]:
    """All names that the package defines or takes: classes, functions, arguments, attributes, options, modules."""
    names = {Path(path).stem for path in nodes_of_the_package()}
    for node in (node for nodes in nodes_of_the_package().values() for node in nodes):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg | ast.keyword):
            names.add(str(node.arg))
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return names


def test_a_name_in_a_docstring_is_one_of_the_package() -> None:
    """In single backticks stand names of ours: the site makes links of them, and says nothing where there is no such name."""
    there, documented, wrong = names_of_the_package(), ast.Module | ast.ClassDef | ast.FunctionDef, []
    for path, nodes in nodes_of_the_package().items():
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
        named = {name for text in texts for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text)}
        wrong += [(path, name) for name in named if not set(name.removesuffix(".py").split(".")) <= there]
    assert wrong == []


def test_no_word_is_explained_both_for_users_and_for_developers() -> None:
    glossary = set(re.findall(r"^([a-z].*)\n  \S", page("glossary"), re.MULTILINE))
    inner = (PACKAGE / "README.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    words = {line.split("|")[1].strip() for line in inner.splitlines() if line.startswith("| ")}
    assert len(glossary) > 40
    assert glossary & words == set()
