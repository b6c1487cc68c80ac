"""``lightning-echo run``: a program without an edit is measured and echoed as with an `EchoCallback`, under each launcher."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_command_program as program
from run_command_program import BATCH, EPOCHS, LENGTH

from lightning_echo.run import _become, _interpreter_options, note

pytestmark = pytest.mark.program

PROGRAM = program.__file__
STEPS = EPOCHS * LENGTH // BATCH


def ran(folder, *command, status=0, **environment):
    """Runs a command, and returns what it has written."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == status, done.stderr
    return done


def run(folder, *options, what="", status=0, **environment):
    return ran(folder, "-m", "lightning_echo", "run", *options, PROGRAM, str(folder), what, status=status, **environment)


def summary(folder):
    return json.loads((folder / "echo_summary.json").read_text())


def batches(folder, rank=0, name="batches"):
    return [json.loads(line) for line in (folder / f"{name}-{rank}").read_text().splitlines()]


def counts(folder):
    last = summary(folder)["reports"][-1]
    return last["fresh_examples"], last["echoed_examples"]


def first_uses(seen):
    known = set()
    fresh = [sum(example not in known and not known.add(example) for example in batch) for batch in seen]
    return sum(fresh)


def test_a_program_is_echoed_as_if_it_had_the_callback(tmp_path):
    done = run(tmp_path, "--factor", "2", "--buffer-size=8", "--seed", "5")
    assert json.loads(done.stdout) == {
        "main": "__main__",
        "argv": [str(tmp_path), ""],
        "callbacks": [["EchoCallback", "RunCallback"]],
    }
    fresh, echoed = counts(tmp_path)
    seen = batches(tmp_path)
    assert len(seen) == STEPS
    assert fresh + echoed == STEPS * BATCH
    assert first_uses(seen[: LENGTH // BATCH]) <= LENGTH // 2 + 8, "half is fresh, and what fills the buffer"
    option = "factor=2, buffer_size=8, seed=5"
    lines = f"  from lightning_echo import EchoCallback\n  trainer = Trainer(..., callbacks=[EchoCallback({option})])"
    assert lines in done.stderr
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    source = (
        Path(PROGRAM)
        .read_text()
        .replace(
            "callbacks: list[Any] = []",
            f"from lightning_echo import EchoCallback\n    callbacks: list[Any] = [EchoCallback({option})]",
        )
    )
    (by_hand / "permanent.py").write_text(source)
    ran(by_hand, "permanent.py", str(by_hand))
    assert batches(by_hand) == seen


@pytest.mark.own_interpreter  # of which it sees the start
def test_the_installed_command_runs_it_too(tmp_path):
    script = Path(sys.executable).with_name("lightning-echo")
    command = [script, "run", "--factor=2", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["argv"] == [str(tmp_path)]
    assert counts(tmp_path)[1] > 0


@pytest.mark.parametrize(
    ("given", "called", "expected"),
    [
        (["python", "-X", "dev", "-m", "lightning_echo", "run"], "/lib/lightning_echo/__main__.py", ["-X", "dev"]),
        (["python", "/bin/lightning-echo", "run", "-m", "x"], "/bin/lightning-echo", []),
        (["python", "-E", "/bin/lightning-echo", "run", "train.py"], "/bin/lightning-echo", ["-E"]),
    ],
    ids=["module", "script", "script with an option"],
)
def test_the_interpreters_own_options_are_kept(monkeypatch, given, called, expected):
    monkeypatch.setattr(sys, "orig_argv", given)
    monkeypatch.setattr(sys, "argv", [called, *given[given.index("run") :]])
    assert _interpreter_options() == expected


@pytest.mark.own_interpreter  # of which it sees the start
def test_closed_streams_are_the_programs_affair(tmp_path):
    command = f"exec {sys.executable} -m lightning_echo run {PROGRAM} {tmp_path} 'no fit' 1>&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False, timeout=150).returncode == 0


def test_without_a_place_for_temporary_files_the_program_runs_all_the_same(monkeypatch):
    started = []
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: (_ for _ in ()).throw(FileNotFoundError("no usable temporary directory")))
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    monkeypatch.setenv("LIGHTNING_ECHO_RUN", "")
    _become(["train.py", "--fast"], {})
    assert [command[-2:] for command in started] == [["train.py", "--fast"]]
    assert json.loads(os.environ["LIGHTNING_ECHO_RUN"])["seen"] is None


def test_a_process_that_outlives_the_program_leaves_no_file(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    monkeypatch.setenv("LIGHTNING_ECHO_RUN", json.dumps({"seen": str(gone)}))
    note("fit")
    assert not gone.exists()
    gone.touch()
    note("fit")
    assert gone.read_text() == "fit\n"


def test_without_an_option_a_program_is_measured_and_trains_on_what_it_would_train_on(tmp_path):
    plain, measured = tmp_path / "plain", tmp_path / "measured"
    plain.mkdir()
    measured.mkdir()
    ran(plain, PROGRAM, str(plain))
    run(measured)
    assert batches(measured) == batches(plain)
    assert counts(measured) == (STEPS * BATCH, 0)
    assert not (plain / "echo_summary.json").exists()


@pytest.mark.parametrize("what", ["ddp", "spawn", "torchrun"])
def test_each_rank_is_echoed_under_each_launcher(tmp_path, what):
    if what == "torchrun":
        command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", "-m", "lightning_echo", "run", "--factor=2", PROGRAM, str(tmp_path)]
        done = ran(tmp_path, *command)
    else:
        done = run(tmp_path, "--factor=2", what=what)
    seen = [batches(tmp_path, rank) for rank in (0, 1)]
    assert [len(each) for each in seen] == [STEPS // 2] * 2
    assert not {example for batch in seen[0][: STEPS // 4] for example in batch} & {
        example for batch in seen[1][: STEPS // 4] for example in batch
    }, "in an epoch no rank has examples of the other"
    assert sum(counts(tmp_path)) == STEPS * BATCH
    assert counts(tmp_path)[1] > 0
    assert done.stderr.count("these two lines have the same effect") == 1
    assert "nothing was measured" not in done.stderr


def test_a_program_of_pytorch_lightning_is_echoed_too(tmp_path):
    run(tmp_path, "--factor=2", TEST_PACKAGE="pytorch_lightning")
    assert sum(counts(tmp_path)) == STEPS * BATCH
    assert set(summary(tmp_path)["packages"]) == {"lightning_echo", "pytorch_lightning", "torch"}


def test_a_module_is_run_with_its_own_arguments(tmp_path):
    folder = Path(PROGRAM).parent
    command = ["-m", "lightning_echo", "run", "-m", "run_command_program", str(tmp_path), "--factor=2"]
    done = ran(folder, *command)
    assert json.loads(done.stdout)["argv"] == [str(tmp_path), "--factor=2"]
    assert counts(tmp_path)[1] == 0


def test_a_callback_that_the_program_has_stays_the_only_one(tmp_path):
    done = run(tmp_path, "--factor=2", what="own callback")
    assert "has an EchoCallback of its own, so the options of run are left out" in done.stderr
    assert summary(tmp_path)["decisions"][0]["factor"] == 3
    assert json.loads(done.stdout)["callbacks"] == [["EchoCallback", "RunCallback"]]


@pytest.mark.parametrize("what", ["two Trainers", "one list"])
def test_each_of_two_trainers_is_echoed_once(tmp_path, what):
    done = run(tmp_path, "--factor=2", what=what)
    for folder, name in ((tmp_path, "batches"), (tmp_path / "second", "second-batches")):
        assert sum(counts(folder)) == STEPS * BATCH
        assert len(batches(tmp_path, name=name)) == STEPS
    assert [each.count("EchoCallback") for each in json.loads(done.stdout)["callbacks"]] == [1, 1]
    assert done.stderr.count("this is Trainer number 2 of") == 1
    assert done.stderr.count("these two lines have the same effect") == 2
    assert "has an EchoCallback of its own" not in done.stderr


def test_a_run_is_resumed_by_a_program_that_has_the_callback(tmp_path):
    whole, first = tmp_path / "whole", tmp_path / "first"
    source = Path(PROGRAM).read_text()
    permanent = source.replace(
        "callbacks: list[Any] = []",
        "from lightning_echo import EchoCallback\n    callbacks: list[Any] = [EchoCallback(factor=2, seed=5)]",
    )
    longer = permanent.replace("EPOCHS = 48, 4, 2", "EPOCHS = 48, 4, 4")
    whole.mkdir()
    first.mkdir()
    (tmp_path / "longer.py").write_text(longer)
    resumes = longer.replace("run.fit(model)", f"run.fit(model, ckpt_path={str(first / 'saved.ckpt')!r})")
    (tmp_path / "resumes.py").write_text(resumes)
    ran(tmp_path, "longer.py", str(whole))
    run(first, "--factor=2", "--seed=5", what="saves")
    ran(tmp_path, "resumes.py", str(first))
    assert batches(first) == batches(whole)
    assert counts(first) == counts(whole)


def test_an_error_of_the_program_is_its_own(tmp_path):
    failed = run(tmp_path, "--factor=2", what="fails", status=1)
    assert "ValueError: the program's own error" in failed.stderr
    assert "lightning_echo/run" not in failed.stderr.partition("ValueError")[0]


@pytest.mark.parametrize(
    ("what", "status", "says"),
    [
        ("no fit", 0, "called no fit, so nothing was measured"),
        ("no Trainer", 3, "made no Trainer of lightning or pytorch_lightning"),
    ],
)
def test_what_a_program_has_not_done_is_said_at_its_end(tmp_path, what, status, says):
    assert says in run(tmp_path, "--factor=2", what=what, status=status).stderr


def test_an_option_after_the_name_of_a_program_without_a_trainer_is_explained(tmp_path):
    done = ran(tmp_path, "-m", "lightning_echo", "run", PROGRAM, str(tmp_path), "no Trainer", "--factor=2", status=3)
    assert f"--factor=2 belongs to {PROGRAM}: options of run come before the program's name" in done.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["--factr", "2", "train.py"], r"run has no option --factr: did you mean --factor\? It has --factor, "),
        (["--factor=0.5", "train.py"], r"run: factor must be a finite number >= 1, got 0\.5"),
        (["--controller=Nothing", "train.py"], r"run: .*Nothing"),
        (["--factor=2", "missing.py"], r"there is no file 'missing\.py'"),
        (["--factor=2"], r"the program is missing: lightning-echo run \[options\] train\.py"),
        (["-m"], r"the module after -m is missing"),
        (["--echo.factor", "4", "train.py"], r"run has no option --echo\.factor: leave echo\. out; It has --factor"),
        (["-factor", "4", "train.py"], r"run has no option -factor: did you mean --factor\?"),
        (["--factor"], r"run: --factor has no value"),
        (["--enabled", "False", "missing.py"], r"there is no file 'missing\.py'"),
        (["--tune", "missing.py"], r"there is no file 'missing\.py'"),
        (["--tune=0", "train.py"], r"run: --tune must be alone, or have a number of seconds > 0 as in --tune=60, got '0'"),
        (["--tune=fast", "train.py"], r"run: --tune must be alone, or have a number of seconds > 0 .* got 'fast'"),
        (["--tune", "--factor", "2", "train.py"], r"run: --tune finds the options itself: leave out --factor, or leave out"),
        (["--tun", "train.py"], r"run has no option --tun: did you mean --tune\?"),
    ],
    ids=[
        "unknown",
        "bad value",
        "bad controller",
        "no file",
        "no program",
        "no module",
        "echo",
        "one dash",
        "no value",
        "a switch",
        "tune alone",
        "no seconds",
        "bad seconds",
        "tune and another",
        "nearly tune",
    ],
)
def test_a_wrong_command_starts_nothing(capsys, command, says):
    from lightning_echo.__main__ import main

    assert main(["run", *command]) == 2
    captured = capsys.readouterr()
    assert re.search(f"^error: {says}", captured.err), captured.err
    assert captured.out == ""


@pytest.mark.own_interpreter  # of which it sees the start
def test_a_trainer_of_any_other_program_imports_almost_nothing_of_ours(tmp_path):
    script = (
        "import sys, lightning.pytorch as pl\n"
        "pl.Trainer(accelerator='cpu', logger=False, enable_checkpointing=False)\n"
        "print(sorted(name for name in sys.modules if name.startswith('lightning_echo')))"
    )
    assert ran(tmp_path, "-c", script).stdout.splitlines()[-1] == "['lightning_echo', 'lightning_echo.log', 'lightning_echo.run']"
