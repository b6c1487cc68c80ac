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


def test_the_trainer_gets_the_users_loader_echoed_with_the_options() -> None:
    users, echo = Users(), training_echo(config(2, epoch_length="full_pass"), make_trainer())
    assert echo.loader is None
    assert not echo.gives_loader
    echo.begin_fit(echo._attached.trainer)
    loader = asked(echo, users)
    assert isinstance(loader, EchoLoader)
    assert (loader.factor, loader.seed, len(loader)) == (2, 0, 8)
    assert (echo.loader, echo.gives_loader, users.asked) == (loader, True, 1)
    assert loader.factor_owner == "EchoCallback"
    assert loader.limit_train_batches == 1.0


def test_what_it_got_is_known_again_also_in_a_collection_that_lightning_has_made_anew() -> None:
    single, several = training_echo(), training_echo()
    loader = single.train_dataloader(plain)
    loaders = several.train_dataloader(lambda: {"a": plain(), "b": plain()})
    assert single.is_in_use(loader)
    assert several.is_in_use(dict(loaders))
    for echo in (single, several):
        assert not echo.is_in_use(plain())
        assert not echo.is_in_use({"a": EchoLoader(plain(), 2), "b": loaders["b"]})


def test_how_long_the_run_will_be_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(max_epochs=4)
    echo = training_echo(trainer=trainer)
    with caplog.at_level("INFO"):
        for _ in range(2):
            echo.train_dataloader(plain)
    said = [record.getMessage() for record in caplog.records if "passes over the data" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("lightning_echo: 4 epochs x 4 steps = 2 passes over the data at factor 2")


def test_a_factor_that_is_set_before_there_is_a_loader_is_the_loaders() -> None:
    echo = training_echo(config(2))
    assert (echo.factor, echo.factors) == (2, {"": 2})
    echo.factor = 3
    assert (echo.factor, echo.factors) == (3, {"": 3})
    assert echo.train_dataloader(plain).factor == 3


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


@pytest.mark.parametrize(("epoch_length", "training"), [("fixed", True), ("full_pass", False)])
def test_no_reload_is_ordered_where_no_length_changes_or_nobody_trains(epoch_length: str, training: bool) -> None:
    trainer = make_trainer(training=training)
    echo = training_echo(config(2, epoch_length=epoch_length), trainer)
    loader = echo.train_dataloader(plain)
    echo.factor = 3
    assert (loader.factor, trainer.reload_dataloaders_every_n_epochs) == (3, 0)


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


def test_a_state_that_comes_before_the_loader_waits_for_it() -> None:
    echo, state = training_echo(), state_after(3)
    assert echo.state_dict() is None
    echo.load_state_dict(state)
    assert echo.state_dict() == state
    loader = echo.train_dataloader(plain)
    assert loader.delivered_batches == 3
    next(iter(loader))
    assert echo.state_dict() == loader.state_dict()
    assert echo.train_dataloader(plain).delivered_batches == 4, "it was loaded once"


def test_a_state_without_a_loader_is_the_start_of_the_run() -> None:
    echo = training_echo()
    loader = echo.train_dataloader(plain)
    loader.load_state_dict(state_after(3))
    echo.load_state_dict(None)
    assert (loader.delivered_batches, loader.is_at_start) == (0, True)
