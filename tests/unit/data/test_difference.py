"""What counts as a difference between two examples."""

import copy
import functools
import io
import random
import re
import struct
import weakref
from collections import UserDict

import numpy as np
import pytest
import torch
from data_cases import Pair, Plain, Sample, Slotted, objects
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.difference import difference

nan = float("nan")


class Refuses:
    def __eq__(self, other):
        raise RuntimeError("not comparable")


class SlotsAndMore:
    __slots__ = ("__dict__", "value")

    def __init__(self, value):
        self.value, self.name = value, "boxes"

    __eq__ = Refuses.__eq__


class ByIdentity:
    """As PyTorch Geometric's ``Data``: ``==`` is identity, the content lies in a store that refers back."""

    def __init__(self, **content):
        self.store = Store(self, content)

    def __eq__(self, other):
        return self is other

    def __getattr__(self, name):
        if name == "store" or name.startswith("__"):
            raise AttributeError(name)
        return self.store.content[name]


class Store:
    def __init__(self, parent, content):
        self.parent, self.content, self.whole = weakref.ref(parent), content, [parent]

    __eq__ = ByIdentity.__eq__


class Storage(UserDict):
    """As PyTorch Geometric's: a mapping whose keys are no set, and whose ``==`` asks its members."""

    def __init__(self, **content):
        super().__init__(content)

    def keys(self):
        return iter(self.data)


class Wrapped(Plain):
    """Its ``==`` raises where tensors give no single answer."""

    def __eq__(self, other):
        return bool(self.value == other.value)


class Rounded(Plain):
    def __eq__(self, other):
        return round(self.value) == round(other.value)


class Node(Plain):
    def __init__(self, value):
        super().__init__(value)
        self.next = self


def boxes(size=(8, 8), kind="XYXY", values=(1.0, 2, 3, 4)):
    return tv_tensors.BoundingBoxes(torch.tensor([values]), format=kind, canvas_size=size)


def image(mode="RGB", size=(4, 4), color=0):
    return Image.new(mode, size, color)


def palette(blue):
    made = image("P")
    made.putpalette([1, 2, blue] * 256)
    return made


def trace(name="Resize", number=1):
    """The keys under which MONAI notes which transform it has applied."""
    return {"class": name, "id": number, "tracing": True, "do_transforms": True}


EQUAL = [
    lambda: None,
    lambda: nan,
    lambda: "text",
    lambda: torch.tensor([1.0, nan]),
    lambda: torch.tensor([], dtype=torch.int64),
    lambda: torch.tensor([1 + 2j]),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.zeros(2, requires_grad=True) * 1,
    lambda: torch.empty(3, device="meta"),
    boxes,
    lambda: np.array(["a", "b"]),
    lambda: np.array(["2019-07-12", "NaT"], dtype="datetime64[D]"),
    lambda: objects([1], torch.tensor(nan)),
    lambda: np.array([(1, nan)], dtype=[("a", int), ("b", float)]),
    image,
    lambda: {"a": [1, (2, nan)], "b": {3}},
    lambda: Pair(image(), 1),
    lambda: Sample(torch.tensor([nan])),
    lambda: Plain(Plain(np.zeros(2))),
    lambda: Slotted([1, 2]),
    lambda: ByIdentity(x=torch.arange(3.0), label="a"),
    lambda: [ByIdentity(x=torch.arange(3.0))] * 2,
    lambda: Storage(x=torch.zeros(3), y=2),
    lambda: Wrapped(torch.arange(3)),
    lambda: Node(1),
    lambda: functools.partial(int, "1"),
    lambda: random.Random(1),
    lambda: io.BytesIO(b"a"),
    lambda: ValueError("a"),
    lambda: b"bytes",
]


@pytest.mark.parametrize("make", EQUAL)
@pytest.mark.parametrize("exactly", [False, True])
def test_made_twice_there_is_no_difference(make, exactly):
    assert difference(make(), make(), exactly=exactly) is None


UNEQUAL = [
    (1, 2, "1 and 2"),
    (1, 1.0, "a int and a float"),
    (nan, 1.0, "nan and 1.0"),
    (torch.zeros(2), torch.zeros(3), r"tensors of shape .*2.* and .*3"),
    (torch.empty(3, device="meta"), torch.empty(4, device="meta"), "shape"),
    (torch.zeros(2), torch.zeros(2).double(), "tensors of dtype torch.float32 and torch.float64"),
    (torch.zeros(2, requires_grad=True), torch.zeros(2), "requires_grad True and False"),
    (torch.tensor([nan, 1.0]), torch.tensor([1.0, nan]), "tensors that differ in 2 of 2 elements"),
    (torch.zeros(2), tv_tensors.Mask(torch.zeros(2)), "a Tensor and a Mask"),
    (boxes(), boxes(size=(8, 9)), r"at .*canvas_size.*: 8 and 9"),
    (boxes(), boxes(kind="XYWH"), r"XYXY.* and .*XYWH"),
    (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), "2 of 4 elements"),
    (np.zeros(2), np.zeros((2, 1)), r"arrays of shape \(2,\) and \(2, 1\)"),
    (np.zeros(2), np.array([0, nan]), "arrays that differ in 1 of 2 elements"),
    (np.array(["a"]), np.array(["b"]), "1 of 1"),
    (objects([1], 2), objects([3], 2), r"at \[0\]\[0\]: 1 and 3"),
    (image(), image(mode="L"), "images of mode RGB and L"),
    (image(), image(size=(4, 5)), r"images of size \(4, 4\) and \(4, 5\)"),
    (image(), image(color=1), "images with different pixels"),
    (palette(3), palette(4), "images with different palettes"),
    ([1, 2], [1], "lists of 2 and 1 elements"),
    ([1], (1,), "a list and a tuple"),
    (Pair(1, 2), (1, 2), "a Pair and a tuple"),
    ({"a": 1}, {"b": 1}, r"keys \['a'\] and \['b'\]"),
    ({"a": {"b": [0, 1]}}, {"a": {"b": [0, 2]}}, r"at \['a'\]\['b'\]\[1\]: 1 and 2"),
    ({1}, {2}, r"\{1\} and \{2\}"),
    (Sample(1), Sample(2), "at .value: 1 and 2"),
    (Slotted([1, 2]), Slotted([1, 3]), r"at .value\[1\]: 2 and 3"),
    (Rounded(1.1), Rounded(2.2), "Rounded"),
    (Node(1), Node(2), "at .value: 1 and 2"),
    (ByIdentity(x=torch.zeros(3), y="a"), ByIdentity(x=torch.eye(3)[2], y="a"), r"at .store.content\['x'\]: .* 1 of 3 elements"),
    (ByIdentity(x=1, label="a"), ByIdentity(x=1), r"at .store.content: keys \['x', 'label'\] and \['x'\]"),
    (Storage(x=torch.zeros(3)), Storage(x=torch.ones(3)), r"at \['x'\]: tensors that differ in 3 of 3"),
    (Storage(x=1, y=2), Storage(x=1), r"keys \['x', 'y'\] and \['x'\]"),
    (Wrapped(torch.zeros(3)), Wrapped(torch.ones(3)), "at .value: tensors that differ in 3 of 3 elements"),
    (trace(), trace("Crop"), r"at \['class'\]: 'Resize' and 'Crop'"),
    ({"id": 1, "class": "a"}, {"id": 2, "class": "a"}, r"at \['id'\]: 1 and 2"),
    (functools.partial(int, "1"), functools.partial(int, "2"), ""),
    (random.Random(1), random.Random(2), ""),
    (io.BytesIO(b"a"), io.BytesIO(b"b"), ""),
    (ValueError("a"), ValueError("b"), ""),
    (object(), object(), "two objects of object, which cannot be compared"),
    (Refuses(), Refuses(), r"two objects of Refuses, which cannot be compared \(not comparable\)"),
    (SlotsAndMore(1), SlotsAndMore(2), r"two objects of SlotsAndMore, which cannot be compared \(not comparable\)"),
]


@pytest.mark.parametrize(("left", "right", "text"), UNEQUAL, ids=range(len(UNEQUAL)))
def test_a_difference_is_found_both_ways_and_said(left, right, text):
    found = difference(left, right)
    assert found is not None
    assert re.search(text, found), found
    assert difference(right, left) is not None
    assert difference(left, right, exactly=True) is not None


def test_where_equality_compares_contents_it_decides_and_where_it_is_identity_it_does_not():
    one = ByIdentity(x=1)
    assert one != copy.copy(one)
    assert difference(Rounded(1.1), Rounded(1.2)) is None


def test_the_address_that_a_trace_notes_down_does_not_count():
    assert difference([trace(number=1)], [trace(number=2)]) is None


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_opened_file_is_like_its_copy_and_unlike_another_image(kind, tmp_path):
    image(color=1).save(tmp_path / "image", kind)
    opened = Image.open(tmp_path / "image")
    assert type(opened) is not type(opened.copy())
    assert difference(opened, opened.copy()) is None
    assert difference(opened.copy(), opened) is None
    assert difference(opened, image(color=200)) == "images with different pixels"


def test_an_attribute_that_only_one_has_is_a_difference():
    fewer = Slotted(1)
    del fewer.label
    assert difference(fewer, Slotted(1)) == "objects of Slotted with different attributes"


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e5m2, torch.uint16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_are_compared_that_torch_cannot_compare(dtype):
    one = torch.zeros(16, dtype=torch.uint8).view(dtype)
    other = torch.ones(16, dtype=torch.uint8).view(dtype)
    for exactly in (False, True):
        assert difference(one, one.clone(), exactly=exactly) is None
        assert "tensors that differ in" in difference(one, other, exactly=exactly)


def test_exactly_means_by_bits():
    negative = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]
    for make in (lambda x: x, lambda x: torch.tensor([x]), lambda x: np.array([x])):
        for one, other in ((nan, negative), (-0.0, 0.0)):
            assert difference(make(one), make(other)) is None
            assert difference(make(one), make(other), exactly=True) is not None


def test_exactly_means_with_attributes_for_which_equality_does_not_ask():
    class ByLabel(dict):
        def __eq__(self, other):
            return True

    one, other = ByLabel(a=1), ByLabel(a=1)
    one.note = 3
    assert difference(one, other) is None
    assert difference(one, other, exactly=True) == "objects of ByLabel with different attributes"
    other.note = 4
    assert difference(one, other, exactly=True) == "at .note: 3 and 4"


def test_exactly_means_in_order_and_with_the_information_of_images():
    left, right = image(), image()
    left.info["dpi"] = 3
    assert difference(left, right) is None
    assert difference(left, right, exactly=True) == "at .info: keys ['dpi'] and []"
    assert difference({"a": 1, "b": 2}, {"b": 2, "a": 1}, exactly=True) == "keys ['a', 'b'] and ['b', 'a']"


class Counted(Plain):
    """Notes down what it has computed, and compares by identity."""

    def __getstate__(self):
        return {"value": self.value}


def test_objects_may_be_compared_by_what_their_pickle_would_hold():
    one, same, other = Counted([1]), Counted([1]), Counted([2])
    same.computed = 1
    assert difference(one, same) == "objects of Counted with different attributes"
    assert difference(one, same, takes_apart=True) is None
    assert difference(one, other, takes_apart=True) is not None
    assert difference(object(), object(), takes_apart=True) is None
    assert difference(torch.Generator(), torch.Generator().manual_seed(3), takes_apart=True) is not None
