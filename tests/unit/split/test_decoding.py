"""Images that a data set only opened are decoded where they are read. The model: a file that is empty afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from lightning_echo.pipeline.worker import ExampleCache, Request
from lightning_echo.split.staged import Stages, add_decoding, unchanged, uncut_stages

# Many, and not to be compressed: a small file is in the buffer with its header.
PIXELS = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)


def make_opened(folder: Path, number: int = 0) -> Image.Image:
    """An image of which nothing but the header was read."""
    path = folder / f"{number}.png"
    Image.fromarray(PIXELS).save(path)
    return Image.open(path)


def is_right_without_its_file(image: Image.Image, folder: Path, number: int = 0) -> bool:
    (folder / f"{number}.png").write_bytes(b"")
    return np.array_equal(np.asarray(image), PIXELS)


SHAPES = {
    "alone": lambda image: image,
    "tuple": lambda image: (1, image),
    "list": lambda image: [image, 1],
    "dict": lambda image: {"label": 1, "image": image},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("many", [False, True])
def test_opened_images_are_decoded_when_they_are_loaded(shape: str, many: bool, tmp_path: Path) -> None:
    image = make_opened(tmp_path)
    example = SHAPES[shape](image)
    stages = Stages(lambda index: example, unchanged, reused=(), redone=(), load_many=lambda indices: [example])
    add_decoding(stages)
    loaded = stages.load_many([0])[0] if many else stages.load(0)
    assert loaded is example
    assert is_right_without_its_file(image, tmp_path)


def test_stages_that_read_one_by_one_go_on_to_do_so() -> None:
    stages = uncut_stages([1, 2])
    add_decoding(stages)
    assert stages.load_many is None


def test_an_example_of_many_values_is_not_gone_through() -> None:
    class Counted(list[int]):
        taken = 0

        def __iter__(self) -> Any:
            for value in super().__iter__():
                Counted.taken += 1
                yield value

    stages = uncut_stages([Counted(range(1000))])
    add_decoding(stages)
    stages.load(0)
    assert Counted.taken < 20


@pytest.mark.parametrize("kept", [b"\0\0", b"\0\1"])
def test_a_worker_decodes_before_it_augments(kept: bytes, tmp_path: Path) -> None:
    class Files(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            return make_opened(tmp_path, index), index

    def augment(index: int, example: Any) -> bool:
        return is_right_without_its_file(example[0], tmp_path, example[1])

    def make_stages(dataset: Files) -> Stages:
        return Stages(dataset.__getitem__, augment, reused=(), redone=())

    cache = ExampleCache(Files(), make_stages, 0, None)
    examples, _ = cache.fetch(Request(number=0, positions=[0, 1], fresh=2, indices=[0, 1], stays_live=kept))
    assert examples == [True, True]
