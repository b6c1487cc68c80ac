"""A controller that is asked within epochs: at which steps, from which batch on its factor counts, and after a resume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from trainer_runs import Data, Recorder, Run, SaveAt, fit

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoLoader, MetricGuard, TargetIdle
from lightning_echo.measure.control import Decision, Moment, Observation, Reason

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


def by_hand(told: dict[int, float], batches: int, workers: int = 2) -> list[Any]:
    """The batches of a loader whose factor somebody sets after certain numbers of batches."""
    loader = EchoLoader(Data(workers, length=LENGTH).train_dataloader(), 1, **OPTIONS)
    found: list[Any] = []
    while len(found) < batches:
        for batch in loader:
            found.append((tuple(batch["index"].tolist()), tuple(map(tuple, batch["noise"].tolist()))))
            if len(found) in told:
                loader.factor = told[len(found)]
    loader.close()
    return found


# ---------------------------------------------------------------------- when it is asked


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (2, AHEAD)])
def test_early_it_is_asked_once_after_what_was_queued_and_ten_steps_more(workers: int, ahead: int) -> None:
    controller = Scripted(first=5)
    run(controller, workers=workers)
    at = ahead + 10 + 5
    assert controller.asked == [(at, "early"), (EPOCH, "epoch_end"), (2 * EPOCH, "epoch_end")]
    assert [seen.steps for seen in controller.seen] == [5, EPOCH - at, EPOCH], "each step is judged once"
    assert [seen.epoch for seen in controller.seen] == [0, 0, 1]


@pytest.mark.parametrize(("reuse", "filling"), [("each", 80 // 4), ("memory", 1)])  # from memory only the first is all fresh
def test_early_comes_after_a_buffer_has_been_filled_too(reuse: str, filling: int) -> None:
    controller = Scripted(first=5)
    run(controller, workers=0, echo={"factor": 2, "buffer_size": 80, "reuse": reuse})
    assert controller.asked[0] == (filling + 10 + 5, "early")


@pytest.mark.parametrize(("length", "asked"), [(100, 25), (96, 24)])
def test_an_epoch_that_ends_at_that_step_or_before_it_has_no_early_decision(length: int, asked: int) -> None:
    controller = Scripted(first=15)
    fit(Data(0, length=length), callbacks=[scripted(controller)], max_epochs=3)
    assert controller.asked == [(asked * epoch, "epoch_end") for epoch in (1, 2, 3)]


def test_by_default_a_controller_is_asked_at_the_ends_of_epochs_alone() -> None:
    controller = Scripted()
    run(controller)
    assert controller.asked == [(EPOCH, "epoch_end"), (2 * EPOCH, "epoch_end")]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"val_check_interval": 7}])
def test_every_so_many_batches_of_an_epoch_it_is_asked_and_at_the_end_once(options: dict[str, Any]) -> None:
    controller = Scripted(every=20)
    run(controller, limit_train_batches=40, **options)
    ends = [(20, "within_epoch"), (40, "epoch_end"), (60, "within_epoch"), (80, "epoch_end")]
    assert controller.asked == ends
    assert [seen.steps for seen in controller.seen] == [20 - 2, 20, 20, 20], "the workers' first batches tell nothing"


def test_the_run_s_last_step_ends_an_epoch() -> None:
    controller = Scripted(every=20)
    run(controller, max_epochs=-1, max_steps=70)
    assert controller.asked == [(20, "within_epoch"), (40, "within_epoch"), (50, "epoch_end"), (70, "epoch_end")]
    assert controller.seen[-1].steps == 20


@pytest.mark.parametrize("told", [{"epoch_length": "full_pass"}, None])
def test_where_the_trainer_could_not_be_told_of_a_new_length_or_nothing_is_echoed_it_is_not_asked(told: Any) -> None:
    controller = Scripted(first=5, every=20)
    if told is None:
        run(controller, data=Data(2, length=LENGTH, loader_options={}), overfit_batches=30)
        assert controller.asked == []
    else:
        run(controller, echo=told)
        assert controller.asked == [(EPOCH, "epoch_end"), (2 * EPOCH, "epoch_end")]


def test_impossible_numbers_of_steps_are_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"Scripted\.every_n_steps must be a number of steps >= 1, got 0"):
        scripted(Scripted(every=0))
    with pytest.raises(
        TypeError, match=r"Scripted\.first_after_steps must be a number of steps \(an integer\), or None, got 2\.5"
    ):
        scripted(Scripted(first=2.5))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what becomes of the decision


@pytest.mark.parametrize("workers", [0, 2])
def test_an_early_factor_counts_from_the_first_batch_that_is_not_planned_yet(workers: int) -> None:
    at = 10 + 5 + (AHEAD if workers else 0)
    told = {at: 3.0, EPOCH: 2.0}
    found = run(Scripted(told, first=5), workers=workers)
    assert found.model.batches == by_hand(told, 2 * EPOCH, workers)
    assert found.model.steps == [EPOCH, EPOCH]


def test_a_run_that_is_resumed_after_a_decision_within_an_epoch_gets_the_same_batches(tmp_path: Path) -> None:
    at = AHEAD + 10 + 5
    told = {at: 3.0, 30: 1.5, EPOCH: 2.0, EPOCH + 30: 4.0}
    steps = [at, at + 1, at + AHEAD, 30, 35, EPOCH, EPOCH + 29, EPOCH + 30, EPOCH + 31, 95]
    whole = scripted(Scripted(told, first=5, every=30))
    expected = fit(Data(2, length=LENGTH), callbacks=[whole, SaveAt(tmp_path, steps)], max_epochs=2)
    assert [use.factor for use in whole.decisions] == [1, 3, 1.5, 2, 4]
    assert [use.step for use in whole.decisions] == [0, *told]
    assert [use.batch for use in whole.decisions] == [0, *(step + AHEAD for step in told)]
    for step in steps:
        controller = Scripted(told, first=5, every=30)
        resumed = scripted(controller)
        path = SaveAt(tmp_path, []).path(step)
        again = fit(Data(2, length=LENGTH), callbacks=[resumed], max_epochs=2, ckpt_path=path)
        assert again.model.batches == expected.model.batches[step:], step
        assert resumed.decisions == whole.decisions, step
        assert all(seen.moment is not Moment.early for seen in controller.seen), step


def test_a_run_that_is_resumed_before_its_early_decision_makes_it_after_as_many_steps_of_its_own(tmp_path: Path) -> None:
    run(Scripted(first=5), SaveAt(tmp_path, [12]))
    controller = Scripted(first=5)
    run(controller, ckpt_path=SaveAt(tmp_path, []).path(12))
    assert controller.asked[0] == (12 + AHEAD + 10 + 5, "early")


def test_a_checkpoint_from_before_early_decisions_resumes(tmp_path: Path) -> None:
    """Its first epoch was over, so that nothing is early any more."""
    run(Scripted(), SaveAt(tmp_path, [EPOCH + 5]))
    path = SaveAt(tmp_path, []).path(EPOCH + 5)
    checkpoint = torch.load(path, weights_only=True)
    state = checkpoint["callbacks"]["EchoCallback"]
    del state["decisions"], state["asked"], state["meter"]["stretch_start"]
    torch.save(checkpoint, path)
    controller = Scripted(first=5)
    run(controller, ckpt_path=path)
    assert controller.asked == [(2 * EPOCH, "epoch_end")]


# ---------------------------------------------------------------------- `TargetIdle`


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


@pytest.mark.parametrize("guarded", [False, True])
def test_target_idle_echoes_in_the_first_epoch_behind_a_source_that_starves_the_step(guarded: bool) -> None:
    """Reading takes many times as long as a step: without any doubt."""
    controller: Controller = TargetIdle(max_factor=4, first_after_steps=10)
    callback = scripted(MetricGuard(controller) if guarded else controller)
    found = fit(Data(2, length=LENGTH, delay=0.04), callbacks=[callback], max_epochs=1)
    early = callback.decisions[1]
    assert (early.step, early.batch, early.reason) == (AHEAD + 20, 2 * AHEAD + 20, "at_maximum")
    assert early.factor == 4
    assert found.loader.counts.echoed > 0 if isinstance(found.data, EchoLoader) else callback.reports[0].echoed_examples > 0


def test_target_idle_leaves_a_fed_device_alone() -> None:
    class Slow(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.linalg.matrix_power(torch.eye(400), 15)
            return super().training_step(batch, batch_idx)

    callback = scripted(TargetIdle(0.9, first_after_steps=10))
    fit(Data(2, length=LENGTH), model=Slow(), callbacks=[callback], max_epochs=1)
    assert [use.factor for use in callback.decisions] == [1]
    assert not math.isnan(callback.reports[0].idle_fraction or 0.0)
