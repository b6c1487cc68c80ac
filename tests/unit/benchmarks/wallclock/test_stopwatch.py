from typing import Any

import pytest
import torch
from learning.reuse.studies import STUDIES
from timing import Stopwatch
from torch import nn
from wallclock.source import SlowSource
from wallclock.stopwatch import TimedEvaluator


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Told:
    """What an `EchoCallback` is told."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_validation_start(self, *args: Any) -> None:
        self.events.append("start")

    def on_validation_end(self, *args: Any) -> None:
        self.events.append("end")


def test_an_evaluation_costs_no_time_moves_no_read_and_counts_as_a_validation() -> None:
    clock, events, source = Clock(), [], SlowSource(0.0)
    watch = Stopwatch(clock)

    def evaluate(model: nn.Module) -> float:
        events.append(f"evaluate, source stands still: {source.stands_still}, training: {model.training}")
        clock.now += 1000
        return 12.0

    evaluator = TimedEvaluator(STUDIES["glyphs"], evaluate, source, Told(events), watch)  # type: ignore[arg-type]
    module = nn.Module()
    module.model = torch.nn.Identity()
    evaluator.on_train_epoch_start(None, None)  # type: ignore[arg-type]
    clock.now += 0.25
    evaluator.on_train_batch_start()
    clock.now += 4
    assert evaluator.evaluated(None, module) == 12.0  # type: ignore[arg-type]
    evaluator.on_train_epoch_start(None, None)  # type: ignore[arg-type]
    clock.now += 1
    evaluator.on_train_batch_start()
    evaluator.evaluated(None, module)  # type: ignore[arg-type]
    assert evaluator.seconds == pytest.approx([4.25, 5.25])
    assert evaluator.first_batch_seconds == 0.25
    assert watch.stood_seconds == 2000
    assert events == ["start", "evaluate, source stands still: True, training: False", "end"] * 2
    assert module.training
