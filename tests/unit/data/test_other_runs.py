"""Other runs of the same program: from processes that are made up, in files as Linux shows them."""

import os
import sys
from types import SimpleNamespace

import pytest

from lightning_echo.data.machine import NO_OTHER_RUNS, OtherRuns, other_runs

PYTHON, SHELL, THIS = "/usr/bin/python3.11", 5, 100


@pytest.fixture(autouse=True)
def nobody_looks_for_other_runs():
    """Here somebody does."""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(tmp_path / "work" / "train.py"), __spec__=None))
    return Made(tmp_path)


class Made:
    """A machine with a shell, which has started this process: ``python train.py``, in the folder ``work``."""

    def __init__(self, folder):
        self.proc, self.work = folder / "proc", folder / "work"
        for name in ("train.py", "other/train.py", "other/made.py"):
            (self.work / name).parent.mkdir(parents=True, exist_ok=True)
            (self.work / name).touch()
        self.start(SHELL, "bash", parent=1, exe="/bin/bash")
        self.start(1, "init", parent=0, exe="/sbin/init")
        self.start(THIS, "python train.py")
        (self.proc / "meminfo").touch()

    def start(self, pid, line, parent=SHELL, exe=PYTHON, cwd=None, **environ):
        of_process = self.proc / str(pid)
        of_process.mkdir(parents=True)
        (of_process / "cmdline").write_bytes("".join(f"{word}\0" for word in line.split()).encode())
        (of_process / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0\n")
        (of_process / "environ").write_bytes("".join(f"{name}={value}\0" for name, value in environ.items()).encode())
        (of_process / "exe").symlink_to(exe)
        (of_process / "cwd").symlink_to(self.work if cwd is None else self.work / cwd)

    def look(self, *ranks):
        return other_runs(ranks, self.proc, THIS)


def test_alone_there_are_no_other_runs(machine):
    assert machine.look() == OtherRuns("train.py", 0)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("python train.py --lr 0.1", {}),
        ("/venv/bin/python3 -u -X faulthandler -Wignore -W error train.py", {}),
        ("python ../train.py", {"cwd": "other"}),
        ("python train.py", {"parent": 1}),  # the shell has ended
    ],
)
def test_a_process_that_runs_the_same_file_is_another_run(machine, line, options):
    machine.start(200, line, **options)
    machine.start(300, line, **options)
    assert machine.look() == OtherRuns("train.py", 2)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("python train.py", {"cwd": "other"}),  # another file of this name
        ("python other/train.py", {}),
        ("python evaluate.py train.py", {}),
        ("python -m train.py", {}),
        ("python -c train.py", {}),
        ("python -", {}),
        ("python -X", {}),
        ("vim train.py", {"exe": "/usr/bin/vim"}),
        ("python train.py", {"exe": "/opt/python3.12"}),
        ("python /venv/bin/torchrun train.py", {}),
        ("", {}),  # a kernel thread, or one that has ended and waits for its parent
    ],
)
def test_what_runs_something_else_is_none(machine, line, options):
    machine.start(200, line, **options)
    assert machine.look() == OtherRuns("train.py", 0)


def test_the_workers_of_a_run_and_all_that_they_start_belong_to_it(machine):
    for run in (THIS, 200):
        if run != THIS:
            machine.start(run, "python train.py")
        machine.start(run + 1, "python train.py", parent=run)
        machine.start(run + 2, "sh -c x", parent=run, exe="/bin/sh")
        machine.start(run + 3, "python train.py", parent=run + 2)
    assert machine.look() == OtherRuns("train.py", 1)


def test_a_run_that_is_the_first_process_of_its_container_has_its_workers(machine):
    (machine.proc / "1" / "cmdline").write_bytes(b"python\0train.py\0")
    (machine.proc / "1" / "exe").unlink()
    (machine.proc / "1" / "exe").symlink_to(PYTHON)
    assert machine.look() == OtherRuns("train.py", 0)


def test_what_has_started_this_run_is_no_other_one(machine):
    machine.start(50, "python train.py")  # as Lightning starts its ranks
    (machine.proc / str(THIS) / "stat").write_text(f"{THIS} (python) S 50 1 1 0\n")
    machine.start(101, "python train.py", parent=50)
    assert machine.look() == OtherRuns("train.py", 0)


def test_ranks_of_this_run_are_none_however_they_were_started(machine):
    for pid in (200, 300):
        machine.start(pid, "python train.py")
    assert machine.look(THIS, 200, 300, 999) == OtherRuns("train.py", 0)
    assert machine.look(THIS, 300).number == 1


@pytest.mark.parametrize("common", [{"MASTER_PORT": 29500}, {}], ids=["with a port", "by their launcher"])
def test_the_ranks_that_a_launcher_has_started_are_one_run(machine, common):
    for job in (200, 300):
        parent = 7 if common else job
        machine.start(job, "python /venv/bin/torchrun train.py")
        port = {name: value + job for name, value in common.items()}
        for rank in range(3):
            machine.start(job + rank + 1, "python train.py", parent=parent, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=3, **port)
    assert machine.look().number == 2


def test_this_run_among_the_ranks_that_its_launcher_has_started_is_one_run(machine):
    (machine.proc / str(THIS) / "environ").write_bytes(b"SLURM_PROCID=0\0HOME=/\0")
    machine.start(200, "python train.py", SLURM_PROCID=1)
    assert machine.look().number == 0
    machine.start(300, "python train.py", SLURM_PROCID=0)  # as of a shell that starts two in a job
    assert machine.look().number == 1


@pytest.mark.parametrize("name", ["pack.train", "pack.train.__main__"])
def test_a_module_is_another_run_where_it_was_started_in_the_same_folder(machine, name):
    sys.modules["__main__"].__spec__ = SimpleNamespace(name=name)
    (machine.proc / str(THIS) / "cmdline").write_bytes(b"python\0-m\0pack.train\0--fast\0")
    machine.start(200, "python -m pack.train")
    machine.start(300, "python -m pack.train", cwd="other")
    machine.start(400, "python -m pack.train2")
    assert machine.look() == OtherRuns("pack.train", 1)


def test_processes_of_other_users_are_none(machine, monkeypatch):
    machine.start(200, "python train.py")
    monkeypatch.setattr(os, "getuid", lambda: 12345678)
    assert machine.look().number == 0


@pytest.mark.parametrize("file", ["exe", "cwd", "environ", "cmdline"])
def test_a_process_that_ends_meanwhile_is_no_error(machine, file):
    machine.start(200, "python train.py")
    machine.start(300, "python train.py")
    (machine.proc / "200" / file).unlink()
    assert machine.look().number == (0 if file == "environ" else 1)


@pytest.mark.parametrize("line", ["python -c x", "python", "python -i", "python gone.py"])
def test_of_a_program_that_is_no_file_no_other_run_is_known(machine, line):
    (machine.proc / str(THIS) / "cmdline").write_bytes("".join(f"{word}\0" for word in line.split()).encode())
    machine.start(200, line)
    assert machine.look() == NO_OTHER_RUNS


def test_where_the_system_shows_nothing_none_are_known(tmp_path, machine):
    assert other_runs((), tmp_path / "none", THIS) == NO_OTHER_RUNS
    machine.start(200, "python train.py")
    for text, number in (("", 1), ("damaged", 0), ("200 (x) S y z\n", 0)):
        (machine.proc / "200" / "stat").write_text(text)  # a parent that is not shown is one of another user
        assert machine.look().number == number


@pytest.mark.parametrize(
    "main", [{}, {"__file__": "/work/other.py"}, {"__spec__": SimpleNamespace(name="train")}], ids=["notebook", "fork", "module"]
)
def test_where_this_process_does_something_else_than_its_program_none_are_known(machine, monkeypatch, main):
    machine.start(200, "python train.py")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**main))
    assert machine.look() == NO_OTHER_RUNS
