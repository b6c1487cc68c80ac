"""The training loader of a run, echoed: what the Trainer gets, factors and lengths, reloads and states."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainers import trainer_at

from lightning_echo import EchoConfig, EchoLoader
from lightning_echo.training.training_echo import TrainingEcho

POINT = "after_augmentation"


def plain() -> DataLoader[Any]:
    return DataLoader(range(16), batch_size=4)  # type: ignore[arg-type]


def config(factor: float = 2, **options: Any) -> EchoConfig:
    return EchoConfig(factor, **{"insertion_point": POINT, "seed": 0, **options})


def make_trainer(**attributes: Any) -> Any:
    """A Trainer before its first epoch, when it does not know the length of epochs yet."""
    told = {
        "reload_dataloaders_every_n_epochs": 0,
        "overfit_batches": 0,
        "limit_train_batches": 1.0,
        "max_epochs": -1,
        "optimizers": ["of this fit"],
        "distributed_sampler_kwargs": None,
        "lr_scheduler_configs": [],
        "sanity_checking": False,
        "strategy": SimpleNamespace(process_dataloader=lambda loader: loader),
    }
    return trainer_at(length=math.inf, epochs=(0, 0, 0), **{**told, **attributes})


class Users:
    """A user's ``train_dataloader``, which makes its loaders anew and counts how often it was asked."""

    def __init__(self, make: Any = plain) -> None:
        self.make, self.asked = make, 0

    def __call__(self) -> Any:
        self.asked += 1
        return self.make()


def training_echo(options: Any = None, trainer: Any = None, **arguments: Any) -> TrainingEcho:
    attached = SimpleNamespace(trainer=trainer)
    return TrainingEcho(options or config(), attached, **{"owner_name": "EchoCallback", **arguments})


def asked(echo: TrainingEcho, users: Any) -> Any:
    """Returns what a Trainer gets that asks in its ``fit``: what the hook returns goes through the strategy, loader by loader."""
    loaders, process = echo.train_dataloader(users), echo._attached.trainer.strategy.process_dataloader
    return process(loaders) if not isinstance(loaders, dict) else {name: process(each) for name, each in loaders.items()}


def state_after(batches: int) -> Any:
    """The state of a loader that has delivered so many batches."""
    loader = EchoLoader(plain(), 2, insertion_point=POINT, seed=0)
    stream = iter(loader)
    for _ in range(batches):
        next(stream)
    return loader.state_dict()


def test_what_it_got_is_known_again_also_in_a_collection_that_lightning_has_rebuilt() -> None:
    single, several = training_echo(), training_echo()
    loader = single.train_dataloader(plain)
    loaders = several.train_dataloader(lambda: {"a": plain(), "b": plain()})
    assert single.is_in_use(loader)
    assert several.is_in_use(dict(loaders))
    for echo in (single, several):
        assert not echo.is_in_use(plain())
        assert not echo.is_in_use({"a": EchoLoader(plain(), 2), "b": loaders["b"]})


def test_a_new_length_is_told_by_one_reload_which_the_user_does_not_see() -> None:
    trainer, users = make_trainer(), Users()
    echo = training_echo(config(2, epoch_length="full_pass"), trainer)
    echo.begin_fit(trainer)
    trainer.optimizers = ["configured"]  # so that nobody has read how long the run will be
    loader = asked(echo, users)
    echo.factor = 3
    assert trainer.reload_dataloaders_every_n_epochs == 1
    assert len(loader) == 8, "as the Trainer believes"
    assert asked(echo, users) is loader
    assert (len(loader), users.asked, trainer.reload_dataloaders_every_n_epochs) == (12, 1, 0)


def test_loaders_of_other_names_begin_anew_with_a_warning() -> None:
    echo = training_echo()
    before = echo.train_dataloader(lambda: {"a": plain(), "b": plain()})
    for loader in before.values():
        loader.load_state_dict(state_after(2))
        next(iter(loader))
    assert before["a"].is_running
    message = "returned loaders named 'a', 'b' before and returns loaders named 'b', 'c' now"
    with pytest.warns(UserWarning, match=message):
        now = echo.train_dataloader(lambda: {"b": plain(), "c": plain()})
    assert (now["b"].delivered_batches, now["c"].delivered_batches) == (3, 0)
    assert not before["a"].is_running


def test_an_adopted_loader_cannot_begin_with_another_length() -> None:
    echo = training_echo()
    echo.factor = 3
    with pytest.raises(MisconfigurationException, match=r"begins with factor 3, .*pass EchoLoader\(loader, 3, ...\) to fit"):
        echo.adopt(EchoLoader(plain(), 2, insertion_point=POINT, epoch_length="full_pass"))
    loader = EchoLoader(plain(), 3, insertion_point=POINT, epoch_length="full_pass")
    echo.adopt(loader)
    assert echo.loader is loader
