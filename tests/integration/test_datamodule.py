"""EchoDataModule: the user's data module behaves as if it were attached itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Subset
from trainer_runs import Data, Recorder, SaveAt, Scans, fit, trainer

from lightning_echo import EchoDataModule

HOOKS = {
    *("prepare_data", "setup", "teardown", "on_exception", "state_dict", "load_state_dict"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
}


class AllHooks(Data):
    """Overrides every hook there is and remembers the calls: name, arguments but for batches, stage of the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []


def _remembering(name: str) -> Any:
    def hook(self: AllHooks, *args: Any, **kwargs: Any) -> Any:
        told = [str(each) for each in (*args, *kwargs.values()) if not (isinstance(each, dict) and "index" in each)]
        self.calls.append((name, *told, self.trainer and self.trainer.state.stage))
        if name == "state_dict":
            return {"vocabulary": ["a", "b"]}
        if "transfer" in name:
            return args[0]
        return getattr(Data, name.replace("test", "val").replace("predict", "val"))(self, *args, **kwargs)

    return hook


for _name in HOOKS:
    setattr(AllHooks, _name, _remembering(_name))


class TrainOnly(pl.LightningDataModule):
    """Overrides nothing but what it must."""

    def train_dataloader(self) -> Any:
        return DataLoader(Scans(), 4)


class Evaluated(Recorder):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["index"]


def whole_life(attached: Any, user: AllHooks, folder: Path) -> list[tuple[Any, ...]]:
    """Calls that the user's module gets in fit, a resumed fit that fails, validate, test and predict."""

    class Fails(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            raise RuntimeError("on purpose")

    folder.mkdir()
    save = SaveAt(folder, [6])
    model = Evaluated()
    fit(attached, model=model, max_epochs=2, callbacks=[save])
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(attached, max_epochs=2, ckpt_path=save.path(6), callbacks=[Fails()])
    for stage in ("validate", "test", "predict"):
        getattr(trainer(), stage)(model, datamodule=attached)
    return user.calls


def test_every_hook_of_the_users_is_called_when_it_would_be_without_echoing(tmp_path: Path) -> None:
    plain, user = AllHooks(), AllHooks()
    expected = whole_life(plain, plain, tmp_path / "plain")
    assert {call[0] for call in expected} == HOOKS
    assert whole_life(EchoDataModule(user, 2), user, tmp_path / "echoed") == expected


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")  # said before setup
def test_hooks_that_the_users_setup_puts_onto_the_instance_are_called() -> None:
    class InSetup(TrainOnly):
        def setup(self, stage: str) -> None:
            self.val_dataloader = lambda: DataLoader(Scans(12), 4)  # type: ignore[method-assign]

    run = fit(EchoDataModule(InSetup(), 2), max_epochs=1)
    assert run.trainer.num_val_batches == [3]


def test_hyperparameters_are_the_users_also_in_the_checkpoint(tmp_path: Path) -> None:
    class Named(Data):
        def __init__(self, path: str = "here", size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

    user, save = Named("there", 8), SaveAt(tmp_path, [6])
    data = EchoDataModule(user, 2)
    assert dict(data.hparams) == dict(data.hparams_initial) == {"path": "there", "size": 8}
    fit(data, max_epochs=1, callbacks=[save])
    saved = torch.load(save.path(6), weights_only=True)
    assert saved["datamodule_hyper_parameters"] == {"path": "there", "size": 8}
    assert Named.load_from_checkpoint(save.path(6)).hparams == user.hparams


class Moving(Data):
    """Another data set each time it is asked, as with a growing corpus."""

    def __init__(self, lengths: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.lengths = lengths

    def train_dataloader(self) -> Any:
        number = self.asked["train"]
        self.asked["train"] += 1
        start = sum(self.lengths[:number])
        part = Subset(Scans(1000), range(start, start + self.lengths[number]))
        return DataLoader(part, self.batch_size, shuffle=True, num_workers=self.workers)


CUT = "ignore:lightning_echo. a new loader was made within a pass"


@pytest.mark.filterwarnings(CUT)
@pytest.mark.parametrize(("workers", "lengths", "limit"), [(0, [22, 22, 22], 2), (1, [22, 42, 10], 1.0)])
def test_the_users_own_reload_trains_on_what_it_now_returns(workers: int, lengths: list[int], limit: float) -> None:
    user = Moving(lengths, workers=workers)
    data = EchoDataModule(user, 2, seed=7, insertion_point="after_augmentation")
    run = fit(data, reload_dataloaders_every_n_epochs=1, limit_train_batches=limit)
    steps = [min(-(-length // 4), 2 if limit == 2 else length) for length in lengths]
    assert run.model.steps == steps
    assert run.model.validated_at == [sum(steps[: i + 1]) for i in range(3)]
    assert user.asked["train"] == 3
    for number, epoch in enumerate(run.model.by_epoch):
        start = sum(lengths[:number])
        assert {index for indices, _ in epoch for index in indices} <= set(range(start, start + lengths[number]))
    assert run.loader.counts.delivered == sum(len(indices) for indices, _ in run.model.batches)
    assert run.trainer.reload_dataloaders_every_n_epochs == 1


@pytest.mark.filterwarnings(CUT)
@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_a_reload_of_the_users_and_a_new_factor_go_together(epoch_length: str) -> None:
    data = EchoDataModule(Moving([22, 42, 10]), 2, seed=7, epoch_length=epoch_length)

    class AtStartAndEnd(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            data.factor = 4

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if epoch_length == "fixed" and trainer.current_epoch:
                data.factor = 3  # before the first batch of a loader that is new

    run = fit(data, reload_dataloaders_every_n_epochs=1, callbacks=[AtStartAndEnd()])
    assert run.model.steps == ([6, 11, 3] if epoch_length == "fixed" else [2 * 6, 4 * 11, 4 * 3])
    assert run.data.factor == run.loader.factor == 4
    assert run.trainer.reload_dataloaders_every_n_epochs == 1


# ---------------------------------------------------------------------- in a plain LightningCLI

QUIET = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}


class Saves(Data):
    """Records its hyperparameters, but not for the logger, and uses them."""

    def __init__(self, batch_size: int = 8, path: str = "here") -> None:
        super().__init__(batch_size=batch_size)
        self.save_hyperparameters(logger=False)

    def train_dataloader(self) -> Any:
        self.batch_size = self.hparams.batch_size
        return super().train_dataloader()


def saved_by(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Recorder, dict[str, Any]]:
    """The model that LightningCLI trained, and a checkpoint of its first epoch."""
    monkeypatch.setattr(sys, "argv", ["program"])
    save = SaveAt(folder, [3])
    options: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(Recorder, args=["fit", *arguments], trainer_defaults={**QUIET, **HIDDEN, "callbacks": [save]}, **options)
    found = torch.load(save.path(3), weights_only=True)
    for name in ("_class_path", "_instantiator"):  # what newer versions of LightningCLI note for themselves
        found["datamodule_hyper_parameters"].pop(name, None)
    return cli.model, found


def test_hyperparameters_are_recorded_as_without_echoing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{Saves.__module__}.{Saves.__name__}"
    plain, expected = saved_by(tmp_path, monkeypatch, f"--data={path}", "--data.batch_size=4")
    outer = ["--data=lightning_echo.EchoDataModule", "--data.factor=2.5", f"--data.datamodule={path}"]
    model, found = saved_by(tmp_path, monkeypatch, *outer, "--data.datamodule.batch_size=4")
    assert expected["datamodule_hyper_parameters"]["batch_size"] == 4
    for name in ("datamodule_hyper_parameters", "datamodule_hparams_name"):
        assert found[name] == expected[name]
    assert model.sizes == plain.sizes == [[4, 4, 4, 4, 4, 2]]
    assert model.trainer.datamodule.factor == 2.5  # type: ignore[attr-defined]
    inner = model.trainer.datamodule.datamodule  # type: ignore[attr-defined]
    assert inner.hparams_initial == inner.hparams
    assert inner.hparams.batch_size == Saves.load_from_checkpoint(tmp_path / "step-3.ckpt").hparams.batch_size == 4
    assert inner._log_hyperparams is False  # what the user said about the logger


def test_other_hyperparameters_are_left_alone() -> None:
    """Of a wrapper of the user's own, with an option of the same name."""
    user, given = Saves(batch_size=4), {"class_path": "elsewhere.Other", "init_args": {"batch_size": 2}}
    user.hparams.clear()
    user.save_hyperparameters({"datamodule": given, "_instantiator": "lightning.pytorch.cli.instantiate_module"})
    EchoDataModule(user, 2)
    assert user.hparams["datamodule"] == given
