"""The device batch is reused: which hook runs how often, on whom, and what the model sees, in a real Trainer."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import time
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.data_connector import warning_cache
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainer_runs import At, Data, Killed, Recorder, Run, SaveAt, Scans, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, TargetIdle

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
HERE = torch.device("cpu")
OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_transfer", "seed": 7}
pytestmark = [
    pytest.mark.filterwarnings("ignore:You have overridden"),  # Lightning says so with a plain loader, too
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),  # which counts the hooks' marks among the examples
]


class Hooks:
    """The three hooks; each counts its calls by what the Trainer is at, and leaves a mark that a second call would change."""

    trainer: Any
    calls: Counter[tuple[str, str]]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._count(HOOKS[0])
        batch["prepared"] = batch.get("prepared", 0) + 1
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self._count(HOOKS[1])
        assert (device, dataloader_idx) == (HERE, 0)
        moved = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        return {**moved, "transferred": moved.get("transferred", 0) + 1}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self._count(HOOKS[2])
        return {**batch, "augmented": batch.get("augmented", 0) + 1, "drawn": torch.rand(len(batch["index"]))}

    def _count(self, name: str) -> None:
        self.calls[name, self.trainer.state.stage.value] += 1


class HookedData(Hooks, Data):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls = Counter()


class PlainModel(Recorder):
    """Remembers the batches whole, beside what `Recorder` remembers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.whole: list[Any] = []
        self.calls: Counter[tuple[str, str]] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.whole.append(batch)
        return super().training_step(batch, batch_idx)


class HookedModel(Hooks, PlainModel):
    def train_dataloader(self) -> Any:
        return Data().train_dataloader()

    def val_dataloader(self) -> Any:
        return Data().val_dataloader()


def fit_by(how: str, data: Any, model: Any, **options: Any) -> Run:
    """Trains, echoed by a data module or by a callback, or not at all."""
    callbacks, echo = options.pop("callbacks", []), {**OPTIONS, **options.pop("echo", {})}
    if how == "callback":
        callbacks = [*callbacks, EchoCallback(echo=EchoConfig(**echo), summary=False)]
    if how == "data module":
        data = EchoDataModule(data, **echo)
    run = Run(model, data, trainer(callbacks=callbacks, **{"num_sanity_val_steps": 1, **options}))
    run.trainer.fit(model, datamodule=data)
    return run


def fresh_batches(model: Any) -> int:
    """Each batch that was read has noise of its own."""
    return len(set(model.batches))


def bound_hooks(*instances: Any) -> list[str]:
    return [name for instance in instances for name in vars(instance) if name in HOOKS]


# ---------------------------------------------------------------------- which hook runs how often


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["data module", "callback"])
@pytest.mark.parametrize(
    ("make_data", "make_model"),
    [(HookedData, PlainModel), (Data, HookedModel), (HookedData, HookedModel)],
    ids=["on the data module", "on the model", "on both"],
)
def test_the_hooks_that_lightning_would_call_run_once_per_fresh_batch_and_the_last_for_every_use(
    make_data: Any, make_model: Any, how: str, workers: int
) -> None:
    plain_model, plain_data = make_model(), make_data(workers)
    fit_by("", plain_data, plain_model)
    model, data = make_model(), make_data(workers)
    fit_by(how, data, model)
    fresh, steps = fresh_batches(model), len(model.batches)
    assert (steps, len(plain_model.batches)) == (18, 18)
    assert abs(fresh - steps / 2.5) <= 2
    for echoed, plain in ((model.calls, plain_model.calls), (getattr(data, "calls", {}), getattr(plain_data, "calls", {}))):
        expected = dict(zip(HOOKS, (fresh, fresh, steps), strict=True))
        assert echoed == {(name, stage): expected[name] if stage == "train" else count for (name, stage), count in plain.items()}
    assert model.calls or data.calls


@pytest.mark.parametrize("how", ["data module", "callback"])
@pytest.mark.parametrize("make_data", [HookedData, Data])
@pytest.mark.parametrize("make_model", [HookedModel, PlainModel])
def test_lightning_warns_of_the_hooks_as_without_echoing(make_data: Any, make_model: Any, how: str) -> None:
    said = []
    for way in ("", how):
        warning_cache.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit_by(way, make_data(), make_model())
        said.append({str(each.message) for each in caught if "overridden" in str(each.message)})
    assert said[0] == said[1]
    assert bool(said[0]) == (make_model is HookedModel)


@pytest.mark.parametrize("how", ["data module", "callback"])
def test_without_hooks_lightnings_own_transfer_runs_once_per_fresh_batch(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning.pytorch.core.hooks as module

    moved: list[Any] = []
    move = module.move_data_to_device
    monkeypatch.setattr(module, "move_data_to_device", lambda batch, device: moved.append(device) or move(batch, device))
    model = PlainModel()
    fit_by(how, Data(), model, limit_val_batches=0)
    assert moved == [HERE] * fresh_batches(model)
    assert len(moved) < len(model.batches) == 18


def test_a_model_that_has_its_data_itself_is_echoed_by_a_callback() -> None:
    model = HookedModel()
    fit_by("callback", None, model)
    assert model.calls[HOOKS[1], "train"] == fresh_batches(model) < 10
    assert model.calls[HOOKS[2], "train"] == 18


@pytest.mark.parametrize("how", ["data module", "callback"])
def test_what_the_hooks_did_was_done_once_to_each_use(how: str) -> None:
    model = PlainModel()
    fit_by(how, HookedData(2), model)
    assert {(batch["prepared"], batch["transferred"], batch["augmented"]) for batch in model.whole} == {(1, 1, 1)}
    assert len({batch["drawn"][0].item() for batch in model.whole}) == 18, "drawn anew for each use"
    assert fresh_batches(model) < 10


def test_the_memory_of_a_fresh_batch_is_that_of_its_echoes() -> None:
    model = PlainModel()
    fit_by("data module", HookedData(), model)
    addresses = {(recorded, batch["noise"].data_ptr()) for recorded, batch in zip(model.batches, model.whole, strict=True)}
    assert len(addresses) == fresh_batches(model) < len({id(batch["noise"]) for batch in model.whole})


@pytest.mark.parametrize("options", [{}, {"epoch_length": "full_pass"}, {"workers": 2}], ids=["", "full_pass", "workers"])
def test_batches_and_weights_are_those_of_after_batching(options: Any) -> None:
    runs = []
    for point in ("after_batching", "after_transfer"):
        echo = {name: value for name, value in options.items() if name == "epoch_length"}
        data = EchoDataModule(Data(options.get("workers", 0)), **{**OPTIONS, "insertion_point": point}, **echo)
        runs.append(fit(data))
    assert runs[0].model.batches == runs[1].model.batches
    assert runs[0].model.weights == runs[1].model.weights
    assert runs[0].model.validated_at == runs[1].model.validated_at
    assert runs[0].loader.counts == runs[1].loader.counts


def test_a_precision_plugin_converts_each_fresh_batch_once() -> None:
    class Counting(DoublePrecision):
        converted = 0

        def convert_input(self, data: Any) -> Any:
            found: list[Any] = []
            result = super().convert_input(data)
            torch.utils._pytree.tree_map_only(torch.Tensor, found.append, data)
            self.converted += bool(found)
            return result

    class Seen(HookedModel):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            assert batch["half"].dtype is torch.float64
            return super().on_before_batch_transfer(batch, dataloader_idx)

    class Halves(Scans):
        def augment(self, example: Any) -> Any:
            return {**super().augment(example), "half": torch.zeros(2)}

    class Double(Seen):
        def train_dataloader(self) -> Any:
            return DataLoader(Halves(), 4, shuffle=True, num_workers=2)

        def loss(self, batch: Any) -> Any:
            return self.layer(batch["noise"]).sum()

    plugin, model = Counting(), Double()
    fit_by("callback", None, model, plugins=[plugin], limit_val_batches=0)
    assert {batch["half"].dtype for batch in model.whole} == {torch.float64}
    assert plugin.converted == fresh_batches(model) < 10
    assert len(model.batches) == 18


# ---------------------------------------------------------------------- edits


@pytest.mark.parametrize("how", ["data module", "callback"])
@pytest.mark.parametrize("hooked", [True, False], ids=["other memory", "the host's memory"])
@pytest.mark.parametrize("where", ["training_step", "on_after_batch_transfer"])
def test_in_place_edits_do_no_harm_and_are_warned_of_once(where: str, hooked: bool, how: str) -> None:
    class Edits(PlainModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if where == "training_step":
                batch["noise"].add_(1)
            return loss

    class EditsData(HookedData if hooked else Data):  # type: ignore[misc]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if where == "on_after_batch_transfer" and self.trainer.training:
                batch["noise"].mul_(2)
            return batch

    expected = fit_by("", EditsData(), Edits()) and fit(EchoDataModule(Data(), **OPTIONS)).model.batches
    factor = 2 if where == "on_after_batch_transfer" else 1
    data, model = EditsData(), Edits()
    with pytest.warns(UserWarning, match="edited in place on the device.*fresh transfer.*after_batching") as said:
        fit_by(how, data, model)
    assert len([each for each in said if "edited in place" in str(each.message)]) == 1
    doubled = [(indices, tuple(tuple(factor * number for number in noise) for noise in noises)) for indices, noises in expected]
    assert model.batches == doubled
    if hooked:
        assert data.calls[HOOKS[1], "train"] == 18, "each use is transferred"
        assert data.calls[HOOKS[0], "train"] == fresh_batches(model) < 10, "but prepared once"


def test_a_popped_key_comes_back_and_costs_nothing() -> None:
    class Pops(PlainModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(dict(batch), batch_idx)
            batch.clear()
            return loss

    data, model = HookedData(), Pops()
    fit_by("data module", data, model)
    assert all(set(batch) == set(model.whole[0]) for batch in model.whole)
    assert data.calls[HOOKS[1], "train"] == fresh_batches(model) < 10


# ---------------------------------------------------------------------- beginning and end


def fails_at(step: int) -> pl.Callback:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == step:
                raise Killed

    return Fails()


@pytest.mark.parametrize("how", ["data module", "callback"])
@pytest.mark.parametrize("ends", ["fit", "exception"])
@pytest.mark.parametrize("make", [(HookedData, PlainModel), (Data, HookedModel)], ids=["data", "model"])
def test_the_hooks_are_there_during_fit_and_gone_afterwards(make: Any, ends: str, how: str) -> None:
    data, model = make[0](), make[1]()
    mine = model.transfer_batch_to_device
    vars(model)[HOOKS[1]] = mine  # a hook that the user has put onto the instance
    seen: list[Any] = []
    look = At({0: lambda trainer: seen.extend(bound_hooks(data, model))})
    if ends == "fit":
        run = fit_by(how, data, model, callbacks=[look])
        assert all(name not in vars(run.data) or vars(run.data)[name] == getattr(data, name) for name in HOOKS)
    else:
        with pytest.raises(Killed):
            fit_by(how, data, model, callbacks=[look, fails_at(8)])
    assert HOOKS[0] in seen
    assert bound_hooks(data) == []
    assert bound_hooks(model) == [HOOKS[1]]
    assert vars(model)[HOOKS[1]] is mine


@pytest.mark.parametrize("reuse", ["each", "memory"])
@pytest.mark.parametrize("how", ["data module", "callback"])
def test_nothing_is_left_on_the_device_after_fit(how: str, reuse: str) -> None:
    held: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    class Watched(HookedData):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
            if self.trainer.training:
                held.add(moved["noise"])
            return moved

    largest: list[int] = []
    data, looks = Watched(), At({epoch: lambda trainer: largest.append(len(held)) for epoch in range(3)})
    run = fit_by(how, data, Recorder(), callbacks=[looks], echo={"buffer_size": 4, "reuse": reuse})
    assert 1 <= max(largest) <= 5
    gc.collect()
    assert len(held) == 0
    assert run.trainer.global_step == 18


def test_another_fit_with_another_model_binds_that_one() -> None:
    data = EchoDataModule(HookedData(), **OPTIONS)
    models = [PlainModel(), PlainModel()]
    for model in models:
        trainer().fit(model, datamodule=data)
        assert bound_hooks(model, data.datamodule) == []
    assert [len(model.batches) for model in models] == [18, 18]
    assert data.datamodule.calls[HOOKS[1], "train"] == sum(map(fresh_batches, models))


def test_hooks_that_are_put_onto_the_data_module_during_training_leave_echoing_alone() -> None:
    def put(trainer: pl.Trainer) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        datamodule.test_dataloader = datamodule.val_dataloader

    data, model = HookedData(), PlainModel()
    run = fit_by("data module", data, model, callbacks=[At({0: put})])
    assert data.calls[HOOKS[1], "train"] == fresh_batches(model) < 10
    assert not [name for name in HOOKS if hasattr(vars(run.data).get(name), "__wrapped__")]


def test_a_reload_of_the_users_each_epoch_changes_nothing_and_is_not_said_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run = fit_by("data module", HookedData(length=24), PlainModel(), reload_dataloaders_every_n_epochs=1)
    assert run.data.datamodule.asked["train"] == 3
    read_again = run.loader.counts.refetched // 4
    assert run.data.datamodule.calls[HOOKS[1], "train"] == fresh_batches(run.model) + read_again < 18
    assert len(said_of_memory(caplog)) == 1


def said_of_memory(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "device memory, buffer_size=" in record.message]


def test_the_measured_memory_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Large(Data):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.zeros(24, 2**16), 4)  # 1 MiB a batch

    class Sums(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[:, :3]).sum()

    for _ in range(2):
        with caplog.at_level(logging.INFO):
            fit_by("callback", Large(), Sums(), limit_val_batches=0, echo={"buffer_size": 4})
        assert said_of_memory(caplog) == [
            "lightning_echo: a live batch takes 1 MiB of device memory, buffer_size=4 of them 4 MiB, "
            "and about as much on the host"
        ]
        caplog.clear()


@pytest.mark.filterwarnings("ignore:You are using `torch.load` with `weights_only=False`:FutureWarning")  # torch 2.4
@pytest.mark.parametrize("how", ["data module", "callback"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_a_copy_of_the_model_made_during_training_transfers_by_itself(copied: Any, how: str) -> None:
    copies: list[Any] = []

    def take(trainer: pl.Trainer) -> None:
        trainer.lightning_module.whole = []  # type: ignore[assignment]
        model = trainer.lightning_module
        attached, model._trainer = model._trainer, None
        copies.append(copied(model))
        model._trainer = attached

    fit_by(how, Data(), HookedModelAlone(), callbacks=[At({0: take})])
    model = copies[0]
    model.trainer = trainer()
    batch = model.transfer_batch_to_device({"x": torch.zeros(1)}, HERE, 0)
    assert batch["transferred"] == 1
    assert model.transfer_batch_to_device.__self__ is model
    assert model.on_before_batch_transfer.__self__ is model


class HookedModelAlone(Hooks, PlainModel):
    """Without a data module's hooks beside its own."""

    on_before_batch_transfer = Recorder.on_before_batch_transfer
    on_after_batch_transfer = Recorder.on_after_batch_transfer

    def _count(self, name: str) -> None: ...


# ---------------------------------------------------------------------- resuming, measuring, controllers


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_prepares_and_transfers_what_it_reads_again(workers: int, tmp_path: Path) -> None:
    def run(**options: Any) -> Run:
        data = EchoDataModule(HookedData(workers), **OPTIONS)
        return fit(data, model=PlainModel(), **options)

    whole, save = run(), SaveAt(tmp_path, [8], dies=True)
    with pytest.raises(Killed):
        run(callbacks=[save])
    resumed = run(ckpt_path=save.path(8))
    assert resumed.model.batches == whole.model.batches[8:]
    assert resumed.model.weights == whole.model.weights
    assert {(batch["prepared"], batch["transferred"]) for batch in resumed.model.whole} == {(1, 1)}
    again = set(whole.model.batches[:8]) & set(resumed.model.batches)
    assert resumed.loader.counts.refetched == sum(len(indices) for indices, _ in again) > 0
    for name in HOOKS[:2]:
        assert resumed.data.datamodule.calls[name, "train"] == fresh_batches(resumed.model)


def test_an_epoch_that_is_cut_short_goes_on() -> None:
    model, data = PlainModel(), HookedData(2)
    fit_by("data module", data, model, limit_train_batches=4)
    assert model.steps == [4, 4, 4]
    assert data.calls[HOOKS[1], "train"] == fresh_batches(model)
    assert model.batches == fit(EchoDataModule(Data(2), **OPTIONS)).model.batches[:12]


def test_a_controller_measures_and_decides_as_at_the_other_points() -> None:
    class Slow(Scans):
        def load(self, index: Any) -> Any:
            time.sleep(0.005)
            return super().load(index)

    class SlowData(HookedData):
        def train_dataloader(self) -> Any:
            return DataLoader(Slow(64), 4, shuffle=True, num_workers=2)

    class Works(PlainModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.002)
            return super().training_step(batch, batch_idx)

    callback = EchoCallback(TargetIdle(max_factor=8), echo=EchoConfig(1, insertion_point="after_transfer", seed=7))
    model, data = Works(), SlowData()
    trainer(callbacks=[callback], limit_val_batches=0, max_epochs=8).fit(model, datamodule=data)
    reports = callback.reports
    assert reports[0].factor == 1
    assert reports[-1].factor > 2
    assert reports[0].upstream_seconds == pytest.approx(0.01, rel=0.5), "4 examples of 5 ms, two workers"
    assert reports[-1].fresh_examples + reports[-1].echoed_examples == 8 * 64
    assert data.calls[HOOKS[1], "train"] == fresh_batches(model) < 128
    assert data.calls[HOOKS[2], "train"] == 128


def test_a_loader_that_was_passed_to_fit_is_adopted_beside_a_controller() -> None:
    loader = EchoLoader(Data(2).train_dataloader(), **OPTIONS)
    model = HookedModelAlone()
    callback = EchoCallback(FactorSchedule({0: 2.5}), summary=False)
    trainer(callbacks=[callback]).fit(model, loader, Data().val_dataloader())
    assert len(model.batches) == 18
    assert fresh_batches(model) < 10
    assert bound_hooks(model) == []
    assert not loader.is_transferred


# ---------------------------------------------------------------------- refused


def test_a_bare_loader_is_refused_at_its_first_batch_with_the_ways_out() -> None:
    loader, model = EchoLoader(Data().train_dataloader(), **OPTIONS), PlainModel()
    with pytest.raises(
        RuntimeError, match=r"this loop does not put them there\. Train a single loader with EchoDataModule.*or EchoCallback"
    ):
        trainer().fit(model, loader, Data().val_dataloader())
    assert model.batches == []


def test_after_fit_the_loader_of_a_data_module_is_refused_like_a_bare_one() -> None:
    run = fit_by("data module", Data(), PlainModel())
    for loader in (run.data.loader, run.data.train_dataloader()):
        with pytest.raises(RuntimeError, match="this loop does not put them there"):
            next(iter(loader))
    assert bound_hooks(run.model, run.data.datamodule) == []


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize("how", ["data module", "callback"])
def test_a_step_that_transfers_itself_is_refused(how: str) -> None:
    class Fetches(PlainModel):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    model = Fetches()
    with pytest.raises(MisconfigurationException, match=r"training_step\(self, dataloader_iter\).*after_batching"):
        fit_by(how, Data(), model)
    assert bound_hooks(model) == []


@pytest.mark.parametrize("name", ["batch_to_device", "process_dataloader"])
def test_a_strategy_that_transfers_by_other_means_is_refused(name: str) -> None:
    def own(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        return getattr(SingleDeviceStrategy, name)(self, batch, *args, **options)

    strategy = type("OwnTransfer", (SingleDeviceStrategy,), {name: own})(HERE)
    with pytest.raises(MisconfigurationException, match=rf"impossible with OwnTransfer.*own {name}.*after_batching"):
        fit_by("data module", Data(), PlainModel(), strategy=strategy, accelerator="auto")


@pytest.mark.parametrize("how", ["data module", "callback"])
def test_a_collection_of_loaders_is_refused(how: str) -> None:
    class Several(Data):
        def train_dataloader(self) -> Any:
            return {"one": super().train_dataloader(), "two": super().train_dataloader()}

    with pytest.raises(MisconfigurationException):
        fit_by(how, Several(), PlainModel())
