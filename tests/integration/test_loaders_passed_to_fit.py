"""EchoCallback echoes a loader that is passed to fit: ``trainer.fit(model, loader)``.

Expected is what an EchoDataModule makes of the same data, which the other tests prove.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import POINTS, At, Data, Killed, Recorder, Run, SaveAt, Scans, echoed, fit, trainer

from lightning_echo import Controller, EchoCallback, EchoConfig, EchoLoader, FactorSchedule, TargetIdle

PROCESS = "process_dataloader"
OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}  # what trainer_runs.echoed says


def callback(controller: Controller | None = None, **options: Any) -> EchoCallback:
    return EchoCallback(controller, **{**OPTIONS, **options})


def passed(workers: int = 0, **options: Any) -> DataLoader[Any]:
    loader: DataLoader[Any] = Data(workers, **options).train_dataloader()
    return loader


def is_bound(run: Any) -> bool:
    """Whether the strategy of a run, or of a Trainer, has a hook of its own."""
    return PROCESS in vars(getattr(run, "trainer", run).strategy)


class OwnLoader(Recorder):
    """A model with data of its own, longer than what is passed."""

    def train_dataloader(self) -> Any:
        return passed(length=40)


# ---------------------------------------------------------------------- what is echoed


@pytest.mark.parametrize("point", ["after_read", *POINTS])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_echoed_as_by_an_echo_data_module(point: str, workers: int) -> None:
    run = fit(passed(workers), callbacks=[callback(insertion_point=point)])
    expected = fit(echoed(point=point, workers=workers))
    assert run.model.batches == expected.model.batches
    assert run.model.validated_at == expected.model.validated_at
    assert run.model.weights == expected.model.weights


def test_a_controller_decides_on_the_factor_of_a_loader() -> None:
    echo = EchoCallback(FactorSchedule({0: 1.0, 1: 3.0}))
    run = fit(passed(), callbacks=[echo])
    assert [report.factor for report in echo.reports] == [1, 3, 3]
    assert type(run.trainer.train_dataloader) is EchoLoader


def test_a_loader_with_a_factor_that_is_decided_on_is_echoed_from_factor_one_on() -> None:
    echo = EchoCallback(factor="auto")
    run = fit(passed(), callbacks=[echo], max_epochs=1)
    assert echo.reports[0].factor == 1
    assert type(run.trainer.train_dataloader) is EchoLoader


def test_without_arguments_a_loader_is_measured_as_it_is() -> None:
    seen: list[Any] = []
    loader = passed()
    run = fit(loader, callbacks=[EchoCallback(), At({0: lambda trainer: seen.append(is_bound(trainer))})])
    assert run.trainer.train_dataloader is loader
    assert seen == [False]


def test_the_length_is_known_to_a_model_that_asks_for_it_before_training() -> None:
    model = Recorder(reads_stepping=True)
    run = fit(passed(), model=model, callbacks=[callback(factor=2, epoch_length="full_pass")])
    assert model.steps == [12, 12, 12]
    assert run.trainer.estimated_stepping_batches == 36


class Batches:
    """Batches of a user's own making."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(DataLoader(Scans(20), 4))


def test_an_iterable_of_batches_is_echoed() -> None:
    run = fit(Batches(), callbacks=[EchoCallback(factor=2, seed=7)])
    used: Any = run.trainer.train_dataloader
    assert run.model.steps == [5, 5, 5]
    assert (str(used.insertion_point), used.counts.delivered) == ("after_batching", 60)


def test_overfit_batches_are_not_echoed() -> None:
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        model = fit(passed(), overfit_batches=2, callbacks=[callback()]).model
    assert [[indices for indices, _ in epoch] for epoch in model.by_epoch] == [[(0, 1, 2, 3), (4, 5, 6, 7)]] * 3


def test_the_learning_rate_finder_leaves_the_position_as_it_was(tmp_path: Path) -> None:
    class Rated(Recorder):
        lr = 0.05

    finder = LearningRateFinder(num_training_steps=5, early_stop_threshold=None, update_attr=False)
    echo = callback(factor=2)
    run = fit(passed(length=300), model=Rated(), max_epochs=1, default_root_dir=tmp_path, callbacks=[echo, finder])
    trained = run.model.batches[5:]
    assert len(trained) >= 70  # in Lightning 2.5.0 the trial's steps are taken off the epoch
    assert trained == fit(echoed(2, length=300), max_epochs=1).model.batches[: len(trained)]


@pytest.mark.parametrize("controlled", [False, True])
def test_a_loader_beside_a_models_own_is_the_one_that_is_echoed(controlled: bool) -> None:
    model = OwnLoader()
    run = fit(passed(), model=model, callbacks=[callback(FactorSchedule({0: 2.5}) if controlled else None)])
    assert model.batches == fit(echoed()).model.batches
    assert "train_dataloader" not in vars(run.model)


def test_a_hook_that_is_replaced_after_the_setup_of_callbacks_is_echoed() -> None:
    class InSetup(Recorder):
        def train_dataloader(self) -> Any:
            raise AssertionError("replaced in setup")

        def setup(self, stage: str) -> None:
            self.train_dataloader = passed  # type: ignore[method-assign]

    run = Run(InSetup(), None, trainer(callbacks=[callback()]))
    run.trainer.fit(run.model, val_dataloaders=Data().val_dataloader())
    assert run.model.batches == fit(echoed()).model.batches


# ---------------------------------------------------------------------- validation


@pytest.mark.parametrize("options", [{}, {"reload_dataloaders_every_n_epochs": 1}, {"val_check_interval": 2}])
def test_validation_loaders_are_left_alone(options: dict[str, Any]) -> None:
    loaders = [Data().val_dataloader(), passed()]
    seen: list[Any] = []

    class Look(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append(trainer.val_dataloaders)

    class Two(Recorder):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    runner = trainer(callbacks=[callback(), Look()], num_sanity_val_steps=2, max_epochs=2, **options)
    model = Two()
    with pytest.warns(UserWarning, match="`val_dataloader`'s sampler has shuffling enabled"):
        runner.fit(model, passed(), loaders)
    assert len(seen) >= 3  # the sanity check and two epochs
    assert all(each == loaders and type(each[1]) is DataLoader for each in seen)
    expected = fit(echoed(), max_epochs=2, **options)
    assert model.batches == expected.model.batches


def test_the_loader_that_is_trained_on_may_be_the_one_to_validate_on() -> None:
    loader = passed(loader_options={})
    runner, model = trainer(callbacks=[callback()], num_sanity_val_steps=2), Recorder()
    runner.fit(model, loader, loader)
    assert type(runner.train_dataloader) is EchoLoader
    assert runner.val_dataloaders is loader
    assert model.steps == [6, 6, 6]


def test_evaluating_binds_nothing() -> None:
    seen: list[bool] = []

    class Look(pl.Callback):
        def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append(is_bound(trainer))

    runner = trainer(callbacks=[callback(), Look()])
    loader = Data().val_dataloader()
    runner.validate(Recorder(), loader, verbose=False)
    assert seen == [False]
    assert runner.val_dataloaders is loader


# ---------------------------------------------------------------------- reload, new factors, going on


@pytest.mark.parametrize("every", [1, 2])
def test_the_users_own_reload_goes_on(every: int) -> None:
    run = fit(passed(), callbacks=[callback()], reload_dataloaders_every_n_epochs=every, max_epochs=4)
    assert run.model.batches == fit(echoed(), max_epochs=4).model.batches


@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_a_new_factor_is_in_force_with_the_next_epoch(epoch_length: str) -> None:
    echo = callback(factor=1, epoch_length=epoch_length)
    change = At({0: lambda trainer: setattr(echo.attachment.echo, "factor", 3)})
    run = fit(passed(2), callbacks=[echo, change])
    expected = [6, 6, 6] if epoch_length == "fixed" else [6, 18, 18]
    assert run.model.steps == expected
    assert run.model.validated_at == [sum(expected[: i + 1]) for i in range(3)]
    assert run.trainer.reload_dataloaders_every_n_epochs == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("again", [False, True], ids=["the same loader", "another one"])
def test_several_fits_of_the_same_trainer_go_on(again: bool) -> None:
    runner, models = trainer(callbacks=[callback()]), [Recorder() for _ in range(3)]
    loader = passed(2)
    for epochs, model in enumerate(models, 1):
        runner.fit_loop.max_epochs = 2 * epochs
        runner.fit(model, passed(2) if again else loader, Data().val_dataloader())
        assert not is_bound(runner)
    batches = [batch for model in models for batch in model.batches]
    assert batches == fit(echoed(workers=2), max_epochs=6).model.batches


def test_a_fit_with_a_loader_follows_one_with_a_data_module() -> None:
    runner, first, second = trainer(callbacks=[callback()]), Recorder(), Recorder()
    user = Data()
    runner.fit(first, datamodule=user)
    runner.fit_loop.max_epochs = 6
    runner.fit(second, passed(), Data().val_dataloader())
    assert first.batches + second.batches == fit(echoed(), max_epochs=6).model.batches
    assert "train_dataloader" not in vars(user)


@pytest.mark.parametrize("reads_stepping", [False, True])
@pytest.mark.parametrize(
    ("point", "step", "limit"),
    [
        ("before_augmentation", 8, 1.0),
        ("after_batching", 11, 1.0),
        ("after_augmentation", 10, 5),
        ("after_augmentation", 12, 1.0),
    ],
)
def test_a_run_resumes_exactly(reads_stepping: bool, point: str, step: int, limit: Any, tmp_path: Path) -> None:
    def run(*callbacks: Any, **options: Any) -> Run:
        made = callback(insertion_point=point)
        return fit(
            passed(2),
            model=Recorder(reads_stepping),
            callbacks=[made, *callbacks],
            limit_train_batches=limit,
            **options,
        )

    whole, save = run(), SaveAt(tmp_path, [step], dies=True)
    with pytest.raises(Killed):
        run(save)
    resumed = run(ckpt_path=save.path(step))
    assert resumed.model.batches == whole.model.batches[step:]
    assert resumed.model.weights == whole.model.weights


def test_a_checkpoint_fits_runs_with_a_data_module_and_without_echoing(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [6])
    whole = fit(passed(), callbacks=[callback(), save])
    with_module = fit(Data(), callbacks=[callback()], ckpt_path=save.path(6))
    assert with_module.model.batches == whole.model.batches[6:]
    plain = fit(passed(), callbacks=[EchoCallback()], ckpt_path=save.path(6))
    assert len(plain.model.batches) == 12


# ---------------------------------------------------------------------- no trace


@pytest.mark.parametrize("ending", ["at its end", "with an exception"])
def test_nothing_is_left_on_strategy_and_machine_after_fit(ending: str) -> None:
    processes = set(psutil.Process().children(recursive=True))

    def last(trainer: pl.Trainer) -> None:
        assert is_bound(trainer)
        if ending == "with an exception":
            raise Killed

    runner = trainer(callbacks=[callback(), At({1: last})])
    before = set(vars(runner.strategy))
    if ending == "with an exception":
        with pytest.raises(Killed):
            runner.fit(Recorder(), passed(2), Data().val_dataloader())
    else:
        runner.fit(Recorder(), passed(2), Data().val_dataloader())
    assert before - set(vars(runner.strategy)) == set()
    assert not is_bound(runner)
    assert not {each for each in psutil.Process().children(recursive=True) if each.is_running()} - processes


class Counting(SingleDeviceStrategy):
    """A strategy of the user's own."""

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.processed: list[Any] = []

    def process_dataloader(self, dataloader: Any) -> Any:
        self.processed.append(type(dataloader).__name__)
        return dataloader


def test_a_strategy_processes_the_echoed_loader() -> None:
    strategy = Counting()
    fit(passed(), callbacks=[callback()], strategy=strategy, accelerator="auto")
    assert strategy.processed == ["EchoLoader", "DataLoader"]


def test_an_attribute_of_the_strategy_that_was_there_before_is_put_back() -> None:
    runner, model = trainer(callbacks=[callback()]), Recorder()
    before = vars(runner.strategy)[PROCESS] = lambda dataloader: dataloader
    runner.fit(model, passed(), Data().val_dataloader())
    assert vars(runner.strategy)[PROCESS] is before
    assert model.batches == fit(echoed()).model.batches


def test_a_hook_that_somebody_else_has_put_there_meanwhile_is_left_alone() -> None:
    other = lambda dataloader: dataloader  # noqa: E731
    run = fit(passed(), callbacks=[callback(), At({0: lambda trainer: setattr(trainer.strategy, PROCESS, other)})])
    assert vars(run.trainer.strategy)[PROCESS] is other


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4, where pickle meets a tensor
@pytest.mark.parametrize("duplicate", [copy.copy, lambda hook: pickle.loads(pickle.dumps(hook))], ids=["copied", "pickled"])
def test_a_copy_of_the_hook_made_during_training_changes_nothing(duplicate: Any) -> None:
    loader, seen = passed(), []
    at_end = At({0: lambda trainer: seen.append(duplicate(trainer.strategy.process_dataloader.__self__))})
    fit(passed(), callbacks=[callback(), at_end], strategy=Counting(), accelerator="auto", max_epochs=1)
    assert seen[0].process_dataloader(loader) is loader


# ---------------------------------------------------------------------- what is refused


def two(kind: str) -> Any:
    loaders = {"long": passed(), "short": passed(length=10)}
    return {
        "a dict": loaders,
        "over the same data": [first := passed(), DataLoader(first.dataset, 2)],
        "a list": list(loaders.values()),
        "a CombinedLoader": CombinedLoader(loaders, "max_size"),
        "a dict of one": {"long": passed()},
    }[kind]


@pytest.mark.parametrize("kind", ["a dict", "a list", "a CombinedLoader", "a dict of one", "over the same data"])
@pytest.mark.parametrize("echo", ["options", "controller", "names"])
def test_several_loaders_are_refused_before_the_first_step_with_the_ways_out(kind: str, echo: str) -> None:
    made = {
        "options": lambda: callback(),
        "controller": lambda: EchoCallback(TargetIdle()),
        "names": lambda: EchoCallback(echo={"long": EchoConfig(2.5)}),
    }[echo]()
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

    run = fit(loaders, model=Both(), callbacks=[EchoCallback(FactorSchedule({0: 3.0}))])
    assert loaders["echoed"].factor == 3  # type: ignore[attr-defined]
    assert type(run.trainer.train_dataloader["plain"]) is DataLoader  # type: ignore[index]


def test_a_loader_that_is_passed_after_a_fit_with_an_echo_data_module_is_refused_with_the_ways_out() -> None:
    runner, model = trainer(callbacks=[EchoCallback(FactorSchedule({0: 2.5}))]), Recorder()
    runner.fit(Recorder(), datamodule=echoed())
    runner.fit_loop.max_epochs = 6
    with pytest.raises(
        MisconfigurationException, match=r"earlier fit, .*Pass EchoLoader\(loader, 1\) to fit, or use another Trainer"
    ):
        runner.fit(model, passed(), Data().val_dataloader())
    assert model.batches == []


def test_an_echo_loader_that_comes_after_a_plain_one_is_refused_with_the_ways_out() -> None:
    loaders = {"plain": passed(), "echoed": EchoLoader(passed(), 1, seed=7)}
    with pytest.raises(MisconfigurationException, match="several loaders that were passed to fit"):
        fit(loaders, callbacks=[EchoCallback(TargetIdle())])


class Hides(Counting):
    def process_dataloader(self, dataloader: Any) -> Any:
        return list(dataloader)


@pytest.mark.filterwarnings("ignore:lightning_echo. only a training is echoed")
def test_a_strategy_that_trains_on_something_else_is_found_before_the_first_step_with_the_way_out() -> None:
    model = Recorder()
    with pytest.raises(MisconfigurationException, match=r"trains on, a list: .*Use EchoLoader\(loader, 2\.5\)"):
        fit(passed(), model=model, callbacks=[callback()], strategy=Hides(), accelerator="auto")
    assert model.batches == []


@pytest.mark.parametrize("model", [Recorder, OwnLoader])
def test_options_beside_an_echo_loader_are_refused_with_both_ways_out(model: type[Recorder]) -> None:
    made = model()
    message = "EchoLoader is passed to fit, .*: pass the plain loader, or leave echo, factor and the other options out"
    with pytest.raises(MisconfigurationException, match=message):
        fit(EchoLoader(passed(), 2), model=made, callbacks=[callback()])
    assert made.batches == []
