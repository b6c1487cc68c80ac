"""Echoing where what comes after the insertion point takes longer than a step: no factor feeds the device, and one gains."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader
from trainer_runs import Scans, fit

from lightning_echo import EchoCallback, TargetIdle
from lightning_echo.measure.control import Reason

READ_SECONDS, AUGMENT_SECONDS = 0.006, 0.002  # of an example; for a batch of 8 by two workers 24 ms and 8 ms, the step about 1


class Slow(Scans):
    def load(self, index: Any) -> Any:
        time.sleep(READ_SECONDS)
        return super().load(index)

    def augment(self, example: Any) -> Any:
        time.sleep(AUGMENT_SECONDS)
        return super().augment(example)


def test_target_idle_echoes_as_far_as_that_gains_and_names_the_point_where_more_is_gained():
    callback = EchoCallback(TargetIdle(), insertion_point="before_augmentation")
    loader = DataLoader(Slow(800), 8, shuffle=True, num_workers=2)
    fit(loader, callbacks=[callback], max_epochs=2)
    last = callback.reports[-1]
    assert last.reason == Reason.downstream_too_slow.value
    # Without jitter: 24 / (1.05 * (24 / 8 + 8) - 8) = 6.8.
    assert 4 < last.factor <= 8
    assert last.echoed_examples > 2 * last.fresh_examples
    assert "insertion_point='after_augmentation'" in last.message
    assert "whose echoes repeat their augmentation" in last.message
