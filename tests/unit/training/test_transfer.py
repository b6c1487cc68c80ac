"""The hooks that stand in the place of a user's: Lightning does not see them, and other batches pass them by."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_echo import EchoDataModule, EchoLoader
from lightning_echo.pipeline.batches import LiveBatch
from lightning_echo.training.hooks import TransferHooks

HERE = torch.device("cpu")
NAMES = ("on_before_batch_transfer", "transfer_batch_to_device")
LOADERS = DataLoader(range(8), batch_size=4)


class Plain(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class Overrides(Plain):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return ("prepared", batch)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return ("moved", batch)


class OverridesData(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return LOADERS

    transfer_batch_to_device = Overrides.transfer_batch_to_device


def decorated() -> Plain:
    """Lightning takes what was decorated for what is overridden, or not."""
    model = Plain()
    inner = model.transfer_batch_to_device

    @functools.wraps(inner)
    def timed(*args: Any) -> Any:
        return inner(*args)

    vars(model)["transfer_batch_to_device"] = timed
    return model


def with_hook(make: Any) -> Plain:
    model = Overrides()
    vars(model)["transfer_batch_to_device"] = make(model.transfer_batch_to_device)
    return model


def follow(hooks: TransferHooks, model: Any, datamodule: Any = None, point: str = "after_transfer", **trainer: Any) -> EchoLoader:
    loader = EchoLoader(LOADERS, 2, insertion_point=point)
    strategy = SingleDeviceStrategy(HERE)
    told = {"training": True, "strategy": strategy, "lightning_module": model, "datamodule": datamodule, **trainer}
    hooks.bind(loader, SimpleNamespace(**told))
    return loader


@pytest.mark.parametrize(
    "make",
    [Plain, Overrides, decorated, lambda: with_hook(functools.partial), lambda: with_hook(lambda inner: Mock(wraps=inner))],
    ids=["plain", "overridden", "decorated", "partial", "mock"],
)
def test_whether_a_hook_is_overridden_is_the_same_with_ours_in_its_place(make: Any) -> None:
    model, hooks = make(), TransferHooks()
    before, attributes = [is_overridden(name, model) for name in NAMES], dict(vars(model))
    follow(hooks, model)
    assert set(NAMES) <= set(vars(model))
    assert [is_overridden(name, model) for name in NAMES] == before
    hooks.unbind()
    assert vars(model) == attributes


@pytest.mark.parametrize("overridden", [True, False])
def test_of_an_echo_data_module_too(overridden: bool) -> None:
    data = OverridesData() if overridden else pl.LightningDataModule.from_datasets(range(8))  # type: ignore[arg-type]
    outer, hooks = EchoDataModule(data, 2), TransferHooks()
    follow(hooks, Plain(), outer)
    assert [is_overridden(name, outer) for name in NAMES] == [False, overridden]
    outer.setup("fit")  # takes the user's hooks anew
    assert [is_overridden(name, outer) for name in NAMES] == [False, overridden]
    use = LiveBatch({"x": torch.zeros(1)}).use(True)
    batch = outer.transfer_batch_to_device(outer.on_before_batch_transfer(use, 0), HERE, 0)
    assert type(batch) is (tuple if overridden else dict), "moved by the user's hook or by Lightning's"
    hooks.unbind()
    assert not [name for name in NAMES if name in vars(data)]
    assert not [name for name in NAMES if hasattr(vars(outer).get(name), "__wrapped__")]


@pytest.mark.parametrize("batch", [torch.zeros(2), {"x": 1}, (1, 2, 3), None, [LiveBatch(1)]])
def test_any_other_batch_goes_straight_to_the_users_hook(batch: Any) -> None:
    model, hooks = Overrides(), TransferHooks()
    follow(hooks, model)
    prepared = model.on_before_batch_transfer(batch, dataloader_idx=1)
    assert prepared == ("prepared", batch)
    assert prepared[1] is batch
    assert model.transfer_batch_to_device(batch, HERE, 0)[1] is batch


def test_a_second_loader_takes_the_place_of_the_first() -> None:
    model, hooks = Overrides(), TransferHooks()
    first, bound = follow(hooks, model), dict(vars(model))
    second = follow(hooks, model)
    assert all(vars(model)[name] is bound[name] for name in NAMES), "not one hook upon the other"
    assert (first.is_transferred, second.is_transferred) == (False, True)
    hooks.unbind()
    assert not second.is_transferred
    assert not set(NAMES) & set(vars(model))
