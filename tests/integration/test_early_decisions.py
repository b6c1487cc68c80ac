"""A controller that is asked within epochs: at which steps, from which batch on its factor counts, and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from trainer_runs import Data, Run, SaveAt, fit

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoLoader, MetricGuard, TargetIdle
from lightning_echo.measure.control import Decision, Observation, Reason

LENGTH, EPOCH = 200, 50  # examples; batches of 4
AHEAD = 2 * 2 + 2  # two workers with two batches each, and what the fetching thread holds
OPTIONS: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 7}


class Scripted(Controller):
    """Decides as told after certain numbers of batches, and remembers when it was asked."""

    def __init__(self, told: dict[int, float] | None = None, *, first: int | None = None, every: int | None = None) -> None:
        self.told, self.seen = told or {}, []  # type: ignore[var-annotated]
        self.first_after_steps, self.every_n_steps = first, every

    def decide(self, observation: Observation) -> Decision:
        self.seen.append(observation)
        return Decision(self.told.get(observation.batches, observation.factor), Reason.custom, "told to")

    @property
    def asked(self) -> list[tuple[int, str]]:
        return [(seen.batches, seen.moment.value) for seen in self.seen]


def scripted(controller: Controller, factor: float = 1, **options: Any) -> EchoCallback:
    return EchoCallback(controller, echo=EchoConfig(factor, **{**OPTIONS, **options}))


def run(controller: Controller, *callbacks: Any, workers: int = 2, echo: Any = None, data: Any = None, **options: Any) -> Run:
    callback, data = scripted(controller, **(echo or {})), data or Data(workers, length=LENGTH)
    return fit(data, callbacks=[callback, *callbacks], **{"max_epochs": 2, **options})


def by_hand(told: dict[int, float], batches: int) -> list[Any]:
    """The batches of a loader whose factor somebody sets after certain numbers of batches."""
    loader = EchoLoader(Data(2, length=LENGTH).train_dataloader(), 1, **OPTIONS)
    found: list[Any] = []
    while len(found) < batches:
        for batch in loader:
            found.append((tuple(batch["index"].tolist()), tuple(map(tuple, batch["noise"].tolist()))))
            if len(found) in told:
                loader.factor = told[len(found)]
    loader.close()
    return found


FULL_PASS = {"epoch_length": "full_pass"}
ENDS = [(EPOCH, "epoch_end"), (2 * EPOCH, "epoch_end")]
DOUBLED = [*((at, "early") for at in (5, 10, 20, 40)), ENDS[0], (80, "early"), ENDS[1]]
PARTS = [(20, "within_epoch"), (40, "epoch_end"), (60, "within_epoch"), (80, "epoch_end")]


@pytest.mark.parametrize(
    ("when", "options", "unsettled", "asked"),
    [
        pytest.param({}, {}, 0, ENDS, id="by default at the ends of epochs"),
        pytest.param({"first": 5}, {}, 0, DOUBLED, id="early, and each time that there are twice as many steps"),
        pytest.param({"first": 5}, {"workers": 2}, 2, DOUBLED, id="early, and the workers' first batches tell nothing"),
        pytest.param({"first": 5}, {"workers": 3}, 3, DOUBLED, id="early, of whole rounds of the workers"),
        pytest.param(
            {"first": 5},
            {"echo": {"factor": 2, "buffer_size": 80, "reuse": "each"}},
            *(80 // 4, DOUBLED),
            id="early, and a buffer that is being filled tells nothing",
        ),
        pytest.param(  # from memory only the first batch is all fresh
            {"first": 5},
            {"echo": {"factor": 2, "buffer_size": 80, "reuse": "memory"}},
            *(1, DOUBLED),
            id="early, from memory",
        ),
        pytest.param({"first": 50}, {}, 0, ENDS, id="an epoch that ends at that step"),
        pytest.param(
            {"first": 5, "every": 20}, {"limit_train_batches": 40}, 0, [*DOUBLED[:2], *PARTS], id="early until the other"
        ),
        pytest.param({"every": 20}, {"limit_train_batches": 40, "workers": 2}, 2, PARTS, id="every so many batches"),
        pytest.param(
            {"every": 20},
            {"limit_train_batches": 40, "accumulate_grad_batches": 3, "val_check_interval": 7},
            *(0, PARTS),
            id="accumulating and validating",
        ),
        pytest.param(
            {"every": 20},
            {"max_epochs": -1, "max_steps": 70},
            *(0, [(20, "within_epoch"), (40, "within_epoch"), (50, "epoch_end"), (70, "epoch_end")]),
            id="the run's last step ends an epoch",
        ),
        pytest.param({"first": 5, "every": 20}, {"echo": FULL_PASS}, 0, ENDS, id="the Trainer cannot be told of a new length"),
        pytest.param(
            {"first": 5, "every": 20},
            {"data": Data(length=LENGTH, loader_options={}), "overfit_batches": 30},
            *(0, []),
            id="nothing is echoed",
        ),
    ],
)
def test_when_a_controller_is_asked(
    when: dict[str, int], options: dict[str, Any], unsettled: int, asked: list[tuple[int, str]]
) -> None:
    """And of how many steps since the last time it is told."""
    controller = Scripted(**when)
    run(controller, **{"workers": 0, **options})
    assert controller.asked == asked
    workers, judged = options.get("workers", 0), []
    for (before, _), (now, moment) in pairwise([(0, ""), *asked]):
        steps = max(0, now - max(before, unsettled))
        judged.append(steps - (steps % workers if moment != "epoch_end" and steps > workers > 0 else 0))
    assert [seen.steps for seen in controller.seen] == judged, "each step is judged once"


def test_impossible_numbers_of_steps_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"Scripted\.every_n_steps must be a number of steps >= 1, got 0"):
        scripted(Scripted(every=0))


def test_an_early_factor_counts_from_the_first_batch_that_is_not_planned_yet() -> None:
    told = {14: 3.0, EPOCH: 2.0}
    found = run(Scripted(told, first=7))
    assert found.model.batches == by_hand(told, 2 * EPOCH)
    assert found.model.steps == [EPOCH, EPOCH]


@pytest.mark.slow
def test_a_run_that_is_stopped_anywhere_and_resumed_is_asked_and_gets_the_same(tmp_path: Path) -> None:
    """Between the early decisions, right after one, within an epoch, at its end, and in the next one."""
    told = {14: 3.0, 30: 1.5, EPOCH: 2.0, EPOCH + 30: 4.0}
    controller, saving = Scripted(told, first=7, every=30), SaveAt(tmp_path, [3, 10, 14, 27, EPOCH, EPOCH + 31])
    whole = scripted(controller)
    expected = fit(Data(2, length=LENGTH), callbacks=[whole, saving], max_epochs=2)
    assert [at for at, _ in controller.asked] == [7, 14, 28, 30, EPOCH, EPOCH + 30, 2 * EPOCH]
    assert [use.factor for use in whole.decisions] == [1, 3, 1.5, 2, 4]
    assert [use.step for use in whole.decisions] == [0, *told]
    assert [use.batch for use in whole.decisions] == [0, *(step + AHEAD for step in told)]
    for step in saving.steps:
        again = Scripted(told, first=7, every=30)
        resumed = scripted(again)
        rest = fit(Data(2, length=LENGTH), callbacks=[resumed], max_epochs=2, ckpt_path=saving.path(step))
        assert rest.model.batches == expected.model.batches[step:], step
        assert resumed.decisions == whole.decisions, step
        later = [each for each in controller.asked if each[0] > step or each == (step, "epoch_end")]
        assert again.asked == later, step


class Endless(IterableDataset):  # type: ignore[type-arg]
    """What `Recorder` expects of an example, without end unless there is a length."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        numbers = count() if self.length is None else range(self.length)
        return ({"index": index, "pid": 0, "noise": torch.rand(3, dtype=torch.float64)} for index in numbers)


def test_an_epoch_whose_length_nobody_knows_ends_with_one_decision() -> None:
    controller = Scripted(every=12)
    loader = EchoLoader(DataLoader(Endless(96), batch_size=4), 1, seed=7, insertion_point="after_augmentation")
    fit(loader, callbacks=[EchoCallback(controller)], max_epochs=2, limit_val_batches=0)
    assert controller.asked == [(12, "within_epoch"), (24, "epoch_end"), (36, "within_epoch"), (48, "epoch_end")]
    loader.close()


def test_in_an_epoch_that_never_ends_a_controller_is_asked_all_the_same() -> None:
    controller = Scripted({20: 2.0, 60: 4.0}, every=20)
    loader = EchoLoader(DataLoader(Endless(), batch_size=4), 1, seed=7, insertion_point="after_augmentation")
    callback = EchoCallback(controller)
    fit(loader, callbacks=[callback], max_epochs=-1, max_steps=100, limit_val_batches=0)
    assert controller.asked == [*((at, "within_epoch") for at in (20, 40, 60, 80)), (100, "epoch_end")]
    assert [use.factor for use in callback.decisions] == [1, 2, 4]
    assert loader.counts.echoed > 100
    loader.close()


def test_target_idle_under_a_guard_echoes_in_the_first_epoch_behind_a_source_that_starves_the_step() -> None:
    """Reading takes many times as long as a step: without any doubt."""
    callback = scripted(MetricGuard(TargetIdle(max_factor=4)))
    fit(Data(2, length=LENGTH, delay=0.04), callbacks=[callback], max_epochs=1)
    early = callback.decisions[1]
    assert early.step in (10, 20, 40)
    assert (early.batch, early.reason) == (AHEAD + early.step, "at_maximum")
    assert early.factor == 4
    assert callback.reports[0].echoed_examples > 0
