"""What examples weigh is estimated from some of them; images that a data set only opened are decoded where they are read."""

import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset

from lightning_echo.pipeline.worker import LiveExamples, Request
from lightning_echo.split.prove import find_split, weighed
from lightning_echo.split.staged import (
    ExampleSize,
    StagedDataset,
    Stages,
    add_decoding,
    size_of_examples,
    unchanged,
    uncut_stages,
)


class Sized(Dataset):
    """Examples of so many bytes. None: it cannot be read."""

    def __init__(self, sizes):
        self.sizes, self.read = sizes, []

    def __getitem__(self, index):
        self.read.append(index)
        torch.rand(1)
        return torch.zeros(self.sizes[index], dtype=torch.uint8)

    def __len__(self):
        return len(self.sizes)


class ByBatches(Sized):
    def __getitems__(self, indices):
        return [Sized.__getitem__(self, index) for index in indices]

    def __getitem__(self, index):
        raise AssertionError("it is read by batches")


@pytest.mark.parametrize("kind", [Sized, ByBatches])
def test_the_first_and_the_last_example_may_be_unlike_all_others_and_a_copy_is_read(kind):
    dataset, before = kind([10, *[1000] * 98, 10]), torch.get_rng_state()
    assert size_of_examples(dataset, uncut_stages) == ExampleSize(1000, (6 * 1000 + 2 * 10) // 8)
    assert dataset.read == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dataset", [Sized([None] * 20), Sized([]), object()], ids=["all raise", "empty", "no length"])
def test_where_nothing_can_be_read_nothing_is_known(dataset):
    assert size_of_examples(dataset, uncut_stages) is None


@pytest.mark.timeout(60, method="thread")  # a timer of its own would be left alone, and no read be cut
def test_of_a_source_that_hangs_one_example_is_begun_however_long_its_stages_take_to_make():
    begun = []

    class Hangs(Sized):
        def __getitem__(self, index):
            begun.append(index)
            time.sleep(3)
            return super().__getitem__(index)

    def make(dataset):
        time.sleep(0.2)  # as the copy of a large data set; the timer of reads runs meanwhile
        return uncut_stages(dataset)

    assert size_of_examples(Hangs([10] * 20), make) is None
    assert begun == [0]


class Quiet(Sized):
    def __getitem__(self, index):
        return torch.zeros(self.sizes[index], dtype=torch.uint8)


def test_a_split_that_is_weighed_keeps_the_largest_example_of_its_proof():
    parts = [StagedDataset.of(Quiet(sizes), augment=torch.neg) for sizes in ([1000] * 2, [10, *[2000] * 998, 10], [9000, 9000])]
    dataset = ConcatDataset(parts)
    split = find_split(dataset)
    assert (split.example_bytes, split.packed_bytes) == (9000, (1000 + 10 + 9000) // 3)
    assert weighed(dataset, split) == split.__class__(**{**vars(split), "packed_bytes": (1000 + 6 * 2000 + 9000) // 8})
    assert weighed(dataset, split, [2, 3, 1000]).example_bytes == 9000


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
