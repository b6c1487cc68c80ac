"""In-place edits never reach an echo: what is handed out shares nothing mutable with what is kept."""

import copy
import dataclasses
import datetime
import enum
import pathlib
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageOps
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_echo.data.copies import copy_example, nbytes

Pair = namedtuple("Pair", ["value", "label"])


@dataclasses.dataclass
class Sample:
    value: object
    label: int = 3


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    value: object
    label: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedSample:
    value: object
    label: int = 3


class Attributes:
    def __init__(self, value):
        self.value = value


class Tagged(dict):
    """A dict subclass with an attribute, as data libraries have them."""


def tagged(value):
    made = Tagged(label=3)
    made.tag = value
    return made


def objects(*members):
    made = np.empty(len(members), dtype=object)
    for place, member in enumerate(members):
        made[place] = member
    return made


# What an example may hold: how to make it, how to edit it in place, how to read it in plain values.
PAYLOADS = {
    "tensor": (lambda: torch.arange(6.0).view(2, 3), lambda t: t[:, 0].add_(10), lambda t: t.tolist()),
    "tensor through numpy": (
        lambda: torch.arange(4),
        lambda t: t.numpy().__setitem__(0, 99),
        lambda t: t.tolist(),
    ),
    "boxes": (
        lambda: tv_tensors.BoundingBoxes(torch.tensor([[1.0, 2, 3, 4]]), format="XYXY", canvas_size=(8, 9)),
        lambda t: t.__setitem__((slice(None), [0, 2]), 9 - t[:, [2, 0]]),
        lambda t: t.tolist(),
    ),
    "array": (
        lambda: np.arange(6).reshape(2, 3),
        lambda a: a.sort(axis=0) or a.fill(7),
        lambda a: a.tolist(),
    ),
    "image": (
        lambda: Image.new("RGB", (5, 4), (10, 20, 30)),
        lambda i: ImageDraw.Draw(i).rectangle((0, 0, 2, 2), fill=(255, 0, 0)),
        lambda i: list(i.tobytes()),
    ),
    "shrunk image": (lambda: Image.new("L", (8, 8), 3), lambda i: i.thumbnail((2, 2)), lambda i: i.size),
    "list": (lambda: [1, [2, 3]], lambda v: v[1].append(4), lambda v: repr(v)),
    "dict": (lambda: {"a": 1, "b": {"c": 2}}, lambda v: v["b"].pop("c"), lambda v: repr(v)),
    "set": (lambda: {1, 2}, lambda v: v.add(3), lambda v: sorted(v)),
    "bytearray": (lambda: bytearray(b"abc"), lambda v: v.extend(b"d"), lambda v: bytes(v)),
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
    "dict": (lambda v: {"value": v, "label": 3}, lambda c: c["value"]),
    "list": (lambda v: [3, v], lambda c: c[1]),
    "tuple": (lambda v: (v, 3), lambda c: c[0]),
    "tuple in dict in list": (lambda v: [{"a": (3, v)}], lambda c: c[0]["a"][1]),
    "namedtuple": (lambda v: Pair(v, 3), lambda c: c.value),
    "dataclass": (Sample, lambda c: c.value),
    "frozen dataclass": (FrozenSample, lambda c: c.value),
    "slotted dataclass": (SlottedSample, lambda c: c.value),
    "plain object": (Attributes, lambda c: c.value),
    "namespace": (lambda v: SimpleNamespace(value=v), lambda c: c.value),
    "OrderedDict": (lambda v: OrderedDict(value=v), lambda c: c["value"]),
    "defaultdict": (lambda v: defaultdict(list, value=v), lambda c: c["value"]),
    "UserDict": (lambda v: UserDict(value=v), lambda c: c["value"]),
    "attribute of a dict": (tagged, lambda c: c.tag),
    "attribute of a tensor": (
        lambda v: (lambda t: setattr(t, "extra", v) or t)(torch.zeros(1)),
        lambda c: c.extra,
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_edit_of_the_copy_does_not_reach_the_original(payload, container):
    make, edit, read = PAYLOADS[payload]
    wrap, get = CONTAINERS[container]
    kept = wrap(make())
    untouched = read(make())

    handed_out = copy_example(kept)
    assert type(handed_out) is type(kept)
    assert type(get(handed_out)) is type(get(kept))
    assert read(get(handed_out)) == untouched

    edit(get(handed_out))
    assert read(get(handed_out)) != untouched  # the edit is one
    assert read(get(kept)) == untouched


def test_a_flip_in_place_starts_from_the_same_boxes_at_each_use():
    """The flip found in many repositories: without the copy, every second use is wrong."""

    def flip(example):
        example["boxes"][:, [0, 2]] = 100 - example["boxes"][:, [2, 0]]
        return example

    kept = {"boxes": torch.tensor([[10.0, 0, 30, 5]]), "size": [100, 100]}
    uses = [flip(copy_example(kept))["boxes"].tolist() for _ in range(4)]
    assert uses == [[[70.0, 0, 90, 5]]] * 4

    unprotected = [flip(kept)["boxes"].tolist() for _ in range(4)]
    assert unprotected[1] == [[10.0, 0, 30, 5]]


def test_normalize_in_place_does_not_change_a_reused_tensor():
    kept = (torch.full((3, 2, 2), 5.0), 1)
    normalize = v2.Normalize([1.0] * 3, [2.0] * 3, inplace=True)
    for _ in range(3):
        image, label = copy_example(kept)
        assert normalize(image).unique().tolist() == [2.0]
        assert label == 1


def test_a_copy_of_a_tensor_in_shared_memory_is_not_in_it():
    kept = torch.zeros(4).share_memory_()
    handed_out = copy_example(kept)
    handed_out.add_(1)
    assert not handed_out.is_shared()
    assert kept.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "tensor",
    [
        tv_tensors.Image(torch.zeros(3, 4, 5, dtype=torch.uint8)),
        tv_tensors.Mask(torch.ones(4, 5)),
        tv_tensors.Video(torch.zeros(2, 3, 4, 5)),
        tv_tensors.BoundingBoxes(torch.ones(2, 4), format="CXCYWH", canvas_size=(7, 9)),
    ],
    ids=lambda tensor: type(tensor).__name__,
)
def test_a_tv_tensor_keeps_its_class_and_metadata(tensor):
    handed_out = copy_example({"it": tensor})["it"]
    assert type(handed_out) is type(tensor)
    assert vars(handed_out) == vars(tensor)
    assert handed_out.data_ptr() != tensor.data_ptr()
    assert handed_out.dtype == tensor.dtype
    assert handed_out.tolist() == tensor.tolist()


def test_boxes_can_be_transformed_after_the_copy():
    boxes = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 2, 3, 4]]), format="XYXY", canvas_size=(10, 10))
    flipped = v2.functional.horizontal_flip(copy_example(boxes))
    assert flipped.tolist() == [[7.0, 2, 9, 4]]
    assert flipped.canvas_size == (10, 10)


def test_memory_layout_is_kept():
    channels_last = torch.rand(1, 3, 4, 4).to(memory_format=torch.channels_last)
    assert copy_example(channels_last).stride() == channels_last.stride()
    fortran = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert copy_example(fortran).flags.f_contiguous


def test_a_view_is_copied_alone():
    whole = torch.arange(1000.0)
    handed_out = copy_example(whole[10:12])
    assert handed_out.tolist() == [10.0, 11.0]
    assert handed_out.untyped_storage().nbytes() == 8


def test_a_tensor_with_a_graph_leaves_it_and_still_requires_grad():
    weight = torch.ones(2, requires_grad=True)
    handed_out = copy_example({"x": weight * 2})["x"]
    assert handed_out.is_leaf
    assert handed_out.requires_grad
    assert handed_out.tolist() == [2.0, 2.0]


def test_a_masked_array_keeps_its_mask():
    kept = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    handed_out = copy_example(kept)
    handed_out.mask[0] = True
    handed_out[2] = 9
    assert kept.mask.tolist() == [False, True, False]
    assert kept.data.tolist() == [1, 2, 3]


def test_a_memory_mapped_array_is_copied_into_memory(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(4))
    kept = np.load(tmp_path / "a.npy", mmap_mode="r")
    handed_out = copy_example(kept[1:])
    handed_out[0] = 7
    assert handed_out.tolist() == [7, 2, 3]
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2, 3]


def test_an_image_keeps_what_transforms_need():
    palette = Image.new("P", (3, 2))
    palette.putpalette([9, 8, 7] * 256)
    palette.info["transparency"] = 0
    handed_out = copy_example(palette)
    assert handed_out.mode == "P"
    assert handed_out.getpalette()[:3] == [9, 8, 7]
    assert handed_out.info == {"transparency": 0}
    handed_out.info["transparency"] = 5
    assert palette.info["transparency"] == 0


def test_an_image_read_from_a_file_keeps_format_and_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as opened:
        handed_out = copy_example(opened)
    assert handed_out.format == "JPEG"
    assert ImageOps.exif_transpose(handed_out).size == (4, 6)


def test_an_object_held_twice_is_copied_once():
    shared = torch.zeros(2)
    holder = Sample(shared)
    handed_out = copy_example({"a": shared, "b": [shared, holder], "c": OrderedDict(x=holder)})
    assert handed_out["a"] is handed_out["b"][0]
    assert handed_out["a"] is handed_out["b"][1].value
    assert handed_out["b"][1] is handed_out["c"]["x"]
    assert handed_out["a"] is not shared


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
    handed_out = copy_example({"loop": loop, "object": Attributes(loop), "node": Node(), "knot": knot})
    assert handed_out["knot"]["me"] is handed_out["knot"]
    assert handed_out["knot"].me[0] is handed_out["knot"]
    assert handed_out["knot"] is not knot
    assert handed_out["loop"][1] is handed_out["loop"]
    assert handed_out["loop"] is not loop
    assert handed_out["object"].value is handed_out["loop"]
    assert handed_out["node"].all[0] is handed_out["node"]


class Colour(enum.Enum):
    red = (1,)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            2.5,
            1j,
            "text",
            b"bytes",
            range(3),
            Ellipsis,
            Colour.red,
            Colour,
            len,
            test_memory_layout_is_kept,
        ),
        *(torch.float32, torch.device("cpu"), torch.Size([1, 2]), np.dtype("int8"), np.float32(1.5)),
        *(pathlib.Path("a/b"), datetime.datetime(2019, 7, 12), datetime.timedelta(1)),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_what_cannot_be_edited_is_not_copied(value):
    assert copy_example(value) is value
    assert copy_example([value])[0] is value


def test_a_class_with_a_copying_rule_of_its_own_is_copied_by_it():
    class WithLock:
        def __init__(self):
            self.lock = threading.Lock()
            self.boxes = [1]

        def __getstate__(self):
            return {"boxes": self.boxes}

    class Shared:
        def __deepcopy__(self, memo):
            return self

    kept, shared = WithLock(), Shared()
    handed_out = copy_example((kept, shared))
    handed_out[0].boxes.append(2)
    assert kept.boxes == [1]
    assert handed_out[0].lock is kept.lock  # left out of its pickles, it is not missing here
    assert handed_out[1] is shared


def test_what_cannot_be_copied_is_named_with_the_way_out():
    with pytest.raises(TypeError, match=r"holds a _thread\.lock, which cannot be copied .* __deepcopy__"):
        copy_example({"image": torch.zeros(1), "guard": threading.Lock()})


def test_a_pinned_tensor_is_copied_into_pinned_memory(monkeypatch):
    """Without a device: torch is told that there is one, and asked for pinned memory in the same way."""
    asked = []

    def empty_like(value, **options):
        asked.append(options)
        return torch.zeros(value.shape, dtype=value.dtype)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    monkeypatch.setattr(torch, "empty_like", empty_like)
    kept = torch.tensor([1, 2])
    handed_out = copy_example(kept)
    assert asked == [{"pin_memory": True}]
    assert handed_out.tolist() == [1, 2]
    handed_out.add_(1)
    assert kept.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "payload_bytes"),
    [
        (torch.zeros(3, 224, 224), 3 * 224 * 224 * 4),
        (torch.zeros(3, 224, 224, dtype=torch.uint8), 3 * 224 * 224),
        (torch.zeros(10_000)[:100], 400),  # not the storage that it views
        (tv_tensors.Mask(torch.zeros(100, 100, dtype=torch.bool)), 10_000),
        (np.zeros((50, 50), dtype=np.float64), 20_000),
        (objects(np.zeros(5000, np.uint8)), 5000),
        (Image.new("RGB", (100, 80)), 100 * 80 * 4),  # Pillow pads to four bytes
        (Image.new("L", (100, 80)), 100 * 80),
        (Image.new("I;16", (100, 80)), 100 * 80 * 2),
        (b"x" * 9000, 9000),
        ("x" * 9000, 9000),
        (bytearray(9000), 9000),
        ({"a": [torch.zeros(1000), (torch.zeros(1000),)], "b": "x" * 1000}, 9000),
        (Sample(torch.zeros(1000)), 4000),
        (SlottedSample(torch.zeros(1000)), 4000),
        (UserDict(a=torch.zeros(1000)), 4000),
    ],
    ids=lambda value: "" if isinstance(value, int) else type(value).__name__,
)
def test_the_weight_is_that_of_the_payload_and_a_little_more(value, payload_bytes):
    assert payload_bytes <= nbytes(value) <= payload_bytes + 1500


def test_what_is_held_twice_weighs_once():
    shared = torch.zeros(1000)
    assert 4000 <= nbytes([shared, {"again": shared}]) < 5000


class Cached:
    """Leaves a cache and a lock out of its pickles."""

    def __init__(self, pixels):
        self.pixels, self.cache, self.lock = pixels, {"mean": 1.0}, threading.Lock()

    def __getstate__(self):
        return {"pixels": self.pixels}


class Restored(Cached):
    """Makes them anew when it is unpickled."""

    def __setstate__(self, state):
        self.__init__(state["pixels"])


def test_what_a_class_leaves_out_of_its_pickles_is_not_missing_in_a_copy():
    original = Cached(torch.zeros(2))
    copied = copy_example(original)
    assert copied.pixels is not original.pixels
    assert copied.cache is original.cache
    assert copied.lock is original.lock
    restored = copy_example(Restored(torch.zeros(2)))
    assert restored.cache == {"mean": 1.0}
    assert not restored.lock.locked()


def test_a_class_that_says_how_it_is_made_anew_gets_no_further_attributes():
    class Opened:
        def __reduce__(self):
            return Opened, ()

    original = Opened()
    original.position = 7
    copied = copy_example(original)
    assert type(copied) is Opened
    assert vars(copied) == {}


def test_two_tensors_over_the_same_memory_come_out_as_two():
    """Said in the module; if this changes, so must that."""
    frame = torch.zeros(4)
    copied = copy_example({"frame": frame, "corner": frame[:2]})
    copied["frame"].fill_(1)
    assert copied["corner"].tolist() == [0, 0]
