"""The advice as a file for ``fit --config``. That an `EchoCLI` takes it: test_cli_analyze."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import PropertyMock, patch

import pytest
import yaml
from analyses import ANALYSIS

from lightning_echo import EchoConfig
from lightning_echo.analysis.analyzer import advice_yaml
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.result import StallAnalysis
from lightning_echo.analysis.verdict import Verdict

WORKERS = ANALYSIS.stages.workers
CACHED = TrainingSetting(factor=2.5, insertion_point="after_read", cached_fraction=0.5, hold="raw", cache_size="3GiB")


@pytest.fixture
def advise() -> Callable[[TrainingSetting], str]:
    """Returns what is written of an analysis that advises a setting."""

    def write(setting: TrainingSetting) -> str:
        verdict: Verdict = replace(ANALYSIS.verdict, setting=setting, message="Do this: " + 40 * "a reason, ")
        with patch.object(StallAnalysis, "verdict", PropertyMock(return_value=verdict)):
            return advice_yaml(ANALYSIS)

    return write


def comments_of(text: str) -> str:
    return " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))


def test_the_options_are_those_of_the_group_echo(advise: Callable[[TrainingSetting], str]) -> None:
    settings = yaml.safe_load(advise(CACHED))
    assert settings == {"echo": {"factor": 2.5, "insertion_point": "after_read", "cache": {"size": "3GiB", "hold": "raw"}}}
    assert EchoConfig(**settings["echo"]).cache == {"size": "3GiB", "hold": "raw"}


def test_the_message_is_a_comment_in_short_lines(advise: Callable[[TrainingSetting], str]) -> None:
    text = advise(CACHED)
    assert ("Do this: " + 40 * "a reason, ").strip() in comments_of(text)
    assert max(map(len, text.splitlines())) <= 120
    assert "num_workers" not in text


def test_workers_are_a_comment_since_their_option_is_the_programs(advise: Callable[[TrainingSetting], str]) -> None:
    text = advise(replace(CACHED, workers=WORKERS + 3))
    assert f"Set num_workers={WORKERS + 3} where your program sets it" in comments_of(text)
    assert f"(now {WORKERS})" in comments_of(text)
    assert yaml.safe_load(text) == yaml.safe_load(advise(CACHED))


@pytest.mark.parametrize("setting", [TrainingSetting(), TrainingSetting(workers=WORKERS + 1)])
def test_a_file_with_nothing_to_set_says_so(setting: TrainingSetting, advise: Callable[[TrainingSetting], str]) -> None:
    text = advise(setting)
    assert yaml.safe_load(text) == {}
    assert "There is nothing to set in the group echo: this file changes nothing." in comments_of(text)
    assert ("num_workers" in text) == (setting.workers is not None)
