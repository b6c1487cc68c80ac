"""Where echoing stands during a ``fit``: on the user's hook and on the strategy's, and nowhere afterwards.

The Trainers here have only attributes; a strategy has one method.
"""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.utils.data import DataLoader
from trainers import trainer_at

from lightning_echo import EchoConfig, EchoDataModule, EchoLoader
from lightning_echo.attachment import Attachment

CONFIG = EchoConfig(factor=2, insertion_point="after_augmentation", seed=0)


def plain(length: int = 16) -> DataLoader[Any]:
    return DataLoader(range(length), batch_size=4)  # type: ignore[arg-type]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return plain()


class Model(pl.LightningModule):
    """Has no data."""


class ModelWithData(Model):
    def train_dataloader(self) -> Any:
        return plain()


class Strategy:
    """Remembers the loaders that it was given."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def process_dataloader(self, dataloader: Any) -> Any:
        self.given.append(dataloader)
        return dataloader


def make_trainer(datamodule: Any = None, **attributes: Any) -> Any:
    """A Trainer in its ``fit``, before its first epoch."""
    told = {
        "datamodule": datamodule,
        "strategy": Strategy(),
        "state": SimpleNamespace(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING),
        "optimizers": [],
        "train_dataloader": None,
        "reload_dataloaders_every_n_epochs": 0,
        "overfit_batches": 0,
        "limit_train_batches": 1.0,
        "max_epochs": -1,
        "distributed_sampler_kwargs": None,
    }
    return trainer_at(length=math.inf, epochs=(0, 0, 0), **{**told, **attributes})


def attached(trainer: Any, model: Any = None, config: Any = CONFIG) -> Attachment:
    attachment = Attachment(config)
    attachment.attach(trainer, model or Model())
    return attachment


def asked_by_lightning(trainer: Any, instance: Any) -> Any:
    """Returns what a Trainer trains on that asks this instance: what it gets goes through the strategy at once."""
    return trainer.strategy.process_dataloader(instance.train_dataloader())


# ---------------------------------------------------------------------- a train_dataloader


@pytest.mark.parametrize(("data", "model"), [(Data(), Model()), (None, ModelWithData()), (Data(), ModelWithData())])
def test_the_hooks_of_data_module_and_model_are_echoed_and_left_as_they_were(data: Any, model: Any) -> None:
    trainer = make_trainer(data)
    instances = [each for each in (data, model, trainer.strategy) if each is not None]
    before = [dict(vars(each)) for each in instances]
    attachment = attached(trainer, model)
    for each in (data, model):
        if each is not None and type(each) is not Model:
            assert type(each.train_dataloader()) is DataLoader, "whoever asks himself gets the plain loader"
            echoed = asked_by_lightning(trainer, each)
            assert (type(echoed), echoed.factor) == (EchoLoader, 2)
            assert attachment.echo.loader is echoed
    assert (attachment.trainer, attachment.has_echoed) == (trainer, True)
    attachment.detach()
    assert [dict(vars(each)) for each in instances] == before
    assert (attachment.trainer, attachment.has_echoed) == (None, True)


def test_it_may_be_detached_at_any_time() -> None:
    attachment = Attachment(CONFIG)
    attachment.detach()
    attachment.attach(make_trainer(Data()), Model())
    attachment.detach()
    attachment.detach()
    assert attachment.trainer is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"])
def test_a_copy_of_the_users_module_or_of_the_strategy_is_not_echoed(copied: Any) -> None:
    data = Data()
    trainer = make_trainer(data)
    attachment = attached(trainer)
    assert isinstance(copied(data).train_dataloader(), DataLoader)
    strategy, loader = copied(trainer.strategy), plain()
    assert strategy.process_dataloader(loader) is loader
    attachment.detach()


def test_another_fit_over_the_same_module_is_refused_while_this_one_runs() -> None:
    data = Data()
    first = make_trainer(data)
    attachment = attached(first)
    with pytest.raises(MisconfigurationException, match=r"^Data is in use by another Trainer"):
        attached(make_trainer(data))
    first.state.status = TrainerStatus.FINISHED
    other = attached(make_trainer(data))
    other.detach()
    attachment.detach()
    assert isinstance(data.train_dataloader(), DataLoader)


# ---------------------------------------------------------------------- a loader that is passed to fit


def test_the_loader_to_train_on_is_echoed_and_those_for_validation_are_not() -> None:
    trainer = make_trainer()
    attachment = attached(trainer)
    training, validation = plain(), plain()
    echoed = trainer.strategy.process_dataloader(training)
    trainer.training = False
    assert trainer.strategy.process_dataloader(validation) is validation
    assert (type(echoed), echoed.loader, attachment.echo.loader) == (EchoLoader, training, echoed)
    assert [type(each) for each in trainer.strategy.given] == [EchoLoader, DataLoader]
    attachment.detach()
    trainer.training = True
    assert trainer.strategy.process_dataloader(training) is training


def test_only_what_a_hook_returns_is_dealt_out_to_the_ranks_lightning_has_done_so_with_a_passed_loader() -> None:
    ranks = {"num_replicas": 2, "rank": 1}
    passing, data = make_trainer(distributed_sampler_kwargs=ranks), Data()
    attached(passing)
    assert len(passing.strategy.process_dataloader(plain())) == 4
    asking = make_trainer(data, distributed_sampler_kwargs=ranks)
    attached(asking)
    users = data.train_dataloader()
    with_lightnings_sampler = DataLoader(users.dataset, batch_size=4)
    assert len(asking.strategy.process_dataloader(with_lightnings_sampler)) == 2
    assert len(asked_by_lightning(asking, data)) == 4, "without such a sampler, the user divides the data, or nobody"


def test_a_loader_that_a_user_asked_for_takes_no_part_in_what_the_trainer_gets() -> None:
    data = Data()
    trainer = make_trainer(data)
    attachment = attached(trainer)
    echoed = asked_by_lightning(trainer, data)
    users = data.train_dataloader()
    assert (type(users), attachment.echo.loader) == (DataLoader, echoed)
    assert users is not echoed.loader
    trainer.training = False  # validation begins
    validation = plain()
    assert trainer.strategy.process_dataloader(validation) is validation
    assert attachment.echo.loader is echoed


def test_a_second_loader_is_refused_but_not_the_same_data_again() -> None:
    trainer = make_trainer()
    attached(trainer)
    loader = plain()
    first = trainer.strategy.process_dataloader(loader)
    assert trainer.strategy.process_dataloader(loader) is first
    same_data = DataLoader(loader.dataset, batch_size=2)
    assert trainer.strategy.process_dataloader(same_data).loader is same_data
    with pytest.raises(MisconfigurationException, match="cannot echo several loaders that were passed to fit"):
        trainer.strategy.process_dataloader(plain(8))


def test_options_by_name_do_not_fit_a_loader_without_one() -> None:
    trainer = make_trainer()
    attached(trainer, config={"text": CONFIG})
    with pytest.raises(MisconfigurationException, match=r"they come one by one, without their names\. .*EchoLoader\(loader, 2\)"):
        trainer.strategy.process_dataloader(plain())


# ---------------------------------------------------------------------- what is echoed already


def test_an_echo_loader_is_taken_as_it_is_if_no_options_are_given() -> None:
    trainer, users = make_trainer(), EchoLoader(plain(), 3, insertion_point="after_augmentation")
    attachment = attached(trainer, config=None)
    assert trainer.strategy.process_dataloader(users) is users
    trainer.train_dataloader = users
    attachment.check_in_use()
    assert (attachment.echo.loader, attachment.echo.factor, users.factor_owner) == (users, 3, "EchoCallback")
    attachment.detach()
    assert users.factor_owner == ""


def test_an_echo_loader_beside_options_is_refused() -> None:
    trainer = make_trainer()
    attached(trainer)
    with pytest.raises(
        MisconfigurationException, match="an EchoLoader is passed to fit, and EchoCallback has options of its own"
    ):
        trainer.strategy.process_dataloader(EchoLoader(plain(), 3))


def test_an_echo_data_module_echoes_alone() -> None:
    data = EchoDataModule(Data(), 3)
    attachment = attached(make_trainer(data), config=None)
    assert (attachment.trainer, attachment.has_echoed) == (None, False)
    with pytest.raises(MisconfigurationException, match="the data is echoed twice, by an EchoDataModule and by EchoCallback"):
        attached(make_trainer(data))


# ---------------------------------------------------------------------- what the Trainer trains on


def test_the_loader_that_it_got_here_is_in_use() -> None:
    data = Data()
    trainer = make_trainer(data)
    attachment = attached(trainer)
    trainer.train_dataloader = asked_by_lightning(trainer, data)
    attachment.check_in_use()
    assert attachment.echo.loader is trainer.train_dataloader


@pytest.mark.parametrize("used", [plain(), EchoLoader(plain(), 3)], ids=["plain", "echoed elsewhere"])
def test_a_loader_that_came_past_the_hooks_is_refused(used: Any) -> None:
    data = Data()
    trainer = make_trainer(data, train_dataloader=used)
    attachment = attached(trainer)
    with pytest.raises(
        MisconfigurationException, match=f"does not echo the loader that the Trainer trains on, a {type(used).__name__}"
    ):
        attachment.check_in_use()
    trainer.overfit_batches = 1  # then nothing is echoed
    attachment.check_in_use()
    assert attachment.echo.loader is None


def test_one_of_several_passed_loaders_is_refused() -> None:
    trainer = make_trainer()
    attachment = attached(trainer)
    trainer.train_dataloader = [trainer.strategy.process_dataloader(plain()), plain()]
    with pytest.raises(MisconfigurationException, match="cannot echo several loaders that were passed to fit"):
        attachment.check_in_use()


def test_a_trainer_of_the_other_package_is_refused() -> None:
    trainer = type("Trainer", (), {"__module__": "pytorch_lightning.trainer"})()
    with pytest.raises(TypeError, match="trainer Trainer comes from the separate package pytorch_lightning"):
        Attachment(CONFIG).attach(trainer, Model())
