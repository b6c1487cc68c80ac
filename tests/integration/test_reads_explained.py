"""What a training says of reads in flight: the metric of those that are under way, and that a plain run waits for reading."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader
from trainer_runs import trainer

from lightning_echo import EchoCallback, StagedDataset, StallAnalyzer
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.data.machine import busy_seconds, has_no_request

READ = 0.01  # seconds


class Slow(StagedDataset):
    """Reading sleeps, and counts how many reads are under way with the one that begins."""

    reads_concurrently = True

    def __init__(self, length: int = 400, seconds: float = READ) -> None:
        self.seconds = seconds
        self.beginning = torch.zeros(length).share_memory_()  # by index
        self.under_way = 0

    def __len__(self) -> int:
        return len(self.beginning)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def read(self, index: int) -> int:
        lock = vars(self).setdefault("lock", threading.Lock())
        with lock:
            self.under_way += 1
            self.beginning[index] = self.under_way
        time.sleep(self.seconds)
        with lock:
            self.under_way -= 1
        return index

    def decode(self, raw: int) -> torch.Tensor:
        return torch.full((32,), float(raw))

    def augment(self, example: torch.Tensor) -> torch.Tensor:
        return example + torch.rand(32)


def trained(callback: EchoCallback, dataset: Any, workers: int = 1) -> EchoCallback:
    loader = DataLoader(dataset, 4, num_workers=workers)
    trainer(callbacks=[callback], max_epochs=1, limit_val_batches=0).fit(BoringModel(), loader)
    return callback


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_reads_in_flight_are_logged_as_the_data_set_sees_them(workers: int) -> None:
    """Between one and the number that was asked for; without threads that read ahead, the metric is missing."""
    dataset = Slow()
    callback = trained(EchoCallback(reads_in_flight=8), dataset, workers)
    (report,) = callback.reports
    seen = dataset.beginning.mean().item()
    assert seen <= 9  # threads read at most 8, and the worker itself reads a few again, to compare
    assert report.reads_in_flight == pytest.approx(seen, rel=0.4)
    assert report.logged()["echo/reads_in_flight"] == report.reads_in_flight > 2
    (report,) = trained(EchoCallback(factor=1, reads_in_flight=1, cache="1MiB"), Slow(), workers).reports
    assert report.reads_in_flight is None


class Computes(Slow):
    """Reading computes for as long, in Python."""

    def read(self, index: int) -> int:
        end = time.thread_time() + READ
        while time.thread_time() < end:
            pass
        return index


@pytest.mark.slow
@pytest.mark.skipif(busy_seconds(os.getpid()) is None, reason="this system does not count how busy a process is")
def test_a_plain_run_whose_workers_wait_for_reads_says_so_and_its_advice_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_echo.training.meters.usable_cores", lambda: 1)  # else more workers come first
    callback = trained(EchoCallback(), Slow())
    (report,), verdict = callback.reports, callback.verdict
    assert report.worker_wait_fraction is not None
    assert report.worker_wait_fraction > 0.5
    assert verdict is not None
    assert verdict.message.startswith("Set reads_in_flight to 64, if threads may read the data set, up to ")
    assert verdict.next_line == "EchoCallback(factor=1, reads_in_flight=64)"
    pasted = trained(eval(verdict.next_line), Slow())
    assert pasted.reports[0].reads_in_flight is not None
    assert pasted.reports[0].worker_wait_fraction is None
    computes = trained(EchoCallback(), Computes())
    (report,) = computes.reports
    assert report.worker_wait_fraction is not None
    assert report.worker_wait_fraction < 0.5
    assert computes.verdict is not None
    assert "reads_in_flight" not in computes.verdict.message


class Packed:
    """A batch that takes 4 ms to unpack in the training's process, as a large one would."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples

    def __reduce__(self) -> Any:
        return _unpacked, (torch.stack(self.examples),)


def _unpacked(examples: torch.Tensor) -> torch.Tensor:
    time.sleep(0.004)
    return examples


class Steps(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.skipif(has_no_request(os.getpid()) is None, reason="this system does not tell what a process waits for")
@pytest.mark.parametrize(("seconds", "keeps_up"), [(0.0005, True), (0.006, False)])
def test_a_training_whose_workers_are_ahead_is_told_not_to_echo_however_long_batches_take_to_unpack(seconds, keeps_up) -> None:
    """A step with its batch takes 14 ms, of which 4 wait; a batch of four takes the worker 2 ms, or 24."""
    dataset, callback = Slow(800, seconds), EchoCallback()
    loader = DataLoader(dataset, 4, num_workers=1, collate_fn=Packed)
    trainer(callbacks=[callback], max_epochs=1, limit_val_batches=0).fit(Steps(), loader)
    (report,), verdict = callback.reports, callback.verdict
    assert verdict is not None
    assert report.idle_fraction > 0.1
    if keeps_up:
        assert verdict.message.startswith("Do not echo: the accelerator is busy ")
        assert "the workers had nothing to do for a part of the time" in verdict.message
        assert (report.recommended_factor, verdict.next_line) == (1, "")
    else:
        assert "Do not echo" not in verdict.message
        assert report.recommended_factor > 1.3


@pytest.mark.alone  # it compares times
def test_an_analysis_measures_reads_in_flight_and_tries_them() -> None:
    """A read sleeps for 10 ms: alone it takes as long, and of many under way each takes a part of that."""
    loader = DataLoader(Slow(4000), 4, num_workers=1)
    analyzer = StallAnalyzer(BoringModel(), loader, trainer_kwargs={"accelerator": "cpu"}, say=str)
    found = analyzer.run(10)
    assert (found.stages.read_ahead, found.stages.no_reads_ahead) == ("reading", "")
    seconds = {each.reads: each.seconds.median for each in found.stages.in_flight}
    assert list(seconds)[:3] == [1, 4, 16]
    assert seconds[1] >= READ
    assert all(READ / reads <= each for reads, each in seconds.items())
    assert seconds[16] < seconds[1] / 4
    assert any(remedy.setting.reads_in_flight > 1 for remedy in found.verdict.remedies)
    checked = analyzer.check(found, reads_in_flight=16).checked[-1]
    assert checked.setting == TrainingSetting(reads_in_flight=16)
    assert checked.step_seconds.median < found.step_seconds


@pytest.mark.slow
def test_an_analysis_says_why_threads_may_not_read_ahead_and_a_number_lets_them() -> None:
    class Mine(Slow):
        reads_concurrently = False

    loader = DataLoader(Mine(), 4, num_workers=1)
    found = StallAnalyzer(BoringModel(), loader, trainer_kwargs={"accelerator": "cpu"}, say=str).run(5)
    assert found.stages.in_flight == ()
    assert found.stages.no_reads_ahead.startswith("read of Mine is code of the user's")
    asked = StallAnalyzer(BoringModel(), loader, trainer_kwargs={"accelerator": "cpu"}, say=str, reads_in_flight=16).run(5)
    assert len(asked.stages.in_flight) > 1
