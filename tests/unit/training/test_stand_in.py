"""A stand-in cannot be told apart from the user's data module: attributes, hooks, and what it does not have."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
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


def in_fit():
    return SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING, status=TrainerStatus.RUNNING))


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


def test_a_hook_that_is_put_onto_either_later_counts():
    users = Users()
    stands = StandIn(users)
    stands.val_dataloader = lambda: ["val"]
    assert users.val_dataloader() == stands.val_dataloader() == ["val"]
    users.test_dataloader = lambda: ["test"]
    stands.trainer = None  # whenever a trainer is attached or let go
    assert is_overridden("test_dataloader", stands)
    assert stands.test_dataloader() == ["test"]


def test_a_second_fit_over_it_is_refused():
    stands = StandIn(Users())
    stands.trainer = first = in_fit()
    with pytest.raises(MisconfigurationException, match="the data module Users is in use by another Trainer"):
        stands.trainer = in_fit()
    assert stands.trainer is first


@pytest.mark.parametrize("value", [None, [1, 2], pl.LightningModule])
def test_what_is_no_data_module_is_refused_with_the_way_out(value):
    with pytest.raises(TypeError, match=r"must be a LightningDataModule, got .*; for loaders use Doubled.from_dataloaders"):
        Doubled(value)
    with pytest.raises(TypeError, match=r"got the class LightningDataModule: pass an instance, LightningDataModule\("):
        Doubled(pl.LightningDataModule)


def recorded(class_path, **init_args):
    """Returns the hyperparameters that LightningCLI records for the outer one of two data modules that it builds."""
    return {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "datamodule": {"class_path": class_path, "init_args": init_args},
    }


def test_hyperparameters_that_a_command_line_recorded_of_the_outer_one_become_the_users_own():
    users = Users()
    users.hparams.clear()
    users.hparams.update(recorded("project.data.Users", folder="x", batch_size=8))
    StandIn(users)
    assert {name: users.hparams[name] for name in ("folder", "batch_size")} == {"folder": "x", "batch_size": 8}
    assert "datamodule" not in users.hparams


def test_those_of_another_class_are_left_alone():
    users = Users()
    users.hparams.clear()
    users.hparams.update(recorded("project.data.Others", folder="x"))
    before = dict(users.hparams)
    StandIn(users)
    assert dict(users.hparams) == before
