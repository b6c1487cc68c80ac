"""MONAI: its data sets cut where their random transforms begin, its caches, its loaders, examples that are several crops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from project_runs import (
    WAYS,
    assert_epochs,
    assert_exact,
    assert_noise_redone,
    assert_noise_reused,
    assert_repeatable,
    assert_resumes_exactly,
    assert_unchanged,
    said,
    train,
)

monai = pytest.importorskip("monai", reason="monai is not installed: pip install 'lightning-echo[test-outside]'")

from monai.data import (  # noqa: E402
    ArrayDataset,
    CacheDataset,
    CacheNTransDataset,
    DataLoader,
    Dataset,
    GridPatchDataset,
    IterableDataset,
    PatchIter,
    PersistentDataset,
    ShuffleBuffer,
    SmartCacheDataset,
    ThreadDataLoader,
    decollate_batch,
)
from monai.transforms import (  # noqa: E402
    Compose,
    EnsureChannelFirstd,
    LoadImage,
    LoadImaged,
    OneOf,
    Orientationd,
    RandAdjustContrastd,
    RandFlipd,
    RandGaussianNoise,
    RandGaussianNoised,
    RandomOrder,
    RandSpatialCropSamplesd,
    ScaleIntensityRanged,
    SomeOf,
    Spacingd,
)

LENGTH, BATCH = 22, 4


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
    return [
        LoadImaged("image", reader="NumpyReader", image_only=True),
        ScaleIntensityRanged("image", a_min=0, a_max=1, b_min=0, b_max=2),
    ]


def noise() -> Any:
    return RandGaussianNoised("image", prob=1.0, std=0.01)


def see(batch: Any) -> Any:
    images = batch["image"].flatten(1).tolist()
    return [(number, tuple(image)) for number, image in zip(batch["number"].tolist(), images, strict=True)]


def plain_of(dataset: Any) -> dict[int, Any]:
    return {number: value for batch in DataLoader(dataset, batch_size=BATCH) for number, value in see(batch)}


def cached(data: Any, transform: Any, **options: Any) -> Any:
    return CacheDataset(data, transform, progress=False, **options)


def persistent(folder: Path) -> Callable[[Any, Any], Any]:
    return lambda data, transform: PersistentDataset(data, transform, cache_dir=folder / "cache")


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("kind", ["Dataset", "CacheDataset", "CacheDataset in part", "PersistentDataset", "CacheNTransDataset"])
def test_the_deterministic_part_is_reused_and_the_noise_redone(
    kind: str, workers: int, way: str, files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make: Any = {
        "Dataset": Dataset,
        "CacheDataset": cached,
        "CacheDataset in part": lambda data, transform: cached(data, transform, cache_num=10),
        "PersistentDataset": persistent(tmp_path),
        "CacheNTransDataset": lambda data, transform: CacheNTransDataset(
            data, transform, cache_n_trans=1, cache_dir=tmp_path / "n"
        ),
    }[kind]
    data = make(files, Compose([*deterministic(), noise()]))
    with caplog.at_level("INFO"):
        run = train(lambda: DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert "reuse [load, LoadImaged, ScaleIntensityRanged], redo [RandGaussianNoised]" in said(caplog)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_redone(run)
    plain = plain_of(make(files, Compose(deterministic())))
    assert all(abs(np.subtract(use.value, plain[use.index])).max() < 0.1 for use in run.uses)


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("loader", [DataLoader, ThreadDataLoader])
def test_without_anything_random_every_use_is_what_the_plain_loader_delivers(
    loader: Any, workers: int, way: str, files: Any
) -> None:
    data = Dataset(files, Compose(deterministic()))
    run = train(lambda: loader(data, batch_size=BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_unchanged(run, plain_of(data))


def test_its_threads_make_a_loader_of_batches(files: Any) -> None:
    data = Dataset(files, Compose([*deterministic(), noise()]))
    run = train(lambda: ThreadDataLoader(data, batch_size=BATCH, shuffle=True), see)
    assert run.loader.insertion_point == "after_batching"
    assert_exact(run, range(LENGTH))
    assert_noise_reused(run)


def test_where_it_may_put_off_resampling_what_belongs_together_is_redone_together(
    files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    data = Dataset(files, Compose([*deterministic(), RandFlipd("image", prob=0.5), noise()], lazy=True))
    with caplog.at_level("INFO"):
        run = train(lambda: DataLoader(data, batch_size=BATCH, num_workers=2), see)
    assert "reuse [load, LoadImaged, ScaleIntensityRanged], redo [RandFlipd, RandGaussianNoised]" in said(caplog)
    assert_exact(run, range(LENGTH))
    assert_noise_redone(run)


@pytest.mark.parametrize("some", [OneOf, SomeOf, RandomOrder])
def test_a_choice_between_transforms_is_random(some: Any, files: Any, caplog: pytest.LogCaptureFixture) -> None:
    choice = some([RandGaussianNoised("image", prob=1.0), RandAdjustContrastd("image", prob=1.0)])
    with caplog.at_level("INFO"):
        run = train(lambda: DataLoader(Dataset(files, Compose([*deterministic(), choice])), batch_size=BATCH), see)
    assert f"reuse [load, LoadImaged, ScaleIntensityRanged], redo [{some.__name__}]" in said(caplog)
    assert_exact(run, range(LENGTH))


@pytest.mark.parametrize("workers", [0, 2])
def test_image_and_label_that_its_array_data_set_augments_stay_alike(workers: int, files: Any) -> None:
    """It seeds the transforms of both with one number, which it draws from a generator of its own."""
    paths = [file["image"] for file in files]

    def make() -> Any:
        both = [Compose([LoadImage(reader="NumpyReader", image_only=True), RandGaussianNoise(prob=1.0, std=0.01)]) for _ in "ab"]
        return DataLoader(ArrayDataset(paths, both[0], paths, both[1]), batch_size=BATCH, num_workers=workers)

    def see_both(batch: Any) -> Any:
        images, labels = batch
        assert (images == labels).all()
        return [(round(float(image.mean())), tuple(image.flatten().tolist())) for image in images]

    run = train(make, see_both)
    assert run.loader.insertion_point == "after_augmentation"
    assert_exact(run, range(LENGTH))
    assert_noise_reused(run)
    assert_repeatable(lambda seed: train(make, see_both, epochs=2, seed=seed))


def see_metadata(batch: Any) -> Any:
    """All that MONAI notes down of an image but the address of a transform, which is another one in each process."""
    for one in decollate_batch(batch):
        image = one["image"]
        applied = [{key: value for key, value in trace.items() if key != "id"} for trace in image.applied_operations]
        name = Path(image.meta["filename_or_obj"]).name
        yield int(one["number"]), (name, str(applied), tuple(image.affine.flatten().tolist()), tuple(image.flatten().tolist()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", ["auto", "after_augmentation", "after_batching", "after_transfer"])
def test_images_keep_their_metadata_at_every_point(point: str, workers: int, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed: pip install 'lightning-echo[test-outside]'")
    listed = []
    for number in range(LENGTH):
        path = tmp_path / f"{number}.nii"
        nibabel.save(nibabel.Nifti1Image(np.full((4, 4, 4), number, np.float32), np.diag([2.0, 2.0, 1.0, 1.0])), path)
        listed.append({"image": str(path), "number": number})
    steps = [
        LoadImaged("image"),
        EnsureChannelFirstd("image"),
        Orientationd("image", axcodes="LPS", labels=None),
        Spacingd("image", pixdim=(1, 1, 1)),
    ]
    data = Dataset(listed, Compose(steps))
    plain = {number: seen for batch in DataLoader(data, batch_size=BATCH) for number, seen in see_metadata(batch)}
    run = train(
        lambda: DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers), see_metadata, insertion_point=point
    )
    assert_exact(run, range(LENGTH))
    assert_unchanged(run, plain)


STREAMS: dict[str, Any] = {
    "IterableDataset": lambda data, transform: IterableDataset(data, transform),
    "ShuffleBuffer": lambda data, transform: ShuffleBuffer(data, transform, buffer_size=6, seed=0),
}


@pytest.mark.parametrize(("workers", "way"), WAYS)
@pytest.mark.parametrize("kind", STREAMS)
def test_its_streams_end_their_epochs_and_reuse_their_noise(
    kind: str, workers: int, way: str, files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        data = STREAMS[kind](files, Compose([*deterministic(), noise()]))
        return DataLoader(data, batch_size=BATCH, num_workers=workers)

    with caplog.at_level("INFO"):
        run = train(make, see, way=way)
    assert run.loader.insertion_point == "after_augmentation"
    assert "an epoch ends when the stream ends" in said(caplog)
    assert "state_dict() and load_state_dict(state), or the loader is torchdata's StatefulDataLoader" in said(caplog)
    assert_exact(run, range(LENGTH), passes=3)
    assert len(run.fresh) == 3 * LENGTH
    assert_noise_reused(run)


@pytest.mark.parametrize("workers", [0, 2])
def test_patches_on_a_grid_are_a_stream(workers: int) -> None:
    """Four patches of each image, known by the pixel in their corner."""
    images = [100.0 * number + np.arange(16, dtype=np.float32).reshape(1, 4, 4) for number in range(8)]

    def make() -> Any:
        patches = PatchIter(patch_size=(2, 2), start_pos=(0, 0))
        return DataLoader(GridPatchDataset(images, patches, with_coordinates=False), batch_size=BATCH, num_workers=workers)

    run = train(make, lambda batch: [(int(patch.flatten()[0]), tuple(patch.flatten().tolist())) for patch in batch])
    corners = [100 * number + corner for number in range(8) for corner in (0, 2, 8, 10)]
    assert_exact(run, corners)
    assert_unchanged(run, {corner: tuple(float(corner + step) for step in (0, 1, 4, 5)) for corner in corners})


@pytest.mark.parametrize("workers", [0, 2])
def test_two_runs_with_the_same_seed_draw_the_same_noise(workers: int, files: Any) -> None:
    """Its transforms hold generators of their own."""

    def once(seed: int) -> Any:
        data = Dataset(files, Compose([*deterministic(), noise()]))
        return train(lambda: DataLoader(data, batch_size=BATCH, num_workers=workers), see, epochs=2, seed=seed)

    assert_repeatable(once)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_with_the_same_noise(workers: int, files: Any, tmp_path: Path) -> None:
    def make() -> Any:
        data = Dataset(files, Compose([*deterministic(), noise()]))
        return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)

    assert_resumes_exactly(make, see, tmp_path, (1, 6, 9), epochs=2)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_an_example_that_is_several_crops_stays_together(workers: int, way: str, files: Any) -> None:
    """`list_data_collate` makes a batch of twice as many images; an example is what the data set returns."""
    crops = RandSpatialCropSamplesd("image", roi_size=(2, 2), num_samples=2, random_size=False)
    data = Dataset(files, Compose([*deterministic(), crops, noise()]))

    def see_pairs(batch: Any) -> Any:
        seen = see(batch)
        assert [number for number, _ in seen[::2]] == [number for number, _ in seen[1::2]]
        return [(number, (one, other)) for (number, one), (_, other) in zip(seen[::2], seen[1::2], strict=True)]

    run = train(lambda: DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers), see_pairs, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_redone(run)


class ExchangeCache(pl.Callback):
    """What MONAI asks for after each epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del trainer, pl_module
        self.dataset.update_cache()


def test_a_cache_that_is_exchanged_between_epochs_is_seen_without_workers(files: Any) -> None:
    """An index is another example from then on; an image is always that of its number."""
    data = SmartCacheDataset(files, Compose([*deterministic(), noise()]), replace_rate=0.5, cache_num=12, progress=False)
    data.start()
    try:
        run = train(lambda: DataLoader(data, batch_size=BATCH), see, epochs=6, callbacks=[ExchangeCache(data)])
    finally:
        data.shutdown()
    assert run.loader.insertion_point == "before_augmentation"
    assert run.loader.counts.delivered == len(run.uses) == 6 * 12
    assert max(use.index for use in run.uses) >= 12  # what was not in the cache at first
    assert_noise_redone(run)
    plain = plain_of(Dataset(files, Compose(deterministic())))
    assert all(abs(np.subtract(use.value, plain[use.index])).max() < 0.1 for use in run.uses)
