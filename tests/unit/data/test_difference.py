"""What counts as a difference between two examples; batches that are handed out without a copy, of which an edit is seen."""

import functools
import io
import random
import re
import struct
import weakref
from collections import UserDict, defaultdict

import numpy as np
import pytest
import torch
from data_cases import Pair, Plain, Sample, Slotted, objects
from PIL import Image
from torchvision import tv_tensors

from lightning_echo.data.difference import LentBatch, difference, rebuild, separate, tensors_in

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


def test_the_address_that_a_trace_notes_down_does_not_count():
    assert difference([trace(number=1)], [trace(number=2)]) is None


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


class Encoding(UserDict):
    """As in transformers: ``to`` changes the object that it is called on, and pickling has rules of its own."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self

    def __getstate__(self):
        return {"data": self.data}

    def __setstate__(self, state):
        self.data = state["data"]


CONTAINERS = {
    "tensor": lambda x: x,
    "nested": lambda x: {"a": [({"x": x}, 3)]},
    "defaultdict": lambda x: defaultdict(list, x=x),
    "namedtuple": lambda x: Pair(x, 1),
    "set": lambda x: {x},
    "dataclass": Sample,
    "slots": Slotted,
    "slots of a base class, one without a value": type("MoreSlots", (Slotted,), {"__slots__": ("missing",)}),
    "plain object": Plain,
    "object with a rule for pickling": lambda x: Encoding(x=x),
}


@pytest.fixture(params=CONTAINERS)
def container(request):
    return CONTAINERS[request.param]


def test_each_use_has_containers_of_its_own_and_shares_the_memory(container):
    x = torch.arange(3.0)
    lent = LentBatch(container(x))
    uses = [lent.hand_out() for _ in range(2)]
    assert [type(use) for use in uses] == [type(lent.batch)] * 2
    assert len({id(lent.batch), *map(id, uses)}) == 3
    (first,), (second,) = map(tensors_in, uses)
    assert len({id(x), id(first), id(second)}) == 3
    assert first.data_ptr() == second.data_ptr() == x.data_ptr()
    assert first.tolist() == [0, 1, 2]


def test_what_is_popped_appended_or_edited_beside_the_tensors_comes_back():
    lent = LentBatch({"x": torch.zeros(2), "list": [1], "pair": ("a", {"b": 2}), "array": np.zeros(2), "bytes": bytearray(b"ab")})
    use = lent.hand_out()
    use.pop("x")
    use["list"].append(2)
    use["pair"][1].clear()
    use["new"] = 1
    use["array"][:] = 1
    use["bytes"].clear()
    again = lent.hand_out()
    assert list(again) == ["x", "list", "pair", "array", "bytes"]
    assert (again["list"], again["pair"]) == ([1], ("a", {"b": 2}))
    assert (again["array"].tolist(), again["bytes"]) == ([0, 0], b"ab")
    assert not lent.is_edited()


@pytest.mark.parametrize(
    "rebind",
    [
        lambda x: x.requires_grad_(),
        lambda x: setattr(x, "data", torch.ones(7)),
        lambda x: setattr(x, "note", "mine"),
        lambda x: setattr(x, "grad", torch.ones(2, 3)),
    ],
)
def test_what_is_only_rebound_stays_with_the_use(rebind):
    lent = LentBatch(torch.zeros(2, 3))
    rebind(lent.hand_out())
    assert not lent.is_edited()
    again = lent.hand_out()
    assert (again.shape, again.requires_grad, again.grad, vars(again)) == ((2, 3), False, None, {})
    assert again.sum() == 0


def test_subclasses_keep_class_and_metadata_and_are_watched():
    boxes = tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(5, 6))
    lent = LentBatch([boxes, tv_tensors.Image(torch.zeros(3, 2, 2)), torch.nn.Parameter(torch.zeros(2))])
    use = lent.hand_out()
    assert [type(each) for each in use] == [tv_tensors.BoundingBoxes, tv_tensors.Image, torch.nn.Parameter]
    assert (use[0].format, use[0].canvas_size) == (boxes.format, (5, 6))
    assert use[0].data_ptr() == boxes.data_ptr()
    use[0].canvas_size = (1, 1)
    assert not lent.is_edited()
    assert lent.hand_out()[0].canvas_size == (5, 6)
    use[1][0] += 1
    assert lent.is_edited()


def test_tensors_that_hang_on_a_tensor_are_aliases_too():
    x = torch.zeros(2)
    x.mask, x.notes = torch.ones(2), ["a"]
    lent = LentBatch([x])
    use = lent.hand_out()[0]
    assert use.mask is not x.mask
    assert use.mask.data_ptr() == x.mask.data_ptr()
    use.notes.append("b")
    assert lent.hand_out()[0].notes == ["a"]
    use.mask.zero_()
    assert lent.is_edited()


UNUSUAL = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "empty": lambda: torch.zeros(0),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors(kind):
    x = UNUSUAL[kind]()
    lent = LentBatch({"x": x})
    use = lent.hand_out()["x"]
    assert (type(use), use.layout, use.is_conj(), use.ndim) == (type(x), x.layout, x.is_conj(), x.ndim)
    assert not lent.is_edited()
    use.mul_(2)
    assert lent.is_edited()


@pytest.mark.parametrize(
    "edit",
    [
        lambda x: x[:, 0].mul_(2),
        lambda x: x.copy_(torch.ones(2, 3)),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.unbind()[0].zero_(),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_in_place_edits_of_a_use_are_seen_and_those_from_before_are_not(edit, mode):
    lent = LentBatch({"y": torch.zeros(1), "x": torch.zeros(2, 3).add_(1)})
    lent.hand_out()
    assert not lent.is_edited()
    with mode():
        edit(lent.hand_out()["x"])
    assert lent.is_edited()


def test_inference_tensors_have_no_version_and_are_handed_out_all_the_same():
    with torch.inference_mode():
        x = torch.zeros(2)
    lent = LentBatch([x, torch.zeros(1)])
    assert not lent.is_edited()
    assert lent.hand_out()[0].data_ptr() == x.data_ptr()
    lent.hand_out()[1].add_(1)
    assert lent.is_edited()


def test_rebuilt_containers_are_new_and_tensors_the_same(container):
    x = torch.zeros(2)
    batch = container(x)
    rebuilt = rebuild(batch)
    assert [id(tensor) for tensor in tensors_in(rebuilt)] == [id(x)]
    assert (rebuilt is batch) == (batch is x)


def test_of_two_batches_only_what_shares_memory_is_copied(container):
    shared, own = torch.zeros(4), torch.ones(2)
    batch = {"shared": container(shared), "own": own}
    apart = separate(batch, LentBatch([shared[1:], torch.ones(2)]))
    (copied,) = tensors_in(apart["shared"])
    assert copied.data_ptr() != shared.data_ptr()
    assert torch.equal(copied, shared)
    assert apart["own"] is own
    assert separate(batch, LentBatch({"x": torch.zeros(2)})) is batch
