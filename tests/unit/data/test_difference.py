"""What counts as a difference between two examples."""

import copy
import dataclasses
import functools
import io
import random
import re
import struct
import weakref
from collections import namedtuple
from collections.abc import Mapping, MutableMapping

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.difference import difference

nan = float("nan")
Pair = namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Sample:
    value: object


class Bare:
    def __init__(self, value):
        self.value = value


class Refuses:
    def __eq__(self, other):
        raise RuntimeError("not comparable")


def boxes(size=(8, 8), kind="XYXY", values=(1.0, 2, 3, 4)):
    return tv_tensors.BoundingBoxes(torch.tensor([values]), format=kind, canvas_size=size)


def image(mode="RGB", size=(4, 4), color=0):
    return Image.new(mode, size, color)


def objects(*members):
    made = np.empty(len(members), dtype=object)
    for place, member in enumerate(members):
        made[place] = member
    return made


EQUAL = [
    lambda: None,
    lambda: nan,
    lambda: "text",
    lambda: torch.tensor([1.0, nan]),
    lambda: torch.tensor([], dtype=torch.int64),
    lambda: torch.tensor([True, False]),
    lambda: torch.tensor([1 + 2j]),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.zeros(2, requires_grad=True) * 1,
    boxes,
    lambda: np.array([1.0, nan]),
    lambda: np.array(["a", "b"]),
    lambda: np.array(["2019-07-12", "NaT"], dtype="datetime64[D]"),
    lambda: objects([1], torch.tensor(nan)),
    lambda: np.array([(1, nan)], dtype=[("a", int), ("b", float)]),
    image,
    lambda: {"a": [1, (2, nan)], "b": {3}},
    lambda: Pair(image(), 1),
    lambda: Sample(torch.tensor([nan])),
    lambda: Bare(Bare(np.zeros(2))),
    lambda: b"bytes",
]


@pytest.mark.parametrize("make", EQUAL)
def test_made_twice_there_is_no_difference(make):
    assert difference(make(), make()) is None


UNEQUAL = [
    (1, 2, "1 and 2"),
    (1, 1.0, "a int and a float"),
    (1, True, "a int and a bool"),
    (nan, 1.0, "nan and 1.0"),
    (torch.zeros(2), torch.zeros(3), r"tensors of shape .*2.* and .*3"),
    (torch.zeros(2), torch.zeros(2).double(), "tensors of dtype torch.float32 and torch.float64"),
    (torch.zeros(4), torch.tensor([0.0, 1, nan, 0]), "tensors that differ in 2 of 4 elements"),
    (torch.tensor([nan, 1.0]), torch.tensor([1.0, nan]), "tensors that differ in 2 of 2 elements"),
    (torch.zeros(2), tv_tensors.Mask(torch.zeros(2)), "a Tensor and a Mask"),
    (boxes(), boxes(size=(8, 9)), r"at .*canvas_size.*: 8 and 9"),
    (boxes(), boxes(kind="XYWH"), r"XYXY.* and .*XYWH"),
    (boxes(), boxes(values=(1.0, 2, 3, 5)), "1 of 4 elements"),
    (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), "2 of 4 elements"),
    (np.zeros(2), np.zeros((2, 1)), r"arrays of shape \(2,\) and \(2, 1\)"),
    (np.zeros(2), np.zeros(2, np.float32), "arrays of dtype float64 and float32"),
    (np.zeros(2), np.array([0, nan]), "arrays that differ in 1 of 2 elements"),
    (np.array(["a"]), np.array(["b"]), "1 of 1"),
    (objects([1], 2), objects([3], 2), r"at \[0\]\[0\]: 1 and 3"),
    (image(), image(mode="L"), "images of mode RGB and L"),
    (image(), image(size=(4, 5)), r"images of size \(4, 4\) and \(4, 5\)"),
    (image(), image(color=1), "images with different pixels"),
    ([1, 2], [1], "lists of 2 and 1 elements"),
    ([1], (1,), "a list and a tuple"),
    (Pair(1, 2), (1, 2), "a Pair and a tuple"),
    ({"a": 1}, {"b": 1}, r"keys \['a'\] and \['b'\]"),
    ({"a": {"b": [0, 1]}}, {"a": {"b": [0, 2]}}, r"at \['a'\]\['b'\]\[1\]: 1 and 2"),
    ({1}, {2}, r"\{1\} and \{2\}"),
    (Sample(1), Sample(2), "at .value: 1 and 2"),
    (Bare(1), Bare(2), "at .value: 1 and 2"),
    (object(), object(), "two objects of object, which cannot be compared"),
    (Refuses(), Refuses(), r"two objects of Refuses, which cannot be compared \(not comparable\)"),
]


@pytest.mark.parametrize(("left", "right", "text"), UNEQUAL, ids=range(len(UNEQUAL)))
def test_a_difference_is_found_both_ways_and_said(left, right, text):
    found = difference(left, right)
    assert found is not None
    assert re.search(text, found), found
    assert difference(right, left) is not None


def test_the_palette_counts():
    left, right = image("P"), image("P")
    right.putpalette([1, 2, 3] * 256)
    left.putpalette([1, 2, 4] * 256)
    assert difference(left, right) == "images with different palettes"


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_an_opened_file_is_like_its_copy_and_unlike_another_image(kind, tmp_path):
    image(color=1).save(tmp_path / "image", kind)
    opened = Image.open(tmp_path / "image")
    assert type(opened) is not type(opened.copy())
    assert difference(opened, opened.copy()) is None
    assert difference(opened.copy(), opened) is None
    assert difference(opened, image(color=200)) == "images with different pixels"


def test_a_class_of_the_users_own_is_another_image():
    class Scan(Image.Image):
        pass

    scan = Scan()
    scan.__dict__.update(vars(image()))
    assert difference(image(), scan) == "a Image and a Scan"


def test_comparing_draws_no_random_number_and_changes_nothing():
    state = torch.get_rng_state()
    left, right = {"a": torch.rand(3)}, {"a": torch.rand(3)}
    torch.set_rng_state(state)
    kept = left["a"].tolist()
    difference(left, right)
    assert torch.equal(torch.get_rng_state(), state)
    assert left["a"].tolist() == kept


class ByIdentity:
    """As PyTorch Geometric's ``Data``: ``==`` is identity, the content lies in a store that refers back."""

    def __init__(self, **content):
        self.store = Store(self, content)

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name):
        if name == "store" or name.startswith("__"):
            raise AttributeError(name)
        return self.store.content[name]


class Store:
    def __init__(self, parent, content):
        self.parent, self.content, self.whole = weakref.ref(parent), content, [parent]

    def __eq__(self, other):
        return self is other

    __hash__ = object.__hash__


def test_where_equality_is_identity_contents_are_compared():
    one, same = (ByIdentity(x=torch.arange(3.0), label="a") for _ in range(2))
    assert one != copy.copy(one)
    assert difference(one, same) is None
    assert difference([one, one], [same, same]) is None
    other = ByIdentity(x=torch.tensor([0.0, 1.0, 3.0]), label="a")
    assert difference(one, other) == "at .store.content['x']: tensors that differ in 1 of 3 elements"
    assert difference(one, ByIdentity(x=torch.arange(3.0))) == "at .store.content: keys ['x', 'label'] and ['x']"


class Slots:
    __slots__ = ("rest", "value")

    def __init__(self, value):
        self.value = value


def test_objects_that_hold_all_in_slots_are_compared_by_these():
    assert difference(Slots([1, 2]), Slots([1, 2])) is None
    assert difference(Slots([1, 2]), Slots([1, 3])) == "at .value[1]: 2 and 3"
    more = Slots([1, 2])
    more.rest = 0
    assert difference(Slots([1, 2]), more) == "objects of Slots with different attributes"
    assert difference(object(), object()) == "two objects of object, which cannot be compared"


class Storage(MutableMapping):
    """As PyTorch Geometric's: a mapping whose views are no sets."""

    def __init__(self, **content):
        self.content = content

    def __getitem__(self, key):
        return self.content[key]

    def __setitem__(self, key, value):
        self.content[key] = value

    def __delitem__(self, key):
        del self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)

    def keys(self):
        return View(self)


class View:
    def __init__(self, mapping):
        self.mapping = mapping

    def __iter__(self):
        return iter(self.mapping)


def test_a_mapping_whose_keys_are_no_set_is_compared_by_its_items():
    one, same, other, fewer = Storage(x=1, y=2), Storage(x=1, y=2), Storage(x=1, y=3), Storage(x=1)
    assert difference(one, same) is None
    assert difference(one, other) == "at ['y']: 2 and 3"
    assert difference(one, fewer) == "keys ['x', 'y'] and ['x']"


def test_where_equality_compares_contents_it_decides():
    class Rounded:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return round(self.value) == round(other.value)

        __hash__ = None

    assert difference(Rounded(1.1), Rounded(1.2)) is None
    assert "Rounded" in difference(Rounded(1.1), Rounded(2.2))


class Items(Mapping):
    """A mapping whose ``==`` asks the members of each other."""

    def __init__(self, **members):
        self.members = members

    def __getitem__(self, name):
        return self.members[name]

    def __iter__(self):
        return iter(self.members)

    def __len__(self):
        return len(self.members)


def test_a_mapping_is_compared_by_its_items():
    assert difference(Items(x=torch.zeros(3), y=1), Items(y=1, x=torch.zeros(3))) is None
    assert difference(Items(x=torch.zeros(3)), Items(x=torch.ones(3))) == "at ['x']: tensors that differ in 3 of 3 elements"
    assert difference(Items(x=1), Items(y=1)) == "keys ['x'] and ['y']"


def test_where_equality_raises_since_tensors_give_no_single_answer_contents_are_compared():
    class Wrapped:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return bool(self.value == other.value)

        __hash__ = None

    assert difference(Wrapped(torch.arange(3)), Wrapped(torch.arange(3))) is None
    assert difference(Wrapped(torch.zeros(3)), Wrapped(torch.ones(3))) == "at .value: tensors that differ in 3 of 3 elements"


def test_where_equality_raises_slots_are_not_left_out():
    class Slotted:
        __slots__ = ("__dict__", "value")

        def __init__(self, value):
            self.value, self.name = value, "boxes"

        def __eq__(self, other):
            raise ValueError("no single answer")

        __hash__ = None

    assert difference(Slotted(1), Slotted(2)) == "two objects of Slotted, which cannot be compared (no single answer)"


def trace(name="Resize", number=1):
    """The keys under which MONAI notes which transform it has applied."""
    return {"class": name, "id": number, "tracing": True, "do_transforms": True}


def test_the_address_that_a_trace_notes_down_does_not_count():
    assert difference([trace(number=1)], [trace(number=2)]) is None
    assert difference(trace(), trace("Crop")) == "at ['class']: 'Resize' and 'Crop'"
    assert difference({"id": 1, "class": "a"}, {"id": 2, "class": "a"}) == "at ['id']: 1 and 2"


def test_objects_that_refer_to_each_other_are_compared_once():
    class Node:
        def __init__(self, value):
            self.value, self.next = value, self

    assert difference(Node(1), Node(1)) is None
    assert difference(Node(1), Node(2)) == "at .value: 1 and 2"


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (functools.partial(int, "1"), functools.partial(int, "1"), functools.partial(int, "2")),
        (random.Random(1), random.Random(1), random.Random(2)),
        (io.BytesIO(b"a"), io.BytesIO(b"a"), io.BytesIO(b"b")),
        (ValueError("a"), ValueError("a"), ValueError("b")),
    ],
    ids=["partial function", "generator", "buffer", "exception"],
)
def test_what_lies_beside_the_attributes_counts(one, same, other):
    assert difference([one], [same]) is None
    assert difference([one], [other]) is not None


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e5m2, torch.uint16, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_are_compared_that_torch_cannot_compare(dtype):
    one = torch.zeros(16, dtype=torch.uint8).view(dtype)
    other = torch.ones(16, dtype=torch.uint8).view(dtype)
    for exactly in (False, True):
        assert difference(one, one.clone(), exactly=exactly) is None
        assert "tensors that differ in" in difference(one, other, exactly=exactly)


def test_tensors_without_data_are_compared_by_their_shape():
    assert difference(torch.empty(3, device="meta"), torch.empty(3, device="meta")) is None
    assert "shape" in difference(torch.empty(3, device="meta"), torch.empty(4, device="meta"))


def test_whether_a_tensor_requires_a_gradient_counts():
    assert "requires_grad True and False" in difference(torch.zeros(2, requires_grad=True), torch.zeros(2))


class TestExactly:
    @pytest.mark.parametrize("make", EQUAL)
    def test_made_twice_there_is_no_difference(self, make):
        assert difference(make(), make(), exactly=True) is None

    @pytest.mark.parametrize(("left", "right", "text"), UNEQUAL, ids=range(len(UNEQUAL)))
    def test_what_differs_does_so_exactly_too(self, left, right, text):
        assert difference(left, right, exactly=True) is not None

    def test_bits_count(self):
        negative = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000000))[0]
        for make in (lambda x: x, lambda x: torch.tensor([x]), lambda x: np.array([x])):
            assert difference(make(nan), make(negative)) is None
            assert difference(make(nan), make(negative), exactly=True) is not None
            assert difference(make(-0.0), make(0.0)) is None
            assert difference(make(-0.0), make(0.0), exactly=True) is not None

    def test_attributes_count_for_which_equality_does_not_ask(self):
        class ByLabel(dict):
            def __eq__(self, other):
                return True

            __hash__ = None

        one, other = ByLabel(a=1), ByLabel(a=1)
        one.note = 3
        assert difference(one, other) is None
        assert difference(one, other, exactly=True) == "objects of ByLabel with different attributes"
        other.note = 4
        assert difference(one, other, exactly=True) == "at .note: 3 and 4"

    def test_order_and_information_count(self):
        left, right = image(), image()
        left.info["dpi"] = 3
        assert difference(left, right) is None
        assert difference(left, right, exactly=True) == "at .info: keys ['dpi'] and []"
        assert difference({"a": 1, "b": 2}, {"b": 2, "a": 1}, exactly=True) == "keys ['a', 'b'] and ['b', 'a']"


class Counted:
    """Notes down what it has computed, and compares by identity."""

    def __init__(self, value):
        self.value = value

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
