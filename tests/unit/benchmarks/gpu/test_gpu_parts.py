"""What the stages are made of: images, batches that the device decodes, parts by name, rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.images import write_images
from gpu.setting import Setting
from gpu.sharing import numbered_images, of_passes

SIZE = (80, 60)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("run")
    made = Setting(folder / "out", folder / "data", folder / "scratch", is_tiny=True)
    assert write_images(made.data / "train", 0, 80, SIZE, seconds=60) == 80
    made.note("images", folder=str(made.data), size=SIZE, train=80)
    made.note("R", R=3.0)
    return made


def test_numbers_of_a_pass_lead_to_the_true_labels(setting: Setting) -> None:
    data, labels = numbered_images(setting)
    assert [number for _, number in data.samples] == list(range(len(data)))
    assert [int(Path(path).stem) % 40 for path, _ in data.samples] == labels.tolist()


def test_lost_and_repeated_images_are_those_of_the_worst_pass() -> None:
    assert of_passes([(10, 10), (7, 7), (12, 10)], images=10) == (3, 2)
    assert of_passes([], images=10) == (None, None)
