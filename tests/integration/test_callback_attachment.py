"""EchoCallback echoes what a Trainer trains on, in whatever way it came there, and takes echoing away again."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from callback_cases import WAYS, OwnLoaders, fit_by
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from trainer_runs import At, Data, Killed, Recorder, SaveAt, SetFactor, echoed, first_uses, fit, trainer

from lightning_echo import EchoCallback, EchoLoader, FactorSchedule, TargetIdle

OPTIONS = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says


def callback(**options: Any) -> EchoCallback:
    return EchoCallback(**{**OPTIONS, **options})


def hooks_in(runner: Any) -> set[str]:
    """Where a run has hooks of its own."""
    places = {"data module": runner.datamodule, "model": runner.lightning_module, "strategy": runner.strategy}
    names = {"train_dataloader", "process_dataloader"}
    return {place for place, instance in places.items() if instance is not None and names & set(vars(instance))}


@pytest.fixture(scope="module")
def expected() -> Recorder:
    """What an `EchoDataModule` echoes, in four epochs."""
    model: Recorder = fit(echoed(), max_epochs=4).model
    return model


@pytest.mark.parametrize("way", WAYS)
def test_the_training_loader_is_echoed_as_by_an_echo_data_module(way: str) -> None:
    run = fit_by(way, callback(), workers=1, max_epochs=2)
    expected = fit(echoed(workers=1), max_epochs=2)
    assert run.model.batches == expected.model.batches
    assert run.model.validated_at == expected.model.validated_at
    assert run.model.weights == expected.model.weights
    assert run.trainer.datamodule is (run.data if way == "data module" else None)  # type: ignore[attr-defined]


def test_a_data_module_that_hands_on_the_models_loader_is_echoed_once(expected: Recorder) -> None:
    class HandsOn(Data):
        def train_dataloader(self) -> Any:
            return self.trainer.model.train_dataloader()  # type: ignore[union-attr, operator]

    run = fit(HandsOn(), model=OwnLoaders(Data()), callbacks=[callback()], max_epochs=2)
    assert run.model.batches == expected.batches[: 2 * 6]


@pytest.mark.parametrize("way", ["EchoDataModule", *WAYS])
def test_overfit_batches_are_the_same_few_and_neither_echoed_nor_controlled(way: str) -> None:
    data, callbacks = (echoed(), []) if way == "EchoDataModule" else (Data(), [EchoCallback(TargetIdle())])
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        run = fit_by("data module" if way == "EchoDataModule" else way, *callbacks, data=data, overfit_batches=2)
    assert [[indices for indices, _ in epoch] for epoch in run.model.by_epoch] == [[(0, 1, 2, 3), (4, 5, 6, 7)]] * 3
    assert len(set(run.model.batches)) == 6, "with noise of its own each time"


def test_a_new_factor_is_in_force_with_the_next_epoch() -> None:
    echo = callback(factor=1, epoch_length="full_pass")
    run = fit_by("data module", echo, SetFactor(echo, {0: 3}))  # type: ignore[arg-type]
    assert run.model.steps == [6, 18, 18]
    assert run.model.validated_at == [6, 24, 42]
    assert run.data.asked == {"train": 1, "val": 1}


@pytest.mark.parametrize("way", WAYS)
def test_a_reload_of_the_users_asks_again_and_goes_on(way: str, expected: Recorder) -> None:
    run = fit_by(way, callback(), reload_dataloaders_every_n_epochs=1)
    assert run.data.asked["train"] == (1 if way == "passed" else 3)
    assert run.model.batches == expected.batches[: 3 * 6]


@pytest.mark.parametrize(("way", "fails"), [("data module", False), ("model's own", True), ("passed", False)])
def test_after_fit_no_hook_no_process_and_no_setting_is_left(way: str, fails: bool) -> None:
    processes = set(psutil.Process().children(recursive=True))
    echo, bound = callback(factor=2, epoch_length="full_pass"), []

    def last(runner: Any) -> None:
        echo.factor = 3  # although no epoch follows
        bound.append((hooks_in(runner), runner.reload_dataloaders_every_n_epochs))
        if fails:
            raise Killed

    runner: Any = trainer(max_epochs=2, callbacks=[echo, At({1: last})])
    with pytest.raises(Killed) if fails else nullcontext():
        fit_by(way, runner=runner, workers=1)
    its = {"data module": {"data module"}, "model's own": {"model"}, "passed": set()}[way]
    assert bound == [({"strategy", *its}, 1)]
    assert (hooks_in(runner), runner.reload_dataloaders_every_n_epochs) == (set(), 0)
    assert not {each for each in psutil.Process().children(recursive=True) if each.is_running()} - processes
    echo.attachment.detach()
    echo.on_exception(runner, runner.lightning_module, Killed())  # may come at any time


@pytest.mark.filterwarnings("ignore:.*swa_lrs.*", "ignore:Swapping scheduler")
def test_weight_averaging_which_copies_the_model_works_beside_it() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    assert fit_by("model's own", callback(), averaging).model.steps == [6, 6, 6]


@pytest.mark.parametrize("ways", [("data module", "passed"), ("data module", "model's own"), ("passed", "passed")], ids=str)
def test_a_further_fit_of_the_same_trainer_goes_on(ways: tuple[str, ...], expected: Recorder) -> None:
    runner, batches = trainer(callbacks=[callback()]), []
    for number, way in enumerate(ways, 1):
        runner.fit_loop.max_epochs = 2 * number
        batches += fit_by(way, runner=runner).model.batches
    assert batches == expected.batches


def test_a_state_is_not_kept_by_a_callback_that_does_not_echo(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [6])
    fit(echoed(), max_epochs=1, callbacks=[save, EchoCallback()])
    other = EchoCallback()
    fit(echoed(), ckpt_path=save.path(6), callbacks=[other])
    assert other.attachment.echo.state_dict() is None


class Echoes(Data):
    """A data module that echoes by itself."""

    def train_dataloader(self) -> Any:
        return EchoLoader(super().train_dataloader(), 3, insertion_point="after_augmentation", seed=7)


def test_options_for_a_loader_that_is_echoed_already_are_refused_with_both_ways_out() -> None:
    message = r"returns an EchoLoader already: return the plain loader, or leave echo out of EchoCallback"
    with pytest.raises(MisconfigurationException, match=message):
        fit(Echoes(), callbacks=[callback()])


def test_a_users_echo_loader_is_driven_by_a_controller_and_then_the_users_own_again() -> None:
    seen: list[tuple[Any, str]] = []
    look = At({1: lambda runner: seen.append((runner.train_dataloader, runner.train_dataloader.factor_owner))})
    run = fit_by("model's own", EchoCallback(FactorSchedule({0: 1})), look, data=Echoes())
    assert [len(new) for new in first_uses(run.model.batches)] == [4, 4, 4, 4, 4, 2] * 3
    ((loader, owner),) = seen
    assert (type(loader), owner) == (EchoLoader, "EchoCallback")
    assert (loader.factor_owner, loader.limit_train_batches) == ("", None)


def test_two_callbacks_are_refused() -> None:
    runner: Any = trainer(callbacks=[callback()])
    runner.callbacks.append(EchoCallback())  # past Lightning's own check
    with pytest.raises(MisconfigurationException, match=r"has 2 EchoCallbacks.*keep one"):
        runner.fit(Recorder(), datamodule=Data())
