"""What the stages are made of: images, batches that the device decodes, parts by name, rates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu.data import training_images
from gpu.images import write_images
from gpu.setting import Setting
from gpu.sharing import numbered_images, of_passes
from gpu.training import DecodesOnDevice, Encoded
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2 import functional as F

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


@pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities")  # of torchvision, deprecated since 0.29
def test_what_the_device_decodes_are_crops_of_the_resized_images_some_of_them_flipped(setting: Setting) -> None:
    torch.manual_seed(0)
    subset = training_images(setting, 16)
    data = Encoded([subset.dataset.samples[index] for index in subset.indices])  # type: ignore[attr-defined]
    batch = Encoded.collate([data[index] for index in range(16)])
    model = DecodesOnDevice("tiny", resize=40, crop=32)
    images, labels = model.transfer_batch_to_device(batch, torch.device("cpu"), 0)
    assert images.shape == (16, 3, 32, 32)
    assert labels.tolist() == [label for _, label in data.samples]
    places = set()
    for index, image in enumerate(images):
        whole = resized(data[index][0])
        found = [
            (top, left, flipped)
            for flipped in (False, True)
            for top in range(whole.shape[1] - 31)
            for left in range(whole.shape[2] - 31)
            if torch.equal(image.flip(2) if flipped else image, whole[:, top : top + 32, left : left + 32])
        ]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) > 8
    assert {flipped for _, _, flipped in places} == {False, True}


def resized(content: bytes) -> torch.Tensor:
    return F.resize(decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB), [40], antialias=True)


def test_lost_and_repeated_images_are_those_of_the_worst_pass() -> None:
    assert of_passes([(10, 10), (7, 7), (12, 10)], images=10) == (3, 2)
    assert of_passes([], images=10) == (None, None)
