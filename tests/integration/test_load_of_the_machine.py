"""A machine that other programs keep busy: a training, an analysis and the doctor say so. More workers than cores are no load."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset
from trainer_runs import trainer

from lightning_echo import EchoCallback, StallAnalyzer
from lightning_echo.data.machine import CoreWatch, visible_cores
from lightning_echo.doctor.command import examine

CORES = visible_cores()
# They end by themselves if the test dies. Their parent ends at once: they are no children of this process.
BUSY = "import time; end = time.monotonic() + 100\nwhile time.monotonic() < end: pass"
START = f"""import subprocess, sys
busy = [subprocess.Popen([sys.executable, "-c", {BUSY!r}], stdout=subprocess.DEVNULL) for _ in range({2 * CORES})]
print(*[each.pid for each in busy])"""


@pytest.fixture(autouse=True)
def nobody_looks_at_the_cores() -> None:
    """Here somebody does."""
    watch = CoreWatch()
    watch.look()
    if watch.is_blind:
        pytest.skip("this system does not show CPU contention")


@contextmanager
def busy_programs() -> Iterator[None]:
    started = subprocess.run([sys.executable, "-c", START], stdout=subprocess.PIPE, check=True, text=True)
    try:
        yield
    finally:
        for pid in started.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


class Computes(Dataset[torch.Tensor]):
    """An example takes some milliseconds of processor time."""

    def __init__(self, length: int = 200, seconds: float = 0.005) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return torch.full((32,), float(index))


def trained(workers: int, length: int = 200) -> EchoCallback:
    callback = EchoCallback()
    loader = DataLoader(Computes(length), 4, num_workers=workers)
    trainer(callbacks=[callback], max_epochs=1, limit_val_batches=0).fit(BoringModel(), loader)
    return callback


def analyzed() -> Any:
    loader = DataLoader(Computes(), 4, num_workers=1)
    return StallAnalyzer(BoringModel(), loader, trainer_kwargs={"accelerator": "cpu"}, say=str).run(10, 20)


def others_cores(since: tuple[float, float, float] | None = None) -> Any:
    """How many cores other programs have used since an earlier call, by the kernel's counts of this process and of all."""
    words = next(line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu "))
    idle = (int(words[4]) + int(words[5])) / os.sysconf("SC_CLK_TCK")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    now = time.monotonic(), idle, sum(each.ru_utime + each.ru_stime for each in used)
    if since is None:
        return now
    seconds, idled, own = (after - before for after, before in zip(now, since, strict=True))
    return (os.cpu_count() or 1) - (idled + own) / seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_training_an_analysis_and_the_doctor_say_that_other_programs_have_the_cores(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with busy_programs():
        callback = trained(workers=1)
        analysis = analyzed()
        capsys.readouterr()
        assert examine(None, as_json=True) == 0
    (report,) = callback.reports
    assert report.taken_fraction is not None
    assert report.taken_fraction > 0.3
    assert report.load.startswith("Other programs took ")
    assert report.load.endswith("measure again on a quiet machine")
    assert analysis.load.others > 0.3 * CORES
    assert analysis.notes[0] == f"{analysis.load.sentence}."
    assert analysis.notes[0].startswith("Other programs took ")
    # An example computes for 5 ms, however long that takes.
    name, seconds, cpu_seconds = analysis.costliest[0]
    assert name == "decode"
    assert 0.005 <= cpu_seconds < seconds
    assert analysis.stage_cpu["decode"].undelayed_seconds < seconds
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found["load"]["status"] == "warning"
    assert found["load"]["figures"]["others_cores"] > 0.3 * CORES


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_more_workers_than_cores_wait_for_each_other_and_that_is_no_load_by_others() -> None:
    before = others_cores()
    callback = trained(workers=4 * CORES, length=300 * CORES)  # long enough to be judged: 1.5 s on all cores
    analysis = analyzed()
    if others_cores(before) > 0.15 * CORES:
        pytest.skip("other programs are running")
    (report,) = callback.reports
    assert report.load == ""
    assert report.taken_fraction is not None
    assert report.taken_fraction < 0.2
    assert [note for note in analysis.notes if "programs" in note or "quota" in note] == []
    assert analysis.costliest[0].cpu_seconds == pytest.approx(0.005, rel=0.2)
