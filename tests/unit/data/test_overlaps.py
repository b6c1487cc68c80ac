"""Examples in the same memory are found, whatever they are made of; those beside each other, and the same one again, are not."""

import dataclasses
from collections import deque

import numpy as np
import PIL.Image
import pytest
import torch
from torchvision import tv_tensors

from lightning_echo.data.difference import Overlaps


@dataclasses.dataclass
class Sample:
    image: torch.Tensor


@dataclasses.dataclass(slots=True)
class InSlots:
    image: torch.Tensor


TENSOR, ARRAY, BYTES = torch.zeros(4, 6), np.zeros((4, 6)), bytearray(24)
GRAY = np.zeros((4, 4), np.uint8)
PICTURE = PIL.Image.new("L", (4, 4))


def overlap(*examples):
    overlaps = Overlaps()
    return [overlaps.add(index, example) for index, example in enumerate(examples)][-1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TENSOR[0], TENSOR[0]),
        (TENSOR[0, :4], TENSOR[0, 3:]),
        (TENSOR[:, 0], TENSOR[1]),
        ((TENSOR[0], 3), {"image": [TENSOR[0]]}),
        (Sample(TENSOR[0]), Sample(TENSOR[0])),
        (tv_tensors.Image(TENSOR), tv_tensors.Image(TENSOR)),
        (ARRAY[1], ARRAY),
        (ARRAY[::-1], ARRAY[2, 2:3]),
        (torch.from_numpy(ARRAY), ARRAY[3]),
        (BYTES, memoryview(BYTES)[3:4]),
        (np.frombuffer(BYTES, np.uint8), BYTES),
        (PICTURE, (PICTURE, 1)),
        (PIL.Image.fromarray(GRAY), PIL.Image.fromarray(GRAY)),
        (InSlots(TENSOR[0]), InSlots(TENSOR[0])),
        (deque([TENSOR[0]]), [TENSOR[0]]),
    ],
)
def test_the_same_memory_is_found(one, other):
    assert overlap(one, other)
    assert overlap(other, one)
    assert overlap(torch.zeros(3), one, np.zeros(3), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TENSOR[0], TENSOR[1]),
        (TENSOR[0, :3], TENSOR[0, 3:]),
        (TENSOR, TENSOR.clone()),
        (TENSOR[:0], TENSOR[:0]),
        (ARRAY[0], ARRAY[1]),
        (memoryview(BYTES)[:3], memoryview(BYTES)[3:]),
        (PICTURE, PICTURE.copy()),
        (("a", 1, None, b"bytes", 2.5), ("a", 1, None, b"bytes", 2.5)),
        (torch.zeros(3).to_sparse(), torch.zeros(3).to_sparse()),
    ],
)
def test_other_memory_is_not(one, other):
    assert not overlap(one, other)
    assert not overlap(other, one)


def test_the_same_index_may_give_the_same_memory():
    overlaps = Overlaps()
    assert not overlaps.add(5, TENSOR[0])
    assert not overlaps.add(5, TENSOR[0])
    assert overlaps.add(6, TENSOR[0])


def test_what_was_cleared_is_forgotten():
    overlaps = Overlaps()
    overlaps.add(0, TENSOR)
    overlaps.clear()
    assert not overlaps.add(1, TENSOR)


def test_an_example_that_contains_itself_is_no_endless_one():
    example = [TENSOR]
    example.append(example)
    assert not overlap(example)
