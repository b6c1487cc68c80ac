"""The table of docs/concepts/insertion_points.md, pipeline, point that `auto` takes, way to an earlier one, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Subset
from torchvision import datasets
from torchvision.transforms import v2

from lightning_echo import EchoConfig, EchoDataModule, EchoLoader, StagedDataset

CROP = v2.Compose([v2.RandomCrop(8), v2.PILToTensor()])


def image_folder(folder: Path) -> Any:
    for index in range(8):
        path = folder / "images" / "class" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (index, 0, 0)).save(path)
    return datasets.ImageFolder(folder / "images", CROP)


class Whole(Dataset[Any]):
    """Does everything in ``__getitem__``."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index]) + torch.rand(1)

    def __len__(self) -> int:
        return 16


class Plain(Whole):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)])


class Staged(StagedDataset):
    def load(self, index: Any) -> Any:
        return torch.tensor([float(index)])

    def augment(self, example: Any) -> Any:
        return example + torch.rand(1)

    def __len__(self) -> int:
        return 16


class Raw(Staged):
    def read(self, index: Any) -> Any:
        return bytes([index])

    def decode(self, raw: Any) -> Any:
        return torch.tensor([float(raw[0])])

    def load(self, index: Any) -> Any:
        return self.decode(self.read(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(16.0))


class OwnIter(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([torch.zeros(4)] * 4)


def buckets(dataset: Any) -> Any:
    return BatchSampler(RandomSampler(dataset), 4, drop_last=False)


def take(loader: Any, point: str = "auto") -> str:
    echoed = EchoLoader(loader, 2, insertion_point=point, seed=0)
    assert len(list(echoed)) > 0
    return str(echoed.insertion_point)


def test_torchvisions_convention(tmp_path: Path) -> None:
    folder = image_folder(tmp_path)
    for dataset in (folder, Subset(folder, [0, 2, 3, 5]), ConcatDataset([folder, folder])):
        assert take(DataLoader(dataset, 4)) == "before_augmentation"
        assert take(DataLoader(dataset, 4), "after_read") == "after_read"


def test_staged_data_sets() -> None:
    assert take(DataLoader(Staged(), 4)) == "before_augmentation"
    with pytest.raises(ValueError, match=r"read\(index\) and decode\(raw\)"):
        take(DataLoader(Staged(), 4), "after_read")
    assert take(DataLoader(Raw(), 4)) == "before_augmentation"
    assert take(DataLoader(Raw(), 4), "after_read") == "after_read"


def test_data_sets_that_do_everything_themselves() -> None:
    assert take(DataLoader(Whole(), 4)) == "after_augmentation"
    taken_out = StagedDataset.of(Plain(), augment=lambda example: example + torch.rand(1))
    assert take(DataLoader(taken_out, 4)) == "before_augmentation"


def test_streams() -> None:
    assert take(DataLoader(Stream(), 4)) == "after_augmentation"


def test_what_a_streams_collate_function_draws_is_drawn_for_each_use() -> None:
    def collate(examples: list[Any]) -> Any:
        return torch.stack([torch.stack([example, torch.rand(())]) for example in examples])

    loader = EchoLoader(DataLoader(Stream(), 4, collate_fn=collate), 3, buffer_size=8, seed=0)
    rows = [tuple(row) for _ in range(2) for batch in loader for row in batch.tolist()]
    assert loader.counts.echoed > 0
    assert len({noise for _, noise in rows}) == len(rows)


def test_batch_samplers_of_your_own() -> None:
    assert take(DataLoader(Plain(), batch_sampler=buckets(Plain()))) == "after_batching"
    assert take(DataLoader(Plain(), 4, sampler=RandomSampler(Plain()))) == "after_augmentation"


@pytest.mark.parametrize(
    "loader", [DataLoader(Stream(), batch_size=None), OwnIter(Plain(), 4), [torch.zeros(4)] * 3], ids=["none", "own", "list"]
)
def test_batches_as_they_come(loader: Any) -> None:
    assert take(loader) == "after_batching"
    with pytest.raises(ValueError, match="Use 'after_batching' or 'auto'"):
        EchoLoader(loader, 2, insertion_point="after_augmentation")


def test_collections() -> None:
    loaders = {"labelled": DataLoader(Staged(), 4), "unlabelled": DataLoader(Stream(), 4)}
    points = {
        name: loader.insertion_point
        for name, loader in EchoDataModule.from_dataloaders(loaders, factor=2).train_dataloader().items()
    }
    assert points == {"labelled": "before_augmentation", "unlabelled": "after_augmentation"}
    only = EchoDataModule.from_dataloaders(loaders, loaders={"labelled": EchoConfig(factor=4)}).train_dataloader()
    assert isinstance(only["labelled"], EchoLoader)
    assert only["unlabelled"] is loaders["unlabelled"]


def test_the_latest_point_is_only_taken_on_request() -> None:
    assert EchoLoader(DataLoader(Plain(), 4), 2, insertion_point="after_transfer").insertion_point == "after_transfer"
