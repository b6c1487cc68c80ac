"""A loader passed to fit has no name that EchoCallback hears; what holds of any way to come is in test_callback_attachment.py."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from callback_cases import OwnLoaders
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, Run, echoed, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoLoader, FactorSchedule, TargetIdle


def callback(factor: float = 2.5, **options: Any) -> EchoCallback:
    return EchoCallback(factor=factor, insertion_point="after_augmentation", seed=7, **options)


def passed(**options: Any) -> DataLoader[Any]:
    loader: DataLoader[Any] = Data(**options).train_dataloader()
    return loader


def test_a_loader_beside_a_models_own_is_the_one_that_is_echoed() -> None:
    run = fit(passed(), model=OwnLoaders(Data(length=40)), callbacks=[callback()])
    assert run.model.batches == fit(echoed()).model.batches


def test_a_hook_that_is_replaced_after_the_setup_of_callbacks_is_echoed() -> None:
    class InSetup(Recorder):
        def train_dataloader(self) -> Any:
            raise AssertionError("replaced in setup")

        def setup(self, stage: str) -> None:
            self.train_dataloader = passed  # type: ignore[method-assign]

    run = Run(InSetup(), None, trainer(callbacks=[callback()]))
    run.trainer.fit(run.model, val_dataloaders=Data().val_dataloader())
    assert run.model.batches == fit(echoed()).model.batches


def test_validation_loaders_are_left_alone() -> None:
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 2}
    loaders, seen = [Data().val_dataloader(), passed()], []

    class Look(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append(trainer.val_dataloaders)

    class Two(Recorder):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    runner, model = trainer(callbacks=[callback(), Look()], num_sanity_val_steps=2, max_epochs=2, **options), Two()
    with pytest.warns(UserWarning, match="`val_dataloader`'s sampler has shuffling enabled"):
        runner.fit(model, passed(), loaders)
    assert len(seen) >= 3  # the sanity check and two epochs
    assert all(each == loaders and type(each[1]) is DataLoader for each in seen)
    assert model.batches == fit(echoed(), max_epochs=2, **options).model.batches


def test_the_loader_that_is_trained_on_may_be_the_one_to_validate_on() -> None:
    loader = passed(loader_options={})
    runner, model = trainer(callbacks=[callback()], num_sanity_val_steps=2), Recorder()
    runner.fit(model, loader, loader)
    assert type(runner.train_dataloader) is EchoLoader
    assert runner.val_dataloaders is loader
    assert model.steps == [6, 6, 6]


def two(kind: str) -> Any:
    loaders = {"long": passed(), "short": passed(length=10)}
    return {
        "a dict": loaders,
        "over the same data": [first := passed(), DataLoader(first.dataset, 2)],
        "a list": list(loaders.values()),
        "a CombinedLoader": CombinedLoader(loaders, "max_size"),
        "a dict of one": {"long": passed()},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "echo"),
    [
        ("a dict", "options"),
        ("a list", "controller"),
        ("a CombinedLoader", "names"),
        ("a dict of one", "options"),
        ("over the same data", "options"),
    ],
)
def test_several_loaders_are_refused_before_the_first_step_with_the_ways_out(kind: str, echo: str) -> None:
    made = {
        "options": callback(),
        "controller": EchoCallback(TargetIdle()),
        "names": EchoCallback(echo={"long": EchoConfig(2.5)}),
    }[echo]
    factor = "1" if echo == "controller" else r"2\.5"
    message = rf"several loaders that were passed to fit.*Use EchoLoader\(loader, {factor}\).*from_dataloaders\(loaders, factor="
    model = Recorder()
    with pytest.raises(MisconfigurationException, match=message):
        fit(two(kind), model=model, callbacks=[made])
    assert model.batches == []


def test_an_echo_loader_beside_a_plain_one_is_driven_and_the_plain_one_left_alone() -> None:
    loaders = {"echoed": EchoLoader(passed(), 1, insertion_point="after_augmentation", seed=7), "plain": passed()}

    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch["echoed"]) + self.loss(batch["plain"])

    run = fit(loaders, model=Both(), callbacks=[EchoCallback(FactorSchedule({0: 3.0}))], max_epochs=1)
    assert loaders["echoed"].factor == 3  # type: ignore[attr-defined]
    assert type(run.trainer.train_dataloader["plain"]) is DataLoader  # type: ignore[index]


def test_a_loader_that_is_passed_after_a_fit_with_an_echo_data_module_is_refused_with_the_ways_out() -> None:
    runner, model = trainer(callbacks=[EchoCallback(FactorSchedule({0: 2.5}))], max_epochs=1), Recorder()
    runner.fit(Recorder(), datamodule=echoed())
    runner.fit_loop.max_epochs = 2
    message = r"earlier fit, .*Pass EchoLoader\(loader, 1\) to fit, or use another Trainer"
    with pytest.raises(MisconfigurationException, match=message):
        runner.fit(model, passed(), Data().val_dataloader())
    assert model.batches == []


@pytest.mark.parametrize("model", [Recorder(), OwnLoaders(Data())], ids=["alone", "beside a model's own"])
def test_options_beside_an_echo_loader_are_refused_with_both_ways_out(model: Recorder) -> None:
    message = "EchoLoader is passed to fit, .*: pass the plain loader, or leave echo, factor and the other options out"
    with pytest.raises(MisconfigurationException, match=message):
        fit(EchoLoader(passed(), 2), model=model, callbacks=[callback()])
    assert model.batches == []
