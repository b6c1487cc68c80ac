"""TorchIO: subjects with a random transform, its loader, and its ``Queue`` of patches, which ignores its index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_resumes_exactly, assert_right, said, train

torchio = pytest.importorskip("torchio", reason="torchio is not installed: pip install 'lightning-echo[test-outside]'")


def volume(number: int) -> torch.Tensor:
    return torch.full((1, 4, 4, 4), float(number)) + torch.arange(64).reshape(1, 4, 4, 4) / 100


def in_memory(length: int = LENGTH) -> list[Any]:
    return [torchio.Subject(mri=torchio.ScalarImage(tensor=volume(number)), number=number) for number in range(length)]


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


def loader(subjects: list[Any], workers: int, transform: Any = None) -> Any:
    data = torchio.SubjectsDataset(subjects, transform=transform)
    return torchio.SubjectsLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_subjects_in_files_come_as_they_are(workers: int, way: str, tmp_path: Path) -> None:
    """They are read when they are first looked at: by the loader's collate."""
    subjects = in_files(tmp_path)
    run = train(lambda: loader(subjects, workers), see, way=way)
    values = {number: tuple(volume(number).flatten().tolist()) for number in range(LENGTH)}
    assert_right(run, range(LENGTH), steps=STEPS, values=values)


@pytest.mark.parametrize(("workers", "way"), WAYS)
def test_its_random_transforms_are_redone(workers: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    transform = torchio.Compose([torchio.ToCanonical(), torchio.RandomNoise(std=0.01)])
    with caplog.at_level("INFO"):
        run = train(lambda: loader(in_memory(), workers, transform), see, way=way)
    assert "reuse [load], redo [Compose]; " in said(caplog)
    assert_right(run, range(LENGTH), point="before_augmentation", steps=STEPS, noise="redone")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_run_goes_on_with_the_same_noise(workers: int, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: loader(in_memory(), workers, torchio.RandomNoise()), see, tmp_path, (1, 9), epochs=2)


@pytest.mark.parametrize("way", ["callback", "datamodule"])
def test_a_queue_deals_out_every_patch_once_and_ignores_its_index_which_is_said(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two patches of each subject, in the order in which it comes: nothing is left out or read twice."""

    def make() -> Any:
        data = torchio.SubjectsDataset(in_memory(11))
        queue = torchio.Queue(data, 8, 2, torchio.UniformSampler(2), start_background=False)
        return torchio.SubjectsLoader(queue, batch_size=BATCH)

    with caplog.at_level("INFO"):
        run = train(make, see, way=way, epochs=4)
    assert "Queue returns what comes next, whatever index it is asked for" in said(caplog)
    assert "read again after a resume is another one" in said(caplog)
    assert_right(run, sorted([*range(11), *range(11)]), point="after_augmentation", steps=STEPS, passes=2)
