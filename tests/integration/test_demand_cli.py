"""Echo on demand from a command line: `EchoCLI`, its files, and ``lightning-echo run``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import built, controller_of, refused, run, write
from test_run_command import run as run_program

from lightning_echo import MetricGuard, TargetIdle


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


@pytest.mark.grid
@pytest.mark.parametrize("where", ["command line", "file"])
@pytest.mark.parametrize(("factor", "max_factor", "bound"), [("demand", None, 8), ("demand", 3, 3), ("auto", 6.5, 6.5)])
def test_a_program_echoes_on_demand(where: str, factor: str, max_factor: float | None, bound: float, tmp_path: Path) -> None:
    echo: dict[str, Any] = {"factor": factor, "insertion_point": "after_augmentation"}
    if max_factor is not None:
        echo["max_factor"] = max_factor
    options = [f"--echo.{name}={value}" for name, value in echo.items()]
    if where == "file":
        options = [write(tmp_path / "config.yaml", {"echo": echo})]
    loader = run("fit", *options).model.loader
    assert (loader.on_demand, loader.factor) == (True, bound)


def test_a_guard_needs_no_controller_and_target_idle_is_refused() -> None:
    guard = controller_of(built("--echo.factor=demand", "--echo.controller=MetricGuard", "--echo.controller.patience=2"))
    assert isinstance(guard, MetricGuard)
    assert guard.patience == 2
    assert not guard.why_not_on_demand
    assert refused("fit", "--echo.factor=demand", f"--echo.controller={TargetIdle.__name__}") == 2
    assert refused("fit", "--echo.factor=2", "--echo.max_factor=4") == 2


@pytest.mark.program
@pytest.mark.parametrize("options", ['factor="auto", max_factor=6', 'factor="demand"'])
def test_a_program_without_an_edit_does_too(options: str, tmp_path: Path) -> None:
    arguments = ["--factor", "auto", "--max-factor", "6"] if "auto" in options else ["--factor=demand"]
    said = run_program(tmp_path, *arguments, what="").stderr
    assert f"callbacks=[EchoCallback({options})]" in said
    assert f"on demand, max_factor {6 if 'auto' in options else 8}: " in said
    assert ("factor='auto' echoes on demand" in said) == ("auto" in options)
