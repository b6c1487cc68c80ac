"""Images that a data set only opened are decoded where they are read. The model: a file that is empty afterwards."""

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

from lightning_echo.pipeline.worker import LiveExamples, Request
from lightning_echo.split.staged import Stages, add_decoding, unchanged, uncut_stages

# Many, and not to be compressed: a small file is in the buffer with its header.
PIXELS = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
SHAPES = {
    "alone": lambda image: image,
    "tuple": lambda image: (1, image),
    "list": lambda image: [image, 1],
    "dict": lambda image: {"label": 1, "image": image},
}


def make_opened(folder, number=0):
    """An image of which nothing but the header was read."""
    Image.fromarray(PIXELS).save(folder / f"{number}.png")
    return Image.open(folder / f"{number}.png")


def is_right_without_its_file(image, folder, number=0):
    (folder / f"{number}.png").write_bytes(b"")
    return np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("many", [False, True])
def test_opened_images_are_decoded_when_they_are_loaded(shape, many, tmp_path):
    image = make_opened(tmp_path)
    example = SHAPES[shape](image)
    stages = Stages(lambda index: example, unchanged, reused=(), redone=(), load_many=lambda indices: [example])
    add_decoding(stages)
    loaded = stages.load_many([0])[0] if many else stages.load(0)
    assert loaded is example
    assert is_right_without_its_file(image, tmp_path)


class Counted(list):
    taken = 0

    def __iter__(self):
        for value in super().__iter__():
            Counted.taken += 1
            yield value


def test_an_example_of_many_values_is_not_gone_through_and_reading_one_by_one_stays_that():
    stages = uncut_stages([Counted(range(1000))])
    add_decoding(stages)
    stages.load(0)
    assert Counted.taken < 20
    assert stages.load_many is None


@pytest.mark.parametrize("kept", [b"\0\0", b"\0\1"])
def test_a_worker_decodes_before_it_augments(kept, tmp_path):
    class Files(Dataset):
        def __getitem__(self, index):
            return make_opened(tmp_path, index), index

    def make_stages(dataset):
        return Stages(
            dataset.__getitem__,
            lambda index, example: is_right_without_its_file(example[0], tmp_path, example[1]),
            reused=(),
            redone=(),
        )

    cache = LiveExamples(Files(), make_stages, 0, None)
    examples, _ = cache.fetch(Request(number=0, positions=[0, 1], fresh=2, indices=[0, 1], stays_live=kept))
    assert examples == [True, True]
