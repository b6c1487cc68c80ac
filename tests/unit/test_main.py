"""``lightning-echo``: what its commands print and write, and how they end."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from analyses import ANALYSIS

import lightning_echo
from lightning_echo.__main__ import main
from lightning_echo.analysis.report import report


@pytest.fixture
def saved(tmp_path):
    ANALYSIS.to_json(tmp_path / "analysis.json")
    return str(tmp_path / "analysis.json")


def test_a_report_is_printed_or_written_to_the_files_that_are_asked_for(saved, tmp_path, capsys):
    assert main(["report", saved]) == 0
    assert capsys.readouterr().out == report(ANALYSIS) + "\n"
    html, png = tmp_path / "page.html", tmp_path / "figure.png"
    assert main(["report", saved, "--html", str(html), "--png", str(png)]) == 0
    assert capsys.readouterr().out == f"written: {html}\nwritten: {png}\n"
    assert html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("{", "is not an analysis: it is not JSON"),
        ('{"lightning_echo_analysis": 99}', "update lightning_echo"),
        ('{"lightning_echo_analysis": 4}', "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_ends_in_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "analysis.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "error: ", 1)
    assert message in err
    assert str(path) in err


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_what_cannot_be_written_ends_in_one_line(option, saved, tmp_path, capsys, monkeypatch):
    assert main(["report", saved, option, str(tmp_path / "missing" / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", saved, option, str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == (
        "error: figures need matplotlib, which is not installed: pip install 'lightning-echo[report]'\n"
    )
    assert not (tmp_path / "file").exists()


def test_as_a_program_and_as_the_script_of_the_package_it_ends_with_the_status(tmp_path):
    program = [sys.executable, "-m", "lightning_echo", "report", str(tmp_path / "missing.json")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")
    project = (Path(lightning_echo.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (target,) = re.findall(r'^\[project.scripts\]\nlightning-echo = "(.*)"$', project, flags=re.MULTILINE)
    assert EntryPoint("lightning-echo", target, "console_scripts").load() is main
