"""Lightly: its data set around an image folder or torch's data, transforms that make several views, its collate functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_right, said, train
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from lightning_echo import StagedDataset

lightly = pytest.importorskip("lightly", reason="lightly is not installed: pip install 'lightning-echo[test-outside]'")

from lightly.data import LightlyDataset, MultiViewCollate  # noqa: E402
from lightly.transforms import SimCLRTransform  # noqa: E402


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


def see_views(batch: Any) -> Any:
    views, labels, names = batch
    numbers = [int(Path(name).stem) for name in names]
    assert [number % 2 for number in numbers] == labels.tolist()
    return [(number, tuple(torch.stack(pair).flatten().tolist())) for number, *pair in zip(numbers, *views, strict=True)]


def views() -> Any:
    return SimCLRTransform(input_size=8)


def of_views(data: Any, workers: int = 2) -> Any:
    return DataLoader(data, BATCH, shuffle=True, num_workers=workers, collate_fn=MultiViewCollate())


@pytest.mark.parametrize("of", ["folder", "torchvision"])
def test_its_transform_is_that_of_another_data_set_so_that_views_are_reused_which_is_said(
    of: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        if of == "folder":
            return of_views(LightlyDataset(folder, transform=views()))
        return of_views(LightlyDataset.from_torch_dataset(ImageFolder(folder), transform=views()))

    with caplog.at_level("INFO"):
        run = train(make, see_views)
    assert "LightlyDataset.transform cannot be replaced in a copy alone" in said(caplog)
    assert "a StagedDataset can redo for each use" in said(caplog)
    assert_right(run, range(LENGTH), point="after_augmentation", steps=STEPS, noise="reused")


def to_views(example: Any) -> Any:
    image, *rest = example
    return views()(image), *rest


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_the_views_are_redone_where_they_are_taken_out_as_the_message_says(workers: int, way: str, folder: str) -> None:
    data = StagedDataset.of(LightlyDataset(folder), augment=to_views)
    run = train(lambda: of_views(data, workers), see_views, way=way)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")
