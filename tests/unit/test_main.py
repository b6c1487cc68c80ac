"""``lightning-echo``: what its commands print and write, and how they end."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import lightning_echo
from lightning_echo.__main__ import main
from lightning_echo.analysis.predict import MeasuredStages, Spread
from lightning_echo.analysis.report import report
from lightning_echo.analysis.result import StallAnalysis

STAGES = ("read", "read_cached", "decode", "augment", "collate", "hand_over", "copy", "step")
ANALYSIS = StallAnalysis(
    MeasuredStages(
        **dict.fromkeys(STAGES, Spread.exactly(0.01)),
        read_cpu_share=0.0,
        prepare_cpu_share=0.0,
        step_cpu_seconds=0.0,
        batch_size=4,
        workers=1,
        takes_ahead=True,
        cores=2,
        points=("after_batching",),
    ),
    Spread.exactly(0.13),
    Spread.exactly(0.13),
)


@pytest.fixture
def saved(tmp_path):
    ANALYSIS.to_json(tmp_path / "analysis.json")
    return str(tmp_path / "analysis.json")


def test_without_a_file_to_write_the_text_is_printed(saved, capsys):
    assert main(["report", saved]) == 0
    assert capsys.readouterr().out == report(ANALYSIS) + "\n"


def test_files_that_are_asked_for_are_written_and_named(saved, tmp_path, capsys):
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
        ('{"lightning_echo_analysis": 1}', "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_ends_in_one_line(text, message, tmp_path, capsys):
    path = tmp_path / "analysis.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert str(path) in printed.err
    assert printed.err.count("\n") == 1


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


@pytest.mark.parametrize("arguments", [[], ["something"], ["report"]])
def test_other_commands_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: lightning-echo" in capsys.readouterr().err


def test_as_a_program_it_ends_with_the_status(tmp_path):
    program = [sys.executable, "-m", "lightning_echo", "report", str(tmp_path / "missing.json")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: ")


@pytest.mark.own_interpreter  # sees what is imported
def test_it_needs_neither_lightning_nor_for_text_matplotlib(saved):
    program = f"""
import sys
from importlib.metadata import entry_points
import lightning_echo
from lightning_echo.__main__ import main
assert main(["report", {saved!r}]) == 0
print("loaded:", *sorted({{"lightning", "matplotlib"}} & set(sys.modules)))
assert main(["report", {saved!r}, "--png", {saved + ".png"!r}]) == 0
print("loaded:", *sorted({{"lightning", "matplotlib", "matplotlib.pyplot"}} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    loaded = [line for line in ended.stdout.splitlines() if line.startswith("loaded:")]
    assert loaded == ["loaded:", "loaded: matplotlib"]


@pytest.mark.own_interpreter  # sees what is imported
@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["doctor", "--help"], ["report", "--help"], ["shared", "--help"]]
)
def test_version_and_help_need_neither_torch_nor_lightning(arguments):
    program = f"""
import sys
from importlib.metadata import entry_points
import lightning_echo
from lightning_echo.__main__ import main
try:
    main({arguments!r})
except SystemExit as ended:
    assert ended.code == 0
print("loaded:", *sorted({{"lightning", "torch", "numpy"}} & set(sys.modules)))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    *shown, loaded = ended.stdout.splitlines()
    assert loaded == "loaded:"
    assert shown == [f"lightning-echo {lightning_echo.__version__}"] or "examples:" in shown


def test_the_script_of_the_package_is_this_command():
    project = (Path(lightning_echo.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    (target,) = re.findall(r'^\[project.scripts\]\nlightning-echo = "(.*)"$', project, flags=re.MULTILINE)
    assert EntryPoint("lightning-echo", target, "console_scripts").load() is main
