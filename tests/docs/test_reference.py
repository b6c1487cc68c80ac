"""The reference pages name what is in the package: all of it, and nothing else."""

from __future__ import annotations

import re
from ast import literal_eval
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path

import pytest

from lightning_echo import Decision, EchoCallback, MetricGuard, Observation, Reason, TargetIdle
from lightning_echo.measuring.report import LOGGED
from lightning_echo.monitoring.cache_meter import CacheUse

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"

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
