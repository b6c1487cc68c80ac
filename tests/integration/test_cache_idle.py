"""`TargetIdle` knows nothing of a cache: hits make the measured source cheaper, so the factor that feeds the device falls."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch
from idle_runs import MS, Sleeper, fit
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback, EchoLoader, StagedDataset, TargetIdle
from lightning_echo.cache.kept import CacheConfig

pytestmark = pytest.mark.alone

BATCH, WORKERS, PASS = 8, 2, 32  # batches of a pass
READ, STEP = 30 * MS, 30 * MS
RATIO = BATCH * READ / WORKERS / STEP  # 4: a fresh batch takes 120 ms, all workers working on it
EXAMPLE_BYTES = 2**20 // (BATCH * PASS // 2)  # half of the data set takes a MiB


class SlowScans(StagedDataset):
    """Reading takes 30 ms."""

    def __len__(self) -> int:
        return BATCH * PASS

    def load(self, index: Any) -> Any:
        time.sleep(READ)
        return torch.full((EXAMPLE_BYTES // 4,), float(index))

    def augment(self, example: Any) -> Any:
        return example[:1]


def test_the_factor_falls_by_the_share_that_is_held() -> None:
    """Reads and steps sleep, so that a busy machine makes both longer; only factors of one run are compared."""
    plain = DataLoader(SlowScans(), BATCH, shuffle=True, num_workers=WORKERS)
    loader = EchoLoader(plain, RATIO, insertion_point="before_augmentation", seed=5, cache=CacheConfig(2**20))
    echo = EchoCallback(TargetIdle(target=0.1, max_factor=3 * RATIO), summary=False)
    fit(Sleeper(STEP, loader), echo=echo, max_epochs=9)
    loader.close()
    reports = echo.reports
    held = (reports[-1].cached_examples or 0) / (BATCH * PASS)
    assert 0.4 < held < 0.5
    before = [report.next_factor or 0.0 for report in reports if report.cache_hit_fraction == 0][-1]
    after = median(report.factor for report in reports[-4:])
    assert before > 0.75 * RATIO, "while nothing is held yet, the factor is what the source needs"
    assert 0.7 * (1 - held) < after / before < 1.4 * (1 - held)
    assert "cheaper_source" in [report.reason for report in reports if report.cache_hit_fraction]
