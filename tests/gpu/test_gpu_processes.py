"""Of all processes of a training, only the training itself is on the card."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gpu_data import Coded
from gpu_runs import ON_GPU, Moving, loader_of, trainer

from lightning_echo import EchoCallback, ShareConfig
from lightning_echo.share.sharing import status_of

STEPS, LOOKS_AFTER, SHARE = 16, 6, "gpu"
Processes = dict[int, bytes]  # the command line by process


def descendants(pid: int) -> Processes:
    """All processes below one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(folder.name))
    found: Processes = {}
    left = [pid]
    while left:
        for child in children.get(left.pop(), []):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[child] = Path(f"/proc/{child}/cmdline").read_bytes()
                left.append(child)
    return found


def opened(pid: int) -> set[str]:
    """The files that a process has open."""
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def on_the_card() -> list[str]:
    """The processes that the driver names. Only a machine with a GPU has a driver."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")


class Looks(pl.Callback):
    """Looks at the processes after some steps: those below this one, and a reader, which is nobody's child, with its workers.

    Args:
        share: The name under which a reader reads; None: there is none.
    """

    def __init__(self, share: str | None = None) -> None:
        self._share, self.readers = share, set[int]()
        self.below: Processes = {}
        self.on_card: list[str] = []
        self.with_device: dict[int, set[str]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != LOOKS_AFTER:
            return
        self.below = descendants(os.getpid())
        if self._share is not None:
            status = status_of(self._share)
            assert status is not None
            reader: int = status["pid"]
            self.readers = {reader, *descendants(reader)}
            self.below |= dict.fromkeys(self.readers, b"")
        for pid in self.below:
            files = {name for name in opened(pid) if name.startswith("/dev/nvidia")}
            if files:
                self.with_device[pid] = files
        if ON_GPU:
            self.on_card = [line for line in on_the_card() if line.strip()]


class Plain(Moving):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(100, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch["values"] / 2**20).mean()


@pytest.fixture
def own_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder for readers; those that are left are ended."""
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
    yield
    if (status := status_of(SHARE)) is not None:
        with suppress(ProcessLookupError):
            os.kill(status["pid"], signal.SIGTERM)


def look(context: str, **options: Any) -> tuple[Looks, set[int]]:
    """What there was during a fit, and the new processes that are no forks of this one."""
    here, before = Path("/proc/self/cmdline").read_bytes(), descendants(os.getpid())
    looks = Looks(SHARE if "share" in options else None)
    callback = EchoCallback(factor=2, summary=False, **options)
    fitting = trainer(callbacks=[callback, looks])
    fitting.fit(Plain(), loader_of(Coded(4 * STEPS, 100), 4, workers=2, multiprocessing_context=context))
    assert fitting.global_step == STEPS
    new = {pid for pid, command in looks.below.items() if command != here and pid not in before}
    if ON_GPU:
        assert len(looks.on_card) <= 1
        assert any(name.startswith("/dev/nvidia") for name in opened(os.getpid())), "or nothing below would show"
    return looks, new


def test_forked_workers_are_not_on_the_card() -> None:
    looks, new = look("fork")
    assert len(looks.below) >= 2
    assert not new & looks.with_device.keys()


class Collects(Coded):
    """Each worker collects what it has inherited as garbage, as any worker does some time."""

    has_collected = False

    def __getitem__(self, index: int) -> Any:
        if not self.has_collected:
            self.has_collected = gc.collect() >= 0
        return super().__getitem__(index)


@pytest.mark.parametrize("options", [{}, {"factor": 2}, {"factor": 2, "insertion_point": "after_transfer"}], ids=str)
def test_workers_live_though_they_inherit_a_training_that_is_over(options: dict[str, Any]) -> None:
    """What calls CUDA when it is freed, an event for example, would abort the worker, and with it the training."""
    kept = gc.isenabled()
    gc.disable()  # or this process might collect the trainings that are over, and the workers would inherit none
    try:
        for _ in range(2):
            fitting = trainer(callbacks=[EchoCallback(summary=False, **options)], max_epochs=2)
            fitting.fit(Plain(), loader_of(Collects(4 * STEPS, 100), 4, workers=2))
            assert fitting.global_step == 2 * STEPS
            fitting.__dict__["myself"] = fitting  # garbage from here on, and in a circle
            del fitting
    finally:
        gc.enable() if kept else None


def test_no_workers_on_a_machine_with_many_cores_are_not_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)

    def fit() -> None:
        trainer(callbacks=[EchoCallback(factor=2, summary=False)]).fit(Plain(), loader_of(Coded(4 * STEPS, 100), 4))

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        fit()
    told = [str(warning.message) for warning in given]
    assert any(re.match("lightning_echo: .+ does not have many workers", each) for each in told), told
    fit()  # under the filters of this folder


def test_spawned_workers_have_not_opened_the_device() -> None:
    looks, new = look("spawn")
    assert sum(b"spawn_main" in looks.below[pid] for pid in new) >= 2
    assert {pid: looks.with_device.get(pid) for pid in new} == dict.fromkeys(new)


def test_the_reader_and_its_workers_have_not_opened_the_device(own_folder: None) -> None:
    looks, new = look("fork", share=ShareConfig(SHARE, linger_seconds=0.2, window="16MiB"))
    assert len(looks.readers) >= 2 + 1
    assert looks.readers <= new
    assert {pid: looks.with_device.get(pid) for pid in new} == dict.fromkeys(new)
