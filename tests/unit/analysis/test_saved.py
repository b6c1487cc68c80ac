"""What a path leads to: a folder or a file, a run or an analysis."""

import os

import pytest
from analyses import ANALYSIS
from saved_runs import RUN

from lightning_echo.__main__ import main
from lightning_echo.analysis import report as text
from lightning_echo.analysis.report import read_saved
from lightning_echo.measure import report as run_report


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "echo_summary.json").write_text(RUN.to_json())
    return tmp_path / "run"


def test_runs_and_analyses_are_found_in_their_folders_and_under_any_name(run_dir, tmp_path):
    (tmp_path / "copy.json").write_text(RUN.to_json())
    for path in (run_dir, run_dir / "echo_summary.json", tmp_path / "copy.json", str(run_dir)):
        assert read_saved(path).text() == run_report.report(RUN)
    ANALYSIS.to_json(tmp_path / "analysis.json")
    ANALYSIS.to_json(tmp_path / "mine.json")
    for path in (tmp_path, tmp_path / "mine.json"):
        assert read_saved(path).text() == text.report(ANALYSIS)


def test_of_both_in_a_folder_the_run_is_shown_and_the_analysis_is_named(run_dir, capsys):
    ANALYSIS.to_json(run_dir / "analysis.json")
    said = f"There is a stall analysis, too: lightning-echo report {run_dir / 'analysis.json'}"
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_report.report(RUN)}\n\n{said}\n"


def test_a_folder_without_either_is_refused_and_those_below_are_named(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=r"run_dir must be .* got .*, which has neither; a training with EchoCallback"):
        read_saved(tmp_path)
    for number in range(5):
        folder = tmp_path / f"version_{number}"
        folder.mkdir()
        (folder / "echo_summary.json").write_text(RUN.to_json())
        os.utime(folder / "echo_summary.json", (number, number))
    assert main(["report", str(tmp_path)]) == 2
    latest = ", ".join(str(tmp_path / f"version_{number}") for number in (4, 3, 2))
    assert capsys.readouterr().err.endswith(f"which has neither; these below have: {latest} and 2 more\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "echo_summary.json: "),
        (b'{"version": 99, "reports": [], "decisions": []}', "upgrade lightning_echo"),
    ],
)
def test_a_run_that_cannot_be_read_ends_in_one_line_with_its_path(content, message, tmp_path, capsys):
    path = tmp_path / "echo_summary.json"
    path.write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ")
    assert message in said
    assert said.count("\n") == 1
