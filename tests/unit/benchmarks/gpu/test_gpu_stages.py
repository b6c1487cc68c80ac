"""The driver: whatever happens to a part is reported, the next one runs, and the time is kept."""

from __future__ import annotations

import os
import textwrap
import time
from pathlib import Path

import pytest
from gpu.__main__ import Run, chosen_stages
from gpu.plan import STAGES, Stage
from gpu.rows import read_rows
from gpu.setting import Setting

pytestmark = pytest.mark.own_interpreter  # watches processes

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
PROGRAM = """
import os, subprocess, sys, time
from gpu.setting import Setting, run_parts
setting = Setting.of_environment()

def good():
    setting.add("feed", arm="good")

def bad():
    raise ValueError("this part is broken")

def slow():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    setting.add("feed", arm=str(child.pid))
    time.sleep(100)

def dies():
    os._exit(7)

run_parts(setting, {"good": good, "bad": bad, "slow": slow, "dies": dies, "after": good}, sys.argv[1:])
"""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    (tmp_path / "a_stage.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(BENCHMARKS), str(BENCHMARKS.parent))))
    return Setting(tmp_path / "out", tmp_path / "data", tmp_path / "scratch", is_tiny=True)


def outcomes(setting: Setting) -> list[tuple[str, str]]:
    return [(row["part"], row["outcome"]) for row in read_rows(setting.out, "stages")]


def a_stage(*parts: str, seconds: float = 60, part_seconds: float = 30, needs: str = "", name: str = "x") -> Stage:
    return Stage(name, "a_stage", seconds, parts, part_seconds, needs)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_part_that_raises_or_dies_is_reported_and_the_next_one_runs(setting: Setting) -> None:
    Run(setting, seconds=100).stage(a_stage("good", "bad", "dies", "after"))
    assert outcomes(setting) == [("good", "ran"), ("bad", "failed"), ("dies", "failed"), ("after", "ran")]
    said = {row["part"]: row["said"] for row in read_rows(setting.out, "stages")}
    assert said["bad"] == "exit status 1: ValueError: this part is broken"
    assert said["dies"].startswith("exit status 7")
    assert [row["arm"] for row in read_rows(setting.out, "feed")] == ["good", "good"]
    assert "this part is broken" in (setting.out / "log.txt").read_text()


def test_a_part_that_takes_too_long_is_ended_with_its_processes_and_the_next_one_runs(setting: Setting) -> None:
    Run(setting, seconds=100).stage(a_stage("slow", "after", part_seconds=6))
    assert outcomes(setting) == [("slow", "too long"), ("after", "ran")]
    assert not is_alive(int(read_rows(setting.out, "feed")[0]["arm"]))


def test_a_stage_whose_time_is_over_says_what_did_not_run(setting: Setting) -> None:
    began = time.monotonic()
    Run(setting, seconds=100).stage(a_stage("slow", "good", "after", seconds=6))
    assert outcomes(setting) == [("slow", "too long"), ("good", "not run"), ("after", "not run")]
    assert {row["said"] for row in read_rows(setting.out, "stages")[1:]} == {"the stage's time was over"}
    assert time.monotonic() - began < 60


def test_nothing_begins_when_the_time_of_the_run_is_over(setting: Setting) -> None:
    Run(setting, seconds=1).stage(a_stage("good", "after"))
    assert outcomes(setting) == [("good", "not run"), ("after", "not run")]
    assert {row["said"] for row in read_rows(setting.out, "stages")} == {"the run's time was over"}
    assert read_rows(setting.out, "feed") == []


def test_a_stage_does_not_begin_without_what_it_needs(setting: Setting) -> None:
    run = Run(setting, seconds=100)
    run.stage(a_stage("bad", name="data"))
    run.stage(a_stage("good", needs="data"))
    assert outcomes(setting) == [("bad", "failed"), ("good", "not run")]
    assert "needs stage data" in read_rows(setting.out, "stages")[1]["said"]


def test_stages_bring_what_they_need_in_the_order_of_their_worth() -> None:
    assert [stage.name for stage in chosen_stages(["accuracy", "tests"])] == ["tests", "data", "accuracy"]
    assert [stage.name for stage in chosen_stages([stage.name for stage in STAGES])] == [stage.name for stage in STAGES]


def test_two_calls_of_ten_minutes_have_room_for_all_stages_even_if_each_takes_all_of_its_time() -> None:
    seconds = {stage.name: stage.seconds for stage in STAGES}
    assert seconds["tests"] <= 90
    assert seconds["tests"] + seconds["data"] + seconds["feed"] <= 480
    assert seconds["sharing"] + seconds["accuracy"] <= 600
