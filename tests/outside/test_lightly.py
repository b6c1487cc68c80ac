"""Lightly: its data set around an image folder or torch's data, transforms that make several views, its collate functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from project_runs import (
    WAYS,
    assert_epochs,
    assert_exact,
    assert_noise_redone,
    assert_noise_reused,
    assert_repeatable,
    assert_unchanged,
    said,
    train,
)
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from lightning_echo import StagedDataset

lightly = pytest.importorskip("lightly", reason="lightly is not installed: pip install 'lightning-echo[test-outside]'")

from lightly.data import LightlyDataset, MultiViewCollate  # noqa: E402
from lightly.transforms import SimCLRTransform  # noqa: E402

LENGTH, BATCH = 22, 4


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Two classes of images in one colour, which tells their number, with a corner that is brighter."""
    for number in range(LENGTH):
        directory = tmp_path / "images" / str(number % 2)
        directory.mkdir(parents=True, exist_ok=True)
        picture = Image.new("RGB", (12, 12), (number, 5 * number, 100))
        picture.paste((200, 200, 10 * number), (0, 0, 6, 6))
        picture.save(directory / f"{number:02}.png")
    return str(tmp_path / "images")


def number_of(name: str) -> int:
    return int(Path(name).stem)


def see(batch: Any) -> Any:
    images, _, names = batch
    return [(number_of(name), tuple(one.flatten().tolist())) for name, one in zip(names, images, strict=True)]


def see_views(batch: Any) -> Any:
    views, labels, names = batch
    assert [number_of(name) % 2 for name in names] == labels.tolist()
    return [(number_of(name), tuple(torch.stack(pair).flatten().tolist())) for name, *pair in zip(names, *views, strict=True)]


def views() -> Any:
    return SimCLRTransform(input_size=8)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_images_come_as_they_are(workers: int, way: str, folder: str) -> None:
    data = LightlyDataset(folder, transform=ToTensor())
    run = train(lambda: DataLoader(data, BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_unchanged(run, {number: value for batch in DataLoader(data, BATCH) for number, value in see(batch)})


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("of", ["folder", "torchvision"])
def test_its_transform_is_that_of_another_data_set_so_that_views_are_reused_which_is_said(
    of: str, workers: int, way: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    def data() -> Any:
        if of == "folder":
            return LightlyDataset(folder, transform=views())
        return LightlyDataset.from_torch_dataset(ImageFolder(folder), transform=views())

    def make() -> Any:
        return DataLoader(data(), BATCH, shuffle=True, num_workers=workers, collate_fn=MultiViewCollate())

    with caplog.at_level("INFO"):
        run = train(make, see_views, way=way)
    assert run.loader.insertion_point == "after_augmentation"
    assert "LightlyDataset.transform cannot be replaced in a copy alone" in said(caplog)
    assert "a StagedDataset can redo for each use" in said(caplog)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_reused(run)


def to_views(example: Any) -> Any:
    image, *rest = example
    return views()(image), *rest


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_the_views_are_redone_where_they_are_taken_out_as_the_message_says(workers: int, way: str, folder: str) -> None:
    data = StagedDataset.of(LightlyDataset(folder), augment=to_views)

    def make() -> Any:
        return DataLoader(data, BATCH, shuffle=True, num_workers=workers, collate_fn=MultiViewCollate())

    run = train(make, see_views, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_redone(run)


def test_an_image_folder_with_its_transform_is_split_as_any_other(folder: str) -> None:
    """What Lightly's own tutorials use beside its data set: torchvision's, without file names."""

    def see_labels(batch: Any) -> Any:
        (one, other), labels = batch
        return [(int(label), (a.sum().item(), b.sum().item())) for a, b, label in zip(one, other, labels, strict=True)]

    run = train(lambda: DataLoader(ImageFolder(folder, transform=views()), BATCH, shuffle=True), see_labels)
    assert run.loader.insertion_point == "before_augmentation"
    assert_exact(run, [0, 1] * (LENGTH // 2))
    assert_noise_redone(run)


def test_two_runs_with_the_same_seed_see_the_same_views(folder: str) -> None:
    def once(seed: int) -> Any:
        data = LightlyDataset(folder, transform=views())
        return train(lambda: DataLoader(data, BATCH, collate_fn=MultiViewCollate(), num_workers=2), see_views, seed=seed)

    assert_repeatable(once)
