"""EchoCallback puts echoing between Lightning and the user's train_dataloader, and takes it away again."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import (
    POINTS,
    At,
    Data,
    Killed,
    Recorder,
    Run,
    SaveAt,
    echoed,
    first_uses,
    fit,
    fresh_stream,
    trainer,
)

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, TargetIdle

CONFIG = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says


def config(**options: Any) -> EchoConfig:
    return EchoConfig(**{**CONFIG, **options})


def callback(**options: Any) -> EchoCallback:
    return EchoCallback(echo=config(**options))


def keeps(factor: float) -> FactorSchedule:
    """A controller that never changes the factor."""
    return FactorSchedule({0: factor})


class OwnLoaders(Recorder):
    """A model that has its data itself."""

    def __init__(self, data: Data | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.data = data or Data()

    def train_dataloader(self) -> Any:
        return self.data.train_dataloader()

    def val_dataloader(self) -> Any:
        return self.data.val_dataloader()


def fit_alone(model: Any, *, ckpt_path: Any = None, **options: Any) -> Run:
    """Trains a model that has its data itself."""
    run = Run(model, None, trainer(**options))
    run.trainer.fit(model, ckpt_path=ckpt_path)
    return run


def is_bound(instance: Any) -> bool:
    return "train_dataloader" in vars(instance)


# ---------------------------------------------------------------------- what is echoed


@pytest.mark.grid
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_data_module_is_echoed_as_by_an_echo_data_module(point: str, workers: int) -> None:
    user, seen = Data(workers), []
    look = At({1: lambda trainer: seen.append(trainer.datamodule is user)})
    run = fit(user, callbacks=[callback(insertion_point=point), look])
    expected = fit(echoed(point=point, workers=workers))
    assert run.model.batches == expected.model.batches
    assert run.model.validated_at == expected.model.validated_at
    assert run.model.weights == expected.model.weights
    assert seen == [True]


def test_every_fresh_example_of_a_models_own_loader_is_used_factor_times() -> None:
    model = fit_alone(OwnLoaders(Data(length=64)), max_epochs=6, callbacks=[callback(factor=2)]).model
    fresh = fresh_stream(model.batches)
    assert model.steps == [16] * 6
    assert set(fresh[:64]) == set(range(64))
    assert abs(len(fresh) - 6 * 64 / 2) <= 8
    assert model.validated_at == [16 * (epoch + 1) for epoch in range(6)]


def test_a_controller_alone_echoes_too() -> None:
    seen: list[Any] = []
    look = At({0: lambda trainer: seen.append(type(trainer.train_dataloader))})
    run = fit(Data(), callbacks=[EchoCallback(keeps(1)), look])
    assert seen == [EchoLoader]
    assert [len(new) for new in first_uses(run.model.batches)] == [4, 4, 4, 4, 4, 2] * 3


def test_a_callback_with_neither_leaves_the_run_as_it_is() -> None:
    seen: list[Any] = []
    look = At({0: lambda trainer: seen.extend([type(trainer.train_dataloader), is_bound(trainer.datamodule)])})
    fit(Data(), callbacks=[EchoCallback(), look])
    assert seen == [DataLoader, False]
    loader = EchoLoader(Data().train_dataloader(), 2)
    fit(loader, callbacks=[EchoCallback(), At({0: lambda trainer: seen.append(loader.factor_owner)})])
    assert seen[2:] == [""]


def test_a_data_module_that_hands_on_the_models_loader_is_echoed_once() -> None:
    class HandsOn(Data):
        def train_dataloader(self) -> Any:
            return self.trainer.model.train_dataloader()  # type: ignore[union-attr, operator]

    run = fit(HandsOn(), model=OwnLoaders(), callbacks=[callback()])
    assert run.model.batches == fit(echoed()).model.batches


def test_code_that_asks_the_hook_itself_gets_the_echoed_loader_and_disturbs_nothing() -> None:
    class Asks(Recorder):
        def configure_optimizers(self) -> Any:
            self.length = len(self.trainer.datamodule.train_dataloader())
            return super().configure_optimizers()

    run = fit(Data(), model=Asks(), callbacks=[callback()])
    assert run.model.length == 6
    assert run.model.batches == fit(echoed()).model.batches


def test_evaluating_binds_and_asks_nothing() -> None:
    user = Data()

    class Look(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            assert not is_bound(user)

    trainer(callbacks=[callback(), Look()]).validate(Recorder(), datamodule=user, verbose=False)
    assert user.asked == {"val": 1}


def test_overfit_batches_are_not_echoed() -> None:
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        model = fit(Data(), overfit_batches=2, callbacks=[callback()]).model
    assert [[indices for indices, _ in epoch] for epoch in model.by_epoch] == [[(0, 1, 2, 3), (4, 5, 6, 7)]] * 3


@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_a_new_factor_is_in_force_with_the_next_epoch(epoch_length: str) -> None:
    echo = EchoCallback(echo=config(factor=1, epoch_length=epoch_length))
    change = At({0: lambda trainer: setattr(echo.attachment.echo, "factor", 3)})
    run = fit(Data(2), callbacks=[echo, change])
    expected = [6, 6, 6] if epoch_length == "fixed" else [6, 18, 18]
    assert run.model.steps == expected
    assert run.model.validated_at == [sum(expected[: i + 1]) for i in range(3)]
    assert run.data.asked == {"train": 1, "val": 1}
    assert run.trainer.reload_dataloaders_every_n_epochs == 0


def test_full_pass_takes_a_factor_through_the_callback_alone() -> None:
    def on_the_loader(trainer: pl.Trainer) -> None:
        with pytest.raises(AttributeError, match=r"Set \.factor on the EchoCallback instead"):
            trainer.train_dataloader.factor = 3  # type: ignore[union-attr]

    fit(Data(), callbacks=[callback(epoch_length="full_pass"), At({0: on_the_loader})], max_epochs=1)


def test_the_users_own_reload_asks_the_user_again() -> None:
    run = fit(Data(), callbacks=[callback()], reload_dataloaders_every_n_epochs=1)
    assert run.data.asked["train"] == 3
    assert run.model.batches == fit(echoed()).model.batches


# ---------------------------------------------------------------------- no trace


@pytest.mark.parametrize("ending", ["at its end", "with an exception"])
def test_nothing_is_left_on_data_module_model_and_machine_after_fit(ending: str) -> None:
    processes = set(psutil.Process().children(recursive=True))
    user, model = Data(2), OwnLoaders()

    def last(trainer: pl.Trainer) -> None:
        assert is_bound(user)
        if ending == "with an exception":
            raise Killed

    run = Run(model, user, trainer(callbacks=[callback(), At({2: last})]))
    if ending == "with an exception":
        with pytest.raises(Killed):
            run.trainer.fit(model, datamodule=user)
    else:
        run.trainer.fit(model, datamodule=user)
    assert not is_bound(user)
    assert not is_bound(model)
    assert type(user.train_dataloader()) is DataLoader
    assert not {each for each in psutil.Process().children(recursive=True) if each.is_running()} - processes
    assert run.trainer.reload_dataloaders_every_n_epochs == 0


@pytest.mark.parametrize("ending", ["at its end", "with an exception"])
def test_the_trainers_own_setting_is_back_after_fit_also_where_no_epoch_follows_the_new_factor(ending: str) -> None:
    echo = callback(epoch_length="full_pass", factor=2)

    def last(trainer: Any) -> None:
        echo.attachment.echo.factor = 3
        assert trainer.reload_dataloaders_every_n_epochs == 1
        if ending == "with an exception":
            raise Killed

    run = Run(Recorder(), Data(), trainer(max_epochs=2, callbacks=[echo, At({1: last})]))
    with contextlib.suppress(Killed):
        run.trainer.fit(run.model, datamodule=run.data)
    assert run.model.steps == [12, 12]
    assert run.trainer.reload_dataloaders_every_n_epochs == 0  # type: ignore[attr-defined]


def test_an_attribute_of_the_instance_that_was_there_before_is_put_back() -> None:
    user: Any = pl.LightningDataModule()  # as LightningDataModule.from_datasets makes them
    user.train_dataloader, user.val_dataloader = Data().train_dataloader, Data().val_dataloader
    before = user.train_dataloader
    run = fit(user, callbacks=[callback()])
    assert user.train_dataloader is before
    assert run.model.batches == fit(echoed()).model.batches


def test_a_hook_that_somebody_else_has_put_there_meanwhile_is_left_alone() -> None:
    user: Any = Data()
    other = Data().train_dataloader
    fit(user, callbacks=[callback(), At({0: lambda trainer: setattr(user, "train_dataloader", other)})])
    assert user.train_dataloader == other


def test_detaching_twice_or_without_having_been_attached_does_nothing() -> None:
    echo = callback()
    echo.attachment.detach()
    run = fit(Data(), callbacks=[echo])
    echo.attachment.detach()
    echo.on_exception(run.trainer, run.model, Killed())
    assert not is_bound(run.data)


@pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`:FutureWarning")  # torch 2.4, of pickle
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copied", "pickled"])
def test_a_copy_of_the_model_made_during_training_has_its_own_plain_hook(duplicate: Any) -> None:
    copies = []
    at_end = At({0: lambda trainer: copies.append(duplicate(trainer.lightning_module))})
    fit_alone(OwnLoaders(), callbacks=[callback(), at_end], max_epochs=2)
    loader = copies[0].train_dataloader()
    assert type(loader) is DataLoader
    run = fit_alone(copies[0], callbacks=[callback()], max_epochs=1)
    assert run.model.data.asked["train"] == 3  # of the original before it was copied, just now, and of the run
    assert not isinstance(copies[0].train_dataloader(), EchoLoader)


@pytest.mark.filterwarnings("ignore:.*swa_lrs.*", "ignore:Swapping scheduler")
def test_weight_averaging_which_copies_the_model_works_beside_it() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    run = fit_alone(OwnLoaders(), callbacks=[callback(), averaging])
    assert run.model.steps == [6, 6, 6]


# ---------------------------------------------------------------------- loaders that are echoed already


class Echoes(Data):
    """A data module that echoes by itself."""

    def train_dataloader(self) -> Any:
        return EchoLoader(super().train_dataloader(), 3, insertion_point="after_augmentation", seed=7)


def test_options_for_a_loader_that_is_echoed_already_are_refused_with_both_ways_out() -> None:
    message = r"returns an EchoLoader already: return the plain loader, or leave echo out of EchoCallback"
    with pytest.raises(MisconfigurationException, match=message):
        fit(Echoes(), callbacks=[callback()])


def test_with_a_controller_alone_a_loader_that_is_echoed_already_is_taken_as_it_is() -> None:
    echo = EchoCallback(keeps(3))
    run = fit(Echoes(), callbacks=[echo])
    assert run.model.batches == fit(Echoes()).model.batches
    used = echo.attachment.echo.loader
    assert used is run.trainer.train_dataloader
    assert used is not None
    assert used.factor_owner == ""  # it is the user's own again
    assert used.limit_train_batches is None


@pytest.mark.parametrize("passed", [False, True], ids=["of a data module", "passed to fit"])
def test_the_first_factor_of_a_controller_is_that_of_a_users_echo_loader_too(passed: bool) -> None:
    data = Echoes().train_dataloader() if passed else Echoes()
    run = fit(data, callbacks=[EchoCallback(keeps(1))])
    assert [len(new) for new in first_uses(run.model.batches)] == [4, 4, 4, 4, 4, 2] * 3


def test_a_users_echo_loader_that_changes_with_each_reload_goes_on() -> None:
    run = fit(Echoes(), callbacks=[EchoCallback(keeps(3))], reload_dataloaders_every_n_epochs=1)
    assert run.model.batches == fit(Echoes()).model.batches
    assert run.data.asked["train"] == 3


def test_an_echo_loader_passed_to_fit_is_taken_by_a_controller() -> None:
    echo, loader = EchoCallback(keeps(3)), Echoes().train_dataloader()
    owners: list[str] = []
    note = {epoch: lambda trainer: owners.append(loader.factor_owner) for epoch in (0, 3)}
    runner = trainer(callbacks=[echo, At(note)])
    models = [Recorder(), Recorder()]
    for model in models:
        runner.fit_loop.max_epochs += 3 * (model is models[1])  # type: ignore[operator]
        runner.fit(model, loader, Data().val_dataloader())
        assert echo.attachment.echo.loader is loader
        assert loader.factor_owner == ""
    assert owners == ["EchoCallback", "EchoCallback"]
    whole = fit(Echoes().train_dataloader(), max_epochs=6).model
    assert models[0].batches + models[1].batches == whole.batches


def test_with_a_controller_an_echo_data_module_stays_as_it_is() -> None:
    data = echoed()
    bound: list[bool] = []
    run = fit(data, callbacks=[EchoCallback(keeps(2.5)), At({0: lambda trainer: bound.append(is_bound(data))})])
    assert bound == [False]
    assert run.model.batches == fit(echoed()).model.batches
    assert data.loader.factor_owner == "EchoDataModule"


def test_options_beside_an_echo_data_module_are_refused_with_the_way_out() -> None:
    with pytest.raises(MisconfigurationException, match=r"echoed twice.*leave echo out of EchoCallback.*\.datamodule"):
        fit(echoed(), callbacks=[callback()])


# ---------------------------------------------------------------------- which loader it is


def test_a_models_own_loader_is_echoed_also_after_a_fit_with_a_data_module() -> None:
    runner = trainer(callbacks=[callback()])
    runner.fit(Recorder(), datamodule=Data())
    runner.fit_loop.max_epochs = 6
    model = OwnLoaders()
    runner.fit(model)
    assert model.batches == fit(echoed(), max_epochs=6).model.batches[18:]


def test_loaders_with_nothing_to_echo_are_left_alone() -> None:
    run = fit(Data().train_dataloader(), callbacks=[EchoCallback()])
    assert run.model.steps == [6, 6, 6]


# ---------------------------------------------------------------------- going on


@pytest.mark.parametrize("of_model", [False, True], ids=["data module", "model's own"])
def test_a_second_fit_of_the_same_trainer_goes_on(of_model: bool) -> None:
    whole = fit(echoed(workers=2), max_epochs=5).model
    user, models = Data(2), [OwnLoaders(Data(2)), OwnLoaders(Data(2))]
    runner = trainer(callbacks=[callback()], max_epochs=2)
    for model, epochs in zip(models, (2, 5), strict=True):
        runner.fit_loop.max_epochs = epochs
        runner.fit(model, datamodule=None if of_model else user)
    assert models[0].batches + models[1].batches == whole.batches


@pytest.mark.grid
@pytest.mark.parametrize("reads_stepping", [False, True])
@pytest.mark.parametrize("of_model", [False, True], ids=["data module", "model's own"])
@pytest.mark.parametrize(
    ("point", "step", "limit"), [("before_augmentation", 8, 1.0), ("after_batching", 11, 1.0), ("after_augmentation", 10, 5)]
)
def test_a_run_resumes_exactly(reads_stepping: bool, of_model: bool, point: str, step: int, limit: Any, tmp_path: Path) -> None:
    def run(*callbacks: Any, **options: Any) -> Run:
        model = OwnLoaders(Data(2), reads_stepping=reads_stepping)
        options = {"callbacks": [callback(insertion_point=point), *callbacks], "limit_train_batches": limit, **options}
        return fit_alone(model, **options) if of_model else fit(Data(2), model=model, **options)

    whole, save = run(), SaveAt(tmp_path, [step], dies=True)
    with pytest.raises(Killed):
        run(save)
    resumed = run(ckpt_path=save.path(step))
    assert resumed.model.batches == whole.model.batches[step:]
    assert resumed.model.epochs == whole.model.epochs[step:]
    assert resumed.model.weights == whole.model.weights


def test_a_checkpoint_of_a_run_without_echoing_resumes_with_it_and_with_the_data_modules_state(tmp_path: Path) -> None:
    class Remembers(Data):
        found: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"vocabulary": ["a"]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.found = state_dict

    save = SaveAt(tmp_path, [6])
    fit(Remembers(), max_epochs=1, callbacks=[save])
    run = fit(Remembers(), callbacks=[callback()], ckpt_path=save.path(6))
    assert run.data.found == {"vocabulary": ["a"]}
    assert run.model.batches == fit(echoed(), max_epochs=2).model.batches


def test_what_is_saved_loads_with_weights_only(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    fit(Data(), callbacks=[callback(), save])
    saved = torch.load(save.path(8), weights_only=True)
    assert saved["callbacks"]["EchoCallback"]["loader"]["delivered"] == 8


def test_a_state_is_not_kept_by_a_callback_that_does_not_echo(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [6])
    fit(echoed(), max_epochs=1, callbacks=[save, EchoCallback()])
    other = EchoCallback()
    fit(echoed(), ckpt_path=save.path(6), callbacks=[other])
    assert other.attachment.echo.state_dict() is None


def test_the_learning_rate_finder_leaves_position_and_counts_as_they_were(tmp_path: Path) -> None:
    class Rated(Recorder):
        lr = 0.05

    echo = callback(factor=2)
    finder = LearningRateFinder(num_training_steps=5, early_stop_threshold=None, update_attr=False)
    run = fit(Data(length=300), model=Rated(), max_epochs=1, default_root_dir=tmp_path, callbacks=[echo, finder])
    expected = fit(echoed(2, length=300), max_epochs=1).model.batches
    trained = run.model.batches[5:]  # in Lightning 2.5.0 the trial's steps are taken off the epoch
    assert len(trained) >= 70
    assert trained == expected[: len(trained)]
    assert echo.attachment.echo.loader is not None
    assert echo.attachment.echo.loader.counts.delivered == sum(len(indices) for indices, _ in trained)


# ---------------------------------------------------------------------- misuse


@pytest.mark.parametrize("echo", [EchoCallback(echo=EchoConfig(factor=2)), EchoCallback(TargetIdle())])
def test_a_trainer_of_the_package_pytorch_lightning_is_refused_with_the_ways_out(echo: EchoCallback) -> None:
    theirs = type("Trainer", (), {"__module__": "pytorch_lightning.trainer.trainer", "callbacks": [echo], "datamodule": Data()})
    with pytest.raises(TypeError, match=r"trainer Trainer comes from the separate package pytorch_lightning.*EchoLoader\(loader"):
        echo.setup(theirs(), Recorder(), "fit")


def test_two_callbacks_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `EchoCallback`"):  # Lightning's own words
        trainer(callbacks=[callback(), EchoCallback()])
    runner = trainer(callbacks=[callback()])
    runner.callbacks.append(EchoCallback())  # type: ignore[attr-defined]
    with pytest.raises(MisconfigurationException, match=r"has 2 EchoCallbacks.*keep one"):
        runner.fit(Recorder(), datamodule=Data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"controller": 4}, r"controller must be a Controller such as TargetIdle\(\), or None, got 4; .*EchoCallback\(factor="),
        ({"controller": TargetIdle}, r"got the class TargetIdle: pass an instance, TargetIdle\(\.\.\.\)"),
        ({"controller": "TargetIdle"}, "controller must be a Controller such as"),
        ({"echo": 4}, "echo must be an EchoConfig, a dict .*or None, got int"),
        (
            {"echo": {"fator": 4}},
            "echo has no option 'fator': its options are factor, insertion_point, buffer_size, reuse, epoch_length",
        ),
        (
            {"factor": "TargetIdle"},
            "factor must be a real number >= 1 .* or 'auto', got 'TargetIdle'; .* the argument controller",
        ),
        ({"factor": TargetIdle()}, r"factor must be a real number >= 1 \(1: no echoing\), got TargetIdle"),
        ({"buffer_size": [4]}, "buffer_size must be an integer"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused_with_the_way_out(arguments: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        EchoCallback(**arguments)


def test_the_data_module_is_not_wrapped() -> None:
    assert not isinstance(fit(Data(), callbacks=[callback()], max_epochs=1).trainer.datamodule, EchoDataModule)  # type: ignore[attr-defined]
