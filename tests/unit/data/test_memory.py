"""The memory of an example: the elements that it holds, counted once, and a little for the objects that hold them."""

import sys
from collections import UserDict

import numpy as np
import pytest
import torch
from data_cases import Plain, Sample, Slotted, objects
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.copies import bytes_from_words, bytes_in_words, nbytes

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


def test_what_is_held_twice_counts_once_also_what_holds_itself():
    tensor = zeros()
    pair = [tensor, tensor]
    pair.append(pair)
    assert nbytes(pair) == sys.getsizeof(pair) + KIB


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB"),
        (2**20 - 1, "1,024 KiB"),
        (5 * 2**18, "1.25 MiB"),
        (2**45, "32,768 GiB"),
    ],
)
def test_bytes_have_the_largest_unit_of_which_there_is_one(number, words):
    assert bytes_in_words(number) == words


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8B", 8),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("3 MB", 3 * 10**6),
        (" 1.5 GiB ", 3 * 2**29),
        (".5tb", 5 * 10**11),
        ("8G", 8 * 10**9),
        *[(text, None) for text in ("", "8", "GiB", "-1GiB", "8 apples", "1,5GiB", "1e3B", "8GiB more")],
    ],
)
def test_a_number_with_a_unit_is_bytes_and_nothing_else_is(text, number):
    assert bytes_from_words(text) == number
