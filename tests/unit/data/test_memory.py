"""The memory of an example: its elements, counted once; examples in the same memory are found, those beside each other not."""

from collections import UserDict, deque

import numpy as np
import PIL.Image
import pytest
import torch
from data_cases import Plain, Sample, Slotted, objects
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.copies import nbytes
from lightning_echo.data.difference import Overlaps

KIB = 1024


def zeros():
    return torch.zeros(KIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(KIB, np.uint8),
        bytes(KIB),
        "x" * KIB,
        bytearray(KIB),
        tv_tensors.Mask(zeros().bool()),
        {"a": [{"b": (zeros(),)}]},
        Sample(zeros()),
        Slotted(zeros()),
        Plain(zeros()),
        UserDict(a=zeros()),
        objects(zeros(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kibibyte_weighs_a_kibibyte_and_what_holds_it_little(value):
    assert KIB <= nbytes(value) <= 2 * KIB


@pytest.mark.parametrize(
    ("value", "weight"),
    [
        (torch.zeros(3, 5, dtype=torch.float64), 120),
        (torch.zeros(3, 5, dtype=torch.bool), 15),
        (zeros()[:10], 10),  # a view by what it shows
        (torch.zeros(1, dtype=torch.uint8).expand(KIB), KIB),
        *[(Image.new(mode, (8, 5)), 40 * size) for mode, size in (("L", 1), ("1", 1), ("P", 1), ("I;16", 2), ("RGB", 4))],
        *[(Image.new(mode, (8, 5)), 40 * 4) for mode in ("RGBA", "F")],  # as Pillow holds them in memory
    ],
)
def test_tensors_count_by_their_elements_and_images_by_their_pixels(value, weight):
    assert nbytes(value) == weight


TENSOR, ARRAY, BYTES = torch.zeros(4, 6), np.zeros((4, 6)), bytearray(24)
GRAY = np.zeros((4, 4), np.uint8)
PICTURE = PIL.Image.new("L", (4, 4))
ITSELF = [TENSOR[1]]
ITSELF.append(ITSELF)


def overlap(*examples):
    overlaps = Overlaps()
    return [overlaps.add(index, example) for index, example in enumerate(examples)][-1]


@pytest.mark.parametrize(
    ("one", "other", "is_found"),
    [
        (TENSOR[0], TENSOR[0], True),
        (TENSOR[0, :4], TENSOR[0, 3:], True),
        (TENSOR[:, 0], TENSOR[1], True),
        ((TENSOR[0], 3), {"image": [TENSOR[0]]}, True),
        (Sample(TENSOR[0]), Slotted(TENSOR[0]), True),
        (tv_tensors.Image(TENSOR), tv_tensors.Image(TENSOR), True),
        (ARRAY[1], ARRAY, True),
        (ARRAY[::-1], ARRAY[2, 2:3], True),
        (torch.from_numpy(ARRAY), ARRAY[3], True),
        (BYTES, memoryview(BYTES)[3:4], True),
        (np.frombuffer(BYTES, np.uint8), BYTES, True),
        (PICTURE, (PICTURE, 1), True),
        (PIL.Image.fromarray(GRAY), PIL.Image.fromarray(GRAY), True),
        (deque([TENSOR[0]]), [TENSOR[0]], True),
        (TENSOR[0], TENSOR[1], False),
        (TENSOR[0, :3], TENSOR[0, 3:], False),
        (TENSOR[0], ITSELF, False),
        (TENSOR[:0], TENSOR[:0], False),
        (ARRAY[0], ARRAY[1], False),
        (memoryview(BYTES)[:3], memoryview(BYTES)[3:], False),
        (PICTURE, PICTURE.copy(), False),
        (("a", 1, None, b"bytes", 2.5), ("a", 1, None, b"bytes", 2.5), False),
        (torch.zeros(3).to_sparse(), torch.zeros(3).to_sparse(), False),
    ],
)
def test_the_same_memory_is_found_and_other_memory_is_not(one, other, is_found):
    assert overlap(one, other) is overlap(other, one) is is_found
    assert overlap(torch.zeros(3), one, np.zeros(3), other) is is_found


def test_the_same_index_may_give_the_same_memory_and_what_was_cleared_is_forgotten():
    overlaps = Overlaps()
    assert not overlaps.add(5, TENSOR[0])
    assert not overlaps.add(5, TENSOR[0])
    assert overlaps.add(6, TENSOR[0])
    overlaps.clear()
    assert not overlaps.add(1, TENSOR)
