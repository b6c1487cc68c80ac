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
from lightning_echo.analysis.analyzer import Analyzes
from lightning_echo.analysis.result import _VERSION as analysis_version
from lightning_echo.cli import EchoOptions, Shares
from lightning_echo.doctor.command import Examines
from lightning_echo.doctor.machine import as_document, ok
from lightning_echo.loader.state import STATE_VERSION, EchoState
from lightning_echo.measure.summary import LOGGED, VERSION, EpochReport, FactorUse, RunSummary
from lightning_echo.training.counts import CacheUse

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
PACKAGE = ROOT / "lightning_echo"

# ------------------------------------------------------------------ metrics.md

KEYS = {f"echo/{name}" for name in LOGGED}
PART_KEYS = {f"echo/<name>/{name}" for name in ("factor", "fresh_examples", "echoed_examples", "passes")} | {
    f"echo/<name>/{name}" for name in CacheUse(1.0, 2, 3, 4, True, "raw", received=1.0).logged()
}


def first_cells(page: str) -> list[str]:
    """The first cell of each row of the page's tables."""
    return [line.split("|")[1].strip() for line in (PAGES / page).read_text().splitlines() if line.startswith("| ")]


def test_the_metrics_page_has_each_key_that_is_logged() -> None:
    told = {key for cell in first_cells("metrics.md") for key in re.findall(r"`(echo/[^`]+)`", cell)}
    assert told == KEYS | PART_KEYS | {"echo/summary", "echo/run"}  # the last two are a text and a picture


def test_the_table_of_the_callback_has_the_same_keys() -> None:
    table = set(re.findall(r"^ *``(echo/\w+)`` ", EchoCallback.__doc__ or "", re.MULTILINE))
    assert table == KEYS


@pytest.mark.parametrize("key", ["echo/factor", "echo/fresh_examples", "echo/echoed_examples"])
def test_a_key_that_is_logged_within_epochs_says_so(key: str) -> None:
    """`EchoCallback.on_train_batch_end` logs these three."""
    rows = [line for line in (PAGES / "metrics.md").read_text().splitlines() if line.startswith(f"| `{key}` ")]
    assert [row.split("|")[-2].strip() for row in rows] == ["steps"]


# ------------------------------------------------------------------ controllers.md


@pytest.mark.parametrize("kind", [Observation, Decision])
def test_the_controllers_page_has_each_field(kind: type) -> None:
    section = (PAGES / "controllers.md").read_text().split(f": {kind.__name__}\n")[1].split("\n#")[0].split("These are")[0]
    assert re.findall(r"^\| `(\w+)` ", section, re.MULTILINE) == sorted((field.name for field in fields(kind)), key=section.index)


def test_the_controllers_page_has_each_reason() -> None:
    section = (PAGES / "controllers.md").read_text().split("| reason | meaning |")[1]
    assert re.findall(r"^\| `(\w+)` ", section, re.MULTILINE) == [reason.value for reason in Reason]


@pytest.mark.parametrize("controller", [TargetIdle, MetricGuard])
def test_the_controllers_page_has_each_option_with_its_default(controller: type) -> None:
    section = (PAGES / "controllers.md").read_text().split(f"\n## {controller.__name__}\n")[1].split("\n## ")[0]
    told = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|", section, re.MULTILINE))
    defaults = {name: option.default for name, option in signature(controller).parameters.items()}
    assert list(told) == list(defaults)
    for name, default in defaults.items():
        said = told[name].strip(" `")
        assert said == "" if default is Parameter.empty else literal_eval(said) == default


# ------------------------------------------------------------------ command_line.md

LEFT_OUT = {"self", "model", "datamodule", "ckpt_path", "weights_only"}  # Lightning's own, or without an effect


def section_of(page: str, title: str) -> str:
    return (PAGES / page).read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def told_options(section: str) -> dict[str, str]:
    """The second cell of each row of a section's table, by the first one."""
    return dict(re.findall(r"^\| `([^`]+)` \|(.*?)\|", section, re.MULTILINE))


def plain(default: object) -> str:
    """A default as it is typed on a command line."""
    return f"{default:g}" if isinstance(default, float) else str(default).lower() if isinstance(default, bool) else str(default)


def test_the_page_has_each_command_and_its_arguments() -> None:
    commands = next(action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    page = (PAGES / "command_line.md").read_text()
    assert re.findall(r"^## lightning-echo (\w+)$", page, re.MULTILINE) == ["doctor", "report", "shared"]
    assert set(commands) == {"doctor", "report", "shared"}
    for name, parser in commands.items():
        actions = [action for action in parser._actions if action.dest != "help"]
        expected = {" ".join([*action.option_strings[:1], *([action.metavar] if action.metavar else [])]) for action in actions}
        assert set(told_options(section_of("command_line.md", f"lightning-echo {name}"))) == expected


def test_the_page_has_each_option_of_the_group_echo_with_its_default() -> None:
    told = told_options(section_of("command_line.md", "EchoCLI: the group echo"))
    assert set(told) == {f"--echo.{field.name}" for field in fields(EchoOptions)}
    for field in fields(EchoOptions):
        said = told[f"--echo.{field.name}"].strip(" `")
        assert said.startswith(("none", "chosen", "that of")) if field.default is None else said == plain(field.default)


@pytest.mark.parametrize(
    ("title", "method"), [("analyze", Analyzes.analyze), ("share", Shares.share), ("doctor", Examines.doctor)]
)
def test_the_page_has_each_option_of_a_subcommand_with_its_default(title: str, method: Callable[..., None]) -> None:
    told = told_options(section_of("command_line.md", f"EchoCLI: {title}"))
    options = {name: option for name, option in signature(method).parameters.items() if name not in LEFT_OUT}
    assert list(told) == [f"--{name}" for name in options]
    for name, option in options.items():
        said = told[f"--{name}"].strip(" `")
        assert option.default in (None, "") or said == plain(option.default)


def test_the_page_has_each_environment_variable() -> None:
    told = re.findall(r"^\| `(LIGHTNING_ECHO_\w+)`", (PAGES / "command_line.md").read_text(), re.MULTILINE)
    used = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"LIGHTNING_ECHO_[A-Z_]+", path.read_text())}
    assert set(told) == used


# ------------------------------------------------------------------ messages.md

QUOTED = re.findall(r"^`([^`]+)`\n: ", (PAGES / "messages.md").read_text(), re.MULTILINE)


def text_of(node: ast.expr) -> str:
    """A text of the source, with an ellipsis in the place of each field."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return text_of(node.left) + text_of(node.right) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else "…"


@cache
def texts_of_the_package() -> str:
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    texts = "\n".join(text_of(node) for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return re.sub("…+", "…", re.sub(r"%[rsd]", "…", texts))


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_is_still_said_like_this(quoted: str) -> None:
    assert quoted in texts_of_the_package()


def test_the_messages_that_matter_are_told() -> None:
    assert len(QUOTED) == len(set(QUOTED)) > 40


# ------------------------------------------------------------------ file_formats.md


def told_fields(start: str, page: str = "file_formats.md") -> list[str]:
    """The names in the first cells of the first table after a text of the page."""
    table = (PAGES / page).read_text().split(start)[1].split("| --- |")[1].split("\n\n")[0]
    return [
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1] if row.startswith("|") else "")
    ]


def names_of(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def test_the_fields_of_a_summary_are_told() -> None:
    assert told_fields("## echo_summary.json") == ["version", *names_of(RunSummary)]
    assert told_fields("Each object of `decisions`:") == names_of(FactorUse)
    assert set(told_fields("Each object of `reports`")) == set(names_of(EpochReport)) - set(LOGGED)


def test_the_fields_of_an_analysis_are_told() -> None:
    assert told_fields("## analysis.json") == ["lightning_echo_analysis", *names_of(StallAnalysis), "advice"]


def test_the_fields_of_the_doctors_document_are_told() -> None:
    document = json.loads(as_document([ok("cores", "2 cores.")]))
    assert told_fields("## The doctor's document") == list(document)
    assert told_fields("Each object of `findings`:") == list(document["findings"][0])


def test_the_fields_of_a_state_are_told() -> None:
    assert sorted(told_fields("The fields of the state of an `EchoLoader`")) == sorted(names_of(EchoState))


def test_the_versions_of_the_formats_are_told() -> None:
    page = (PAGES / "file_formats.md").read_text()
    assert f"| `version` | {VERSION} |" in page
    assert f"| `lightning_echo_analysis` | the version of the format: {analysis_version} |" in page
    assert f"state of an `EchoLoader`, version {STATE_VERSION}:" in page


# ------------------------------------------------------------------ api.md, and the names in docstrings


def test_the_page_has_each_public_name_once() -> None:
    listed = re.findall(r"^   ([A-Za-z]\w+)$", (PAGES / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(lightning_echo.__all__)


@cache
def names_of_the_package() -> set[str]:
    """All names that the package defines or takes: classes, functions, arguments, attributes, options, modules."""
    names = set()
    for path in PACKAGE.rglob("*.py"):
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.arg | ast.keyword):
                names.add(str(node.arg))
            elif isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_name_in_a_docstring_is_one_of_the_package(path: Path) -> None:
    """In single backticks stand names of ours: the site makes links of them, and says nothing where there is no such name."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
    named = {name for text in texts for name in re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text)}
    assert [name for name in named if not set(name.removesuffix(".py").split(".")) <= names_of_the_package()] == []


def test_no_word_is_explained_both_for_users_and_for_developers() -> None:
    glossary = set(re.findall(r"^([a-z].*)\n  \S", (PAGES / "glossary.md").read_text(), re.MULTILINE))
    inner = (PACKAGE / "README.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    words = {line.split("|")[1].strip() for line in inner.splitlines() if line.startswith("| ")}
    assert len(glossary) > 40
    assert glossary & words == set()
