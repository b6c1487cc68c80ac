"""Runs of a Trainer on demand, and the oracle of what they must deliver: each example fresh exactly once per pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Batch, Data, Killed, Recorder, Run, SaveAt, fit, fresh_stream

from lightning_echo import Controller, EchoCallback, EchoLoader

LENGTH, BATCH, STEPS = 30, 4, 8  # examples, of a batch, steps of a whole epoch


class Slow(Data):
    """A source of which each example takes up to ``delay`` seconds, in two workers."""

    def __init__(self, delay: float = 0.02, workers: int = 2, **options: Any) -> None:
        super().__init__(workers, BATCH, **{"length": LENGTH, "delay": delay, **options})


def on_demand(controller: Controller | None = None, max_factor: float | None = None, **options: Any) -> EchoCallback:
    echo: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 7, **options}
    return EchoCallback(controller, factor="demand", max_factor=max_factor, **echo)


def run_on_demand(*callbacks: Any, delay: float = 0.02, model: Any = None, workers: int = 2, **options: Any) -> Run:
    return fit(Slow(delay, workers), model=model or Recorder(delay=0.004), callbacks=list(callbacks), **options)


def assert_fresh_once_per_pass(batches: Iterable[Batch], loader: EchoLoader) -> None:
    """What a run has delivered, from its start, with the loader as it is at the end.

    Which examples are fresh is told by their noise: no two reads have the same, and all uses of one have it. Passes overlap where
    one ends. What the loader says of that, in positions from the start of the run, is compared with what the model got: an
    example has come fresh in each pass that is complete, and at most once in each pass that has begun.
    """
    batches = list(batches)
    for indices, _ in batches:
        assert len(set(indices)) == len(indices), "twice in a batch"
    fresh, length = Counter(fresh_stream(batches)), len(loader.dataset)
    place = loader.state_dict()["demand"]
    last = max([place["frontier"], *(first + size for first, size in place["ahead"])])
    assert fresh.total() == loader.counts.fresh == place["frontier"] + sum(size for _, size in place["ahead"])
    assert set(fresh) <= set(range(length))
    assert place["frontier"] // length <= min(fresh[index] for index in range(length))
    assert max(fresh.values()) <= -(-last // length)


def killed_and_resumed(folder: Path, step: int, **options: Any) -> tuple[list[Batch], Run, EchoCallback]:
    """A run that is killed after a step, and goes on from its checkpoint: the batches of both, up to and from that step."""
    models = [options.pop("model", Recorder)(delay=0.004) for _ in range(2)]
    with pytest.raises(Killed):
        run_on_demand(on_demand(), SaveAt(folder, [step], dies=True), model=models[0], **options)
    callback = on_demand()
    run = run_on_demand(callback, model=models[1], ckpt_path=SaveAt(folder, []).path(step), **options)
    return models[0].batches[:step] + models[1].batches, run, callback
