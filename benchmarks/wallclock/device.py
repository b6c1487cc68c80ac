"""A step as on an accelerator: most of its time the processor is free.

The digits' step takes 1.4 ms, nearly all of it Python, on cores that the workers need as well: what would be measured is how they
get in each other's way. Ten milliseconds of sleep in each step stand for the device. The language model's step is long enough
to be taken as it is.
"""

from __future__ import annotations

import time
from typing import Any

from learning.run import Module
from learning.task import Task
from torch import Tensor

__all__ = ["DEVICE_SECONDS", "DeviceModule"]

DEVICE_SECONDS = {"digits": 0.010}  # of each step, by task


class DeviceModule(Module):
    """The task's model, whose step takes `DEVICE_SECONDS` more."""

    def __init__(self, task: Task, rate: float) -> None:
        super().__init__(task, rate)
        self._device_seconds = DEVICE_SECONDS.get(task.name, 0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        time.sleep(self._device_seconds)
        return loss
