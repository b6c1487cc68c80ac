"""StallAnalyzer and caches: one that is predicted can be tried, and that of a verdict can be pasted."""

import time
from dataclasses import replace

import pytest
import torch
from test_stall_analysis import MS, Slept, analyze, loader_of

from lightning_echo import EchoCallback, EchoConfig, StagedDataset
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.verdict import VerdictKind
from lightning_echo.cache.kept import CacheConfig


class Pictures(StagedDataset):
    """Raw items of 40 kB, loaded examples of 160. Reads are noted in a file, since workers read."""

    def __init__(self, log):
        self.log = log

    def __len__(self):
        return 400

    def read(self, index):
        time.sleep(10 * MS)
        with open(self.log, "a") as log:
            log.write(f"{index}\n")
        return bytes(40_000)

    def decode(self, raw):
        return torch.zeros(len(raw))

    def augment(self, example):
        return example[:32] + 1

    def reads(self):
        """The indices that were read since the last call."""
        with open(self.log) as log:
            read = [int(line) for line in log]
        open(self.log, "w").close()
        return read


@pytest.mark.slow
@pytest.mark.parametrize("hold", [pytest.param("raw", marks=pytest.mark.rest_of_grid), "loaded"])
def test_a_cache_that_is_tried_holds_its_share_before_the_steps_that_count(hold, tmp_path):
    """Of ten batches of four, each second example is held: five batches. Then the ten batches come."""
    dataset = Pictures(tmp_path / "log")
    analyzer, found = analyze(Slept(1 * MS), loader_of(dataset), 10)
    order = [index for batch in analyzer._training.phases.real.indices for index in batch]
    held, rest = order[1::2], order[::2]
    dataset.reads()
    found = analyzer.check(found, cached_fraction=0.5, hold=hold)
    read = dataset.reads()
    first = read.index(held[0], read.index(399) + 1)  # before, the cuts are proved by the first and the last example
    read = read[first:]
    assert read[:20] == held
    assert set(rest) - {0} <= set(read[20:]), "the rest is read in the steps that count"
    again = [index for index in read[20:] if index in held]
    assert len(again) <= 2, "a worker compares its first and its tenth hit with the data set"
    checked = found.checked[0]
    assert checked.setting == TrainingSetting(cached_fraction=0.5, hold=hold)
    assert checked.step_seconds.median < 0.8 * found.step_seconds, "half of the reads are left"


@pytest.mark.slow
def test_the_cache_of_a_verdict_can_be_tried_and_pasted(tmp_path, monkeypatch):
    """A step takes as long as two of the four reads of its batch: about half of the examples are to be held."""
    analyzer, found = analyze(Slept(20 * MS), loader_of(Pictures(tmp_path / "log")), 8)
    found = replace(found, stages=replace(found.stages, cores=1, free_bytes=2**30))
    setting = found.verdict.setting
    assert found.verdict.kind is VerdictKind.cache
    assert (setting.hold, setting.workers) == ("raw", None)
    assert 0.3 < setting.cached_fraction < 0.9
    held = 40_000 * 400 * setting.cached_fraction
    assert held < CacheConfig(setting.cache_size).bytes_of() < 1.06 * held + 2**20
    checked = analyzer.check(found).checked[0]
    assert checked.setting == setting
    assert checked.step_seconds.median < 0.9 * found.step_seconds
    assert EchoConfig(**setting.options).cache == {"size": setting.cache_size, "hold": "raw"}
    assert isinstance(eval(setting.line), EchoCallback)
