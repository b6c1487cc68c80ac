"""TorchGeo: rasters indexed by place, its samplers of patches, its data modules, which augment on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from project_runs import (
    BATCH,
    LENGTH,
    WAYS,
    assert_epochs,
    assert_repeatable,
    assert_resumes_exactly,
    assert_right,
    said,
    train,
)
from torch.utils.data import DataLoader

torchgeo = pytest.importorskip("torchgeo", reason="torchgeo is not installed: pip install 'lightning-echo[test-outside]'")

import rasterio  # noqa: E402
from kornia import augmentation as aug  # noqa: E402
from torchgeo.datamodules import NonGeoDataModule  # noqa: E402
from torchgeo.datasets import NonGeoDataset, RasterDataset, stack_samples  # noqa: E402
from torchgeo.samplers import GridGeoSampler, RandomGeoSampler  # noqa: E402

pytestmark = [
    # rasterio 1.4 multiplies matrices as affine 3 no longer wants it.
    pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning"),
    # TorchGeo's data modules have validation data, the model here has no use for it.
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`"),
]

SIDE, PATCH = 32, 8
PIXELS = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A raster whose pixels have a number each."""
    options: dict[str, Any] = {"driver": "GTiff", "count": 1, "height": SIDE, "width": SIDE, "dtype": "float32"}
    place = rasterio.transform.from_origin(500_000, 4_000_000, 1, 1)
    with rasterio.open(tmp_path / "field.tif", "w", crs="EPSG:32610", transform=place, **options) as file:
        file.write(PIXELS, 1)
    return str(tmp_path)


class Fields(RasterDataset):
    filename_glob = "*.tif"


class Scenes(NonGeoDataset):
    def __init__(self, split: str = "train", transforms: Any = None) -> None:
        self.split, self.transforms = split, transforms

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        sample = {"image": torch.full((3, 4, 4), 10.0 * index) + torch.arange(16).reshape(4, 4) / 100, "label": index}
        return sample if self.transforms is None else self.transforms(sample)


def see(batch: Any) -> Any:
    """A patch is known by the pixel in its corner."""
    return [(int(one[0]), tuple(one)) for one in batch["image"].flatten(1).tolist()]


def see_label(batch: Any) -> Any:
    images = batch["image"].flatten(1).tolist()
    return [(number, tuple(one)) for number, one in zip(batch["label"].tolist(), images, strict=True)]


def patch_at(number: int) -> tuple[float, ...]:
    row, column = divmod(number, SIDE)
    return tuple(PIXELS[row : row + PATCH, column : column + PATCH].flatten().tolist())


def patches(sampler_class: Any, folder: str, workers: int, **options: Any) -> Any:
    data = Fields(folder)
    sampler = sampler_class(data, size=PATCH, **options)
    return DataLoader(data, BATCH, sampler=sampler, num_workers=workers, collate_fn=stack_samples)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_each_patch_of_a_grid_is_fresh_once_in_a_pass(
    workers: int, way: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        run = train(lambda: patches(GridGeoSampler, folder, workers, stride=PATCH), see, way=way, epochs=4)
    assert "its sampler (GridGeoSampler) seems to yield no integers" in said(caplog)
    corners = PIXELS[::PATCH, ::PATCH].flatten().astype(int).tolist()
    values = {number: patch_at(number) for number in corners}
    assert_right(run, corners, point="after_augmentation", passes=2, steps=4, values=values)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_patches_follow_the_seed_and_a_killed_run_goes_on_with_them(workers: int, folder: str, tmp_path: Path) -> None:
    """Their sampler draws from several random states."""

    def make(**options: Any) -> Any:
        return patches(RandomGeoSampler, folder, workers, length=16, **options)

    assert_repeatable(lambda seed: train(make, see, epochs=2, seed=seed))
    assert_resumes_exactly(lambda: make(generator=torch.Generator().manual_seed(5)), see, tmp_path, (1, 4, 6), epochs=2)


class Noisy(NonGeoDataModule):
    """As TorchGeo's own: what augments runs in its hook after the transfer."""

    def __init__(self, workers: int, **options: Any) -> None:
        super().__init__(Scenes, BATCH, workers, **options)
        self.train_aug = aug.AugmentationSequential(aug.RandomGaussianNoise(std=0.01, p=1.0), data_keys=None, keepdim=True)


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("point", ["auto", "after_transfer"])
def test_its_data_module_for_scenes_augments_every_use(point: str, workers: int, way: str) -> None:
    run = train(Noisy(workers), see_label, way=way, insertion_point=point)
    assert run.loader.insertion_point == ("before_augmentation" if point == "auto" else point)
    assert_epochs(run, LENGTH // BATCH)
    assert len({(use.index, use.value) for use in run.uses}) == len(run.uses) == 3 * (LENGTH // BATCH) * BATCH
    assert all(abs(use.value[0] - 10 * use.index) < 0.5 for use in run.uses)
