"""The programs in examples/ run as a user would start them; what is tried again, in this process: imports take seconds."""

import re
import runpy
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest
import yaml

from lightning_echo import StallAnalysis
from lightning_echo.analysis.result import promising

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(program: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / program), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


class Start(Protocol):
    def __call__(self, program: str, *arguments: str, cwd: Path) -> str:
        """What the program says."""


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """As `run`, in this process."""

    def start(program: str, *arguments: str, cwd: Path) -> str:
        capsys.readouterr()
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / program), *arguments])
        monkeypatch.chdir(cwd)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in a process of its own they would only be shown
            runpy.run_path(sys.argv[0], run_name="__main__")
        return capsys.readouterr().out

    return start


@pytest.mark.program
def test_the_demo_prints_its_table_and_saves_its_plot(tmp_path: Path) -> None:
    output = run("digits.py", "--quick", "--root", str(tmp_path), cwd=tmp_path).lower()
    assert re.search(r"^ +plain +factor 4 +on demand +cache$", output, re.MULTILINE)
    assert re.search(r"^speed-up +1\.00 ", output, re.MULTILINE)
    assert "the bound on the speed-up with factor 4 is" in output
    plots = [path.read_bytes() for path in tmp_path.rglob("*.png")]
    assert any(plot[:4] == b"\x89PNG" and len(plot) > 10_000 for plot in plots)


class Outcome(NamedTuple):
    """What a program of waves.py says at its end."""

    factor: float
    fresh: int
    echoed: int
    loss: str


EXAMPLES_OF_A_PASS, BUFFER = 512, 64
WORKERS, FIRST_BATCHES = 2, 64  # at most; the examples of their first batches together
NOTHING_SAVED = "--trainer.enable_checkpointing=false"


def outcome(output: str) -> Outcome:
    loss = re.search(r"last loss (\S+)", output)
    counts = re.search(r"^EchoCounts\(fresh=(\d+), echoed=(\d+)", output, re.MULTILINE)
    factor = re.search(r"factor (\S+): reuse .*\nEchoCounts", output)
    assert loss is not None, output[-3000:]
    assert counts is not None, output[-3000:]
    assert factor is not None, output[-3000:]
    return Outcome(float(factor[1]), int(counts[1]), int(counts[2]), loss[1])


def assert_echoed(found: Outcome, factor: float, epochs: int) -> None:
    """As many examples as without echoing, of which one in ``factor`` is fresh; of the first batches all are."""
    delivered = epochs * EXAMPLES_OF_A_PASS
    assert found.fresh + found.echoed == delivered
    assert -WORKERS < found.fresh - delivered / factor <= FIRST_BATCHES * (1 - 1 / factor)


@pytest.mark.program
def test_an_unchanged_cli_program_echoes_by_a_callback_on_its_command_line(tmp_path: Path) -> None:
    options = ["--data=WavesDataModule", "--trainer.callbacks+=lightning_echo.EchoCallback", "--trainer.callbacks.factor=4"]
    options += [f"--trainer.callbacks.buffer_size={BUFFER}", "--trainer.callbacks.controller=lightning_echo.TargetIdle"]
    found = outcome(run("plain_cli.py", "fit", *options, "--trainer.max_epochs=1", cwd=tmp_path))
    assert_echoed(found, 4, epochs=1)  # the controller decides for the first time at the end of the epoch
    (saved,) = tmp_path.rglob("config.yaml")
    (callback,) = yaml.safe_load(saved.read_text())["trainer"]["callbacks"]
    assert callback["init_args"]["controller"]["class_path"].endswith("TargetIdle")


@pytest.mark.program
def test_of_what_the_smallest_program_delivers_half_is_fresh(tmp_path: Path) -> None:
    output = run("minimal.py", cwd=tmp_path)
    fresh, echoed = map(int, re.search(r"EchoCounts\(fresh=(\d+), echoed=(\d+)", output).groups())  # type: ignore[union-attr]
    assert fresh + echoed == 4 * 512
    # But for the first batches of its two workers, which are all fresh, and half an example of each worker by error diffusion.
    assert -2 / 2 <= fresh - (fresh + echoed) / 2 <= 2 * 32 / 2


@pytest.mark.program
@pytest.mark.timeout(410)  # nine processes, each of which imports torch and Lightning
def test_the_sweep_prints_the_time_alone_apart_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    found = dict(re.findall(r"^(.*): (\d+\.\d) s each$", run("sweep.py", cwd=tmp_path), flags=re.MULTILINE))
    assert list(found) == ["one training", "three trainings, each reads for itself", "three trainings, one reads for all"]
    assert min(map(float, found.values())) > 0


@pytest.mark.program
@pytest.mark.timeout(410)
def test_five_folds_print_their_time_and_reads_apart_and_shared_in_less_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    began = time.monotonic()
    printed = run("folds.py", cwd=tmp_path)
    took = time.monotonic() - began
    table = re.findall(r"^ *(each reads for itself|one reads for all) +(\d+\.\d) +(\d+\.\d\d) +(\d+\.\d)$", printed, re.MULTILINE)
    (_, seconds, apart, accuracy), (_, seconds_shared, shared, accuracy_shared) = table
    assert 0 < float(seconds) + float(seconds_shared) < took < 60
    assert float(apart) == pytest.approx(4, abs=0.1)  # each example is in four of the five parts
    assert 1 <= float(shared) < 1.5  # what the reader reads ahead at the end, too
    assert min(float(accuracy), float(accuracy_shared)) > 60


@pytest.mark.program
def test_programs_analyze_by_the_configuration_of_a_training_and_try_what_is_advised(run_here: Start, tmp_path: Path) -> None:
    printed = run_here("echo_cli.py", "analyze", "--config", str(EXAMPLES / "echo_cli.yaml"), cwd=tmp_path)
    analysis = StallAnalysis.from_json(tmp_path / "lightning_logs" / "version_0" / "analysis.json")
    assert (analysis.stages.batch_size, analysis.stages.workers) == (64, 1)
    assert "last loss" not in printed  # which the model says at the end of a training
    printed = run_here("stall_analysis.py", cwd=tmp_path)  # of an image folder
    analysis = StallAnalysis.from_json(tmp_path / "analysis.json")
    assert {"Resize", "RandomResizedCrop", "RandomHorizontalFlip", "ToImage", "Normalize"} <= set(analysis.transforms)
    assert analysis.stages.points[:2] == ("after_read", "before_augmentation")
    assert analysis.notes == ()  # files were seen
    assert [each.setting for each in analysis.proved] == list(promising(analysis.verdict))
    assert "Proved: steps per second" in printed
    assert "Tried: predicted against measured" in printed


CONFIGS = {
    "plain_cli_callback.yaml": "plain_cli.py",
    "plain_cli_datamodule.yaml": "plain_cli.py",
    "echo_cli.yaml": "echo_cli.py",
}


@pytest.mark.program
@pytest.mark.parametrize("config", CONFIGS)
def test_a_cli_program_echoes_by_its_yaml_file_and_the_saved_config_reproduces_the_run(
    config: str, run_here: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program = CONFIGS[config]
    first = outcome(run_here(program, "fit", "--config", str(EXAMPLES / config), NOTHING_SAVED, cwd=tmp_path))
    assert first.factor == 2.5
    assert_echoed(first, 2.5, epochs=2)
    (saved,) = tmp_path.rglob("config.yaml")
    (tmp_path / "again").mkdir()
    assert outcome(run_here(program, "fit", "--config", str(saved), cwd=tmp_path / "again")) == first
    with pytest.raises(SystemExit):
        run_here(program, "fit", "--config", str(EXAMPLES / config), NOTHING_SAVED, "--print_config", cwd=tmp_path)
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(saved.read_text())


@pytest.mark.program
def test_an_omegaconf_program_echoes_by_its_yaml_file_and_the_saved_config_reproduces_the_run(
    run_here: Start, tmp_path: Path
) -> None:
    first = outcome(run("omegaconf_run.py", cwd=tmp_path))
    assert first.factor == 2.5
    assert_echoed(first, 2.5, epochs=2)
    assert outcome(run_here("omegaconf_run.py", "config=config.yaml", cwd=tmp_path)) == first
    by_dots = outcome(run_here("omegaconf_run.py", "echo.factor=4", "trainer.max_epochs=1", cwd=tmp_path))
    assert by_dots.factor == 4
    assert_echoed(by_dots, 4, epochs=1)
