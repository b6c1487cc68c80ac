"""The data of an analysis is a copy, as far as memory reaches; echoing around it is taken off."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

from lightning_echo import EchoDataModule, EchoLoader
from lightning_echo.analysis import sources as module
from lightning_echo.analysis.sources import TrainingData


class Tensors(pl.LightningDataModule):
    """Eighty bytes in memory, which its loader goes over."""

    def __init__(self, loader=None):
        super().__init__()
        self.tensor = torch.zeros(20)
        self.loader = loader or DataLoader(TensorDataset(self.tensor))

    def __len__(self):
        return 0

    def train_dataloader(self):
        return self.loader


def given(data, model=None):
    """What a Trainer is given, and the loader that it gets from that."""
    found = TrainingData(data)
    used = found.as_given(BoringModel() if model is None else model)
    return found, used.train_dataloader() if isinstance(used, pl.LightningDataModule) else used


def test_a_data_module_and_its_loader_are_copies_that_share_what_the_originals_share():
    original = Tensors()
    original.trainer = trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)  # of an earlier fit
    found, loader = given(original)
    (copied,) = found.instances
    assert type(copied) is type(TrainingData(EchoDataModule(Tensors(), 2)).instances[0]) is Tensors
    assert copied is not original
    assert copied.trainer is trainer
    assert loader is copied.loader
    assert loader.dataset.tensors[0] is copied.tensor is not original.tensor
    assert found.too_large == []


@pytest.mark.parametrize(("free", "is_copied"), [(320, True), (319, False), (None, True)])
def test_no_more_than_a_fourth_of_the_free_memory_is_taken(monkeypatch, free, is_copied):
    monkeypatch.setattr(module, "free_memory_bytes", lambda: free)
    original = Tensors()
    found, loader = given(original)
    assert (loader.dataset.tensors[0] is not original.tensor) is is_copied
    assert found.too_large == ([] if is_copied else ["Tensors.tensor", "TensorDataset.tensors"])


@pytest.mark.parametrize("around", [lambda plain: plain, lambda plain: EchoLoader(plain, 2)], ids=["plain", "echoed"])
def test_loaders_are_copies_without_echoing_in_the_same_collection(around):
    plain = DataLoader(TensorDataset(torch.zeros(20)))
    for collection, one_of in (
        (around(plain), lambda used: used),
        ({"a": [around(plain)]}, lambda used: used["a"][0]),
        (CombinedLoader({"a": around(plain)}, "min_size"), lambda used: used.flattened[0]),
        (Tensors(around(plain)), lambda used: used),
    ):
        copied = one_of(given(collection)[1])
        assert type(copied) is DataLoader
        assert copied is not plain
        assert copied.dataset is not plain.dataset


def test_a_models_own_loader_is_a_copy_where_there_is_no_other():
    plain = DataLoader(TensorDataset(torch.zeros(20)))

    class Own(BoringModel):
        def train_dataloader(self):
            return plain

    model = Own()
    assert given(None, model)[1] is None
    assert model.train_dataloader().dataset is not plain.dataset
    other = Own()
    given(DataLoader(range(3)), other)
    assert other.train_dataloader() is plain, "nobody asks for it"
    without = pl.LightningModule()
    given(None, without)
    assert "train_dataloader" not in vars(without), "so that Lightning says that there is none"
