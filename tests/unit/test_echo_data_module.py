"""`EchoDataModule` by itself, without a ``fit``: loaders, the factor, what it refuses, its end and its state.

The data has four batches of four examples.
"""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader
from trainers import trainer_at

from lightning_echo import CacheConfig, EchoConfig, EchoDataModule, EchoLoader, StagedDataset
from lightning_echo.datamodule import DecidesFactor

OPTIONS: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 0}


def plain() -> DataLoader[Any]:
    return DataLoader(range(16), batch_size=4)  # type: ignore[arg-type]


class Data(pl.LightningDataModule):
    """Remembers its calls; may fail at the end."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fails, self.seen = fails, 0

    def train_dataloader(self) -> Any:
        return plain()

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self._end("teardown")

    def on_exception(self, exception: BaseException) -> None:
        self._end("on_exception")

    def _end(self, name: str) -> None:
        self.calls.append(name)
        if self.fails:
            raise RuntimeError("the user's own failure")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def echoed(factor: float | str = 2, data: Any = None) -> EchoDataModule:
    return EchoDataModule(data or Data(), factor, **OPTIONS)


def attach(module: EchoDataModule, *callbacks: Any, status: TrainerStatus = TrainerStatus.RUNNING) -> Any:
    """Attaches a Trainer that is in its fit, before its first epoch."""
    state = SimpleNamespace(fn=TrainerFn.FITTING, status=status)
    told = {"state": state, "callbacks": callbacks, "optimizers": [], "reload_dataloaders_every_n_epochs": 0}
    told["strategy"] = SimpleNamespace(process_dataloader=lambda loader: loader)
    module.trainer = trainer_at(length=math.inf, epochs=(0, 0, 0), **told)
    return module.trainer


# ---------------------------------------------------------------------- loaders and the factor


def test_the_training_loader_is_echoed() -> None:
    module = echoed(3)
    with pytest.raises(MisconfigurationException, match="no EchoLoader is in use"):
        _ = module.loader
    loader = module.train_dataloader()
    assert (type(loader), loader.factor, loader.factor_owner, module.loader) == (EchoLoader, 3, "EchoDataModule", loader)


def test_a_factor_that_is_set_before_or_after_the_loader_is_made_is_the_loaders() -> None:
    module = echoed(2)
    module.factor = 3
    loader = module.train_dataloader()
    assert (module.factor, loader.factor) == (3, 3)
    module.factor = 4
    assert (module.factor, loader.factor) == (4, 4)


def test_only_the_loaders_that_are_named_are_echoed_with_factors_of_their_own() -> None:
    loaders = {name: plain() for name in ("a", "b", "c")}
    options = {"a": EchoConfig(2, **OPTIONS), "b": EchoConfig(3, **OPTIONS)}
    module = EchoDataModule.from_dataloaders(loaders, loaders=options)
    given = module.train_dataloader()
    assert (given["a"].factor, given["b"].factor, given["c"]) == (2, 3, loaders["c"])
    assert module.loader is given
    with pytest.raises(MisconfigurationException, match=r"different echo factors \(a 2, b 3\)"):
        module.check_one_factor()
    module.factor = 4
    module.check_one_factor()
    assert (given["a"].factor, given["b"].factor) == (4, 4)


def staged() -> DataLoader[Any]:
    """Can be cut, so that something can be kept of it."""
    return DataLoader(StagedDataset.of(list(range(16)), augment=float, decode=int), batch_size=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("cache", ["8MiB", {"size": "8MiB"}, CacheConfig("8MiB")])
def test_a_cache_is_the_loaders_and_with_factor_one_there_is_nothing_else(cache: Any) -> None:
    loader = EchoDataModule.from_dataloaders(staged(), factor=1, cache=cache, **OPTIONS).train_dataloader()
    assert (loader.factor, loader.cache) == (1, CacheConfig("8MiB"))
    assert echoed().train_dataloader().cache is None


def test_each_of_several_loaders_has_a_cache_of_its_own_or_none() -> None:
    options: Any = {"a": EchoConfig(2, cache=CacheConfig("8MiB", hold="raw")), "b": {"cache": 0.01}, "c": EchoConfig(2)}
    module = EchoDataModule.from_dataloaders({name: staged() for name in "abcd"}, loaders=options)
    given = module.train_dataloader()
    assert [given[name].cache for name in "abc"] == [CacheConfig("8MiB", hold="raw"), CacheConfig(0.01), None]
    assert type(given["d"]) is DataLoader


def test_a_cache_of_the_users_own_is_not_hidden() -> None:
    data = Data()
    module = EchoDataModule(data, 1, cache="1GiB")
    for name in ("cache", "cache_counts"):
        assert not hasattr(module, name)
        setattr(module, name, [3])
        assert (getattr(module, name), getattr(data, name)) == ([3], [3])


def test_loaders_for_anything_but_training_are_given_on_as_they_are() -> None:
    validation, prediction = plain(), [plain(), plain()]
    module = EchoDataModule.from_dataloaders(plain(), validation, predict_dataloaders=prediction, factor=2, **OPTIONS)
    assert module.val_dataloader() is validation
    assert module.predict_dataloader() is prediction
    assert is_overridden("val_dataloader", module)
    assert not is_overridden("test_dataloader", module)
    assert module.train_dataloader().factor == 2


def test_in_words_it_has_its_factor_and_later_its_loader() -> None:
    module = echoed(2.5)
    assert str(module) == "EchoDataModule(Data, factor 2.5)"
    loader = module.train_dataloader()
    assert str(module) == f"EchoDataModule(Data, {loader!r})"
    named = EchoDataModule(Data(), loaders={"a": EchoConfig(2), "b": EchoConfig(3)})
    assert str(named) == "EchoDataModule(Data, a factor 2, b factor 3)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"])
def test_a_copy_echoes_loaders_of_its_own(copied: Any) -> None:
    validation = [1, 2]
    module = EchoDataModule.from_dataloaders(plain(), validation, factor=2, **OPTIONS)
    twin = copied(module)
    twin.factor = 3
    assert (module.factor, twin.factor, twin.train_dataloader().factor) == (2, 3, 3)
    assert twin.val_dataloader() == validation
    assert twin.val_dataloader() is not validation


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "factor is missing: EchoDataModule"),
        ({"factor": 2, "loaders": {"a": EchoConfig(2)}}, ValueError, "loaders has the options of each loader: leave factor"),
        ({"seed": 2, "loaders": {"a": EchoConfig(2)}}, ValueError, "loaders has the options of each loader: leave factor"),
        ({"cache": "8GiB", "loaders": {"a": EchoConfig(2)}}, ValueError, "loaders has the options of each loader: leave factor"),
        ({"cache": "8GiB"}, TypeError, "factor is missing: .*factor=1 means no echoing, for a cache alone"),
        ({"loaders": {}}, ValueError, "loaders is empty"),
        ({"factor": 0.5}, ValueError, "factor must be a finite number >= 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoDataModule(Data(), **arguments)


def test_what_has_nothing_to_echo_or_is_echoed_already_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match="LightningDataModule has no train_dataloader, so there is nothing to echo"
    ):
        EchoDataModule(pl.LightningDataModule(), 2)
    with pytest.raises(ValueError, match="datamodule is an EchoDataModule already"):
        EchoDataModule(echoed(), 2)


class Decides(DecidesFactor, pl.Callback):
    """Stands for an `EchoCallback`."""


def test_a_factor_that_nobody_decides_on_is_refused_in_fit_alone() -> None:
    module = echoed("auto")
    assert (module.is_auto, module.factor) == (True, 1)
    attach(module)
    module.setup("validate")
    with pytest.raises(MisconfigurationException, match=r"EchoDataModule\(factor='auto'\) needs an EchoCallback in the Trainer"):
        module.setup("fit")
    attach(module, status=TrainerStatus.FINISHED)
    attach(module, Decides())
    module.setup("fit")
    assert module.datamodule.calls == ["setup validate", "setup fit"]  # type: ignore[attr-defined]
    assert not echoed(2).is_auto


# ---------------------------------------------------------------------- the end, and states


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["teardown", "on_exception"])
def test_at_the_end_workers_are_ended_whatever_the_users_hook_does(name: str, fails: bool) -> None:
    data = Data(fails)
    module = EchoDataModule(data, 2, **OPTIONS)
    loader = module.train_dataloader()
    next(iter(loader))
    assert loader.is_running
    argument: Any = "fit" if name == "teardown" else KeyError()
    with pytest.raises(RuntimeError, match="the user's own failure") if fails else nullcontext():
        getattr(module, name)(argument)
    assert data.calls == [name]
    assert not loader.is_running


def test_the_failure_of_another_trainer_to_attach_does_not_end_this_fit() -> None:
    module = echoed()
    attach(module)
    module.on_exception(KeyError())
    assert module.datamodule.calls == []  # type: ignore[attr-defined]
    module.trainer.state.status = TrainerStatus.INTERRUPTED
    module.on_exception(KeyError())
    assert module.datamodule.calls == ["on_exception"]  # type: ignore[attr-defined]


def test_the_users_state_and_the_loaders_come_back() -> None:
    module, again = echoed(), echoed()
    module.seen = 5
    loader = module.train_dataloader()
    stream = iter(loader)
    for _ in range(3):
        next(stream)
    state = module.state_dict()
    assert state == {"datamodule": {"seen": 5}, "loader": loader.state_dict()}
    again.load_state_dict(state)
    assert again.seen == 5
    assert again.train_dataloader().delivered_batches == 3
