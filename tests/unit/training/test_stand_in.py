"""A stand-in cannot be told apart from the user's data module: attributes, hooks, and what it does not have."""

import copy
import pickle

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_echo.training.hooks import StandIn


class Users(pl.LightningDataModule):
    size = 3

    def __init__(self, folder="data", batch_size=4):
        super().__init__()
        self.save_hyperparameters()
        self.prepared = []

    def prepare_data(self):
        self.prepared.append("prepare_data")

    def train_dataloader(self):
        return ["batch"] * self.size

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch, self.size


class Doubled(StandIn):
    """A subclass with something of its own."""

    _own = ("times",)

    def __init__(self, datamodule, times=2):
        self.times = times
        super().__init__(datamodule)

    def train_dataloader(self):
        return self.datamodule.train_dataloader() * self.times


def test_attributes_are_read_from_and_set_on_the_users_module():
    users = Users()
    stands = Doubled(users)
    assert (stands.size, stands.prepared, stands.hparams) == (3, [], users.hparams)
    stands.size = 5
    assert (users.size, len(stands.train_dataloader())) == (5, 10)
    assert stands.datamodule is users
    with pytest.raises(AttributeError, match="nowhere"):
        _ = stands.nowhere


def test_lightning_finds_overridden_what_the_user_overrides_and_nothing_else():
    users = Users()
    stands = StandIn(users)
    for name in ("prepare_data", "setup", "teardown", "train_dataloader", "val_dataloader", "test_dataloader", "state_dict"):
        assert is_overridden(name, stands) is is_overridden(name, users), name
    stands.prepare_data()
    assert users.prepared == ["prepare_data"]
    assert stands.on_before_batch_transfer("batch", 0) == ("batch", 3)


@pytest.mark.parametrize("value", [None, [1, 2], pl.LightningModule])
def test_what_is_no_data_module_is_refused_with_a_hint(value):
    with pytest.raises(TypeError, match=r"must be a LightningDataModule, got .*; for loaders use Doubled.from_dataloaders"):
        Doubled(value)
    with pytest.raises(TypeError, match=r"got the class LightningDataModule: pass an instance, LightningDataModule\("):
        Doubled(pl.LightningDataModule)


class Adding(StandIn):
    """Overrides a hook and calls what it has overridden."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return ("ours", super().on_before_batch_transfer(batch, dataloader_idx))

    def prepare_data(self):
        super().prepare_data()


def test_super_in_a_subclass_leads_to_the_users_module():
    users = Users()
    stand_in = Adding(users)
    assert stand_in.on_before_batch_transfer(1, 0) == ("ours", (1, 3))
    stand_in.prepare_data()
    assert users.prepared == ["prepare_data"]
    assert is_overridden("prepare_data", stand_in)
    for name in ("val_dataloader", "on_after_batch_transfer", "transfer_batch_to_device", "setup"):
        assert not is_overridden(name, stand_in)


def test_a_copy_overrides_the_same_before_it_has_a_trainer():
    for copied in (pickle.loads(pickle.dumps(StandIn(Users()))), copy.deepcopy(StandIn(Users())), copy.copy(StandIn(Users()))):
        assert is_overridden("train_dataloader", copied)
        assert is_overridden("on_before_batch_transfer", copied)
        assert not is_overridden("val_dataloader", copied)
        assert not is_overridden("on_exception", copied)
