"""`EchoDataModule` by itself, without a ``fit``: loaders, the factor, what it refuses, its end and its state."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader
from trainers import trainer_in_fit

from lightning_echo import EchoConfig, EchoDataModule

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


def attach(module: EchoDataModule, *callbacks: Any, status: TrainerStatus = TrainerStatus.RUNNING) -> None:
    trainer = trainer_in_fit(callbacks=callbacks)
    trainer.state.status = status
    module.trainer = trainer


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"])
def test_a_copy_echoes_loaders_of_its_own(copied: Any) -> None:
    validation = [1, 2]
    module = EchoDataModule.from_dataloaders(plain(), validation, factor=2, **OPTIONS)
    twin = copied(module)
    twin.factor = 3
    assert (module.factor, twin.factor, twin.train_dataloader().factor) == (2, 3, 3)
    assert twin.val_dataloader() == validation
    assert twin.val_dataloader() is not validation


A = {"a": EchoConfig(2)}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: EchoDataModule(Data()), TypeError, "factor is missing: EchoDataModule"),
        (lambda: EchoDataModule(Data(), 2, loaders=A), ValueError, "loaders has the options of each loader: leave factor"),
        (lambda: EchoDataModule(Data(), seed=2, loaders=A), ValueError, "loaders has the options of each loader: leave factor"),
        (lambda: EchoDataModule(Data(), cache="8GiB"), TypeError, "factor is missing: .*factor=1 means no echoing, for a cache"),
        (lambda: EchoDataModule(Data(), loaders={}), ValueError, "loaders is empty"),
        (lambda: EchoDataModule(Data(), 0.5), ValueError, "factor must be a finite number >= 1"),
        (lambda: EchoDataModule(echoed(), 2), ValueError, "datamodule is an EchoDataModule already"),
        (
            lambda: EchoDataModule(pl.LightningDataModule(), 2),
            MisconfigurationException,
            "LightningDataModule has no train_dataloader, so there is nothing to echo",
        ),
    ],
)
def test_what_does_not_go_together_or_has_nothing_to_echo_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["teardown", "on_exception"])
def test_at_the_end_workers_are_ended_whatever_the_users_hook_does(name: str, fails: bool) -> None:
    data = Data(fails)
    loader = (module := echoed(2, data)).train_dataloader()
    next(iter(loader))
    assert loader.is_running
    argument: Any = "fit" if name == "teardown" else KeyError()
    with pytest.raises(RuntimeError, match="the user's own failure") if fails else nullcontext():
        getattr(module, name)(argument)
    assert data.calls == [name]
    assert not loader.is_running


def test_the_failure_of_another_trainer_to_attach_does_not_end_this_fit() -> None:
    data = Data()
    module = echoed(2, data)
    attach(module)
    module.on_exception(KeyError())
    assert data.calls == []
    module.trainer.state.status = TrainerStatus.INTERRUPTED
    module.on_exception(KeyError())
    assert data.calls == ["on_exception"]
