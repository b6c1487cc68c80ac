"""MONAI: its data sets cut where their random transforms begin, its caches, its loaders, examples that are several crops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_resumes_exactly, assert_right, said, train

monai = pytest.importorskip("monai", reason="monai is not installed: pip install 'lightning-echo[test-outside]'")

from monai import data as of_monai  # noqa: E402
from monai import transforms  # noqa: E402
from monai.data import DataLoader, Dataset, decollate_batch  # noqa: E402
from monai.transforms import Compose, LoadImaged, RandGaussianNoised  # noqa: E402


@pytest.fixture
def files(tmp_path: Path) -> list[dict[str, Any]]:
    """Images of their own number, a channel first, as people list them for MONAI."""
    listed = []
    for number in range(LENGTH):
        path = tmp_path / f"{number}.npy"
        np.save(path, np.full((1, 4, 4), number, np.float32) + np.arange(16, dtype=np.float32).reshape(1, 4, 4) / 100)
        listed.append({"image": str(path), "number": number})
    return listed


def deterministic() -> list[Any]:
    scaled = transforms.ScaleIntensityRanged("image", a_min=0, a_max=1, b_min=0, b_max=2)
    return [LoadImaged("image", reader="NumpyReader", image_only=True), scaled]


def noise() -> Any:
    return RandGaussianNoised("image", prob=1.0, std=0.01)


def see(batch: Any) -> Any:
    images = batch["image"].flatten(1).tolist()
    return [(number, tuple(image)) for number, image in zip(batch["number"].tolist(), images, strict=True)]


def plain_of(dataset: Any) -> dict[int, Any]:
    return {number: value for batch in DataLoader(dataset, batch_size=BATCH) for number, value in see(batch)}


def loader(data: Any, workers: int = 2) -> Any:
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)


KINDS: dict[str, Any] = {
    "Dataset": lambda folder: Dataset,
    "CacheDataset": lambda folder: lambda *of: of_monai.CacheDataset(*of, progress=False),
    "CacheDataset in part": lambda folder: lambda *of: of_monai.CacheDataset(*of, progress=False, cache_num=10),
    "PersistentDataset": lambda folder: lambda *of: of_monai.PersistentDataset(*of, cache_dir=folder / "cache"),
    "CacheNTransDataset": lambda folder: lambda *of: of_monai.CacheNTransDataset(*of, cache_n_trans=1, cache_dir=folder / "n"),
}


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_deterministic_part_is_reused_and_the_noise_redone(
    kind: str, workers: int, way: str, files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = KINDS[kind](tmp_path)
    data = make(files, Compose([*deterministic(), noise()]))
    with caplog.at_level("INFO"):
        run = train(lambda: loader(data, workers), see, way=way)
    assert "reuse [load, LoadImaged, ScaleIntensityRanged], redo [RandGaussianNoised]" in said(caplog)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")
    plain = plain_of(make(files, Compose(deterministic())))
    assert all(abs(np.subtract(use.value, plain[use.index])).max() < 0.1 for use in run.uses)


def see_metadata(batch: Any) -> Any:
    """All that MONAI notes down of an image but the address of a transform, which is another one in each process."""
    for one in decollate_batch(batch):
        image = one["image"]
        applied = [{key: value for key, value in trace.items() if key != "id"} for trace in image.applied_operations]
        name = Path(image.meta["filename_or_obj"]).name
        yield int(one["number"]), (name, str(applied), tuple(image.affine.flatten().tolist()), tuple(image.flatten().tolist()))


@pytest.mark.parametrize(
    ("point", "workers"), [("auto", 0), ("auto", 2), ("after_augmentation", 2), ("after_batching", 2), ("after_transfer", 0)]
)
def test_images_keep_their_metadata_at_every_point(point: str, workers: int, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed: pip install 'lightning-echo[test-outside]'")
    listed = []
    for number in range(LENGTH):
        path = tmp_path / f"{number}.nii"
        nibabel.save(nibabel.Nifti1Image(np.full((4, 4, 4), number, np.float32), np.diag([2.0, 2.0, 1.0, 1.0])), path)
        listed.append({"image": str(path), "number": number})
    oriented = transforms.Orientationd("image", axcodes="LPS", labels=None)
    spaced = transforms.Spacingd("image", pixdim=(1, 1, 1))
    data = Dataset(listed, Compose([LoadImaged("image"), transforms.EnsureChannelFirstd("image"), oriented, spaced]))
    plain = {number: seen for batch in DataLoader(data, batch_size=BATCH) for number, seen in see_metadata(batch)}
    run = train(lambda: loader(data, workers), see_metadata, insertion_point=point)
    assert_right(run, range(LENGTH), steps=STEPS, values=plain)


@pytest.mark.parametrize(("kind", "options"), [("IterableDataset", {}), ("ShuffleBuffer", {"buffer_size": 6, "seed": 0})])
def test_its_streams_end_their_epochs_and_reuse_their_noise(
    kind: str, options: Any, files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        data = getattr(of_monai, kind)(files, Compose([*deterministic(), noise()]), **options)
        return DataLoader(data, batch_size=BATCH, num_workers=2)

    with caplog.at_level("INFO"):
        run = train(make, see)
    assert "an epoch ends when the stream ends" in said(caplog)
    assert "state_dict() and load_state_dict(state), or the loader is torchdata's StatefulDataLoader" in said(caplog)
    assert_right(run, range(LENGTH), point="after_augmentation", passes=3, noise="reused")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_with_the_same_noise(workers: int, files: Any, tmp_path: Path) -> None:
    """Its transforms hold generators of their own."""

    def make() -> Any:
        return loader(Dataset(files, Compose([*deterministic(), noise()])), workers)

    assert_resumes_exactly(make, see, tmp_path, (1, 9), epochs=2)
