"""Where echoing stands during a ``fit``: on the user's hook and on the strategy's, and nowhere afterwards."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainers import asked_by_lightning, trainer_in_fit

from lightning_echo import EchoConfig, EchoLoader
from lightning_echo.attachment import Attachment

CONFIG = EchoConfig(factor=2, insertion_point="after_augmentation", seed=0)


def plain(length: int = 16) -> DataLoader[Any]:
    return DataLoader(range(length), batch_size=4)  # type: ignore[arg-type]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return plain()


class Model(pl.LightningModule):
    """Has no data."""


def attached(trainer: Any, model: Any = None, config: Any = CONFIG) -> Attachment:
    attachment = Attachment(config)
    attachment.attach(trainer, model or Model())
    return attachment


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"])
def test_a_copy_of_the_users_module_or_of_the_strategy_is_not_echoed(copied: Any) -> None:
    data = Data()
    trainer = trainer_in_fit(data)
    attachment = attached(trainer)
    assert isinstance(copied(data).train_dataloader(), DataLoader)
    strategy, loader = copied(trainer.strategy), plain()
    assert strategy.process_dataloader(loader) is loader
    attachment.detach()


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
