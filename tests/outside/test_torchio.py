"""TorchIO: subjects with a random transform, its loader, and its ``Queue`` of patches, which ignores its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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

torchio = pytest.importorskip("torchio", reason="torchio is not installed: pip install 'lightning-echo[test-outside]'")

LENGTH, BATCH = 22, 4


def volume(number: int) -> torch.Tensor:
    return torch.full((1, 4, 4, 4), float(number)) + torch.arange(64).reshape(1, 4, 4, 4) / 100


def in_memory() -> list[Any]:
    return [torchio.Subject(mri=torchio.ScalarImage(tensor=volume(number)), number=number) for number in range(LENGTH)]


def in_files(folder: Path) -> list[Any]:
    subjects = []
    for number in range(LENGTH):
        path = folder / f"{number}.nii"
        torchio.ScalarImage(tensor=volume(number)).save(path)
        subjects.append(torchio.Subject(mri=torchio.ScalarImage(path), number=number))
    return subjects


def see(batch: Any) -> Any:
    volumes = batch["mri"]["data"].flatten(1).tolist()
    return [(number, tuple(one)) for number, one in zip(batch["number"].tolist(), volumes, strict=True)]


PLAIN = {number: tuple(volume(number).flatten().tolist()) for number in range(LENGTH)}


def queue(subjects: int = 11, **options: Any) -> Any:
    data = torchio.SubjectsDataset(in_memory()[:subjects])
    return torchio.Queue(data, 8, 2, torchio.UniformSampler(2), start_background=False, **options)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_subjects_in_files_come_as_they_are(workers: int, way: str, tmp_path: Path) -> None:
    """They are read when they are first looked at: by the loader's collate."""
    data = torchio.SubjectsDataset(in_files(tmp_path))
    run = train(lambda: torchio.SubjectsLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_unchanged(run, PLAIN)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_its_random_transforms_are_redone(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    transform = torchio.Compose([torchio.ToCanonical(), torchio.RandomNoise(std=0.01)])
    data = torchio.SubjectsDataset(in_memory(), transform=transform)
    with caplog.at_level("INFO"):
        run = train(lambda: torchio.SubjectsLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers), see, way=way)
    assert run.loader.insertion_point == "before_augmentation"
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_redone(run)


def test_two_runs_with_the_same_seed_draw_the_same_noise() -> None:
    def once(seed: int) -> Any:
        data = torchio.SubjectsDataset(in_memory(), transform=torchio.RandomNoise())
        return train(lambda: torchio.SubjectsLoader(data, batch_size=BATCH, num_workers=2), see, epochs=2, seed=seed)

    assert_repeatable(once)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_with_the_same_noise(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        data = torchio.SubjectsDataset(in_memory(), transform=torchio.RandomNoise())
        return torchio.SubjectsLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)

    assert_resumes_exactly(make, see, tmp_path, (1, 6, 9), epochs=2)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_batches_that_are_reused_keep_their_noise(workers: int, way: str) -> None:
    data = torchio.SubjectsDataset(in_memory(), transform=torchio.RandomNoise(std=0.01))

    def make() -> Any:
        return torchio.SubjectsLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)

    run = train(make, see, way=way, insertion_point="after_batching")
    assert_exact(run, range(LENGTH))
    assert_epochs(run, 6)
    assert_noise_reused(run)


@pytest.mark.parametrize("way", ["callback", "datamodule"])
def test_a_queue_ignores_its_index_which_is_said(way: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = train(lambda: torchio.SubjectsLoader(queue(), batch_size=BATCH), see, way=way)
    assert run.loader.insertion_point == "after_augmentation"
    assert "Queue returns what comes next, whatever index it is asked for" in said(caplog)
    assert "read again after a resume is another one" in said(caplog)
    assert_epochs(run, 6)


def test_a_queue_deals_out_every_patch_of_a_pass_fresh_once() -> None:
    """Two of each subject, in the order in which it comes: nothing is left out or read twice."""
    run = train(lambda: torchio.SubjectsLoader(queue(), batch_size=BATCH), see, epochs=4)
    assert_exact(run, sorted([*range(11), *range(11)]), passes=2)
