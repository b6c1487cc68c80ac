"""Echoing and measuring add no synchronisation to a step: counted in traces of CUDA's calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gpu_data import Coded
from gpu_runs import ON_GPU, Moving, loader_of, traced, trainer

from lightning_echo import EchoCallback

# On the processor: the operators that would wait for a device.
ON_PROCESSOR = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize") if ON_GPU else ON_PROCESSOR
SHORT, LONG, WIDTH = 12, 36, 1000
MOST_OF_A_RUN = 120  # of the start and the end of a run and of its one epoch: counts and figures are gathered

Makes = Callable[[], pl.Callback]


class Plain(Moving):
    """A step that waits for nothing, or for its loss if told to."""

    def __init__(self, waits: bool = False) -> None:
        super().__init__()
        self.layer, self.waits = torch.nn.Linear(WIDTH, 1), waits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch["values"] / 2**20).mean()
        if self.waits:
            loss.item()
        return loss


def waits_in(steps: int, make: Makes | None, *, waits: bool = False) -> Counter[str]:
    """How often a fit of so many steps waits for the device, by the name of the call."""
    callbacks = [] if make is None else [make()]
    fitting = trainer(callbacks=callbacks, log_every_n_steps=1000)
    _, events = traced(lambda: fitting.fit(Plain(waits), loader_of(Coded(4 * steps, WIDTH), 4, workers=2)))
    assert fitting.global_step == steps
    names = [event["name"] for event in events]
    return Counter(next(name for name in WAITING if found.startswith(name)) for found in names if found.startswith(WAITING))


@pytest.fixture(scope="module")
def plain() -> dict[int, Counter[str]]:
    """The waits of fits without the callback, by their steps."""
    return {steps: waits_in(steps, None) for steps in (SHORT, LONG)}


def test_the_count_sees_a_step_that_waits(plain: dict[int, Counter[str]]) -> None:
    assert waits_in(LONG, None, waits=True).total() - plain[LONG].total() >= LONG


@pytest.mark.parametrize(
    "make",
    [
        lambda: EchoCallback(summary=False),
        lambda: EchoCallback(factor=4, insertion_point="before_augmentation", summary=False),
        lambda: EchoCallback(factor=4, insertion_point="after_batching", summary=False),
        lambda: EchoCallback(factor=4, insertion_point="after_transfer", summary=False),
    ],
    ids=["measures", "before_augmentation", "after_batching", "after_transfer"],
)
def test_no_step_waits_for_the_device(make: Makes, plain: dict[int, Counter[str]]) -> None:
    """A longer run waits no more often than a shorter one, but for what it does without the callback."""
    short, long = waits_in(SHORT, make), waits_in(LONG, make)
    assert long.total() - short.total() == plain[LONG].total() - plain[SHORT].total()
    assert long.total() - plain[LONG].total() <= MOST_OF_A_RUN
    assert long["cudaEventSynchronize"] <= plain[LONG]["cudaEventSynchronize"] + 1, "once, at the end of the epoch"
