"""Where echoing stands during a ``fit``: on the user's hook and on the strategy's, and nowhere afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerStatus
from torch.utils.data import DataLoader
from trainers import asked_by_lightning, trainer_in_fit

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


def attached(trainer: Any, model: Any = None, config: Any = CONFIG) -> Attachment:
    attachment = Attachment(config)
    attachment.attach(trainer, model or Model())
    return attachment


@pytest.mark.parametrize(("data", "model"), [(Data(), Model()), (None, ModelWithData()), (Data(), ModelWithData())])
def test_the_hooks_of_data_module_and_model_are_echoed_and_left_as_they_were(data: Any, model: Any) -> None:
    trainer = trainer_in_fit(data)
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
    for _ in range(2):  # it may be detached at any time
        attachment.detach()
        assert [dict(vars(each)) for each in instances] == before
        assert (attachment.trainer, attachment.has_echoed) == (None, True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"])
def test_a_copy_of_the_users_module_or_of_the_strategy_is_not_echoed(copied: Any) -> None:
    data = Data()
    trainer = trainer_in_fit(data)
    attachment = attached(trainer)
    assert isinstance(copied(data).train_dataloader(), DataLoader)
    strategy, loader = copied(trainer.strategy), plain()
    assert strategy.process_dataloader(loader) is loader
    attachment.detach()


def test_another_fit_over_the_same_module_is_refused_while_this_one_runs() -> None:
    data = Data()
    first = trainer_in_fit(data)
    attachment = attached(first)
    with pytest.raises(MisconfigurationException, match=r"^Data is in use by another Trainer"):
        attached(trainer_in_fit(data))
    first.state.status = TrainerStatus.FINISHED
    other = attached(trainer_in_fit(data))
    other.detach()
    attachment.detach()
    assert isinstance(data.train_dataloader(), DataLoader)


def test_the_loader_to_train_on_is_echoed_and_those_for_validation_are_not() -> None:
    trainer = trainer_in_fit()
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
    passing, data = trainer_in_fit(distributed_sampler_kwargs=ranks), Data()
    attached(passing)
    assert len(passing.strategy.process_dataloader(plain())) == 4
    asking = trainer_in_fit(data, distributed_sampler_kwargs=ranks)
    attached(asking)
    with_lightnings_sampler = DataLoader(data.train_dataloader().dataset, batch_size=4)
    assert len(asking.strategy.process_dataloader(with_lightnings_sampler)) == 2
    assert len(asked_by_lightning(asking, data)) == 4, "without such a sampler, the user divides the data, or nobody"


def test_a_loader_that_a_user_asked_for_takes_no_part_in_what_the_trainer_gets() -> None:
    data = Data()
    trainer = trainer_in_fit(data)
    attachment = attached(trainer)
    echoed = asked_by_lightning(trainer, data)
    users = data.train_dataloader()
    assert (type(users), attachment.echo.loader) == (DataLoader, echoed)
    assert users is not echoed.loader
    trainer.train_dataloader = echoed
    attachment.check_in_use()
    assert attachment.echo.loader is echoed


def test_a_second_loader_is_refused_but_not_the_same_data_again() -> None:
    trainer = trainer_in_fit()
    attachment, loader = attached(trainer), plain()
    first = trainer.strategy.process_dataloader(loader)
    assert trainer.strategy.process_dataloader(loader) is first
    trainer.train_dataloader = [first, plain()]
    with pytest.raises(MisconfigurationException, match="cannot echo several loaders that were passed to fit"):
        attachment.check_in_use()
    same_data = DataLoader(loader.dataset, batch_size=2)
    assert trainer.strategy.process_dataloader(same_data).loader is same_data
    with pytest.raises(MisconfigurationException, match="cannot echo several loaders that were passed to fit"):
        trainer.strategy.process_dataloader(plain(8))


@pytest.mark.parametrize(
    ("config", "passed", "message"),
    [
        ({"text": CONFIG}, plain(), r"they come one by one, without their names\. .*EchoLoader\(loader, 2\)"),
        (CONFIG, EchoLoader(plain(), 3), "an EchoLoader is passed to fit, and EchoCallback has options of its own"),
    ],
)
def test_options_that_do_not_fit_what_is_passed_are_refused(config: Any, passed: Any, message: str) -> None:
    trainer = trainer_in_fit()
    attached(trainer, config=config)
    with pytest.raises(MisconfigurationException, match=message):
        trainer.strategy.process_dataloader(passed)


def test_an_echo_loader_is_taken_as_it_is_if_no_options_are_given() -> None:
    trainer, users = trainer_in_fit(), EchoLoader(plain(), 3, insertion_point="after_augmentation")
    attachment = attached(trainer, config=None)
    assert trainer.strategy.process_dataloader(users) is users
    trainer.train_dataloader = users
    attachment.check_in_use()
    assert (attachment.echo.loader, attachment.echo.factor, users.factor_owner) == (users, 3, "EchoCallback")
    attachment.detach()
    assert users.factor_owner == ""


def test_an_echo_data_module_echoes_alone() -> None:
    data = EchoDataModule(Data(), 3)
    attachment = attached(trainer_in_fit(data), config=None)
    assert (attachment.trainer, attachment.has_echoed) == (None, False)
    with pytest.raises(MisconfigurationException, match="the data is echoed twice, by an EchoDataModule and by EchoCallback"):
        attached(trainer_in_fit(data))


@pytest.mark.parametrize("used", [plain(), EchoLoader(plain(), 3)], ids=["plain", "echoed elsewhere"])
def test_a_loader_that_came_past_the_hooks_is_refused(used: Any) -> None:
    trainer = trainer_in_fit(Data(), train_dataloader=used)
    attachment = attached(trainer)
    message = f"does not echo the loader that the Trainer trains on, a {type(used).__name__}"
    with pytest.raises(MisconfigurationException, match=message):
        attachment.check_in_use()
    trainer.overfit_batches = 1  # then nothing is echoed
    attachment.check_in_use()
    assert attachment.echo.loader is None


def test_a_trainer_of_the_other_package_is_refused() -> None:
    trainer = type("Trainer", (), {"__module__": "pytorch_lightning.trainer"})()
    with pytest.raises(TypeError, match="trainer Trainer comes from the separate package pytorch_lightning"):
        Attachment(CONFIG).attach(trainer, Model())
