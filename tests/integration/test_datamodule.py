"""EchoDataModule: the user's data module behaves as if it were attached itself."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from packaging.version import Version
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


class Named(Data):
    def __init__(self, path: str = "here", size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_are_the_users_also_in_the_checkpoint(tmp_path: Path) -> None:
    plain, user = Named("there", 8), Named("there", 8)
    data = EchoDataModule(user, 2)
    assert dict(data.hparams) == {"path": "there", "size": 8}
    assert dict(data.hparams_initial) == dict(plain.hparams_initial)
    (tmp_path / "plain").mkdir()
    fit(plain, max_epochs=1, callbacks=[SaveAt(tmp_path / "plain", [6])])
    fit(data, max_epochs=1, callbacks=[SaveAt(tmp_path, [6])])
    saved, expected = (torch.load(path / "step-6.ckpt", weights_only=True) for path in (tmp_path, tmp_path / "plain"))
    assert expected["datamodule_hyper_parameters"] == {"path": "there", "size": 8}
    for key in ("datamodule_hyper_parameters", "datamodule_hparams_name"):
        assert saved.get(key) == expected.get(key)
    restored = Named.load_from_checkpoint(tmp_path / "step-6.ckpt")
    assert restored.hparams == user.hparams


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


@pytest.mark.grid
@pytest.mark.filterwarnings(CUT)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lengths", [[22, 22, 22], [22, 42, 10]])
@pytest.mark.parametrize("limit", [1.0, 2])
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
@pytest.mark.parametrize("lengths", [[22, 22, 22], [22, 42, 10]])
@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_a_reload_of_the_users_and_a_new_factor_go_together(lengths: list[int], epoch_length: str) -> None:
    data = EchoDataModule(Moving(lengths), 2, seed=7, epoch_length=epoch_length)

    class AtStartAndEnd(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            data.factor = 4

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if epoch_length == "fixed" and trainer.current_epoch:
                data.factor = 3  # before the first batch of a loader that is new

    run = fit(data, reload_dataloaders_every_n_epochs=1, callbacks=[AtStartAndEnd()])
    batches = [-(-length // 4) for length in lengths]
    factors = [1, 1, 1] if epoch_length == "fixed" else [2, 4, 4]
    assert run.model.steps == [count * factor for count, factor in zip(batches, factors, strict=True)]
    assert run.data.factor == run.loader.factor == 4
    assert run.trainer.reload_dataloaders_every_n_epochs == 1


def test_whether_to_shard_is_a_truth_value() -> None:
    with pytest.raises(TypeError, match="shard must be True or False, got 'no'"):
        EchoDataModule(Data(), 2, shard="no")  # type: ignore[arg-type]


OF_THE_OTHER_PACKAGE = """
import pytorch_lightning
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from lightning_echo import EchoCallback, EchoDataModule, EchoLoader, StallAnalyzer, TargetIdle

class Theirs(pytorch_lightning.LightningDataModule):
    def train_dataloader(self):
        return plain

def fit(*data, datamodule=None, callbacks=()):
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1, "limit_val_batches": 0}
    trainer = pytorch_lightning.Trainer(**quiet, callbacks=list(callbacks))
    trainer.fit(BoringModel(), *data, datamodule=datamodule)
    return trainer.global_step

plain = DataLoader(RandomDataset(32, 8))
attempts = [
    lambda: EchoDataModule(Theirs(), 2),
    lambda: fit(datamodule=EchoDataModule.from_dataloaders(plain, factor=2)),
    lambda: StallAnalyzer(BoringModel(), Theirs()).run(4),
]
try:
    fit(plain, callbacks=[EchoCallback()])
    attempts.append(lambda: fit(datamodule=Theirs(), callbacks=[EchoCallback(factor=2)]))
    attempts.append(lambda: fit(EchoLoader(plain, 2), callbacks=[EchoCallback(TargetIdle())]))
except ValueError as error:
    assert str(error) == "Expected a parent", error
for attempt in attempts:
    try:
        attempt()
    except TypeError as error:
        print("refused:", error)
print("steps:", fit(EchoLoader(plain, 2), callbacks=[EchoCallback()] if len(attempts) > 3 else []))
"""


@pytest.mark.slow
def test_objects_of_the_package_pytorch_lightning_are_refused_with_the_ways_out_of_which_one_works() -> None:
    """In a process of its own: importing the other package warns, and slows every other test down.

    Up to 2.5, its Trainer fails at any callback of ours before that callback is asked ("Expected a parent").
    """
    command = [sys.executable, "-c", OF_THE_OTHER_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    takes_ours = Version(version("pytorch-lightning")) >= Version("2.6")
    assert len(refused) == (5 if takes_ours else 3), done.stdout + done.stderr[-2000:]
    for words in ("pytorch_lightning", "import lightning.pytorch as pl", "pass EchoLoader(loader, factor) to fit"):
        assert all(words in line for line in refused), refused
    assert "steps: 8" in done.stdout.splitlines()
