"""In-place edits reach neither an echo nor the data set that is copied: copies share nothing mutable with their original."""

import copy
import threading
from array import array
from collections import OrderedDict, UserDict, defaultdict, deque
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from data_cases import Frozen, Holding, Pair, Plain, Sample, SlotsAndMore, Tagged, objects, tagged
from PIL import Image, ImageDraw, ImageOps
from torchvision import tv_tensors

from lightning_echo.data.copies import copy_example, throw_away_copy

# What an example may hold: how to make it, how to edit it in place, how to read it in plain values.
PAYLOADS = {
    "tensor": (lambda: torch.arange(6.0).view(2, 3), lambda t: t[:, 0].add_(10), lambda t: t.tolist()),
    "boxes": (
        lambda: tv_tensors.BoundingBoxes(torch.tensor([[1.0, 2, 3, 4]]), format="XYXY", canvas_size=(8, 9)),
        lambda t: t.__setitem__((slice(None), [0, 2]), 9 - t[:, [2, 0]]),
        lambda t: t.tolist(),
    ),
    "array": (lambda: np.arange(6).reshape(2, 3), lambda a: a.fill(7), lambda a: a.tolist()),
    "image": (
        lambda: Image.new("RGB", (5, 4), (10, 20, 30)),
        lambda i: ImageDraw.Draw(i).rectangle((0, 0, 2, 2), fill=(255, 0, 0)),
        lambda i: list(i.tobytes()),
    ),
    "dict": (lambda: {"a": 1, "b": {"c": 2}}, lambda v: v["b"].pop("c"), repr),
    "set": (lambda: {1, 2}, lambda v: v.add(3), sorted),
    "bytearray": (lambda: bytearray(b"abc"), lambda v: v.extend(b"d"), bytes),
    "array of Python": (lambda: array("d", [1.0]), lambda v: v.append(2), list),
    "masked array": (
        lambda: np.ma.masked_array([1, 2, 3], mask=[False, True, False]),
        lambda a: (a.mask.__setitem__(0, True), a.__setitem__(2, 9)),
        lambda a: a.tolist(),
    ),
    "array of objects": (
        lambda: objects([1, 2], torch.zeros(2)),
        lambda a: (a[0].append(3), a[1].add_(1)),
        lambda a: [a[0], a[1].tolist()],
    ),
    "record": (
        lambda: np.array([(1, 2.0)], dtype=[("a", int), ("b", float)])[0],
        lambda r: r.__setitem__("a", 5),
        lambda r: r.tolist(),
    ),
}

# What it may be held in: how to put it in, how to get it out.
CONTAINERS = {
    "alone": (lambda v: v, lambda c: c),
    "tuple in dict in list": (lambda v: [{"a": (3, v)}], lambda c: c[0]["a"][1]),
    "namedtuple": (lambda v: Pair(v, 3), lambda c: c.value),
    "dataclass": (Sample, lambda c: c.value),
    "frozen dataclass with slots": (Frozen, lambda c: c.value),
    "plain object": (Plain, lambda c: c.value),
    "slots and attributes": (SlotsAndMore, lambda c: c.extra),
    "deque": (lambda v: deque([v], maxlen=4), lambda c: c[0]),
    "partial": (lambda v: partial(print, v), lambda c: c.args[0]),
    "OrderedDict": (lambda v: OrderedDict(value=v), lambda c: c["value"]),
    "defaultdict": (lambda v: defaultdict(list, value=v), lambda c: c["value"]),
    "UserDict": (lambda v: UserDict(value=v), lambda c: c["value"]),
    "attribute of a dict": (tagged, lambda c: c.tag),
    "attribute of a tensor": (lambda v: (lambda t: setattr(t, "extra", v) or t)(torch.zeros(1)), lambda c: c.extra),
}


COPIES = {"of an example": copy_example, "of a data set": lambda value: throw_away_copy(Holding(held=value)).held}
# Of a data set the copy has no attributes of tensors, and shares objects of the standard library and records of numpy.
ONLY_OF_AN_EXAMPLE = {"UserDict", "attribute of a tensor", "record"}


@pytest.mark.parametrize(
    ("copied", "container", "payload"),
    [case for case in product(COPIES, CONTAINERS, PAYLOADS) if case[0] == "of an example" or not ONLY_OF_AN_EXAMPLE & {*case}],
)
def test_an_edit_of_the_copy_does_not_reach_the_original(copied, container, payload):
    make, edit, read = PAYLOADS[payload]
    wrap, get = CONTAINERS[container]
    kept = wrap(make())
    untouched = read(make())

    handed_out = COPIES[copied](kept)
    assert type(handed_out) is type(kept)
    assert type(get(handed_out)) is type(get(kept))
    assert read(get(handed_out)) == untouched

    edit(get(handed_out))
    assert read(get(handed_out)) != untouched  # the edit is one
    assert read(get(kept)) == untouched


@pytest.mark.parametrize(
    "tensor",
    [
        tv_tensors.Mask(torch.ones(4, 5, dtype=torch.uint8)),
        tv_tensors.BoundingBoxes(torch.ones(2, 4), format="CXCYWH", canvas_size=(7, 9)),
        torch.zeros(4).share_memory_(),
    ],
    ids=["Mask", "BoundingBoxes", "in shared memory"],
)
@pytest.mark.parametrize("copied", COPIES)
def test_a_tensor_keeps_its_class_and_metadata_and_leaves_shared_memory(tensor, copied):
    handed_out = COPIES[copied]({"it": tensor})["it"]
    assert (type(handed_out), handed_out.dtype, vars(handed_out)) == (type(tensor), tensor.dtype, vars(tensor))
    assert handed_out.data_ptr() != tensor.data_ptr()
    assert handed_out.tolist() == tensor.tolist()
    assert not handed_out.is_shared()


def test_memory_layout_is_kept_and_a_view_is_copied_alone():
    channels_last = torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last)
    assert copy_example(channels_last).stride() == channels_last.stride()
    assert copy_example(np.asfortranarray(np.arange(6).reshape(2, 3))).flags.f_contiguous
    handed_out = copy_example(torch.arange(1000.0)[10:12])
    assert handed_out.tolist() == [10.0, 11.0]
    assert handed_out.untyped_storage().nbytes() == 8


def test_a_tensor_with_a_graph_leaves_it_and_still_requires_grad():
    weight = torch.ones(2, requires_grad=True)
    handed_out = copy_example({"x": weight * 2})["x"]
    assert handed_out.is_leaf
    assert handed_out.requires_grad
    assert handed_out.tolist() == [2.0, 2.0]


def test_an_image_keeps_what_transforms_need(tmp_path):
    palette = Image.new("P", (3, 2))
    palette.putpalette([9, 8, 7] * 256)
    palette.info["transparency"] = 0
    handed_out = copy_example(palette)
    assert (handed_out.mode, handed_out.getpalette()[:3], handed_out.info) == ("P", [9, 8, 7], {"transparency": 0})
    handed_out.info["transparency"] = 5
    assert palette.info["transparency"] == 0
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as opened:
        handed_out = copy_example(opened)
    assert handed_out.format == "JPEG"
    assert ImageOps.exif_transpose(handed_out).size == (4, 6)


def test_an_object_held_twice_is_copied_once_and_two_tensors_over_one_memory_come_out_as_two():
    shared = torch.zeros(2)
    holder = Sample(shared)
    handed_out = copy_example({"a": shared, "b": [shared, holder], "c": OrderedDict(x=holder), "part": shared[:1]})
    assert handed_out["a"] is handed_out["b"][0]
    assert handed_out["a"] is handed_out["b"][1].value
    assert handed_out["b"][1] is handed_out["c"]["x"]
    assert handed_out["a"] is not shared
    handed_out["a"].fill_(1)
    assert handed_out["part"].tolist() == [0]


def test_an_example_may_refer_back_to_itself():
    class Node:
        def __init__(self):
            self.me = self
            self.all = [self]

        def __deepcopy__(self, memo):
            made = memo[id(self)] = Node.__new__(Node)
            made.me, made.all = copy.deepcopy(self.me, memo), copy.deepcopy(self.all, memo)
            return made

    loop = [1]
    loop.append(loop)
    knot = Tagged()
    knot["me"], knot.me = knot, [knot]
    handed_out = copy_example({"loop": loop, "object": Plain(loop), "node": Node(), "knot": knot})
    assert handed_out["knot"]["me"] is handed_out["knot"] is handed_out["knot"].me[0] is not knot
    assert handed_out["loop"][1] is handed_out["loop"] is not loop
    assert handed_out["object"].value is handed_out["loop"]
    assert handed_out["node"].all[0] is handed_out["node"]


def test_what_cannot_be_copied_is_named_with_a_hint():
    with pytest.raises(TypeError, match=r"holds a _thread\.lock, which cannot be copied .* __deepcopy__"):
        copy_example({"image": torch.zeros(1), "guard": threading.Lock()})


class Cached:
    """Leaves a cache and a lock out of its pickles."""

    def __init__(self, pixels):
        self.pixels, self.cache, self.lock = pixels, {"mean": 1.0}, threading.Lock()

    def __getstate__(self):
        return {"pixels": self.pixels}


class Shared:
    def __deepcopy__(self, memo):
        return self


def test_a_class_with_a_copying_rule_of_its_own_is_copied_by_it():
    original, shared = Cached(torch.zeros(2)), Shared()
    copied, same = copy_example((original, shared))
    assert copied.pixels is not original.pixels
    assert copied.cache is original.cache, "left out of its pickles, it is not missing in a copy"
    assert copied.lock is original.lock
    assert same is shared
