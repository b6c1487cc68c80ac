"""EchoDataModule: the user's data module behaves as if it were attached itself."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from packaging.version import Version
from torch.utils.data import DataLoader, Subset
from trainer_runs import Data, Recorder, SaveAt, Scans, echoed, first_uses, fit, trainer

from lightning_echo import EchoDataModule, EchoLoader

HOOKS = (
    "prepare_data",
    "setup",
    "teardown",
    "on_exception",
    "state_dict",
    "load_state_dict",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)


class AllHooks(Data):
    """Overrides every hook there is and remembers the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.loaders = {name: DataLoader(Scans(6), 3) for name in ("val", "test", "predict")}

    def prepare_data(self) -> None:
        self.calls.append(("prepare_data",))

    def setup(self, stage: str) -> None:
        self.calls.append(("setup", stage, self.trainer is not None))

    def teardown(self, stage: str) -> None:
        self.calls.append(("teardown", stage, self.trainer is not None))

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(("on_exception", str(exception)))

    def state_dict(self) -> dict[str, Any]:
        self.calls.append(("state_dict",))
        return {"vocabulary": ["a", "b"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(("load_state_dict", state_dict))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("on_before_batch_transfer", dataloader_idx, self.trainer.state.stage.value))
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.calls.append(("transfer_batch_to_device", device, dataloader_idx))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("on_after_batch_transfer", dataloader_idx))
        return batch

    def train_dataloader(self) -> Any:
        self.calls.append(("train_dataloader",))
        return super().train_dataloader()

    def val_dataloader(self) -> Any:
        self.calls.append(("val_dataloader",))
        return self.loaders["val"]

    def test_dataloader(self) -> Any:
        self.calls.append(("test_dataloader",))
        return self.loaders["test"]

    def predict_dataloader(self) -> Any:
        self.calls.append(("predict_dataloader",))
        return self.loaders["predict"]


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
    assert {call[0] for call in expected} == set(HOOKS)
    assert whole_life(EchoDataModule(user, 2), user, tmp_path / "echoed") == expected


@pytest.mark.parametrize("user", [TrainOnly, AllHooks, Data])
def test_lightning_finds_exactly_the_hooks_that_the_user_overrides(user: Any) -> None:
    inner = user()
    data = EchoDataModule(inner, 2)
    always = {"setup", "teardown", "on_exception", "state_dict", "load_state_dict"}  # in each of which echoing has a part
    for name in set(HOOKS) - always:
        assert is_overridden(name, data, pl.LightningDataModule) == is_overridden(name, inner, pl.LightningDataModule), name


class OwnTransfer(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.transferred: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred.append("before")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.transferred.append("transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transferred.append("after")
        return {**batch, "noise": batch["noise"] * 0 + 0.5}


@pytest.mark.filterwarnings("ignore:You have overridden `.+` in `LightningModule` but have passed in a `LightningDataModule`")
def test_the_models_transfer_hooks_are_used_where_the_data_module_has_none() -> None:
    model = OwnTransfer()
    fit(echoed(2), model=model, max_epochs=1, limit_val_batches=0)
    assert model.transferred == ["before", "transfer", "after"] * 6
    assert {noise for _, noises in model.batches for noise in noises} == {(0.5, 0.5, 0.5)}


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_a_data_module_without_validation_trains_without_validation() -> None:
    run = fit(EchoDataModule(TrainOnly(), 2))
    assert run.model.steps == [6, 6, 6]
    assert run.model.validated_at == []


def test_hooks_that_were_set_on_the_instance_are_found() -> None:
    user: Any = pl.LightningDataModule()
    user.train_dataloader, user.val_dataloader = Data().train_dataloader, Data().val_dataloader
    run = fit(EchoDataModule(user, 2))
    assert run.model.steps == [6, 6, 6]
    assert run.model.validated_at == [6, 12, 18]


@pytest.mark.parametrize("on", ["the user's", "the echoing one"])
def test_hooks_that_are_set_on_an_instance_after_it_was_wrapped_are_called(on: str) -> None:
    user: Any = Data()
    data = EchoDataModule(user, 2)
    seen = []

    def on_after_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
        seen.append(dataloader_idx)
        return batch

    target: Any = user if on == "the user's" else data
    target.on_after_batch_transfer = on_after_batch_transfer
    target.val_dataloader = lambda: DataLoader(Scans(12), 4)
    run = fit(data, max_epochs=1)
    assert run.trainer.num_val_batches == [3]
    assert len(seen) == 6 + 3


@pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`"
)  # said before setup, as without echoing
def test_hooks_that_the_users_setup_puts_onto_the_instance_are_called() -> None:
    class InSetup(TrainOnly):
        def setup(self, stage: str) -> None:
            self.val_dataloader = lambda: DataLoader(Scans(12), 4)  # type: ignore[method-assign]

    run = fit(EchoDataModule(InSetup(), 2), max_epochs=1)
    assert run.trainer.num_val_batches == [3]


def test_validation_test_and_prediction_loaders_are_the_users_own_objects() -> None:
    user = AllHooks()
    data, runner = EchoDataModule(user, 2), trainer(max_epochs=1)
    runner.fit(Evaluated(), datamodule=data)
    assert runner.val_dataloaders is user.loaders["val"]
    runner.test(Evaluated(), datamodule=data, verbose=False)
    assert runner.test_dataloaders is user.loaders["test"]
    predicted = runner.predict(Evaluated(), datamodule=data)  # Lightning takes a copy of this one in any case
    assert runner.predict_dataloaders.dataset is user.loaders["predict"].dataset
    assert torch.cat(predicted).tolist() == list(range(6))  # type: ignore[arg-type]


def test_evaluating_never_asks_for_the_training_loader() -> None:
    data = EchoDataModule(Data(), 2)
    trainer().validate(Recorder(), datamodule=data, verbose=False)
    assert data.datamodule.asked == {"val": 1}  # type: ignore[attr-defined]


def test_the_trainer_is_the_users_too() -> None:
    user = Data()
    data = EchoDataModule(user, 2)
    assert user.trainer is data.trainer is None
    seen = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append(trainer.datamodule is data and user.trainer is data.trainer is trainer)

    fit(data, callbacks=[Look()], max_epochs=1)
    assert seen == [True]


class Named(Data):
    num_classes = 7

    def __init__(self, path: str = "here", size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokenizer = str.split

    def decode(self, text: str) -> str:
        return f"{self.hparams.path}: {text}"  # type: ignore[attr-defined]

    @property
    def mean(self) -> float:
        return self.hparams.size / 2  # type: ignore[attr-defined]


def test_whatever_is_read_from_or_set_on_trainer_datamodule_is_the_users() -> None:
    user = Named()
    found = []

    class Reads(Recorder):
        def on_train_start(self) -> None:
            data = self.trainer.datamodule
            found.extend([data.num_classes, data.tokenizer("a b"), data.decode("x"), data.mean, hasattr(data, "nothing")])
            data.temperature = 0.5
            data.tokenizer = str.upper

    fit(EchoDataModule(user, 2), model=Reads(), max_epochs=1)
    assert found == [7, ["a", "b"], "here: x", 2.0, False]
    assert user.temperature == 0.5
    assert user.tokenizer is str.upper
    with pytest.raises(AttributeError, match="'Named' object has no attribute 'nothing'"):
        _ = EchoDataModule(user, 2).nothing


def test_switches_of_the_base_class_are_the_users() -> None:
    user = Data()
    user.prepare_data_per_node, user.allow_zero_length_dataloader_with_multiple_devices = False, True
    data = EchoDataModule(user, 2)
    assert data.prepare_data_per_node is False
    assert data.allow_zero_length_dataloader_with_multiple_devices is True
    data.prepare_data_per_node = True
    assert user.prepare_data_per_node is True


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


def test_the_users_state_comes_back_to_it(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [6])
    fit(EchoDataModule(AllHooks(), 2), max_epochs=1, callbacks=[save])
    user = AllHooks()
    fit(EchoDataModule(user, 2), max_epochs=2, ckpt_path=save.path(6))
    assert ("load_state_dict", {"vocabulary": ["a", "b"]}) in user.calls


def test_the_model_gets_exactly_what_the_collate_function_made() -> None:
    class Marked(dict[str, Any]):
        """A type of the user's own."""

    def collate(examples: list[Any]) -> Marked:
        return Marked(torch.utils.data.default_collate(examples))

    kept = []

    class Keeps(Recorder):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            kept.append(batch)

    options = {"shuffle": True, "collate_fn": collate}
    fit(echoed(2, loader_options=options), model=Keeps(), max_epochs=2)
    assert all(type(batch) is Marked and set(batch) == {"index", "pid", "noise"} for batch in kept)
    assert len(kept) == 12


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


def test_a_reload_that_finds_the_same_data_goes_on_with_the_pass() -> None:
    whole = fit(echoed(workers=2), max_epochs=4).model
    run = fit(echoed(workers=2), max_epochs=4, reload_dataloaders_every_n_epochs=2)
    assert run.data.datamodule.asked["train"] == 2
    assert run.model.batches == whole.batches


def test_a_reload_that_returns_the_same_loader_keeps_its_workers() -> None:
    data = EchoDataModule.from_dataloaders(Data(2).train_dataloader(), Data().val_dataloader(), factor=2)
    run = fit(data, reload_dataloaders_every_n_epochs=1)
    assert len(set().union(*run.model.pids)) == 2


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


def test_the_factor_can_be_set_before_there_is_a_loader() -> None:
    data = echoed(2)
    with pytest.raises(MisconfigurationException, match="no EchoLoader is in use"):
        _ = data.loader
    data.factor = 4
    run = fit(data, max_epochs=8)
    assert run.loader.counts.factor == pytest.approx(4, rel=0.2)


def test_a_factor_set_on_the_loader_is_the_data_modules_too() -> None:
    data = echoed(2)

    class OnTheLoader(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            trainer.train_dataloader.factor = 1  # type: ignore[union-attr]

    run = fit(data, callbacks=[OnTheLoader()], max_epochs=2)
    assert data.factor == 1
    assert [len(new) for new in first_uses(run.model.batches)][6:] == [4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copied", "pickled"])
def test_a_copy_trains_by_itself(duplicate: Any) -> None:
    data = echoed(workers=0)
    other = duplicate(data)
    run = fit(other)
    assert run.model.batches == fit(echoed()).model.batches
    assert other.datamodule.asked["train"] == 1
    assert data.datamodule.asked["train"] == 0  # type: ignore[attr-defined]


def test_a_loader_that_is_echoed_already_is_refused() -> None:
    class Twice(Data):
        def train_dataloader(self) -> Any:
            return EchoLoader(super().train_dataloader(), 2)

    with pytest.raises(MisconfigurationException, match="returns an EchoLoader already"):
        fit(EchoDataModule(Twice(), 2))


def test_a_data_module_that_is_wrapped_already_is_refused() -> None:
    with pytest.raises(ValueError, match="EchoDataModule already"):
        EchoDataModule(echoed(2), 2)


def test_a_data_module_without_a_training_loader_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="LightningDataModule has no train_dataloader"):
        EchoDataModule(pl.LightningDataModule(), 2)


@pytest.mark.parametrize("given", [DataLoader(range(4)), None, 3])  # type: ignore[arg-type]
def test_what_is_no_data_module_is_refused_with_the_way_out(given: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a LightningDataModule, got .*from_dataloaders"):
        EchoDataModule(given, 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"factor": 0.5}, ValueError, "factor must be a finite number >= 1, got 0.5"),
        ({"factor": "2x"}, TypeError, "factor must be a real number"),
        ({"factor": 2, "insertion_point": "before"}, ValueError, "insertion_point must be one of 'after_read'"),
        ({"factor": 2, "buffer_size": 0}, ValueError, "buffer_size must be at least 1, got 0"),
        ({"factor": 2, "epoch_length": "long"}, ValueError, "epoch_length must be 'fixed' or 'full_pass', got 'long'"),
        ({"factor": 2, "seed": 1.5}, TypeError, "seed must be an integer"),
    ],
)
def test_bad_options_are_refused_at_once(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoDataModule(Data(), **options)


def test_whether_to_shard_is_a_truth_value() -> None:
    with pytest.raises(TypeError, match="shard must be True or False, got 'no'"):
        EchoDataModule(Data(), 2, shard="no")  # type: ignore[arg-type]


@pytest.mark.slow
def test_objects_of_the_package_pytorch_lightning_are_refused_with_the_ways_out_of_which_one_works() -> None:
    """In a process of its own: importing the other package warns, and slows every other test down.

    Up to 2.5, its Trainer fails at any callback of ours before that callback is asked ("Expected a parent").
    """
    script = """
import pytorch_lightning
from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, StallAnalyzer, TargetIdle

class Theirs(pytorch_lightning.LightningDataModule):
    def train_dataloader(self):
        return plain

def fit(data, **options):
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1, limit_val_batches=0, **options
    )
    trainer.fit(BoringModel(), **data)
    return trainer.global_step

plain = DataLoader(RandomDataset(32, 8))
ours = EchoDataModule.from_dataloaders(plain, factor=2)
attempts = (
    lambda: EchoDataModule(Theirs(), 2),
    lambda: fit({"datamodule": ours}),
    lambda: StallAnalyzer(BoringModel(), Theirs()).run(4),
)
with_callbacks = (
    lambda: fit({"datamodule": Theirs()}, callbacks=[EchoCallback(echo=EchoConfig(factor=2))]),
    lambda: fit({"train_dataloaders": EchoLoader(plain, 2)}, callbacks=[EchoCallback(TargetIdle())]),
)
try:
    fit({"train_dataloaders": plain}, callbacks=[EchoCallback()])
    takes_ours = True
except ValueError as error:
    assert str(error) == "Expected a parent", error
    takes_ours = False
print("takes ours:", takes_ours)
for attempt in (*attempts, *(with_callbacks if takes_ours else ())):
    try:
        attempt()
    except TypeError as error:
        print("refused:", error)
print("steps:", fit({"train_dataloaders": EchoLoader(plain, 2)}, callbacks=[EchoCallback()] if takes_ours else []))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    takes_ours = "takes ours: True" in done.stdout.splitlines()
    assert len(refused) == (5 if takes_ours else 3), done.stdout + done.stderr[-2000:]
    assert takes_ours or Version(version("pytorch-lightning")) < Version("2.6"), done.stdout
    for words in ("pytorch_lightning", "import lightning.pytorch as pl", "pass EchoLoader(loader, factor) to fit"):
        assert all(words in line for line in refused), refused
    assert "steps: 8" in done.stdout.splitlines()
