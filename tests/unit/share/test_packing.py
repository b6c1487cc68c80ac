"""Examples as bytes: everything that torch's collate function takes comes back as it was; anything else is refused."""

import collections
import dataclasses
import enum

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.difference import difference
from lightning_echo.share.window import ERROR, SharedReadError, pack, pack_error, unpack

Pair = collections.namedtuple("Pair", "image label")


def there_and_back(example):
    kind, parts, size = pack(example)
    data = bytearray(b"".join(map(bytes, parts)))
    assert len(data) == size
    return unpack(kind, data)


TENSORS = [torch.arange(6).to(dtype) for dtype in (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64)]
SHARED = [1, 2]


@pytest.mark.parametrize(
    "example",
    [
        7,
        2**80,
        float("inf"),
        True,
        None,
        "text",
        b"bytes",
        *TENSORS,
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.arange(12).reshape(3, 4).t(),
        torch.tensor([1 + 2j]),
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.int64(7),
        np.array("text"),
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


def test_it_shares_no_memory_with_the_bytes_of_another_copy():
    kind, parts, _ = pack({"x": torch.zeros(4)})
    data = b"".join(map(bytes, parts))
    one, other = unpack(kind, bytearray(data)), unpack(kind, bytearray(data))
    one["x"].fill_(1)
    assert other["x"].sum() == 0


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


def test_a_list_within_itself_is_refused():
    example = []
    example.append(example)
    with pytest.raises((TypeError, RecursionError)):
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


def test_of_a_long_message_only_a_part_is_kept():
    assert pack_error(ValueError("x" * 10_000))[2] < 5000
