"""The device batch is reused: which hook runs how often, on whom, and what the model sees, in a real Trainer."""

from __future__ import annotations

import warnings
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

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule

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


@pytest.mark.parametrize(
    ("make_data", "make_model", "how"),
    [(HookedData, PlainModel, "data module"), (HookedData, HookedModel, "callback")],
    ids=["on the data module", "on both"],
)
def test_the_hooks_that_lightning_would_call_run_once_per_fresh_batch_and_the_last_for_every_use(
    make_data: Any, make_model: Any, how: str
) -> None:
    runs, said = [], []
    for way in ("", how):
        warning_cache.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs.append(fit_by(way, make_data(), make_model()))
        said.append({str(each.message) for each in caught if "overridden" in str(each.message)})
    plain, model = runs[0].model, runs[1].model
    fresh, steps = fresh_batches(model), len(model.batches)
    assert (steps, len(plain.batches)) == (18, 18)
    assert abs(fresh - steps / 2.5) <= 2
    users = getattr(runs[1].data, "datamodule", runs[1].data)
    for echoed, counted in ((model.calls, plain.calls), (getattr(users, "calls", {}), getattr(runs[0].data, "calls", {}))):
        expected = dict(zip(HOOKS, (fresh, fresh, steps), strict=True))
        assert echoed == {
            (name, stage): expected[name] if stage == "train" else count for (name, stage), count in counted.items()
        }
    marks = {(batch["prepared"], batch["transferred"], batch["augmented"]) for batch in model.whole}
    assert marks == {(1, 1, 1)}, "done once to each use"
    assert len({batch["drawn"][0].item() for batch in model.whole}) == 18, "drawn for each use"
    assert len({batch["noise"].data_ptr() for batch in model.whole}) == fresh, "the memory is that of its fresh batch"
    assert said[0] == said[1]
    assert bool(said[0]) == (make_model is HookedModel), "Lightning warns as without echoing"


def test_batches_and_weights_are_those_of_after_batching() -> None:
    runs = [
        fit(EchoDataModule(Data(1), **{**OPTIONS, "insertion_point": point}, epoch_length="full_pass"), max_epochs=2)
        for point in ("after_batching", "after_transfer")
    ]
    assert runs[0].model.batches == runs[1].model.batches
    assert runs[0].model.weights == runs[1].model.weights
    assert runs[0].model.validated_at == runs[1].model.validated_at
    assert runs[0].loader.counts == runs[1].loader.counts


@pytest.mark.parametrize(
    ("where", "hooked", "how"),
    [("training_step", False, "callback"), (HOOKS[2], True, "data module")],
    ids=["step, the host's memory", "hook, other memory"],
)
def test_in_place_edits_do_no_harm_and_are_warned_of_once(where: str, hooked: bool, how: str) -> None:
    factor = 2 if where == HOOKS[2] else 1

    class Edits(PlainModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if where == "training_step":
                batch["noise"].add_(1)
            return loss

    class EditsData(HookedData if hooked else Data):  # type: ignore[misc]
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            if where == HOOKS[2] and self.trainer.training:
                batch["noise"].mul_(factor)
            return batch

    expected = fit(EchoDataModule(Data(), **OPTIONS), limit_val_batches=0).model.batches
    data, model = EditsData(), Edits()
    with pytest.warns(UserWarning, match="edited in place on the device.*fresh transfer.*after_batching") as said:
        fit_by(how, data, model, limit_val_batches=0)
    assert len([each for each in said if "edited in place" in str(each.message)]) == 1
    doubled = [(indices, tuple(tuple(factor * number for number in noise) for noise in noises)) for indices, noises in expected]
    assert model.batches == doubled
    if hooked:
        assert data.calls[HOOKS[1], "train"] == 18, "each use is transferred"
        assert data.calls[HOOKS[0], "train"] == fresh_batches(model) < 10, "but prepared once"


class Counting(DoublePrecision):
    """Counts the batches in which it finds tensors to convert."""

    converted = 0

    def convert_input(self, data: Any) -> Any:
        found: list[Any] = []
        torch.utils._pytree.tree_map_only(torch.Tensor, found.append, data)
        self.converted += bool(found)
        return super().convert_input(data)


def test_a_precision_plugin_converts_each_fresh_batch_once() -> None:
    class Double(PlainModel):
        def train_dataloader(self) -> Any:
            return DataLoader(Halves(), 4, shuffle=True)

        def val_dataloader(self) -> Any:
            return Data().val_dataloader()

        def loss(self, batch: Any) -> Any:
            return self.layer(batch["noise"]).sum()

    class Halves(Scans):
        def augment(self, example: Any) -> Any:
            return {**super().augment(example), "half": torch.zeros(2)}

    plugin, model = Counting(), Double()
    fit_by("callback", None, model, plugins=[plugin], limit_val_batches=0)
    assert {batch["half"].dtype for batch in model.whole} == {torch.float64}
    assert plugin.converted == fresh_batches(model) < 10
    assert len(model.batches) == 18


class FailsAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


@pytest.mark.parametrize(
    ("how", "ends", "make"),
    [("data module", "fit", (HookedData, PlainModel)), ("callback", "exception", (Data, HookedModel))],
)
def test_the_hooks_are_there_during_fit_and_gone_afterwards(make: Any, ends: str, how: str) -> None:
    data, model = make[0](), make[1]()
    mine = model.transfer_batch_to_device
    vars(model)[HOOKS[1]] = mine  # a hook that the user has put onto the instance
    seen: list[Any] = []
    look = At({0: lambda trainer: seen.extend(bound_hooks(data, model))})
    if ends == "fit":
        run = fit_by(how, data, model, callbacks=[look], limit_val_batches=0)
        assert all(name not in vars(run.data) or vars(run.data)[name] == getattr(data, name) for name in HOOKS)
        for loader in (run.data.loader, run.data.train_dataloader()):
            with pytest.raises(RuntimeError, match="this loop does not put them there"):
                next(iter(loader))
    else:
        with pytest.raises(Killed):
            fit_by(how, data, model, callbacks=[look, FailsAt(8)], limit_val_batches=0)
    assert HOOKS[0] in seen
    assert bound_hooks(data) == []
    assert bound_hooks(model) == [HOOKS[1]]
    assert vars(model)[HOOKS[1]] is mine


def test_another_fit_with_another_model_binds_that_one_beside_hooks_that_are_put_onto_the_data_module_during_training() -> None:
    def put(trainer: pl.Trainer) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        datamodule.test_dataloader = datamodule.val_dataloader

    data, models = EchoDataModule(HookedData(), **OPTIONS), [PlainModel(), PlainModel()]
    for model in models:
        trainer(callbacks=[At({0: put})], limit_val_batches=0).fit(model, datamodule=data)
        assert bound_hooks(model, data.datamodule) == []
        assert not [name for name in HOOKS if hasattr(vars(data).get(name), "__wrapped__")]
    assert [len(model.batches) for model in models] == [18, 18]
    assert data.datamodule.calls[HOOKS[1], "train"] == sum(map(fresh_batches, models))


def test_a_resumed_run_prepares_and_transfers_what_it_reads_again(tmp_path: Path) -> None:
    def run(**options: Any) -> Run:
        return fit(EchoDataModule(HookedData(1), **OPTIONS), model=PlainModel(), **options)

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


def test_a_loader_that_was_passed_to_fit_is_adopted_beside_a_controller_and_alone_refused_at_its_first_batch() -> None:
    loader, model = EchoLoader(Data().train_dataloader(), **OPTIONS), PlainModel()
    fit(loader, model=model, callbacks=[EchoCallback(FactorSchedule({0: 2.5}), summary=False)])
    assert len(model.batches) == 18
    assert fresh_batches(model) < 10
    assert bound_hooks(model) == []
    assert not loader.is_transferred
    bare, model = EchoLoader(Data().train_dataloader(), **OPTIONS), PlainModel()
    hint = r"this loop does not put them there\. Train a single loader with EchoDataModule.*or EchoCallback"
    with pytest.raises(RuntimeError, match=hint):
        fit(bare, model=model)
    assert model.batches == []


class Fetches(PlainModel):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        raise AssertionError


class Several(Data):
    def train_dataloader(self) -> Any:
        return {"one": super().train_dataloader(), "two": super().train_dataloader()}


def transferring(name: str) -> Any:
    def own(self: Any, batch: Any, *args: Any, **options: Any) -> Any:
        return getattr(SingleDeviceStrategy, name)(self, batch, *args, **options)

    return {"strategy": type("OwnTransfer", (SingleDeviceStrategy,), {name: own})(HERE), "accelerator": "auto"}


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize("how", ["data module", "callback"])
@pytest.mark.parametrize(
    ("data", "make_model", "options", "said"),
    [
        (Data(), Fetches, {}, r"training_step\(self, dataloader_iter\).*after_batching"),
        (Data(), PlainModel, transferring("batch_to_device"), r"with OwnTransfer.*own batch_to_device.*after_batching"),
        (Data(), PlainModel, transferring("process_dataloader"), r"with OwnTransfer.*own process_dataloader.*after_batching"),
        (Several(), PlainModel, {}, None),
    ],
    ids=["a step that transfers itself", "a strategy's transfer", "a strategy's loader", "a collection"],
)
def test_where_batches_are_transferred_by_other_means_it_is_refused(
    data: Any, make_model: Any, options: Any, said: str | None, how: str
) -> None:
    model = make_model()
    with pytest.raises(MisconfigurationException, match=said):
        fit_by(how, data, model, **options)
    assert bound_hooks(model) == []
