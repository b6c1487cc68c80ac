"""The memory of an example: the elements that it holds, counted once, and a little for the objects that hold them."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_echo.data.copies import bytes_from_words, bytes_in_words, nbytes

KIB = 1024


@dataclass
class Example:
    image: torch.Tensor
    label: int = 0


@dataclass(slots=True)
class Slotted:
    image: torch.Tensor


class Plain:
    def __init__(self, image):
        self.image = image


def zeros():
    return torch.zeros(KIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    "value",
    [
        zeros(),
        np.zeros(KIB, np.uint8),
        bytes(KIB),
        [zeros()],
        (zeros(), 3),
        {"image": zeros()},
        {"a": [{"b": (zeros(),)}]},
        Example(zeros()),
        Slotted(zeros()),
        Plain(zeros()),
        np.array([zeros(), None], dtype=object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kibibyte_weighs_a_kibibyte_and_what_holds_it_little(value):
    assert KIB <= nbytes(value) <= 2 * KIB


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, torch.bool])
def test_tensors_count_by_their_elements(kind):
    assert nbytes(torch.zeros(3, 5, dtype=kind)) == 15 * torch.zeros((), dtype=kind).element_size()


def test_a_view_counts_by_what_it_shows():
    assert nbytes(torch.zeros(KIB, dtype=torch.uint8)[:10]) == 10
    assert nbytes(torch.zeros(1, dtype=torch.uint8).expand(KIB)) == KIB


def test_what_is_held_twice_counts_once():
    tensor = zeros()
    pair = [tensor, tensor]
    assert nbytes(pair) == sys.getsizeof(pair) + KIB
    pair.append(pair)
    assert nbytes(pair) == sys.getsizeof(pair) + KIB, "also a list that holds itself"


@pytest.mark.parametrize(
    ("mode", "bytes_of_a_pixel"), [("L", 1), ("1", 1), ("P", 1), ("I;16", 2), ("RGB", 4), ("RGBA", 4), ("F", 4)]
)
def test_images_weigh_what_pillow_holds_in_memory(mode, bytes_of_a_pixel):
    assert nbytes(Image.new(mode, (8, 5))) == 8 * 5 * bytes_of_a_pixel


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
        ("1TiB", 2**40),
        ("8G", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("1.5k", 1500),
        *[(text, None) for text in ("", "8", "GiB", "-1GiB", "8 apples", "1,5GiB", "1e3B", "8GiB more")],
    ],
)
def test_a_number_with_a_unit_is_bytes_and_nothing_else_is(text, number):
    assert bytes_from_words(text) == number
