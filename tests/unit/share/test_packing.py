"""Examples as bytes come back as they were; rows of whole batches, cut and joined again, are as they were."""

import collections
import dataclasses
import enum
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.difference import difference
from lightning_echo.share.packing import ERROR, SharedReadError, pack, pack_error, unpack
from lightning_echo.share.pipeline import cut, joined, rows_of

Pair = collections.namedtuple("Pair", "image label")


def there_and_back(example):
    kind, parts, size = pack(example)
    data = bytearray(b"".join(map(bytes, parts)))
    assert len(data) == size
    return unpack(kind, data)


SHARED = [1, 2]


@pytest.mark.parametrize(
    "example",
    [
        *[7, 2**80, float("inf"), True, None, "text", b"bytes", np.int64(7), np.array("text")],
        *[torch.arange(6).to(dtype) for dtype in (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64)],
        *[torch.tensor(3.5), torch.empty(0, 3), torch.arange(12).reshape(3, 4).t(), torch.tensor([1 + 2j])],
        np.arange(6, dtype=np.int8).reshape(2, 3),
        {"a": [1, (2, torch.ones(2))], 3: {"b": None}},
        (1, (2, ()), []),
        Pair(torch.ones(2), 3),
        {"pairs": [Pair(1, (2, Pair(3, 4)))], "plain": (5, 6)},
        [SHARED, SHARED],
        {"a": SHARED, "b": SHARED},
        Image.new("RGB", (3, 2), (1, 2, 3)),
        tv_tensors.Image(torch.ones(3, 2, 2, dtype=torch.uint8)),
        tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(8, 8)),
        ("tuple", "named"),
        [("named", "collections", "OrderedDict", 1), Pair(1, 2)],
    ],
)
def test_it_comes_back_as_it_was(example):
    back = there_and_back(example)
    assert type(back) is type(example)
    assert difference([back], [example]) is None


@dataclasses.dataclass
class Scan:
    image: torch.Tensor
    label: int = 3
    rest: dataclasses.InitVar[int] = 0

    def __post_init__(self, rest):
        self.label += rest  # must not run a second time


@dataclasses.dataclass(frozen=True, slots=True)
class Molecule:
    weights: np.ndarray
    bonds: tuple[int, ...] = (1, 2)
    scan: Scan | None = None


def test_a_dataclass_comes_back_with_all_that_was_set_on_it():
    scan = Scan(torch.arange(3), 3, 4)
    scan.path = "a.png"
    example = {"one": Molecule(np.arange(2), scan=scan), "two": [scan, scan]}
    back = there_and_back(example)
    assert type(back["one"]) is Molecule
    assert (back["one"].weights.tolist(), back["one"].bonds) == ([0, 1], (1, 2))
    for found in (back["one"].scan, *back["two"]):
        assert type(found) is Scan
        assert (found.image.tolist(), found.label, found.path) == ([0, 1, 2], 7, "a.png")
    del scan.image  # a field that was never set stays so
    assert vars(there_and_back(scan)) == {"label": 7, "path": "a.png"}


class Colour(enum.IntEnum):
    red = 1


class OwnTuple(tuple):
    pass


@dataclasses.dataclass
class OwnDict(dict):
    """Its members are no attributes."""


def local_pair():
    return collections.namedtuple("LocalPair", "a b")(1, 2)


@pytest.mark.parametrize(
    ("example", "path"),
    [
        (object(), "example is a builtins.object"),
        ([1, {"a": (2, {3})}], r"example\[1\]\['a'\]\.1 is a builtins.set"),
        (Pair(1, object()), "example.label is a builtins.object"),
        (Scan(object()), "example.image is a builtins.object"),
        (OwnDict(), "example is a .*OwnDict"),
        ({"c": Colour.red}, r"example\['c'\] is a .*Colour"),
        (OwnTuple((1,)), "example is a .*OwnTuple"),
        (collections.OrderedDict(a=1), "example is a collections.OrderedDict"),
        (torch.ones(2, requires_grad=True), "example is a torch.Tensor"),
        (np.array([object()]), "example is a numpy.ndarray"),
        (local_pair(), "example is a .*LocalPair"),
        (torch.eye(2).to_sparse(), "example is a torch.Tensor"),
    ],
)
def test_anything_else_is_refused_with_the_path_to_it(example, path):
    with pytest.raises(TypeError, match=f"{path}, which cannot be shared"):
        pack(example)


class OwnError(Exception):
    pass


NOTED = ValueError("broken")
NOTED.__notes__ = ["(reading example 7)"]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (KeyError("key"), KeyError, "key"),
        (OSError("no disk"), OSError, "no disk"),
        (NOTED, ValueError, r"broken \(reading example 7\)"),
        # Any other error than Python's own, and those that cannot be made of a message, are named.
        (OwnError("own"), SharedReadError, "OwnError: own"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), SharedReadError, "UnicodeDecodeError: .*bad"),
        (StopIteration("over"), SharedReadError, "StopIteration: over"),
    ],
)
def test_an_error_of_pythons_own_comes_back_with_its_type_and_any_other_one_named(error, kind, said):
    packed, parts, _ = pack_error(error)
    assert packed == ERROR
    with pytest.raises(kind, match=said):
        unpack(packed, bytearray(b"".join(map(bytes, parts))))


class Labelled(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


def batch_of(first, stop):
    """A batch with a leaf of each kind; row ``n`` of each says ``n``."""
    numbers = torch.arange(first, stop)
    return {
        "pair": Labelled(numbers[:, None].expand(-1, 3), numbers),
        "array": np.arange(first, stop),
        "names": [str(number) for number in range(first, stop)],
        "both": (numbers.float(), [numbers]),
    }


def assert_is(found, first, stop):
    """Checks that a batch has these rows, and the containers of `batch_of`."""
    assert (type(found["pair"]), type(found["both"])) == (Labelled, tuple)
    assert difference([found], [batch_of(first, stop)]) is None


@settings(max_examples=30)
@given(st.integers(1, 40), st.data())
def test_what_is_cut_and_joined_has_the_same_rows(count, data):
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    whole = batch_of(0, count)
    assert rows_of(whole) == count
    assert_is(cut(whole, start, stop), start, stop)
    middle = data.draw(st.integers(start + 1, stop))
    parts = [cut(whole, start, middle), *([cut(whole, middle, stop)] if middle < stop else [])]
    assert_is(joined(parts), start, stop)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, "3, 4"),
        ({"a": torch.zeros(3), "b": ["x", "y"]}, "2, 3"),
        ({"a": torch.zeros(3), "b": 7}, "3, None"),
        (torch.tensor(1.0), "None"),
        ({}, "none"),
    ],
)
def test_a_batch_whose_leaves_have_no_common_number_of_rows_is_refused(batch, found):
    with pytest.raises(ValueError, match=rf"leaves must have one number of rows, got {found}\. Give the loader"):
        rows_of(batch)
