"""What an object is made of: told by its class alone, without running code of the object."""

import dataclasses
import io
import types
from collections import UserList, deque, namedtuple

import numpy as np
import pytest
import torch
from own_states import Ends
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_echo.data.objects import (
    COPY_HOOKS,
    attributes_of,
    blank,
    has_dict,
    is_concat,
    is_container,
    is_from_pillow,
    is_image,
    is_in_main_memory,
    is_made_of_attributes,
    is_plain,
    is_stateful,
    is_subset,
    overrides,
    slots_of,
)

Pair = namedtuple("Pair", "left right")


class Plain:
    def __init__(self):
        self.a = 1


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self):
        self.a = 1


class Both(Slotted):
    """Slots of its base, and a ``__dict__``."""

    def __init__(self):
        super().__init__()
        self.c = 3


class Private:
    """Python stores the slot under the name ``_Private__a``."""

    __slots__ = "__a"

    def __init__(self):
        self.__a = 1


class Referred:
    __slots__ = ("__weakref__", "a")


class Shadowing(Slotted):
    __slots__ = ("a",)


class OwnNew(Plain):
    def __new__(cls):
        return super().__new__(cls)


class Named(list):
    name = "examples"


class Lazy(list):
    def __iter__(self):
        raise AssertionError("it reads its members now")


class OwnCopy:
    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize(
    ("kind", "plain", "of_attributes", "with_dict"),
    [
        (Plain, True, True, True),
        (Slotted, False, True, False),
        (Both, False, True, True),
        (Private, False, True, False),
        (Referred, False, True, False),
        (Shadowing, False, True, False),
        (OwnNew, False, False, True),
        (io.BufferedReader, False, False, True),  # in C; from Python 3.12 on, object makes it
        (io.BufferedWriter, False, False, True),
        (torch.nn.Linear, True, True, True),
        (DataLoader, True, True, True),
        (types.SimpleNamespace, False, True, True),
        (int, False, False, False),
        (list, False, False, False),
    ],
)
def test_a_class_says_where_its_objects_hold_what_they_hold(kind, plain, of_attributes, with_dict):
    assert (is_plain(kind), is_made_of_attributes(kind), has_dict(kind)) == (plain, of_attributes, with_dict)


@pytest.mark.parametrize("kind", [np.ufunc, io.BufferedReader, io.FileIO])
def test_a_class_in_c_with_memory_of_its_own_is_not_made_of_attributes(kind):
    """Even if ``object`` makes its instances: those of ufunc on every Python, those of files from 3.12 on."""
    assert not is_plain(kind)
    assert not is_made_of_attributes(kind)


@pytest.mark.parametrize(
    ("make", "attributes", "slots"),
    [
        (Plain, {"a": 1}, set()),
        (Slotted, {"a": 1}, {"a", "b"}),  # b has no value yet
        (Both, {"a": 1, "c": 3}, {"a", "b"}),
        (Private, {"_Private__a": 1}, {"_Private__a"}),
        (lambda: 3, {}, set()),
    ],
)
def test_attributes_are_found_in_the_dictionary_and_in_slots(make, attributes, slots):
    assert attributes_of(make()) == attributes
    assert slots_of(type(make())) == slots


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        *[(kind, True) for kind in (list, dict, set, tuple, deque, Named, Pair)],
        *[(kind, False) for kind in (Lazy, UserList, str, Plain, np.ndarray)],
    ],
)
def test_a_container_is_its_members_and_perhaps_attributes(kind, expected):
    assert is_container(kind) is expected


def test_a_blank_object_is_of_the_same_class_and_never_closes_what_it_is_given():
    closed = []

    class Closing:
        def __init__(self):
            raise AssertionError("it is made already")

        def __del__(self):
            closed.append(self)

    original = object.__new__(Closing)
    copied = blank(original)
    assert isinstance(copied, Closing)
    assert vars(copied) == {}
    assert type(copied).__name__ == "Closing"
    del copied
    assert closed == []
    assert type(blank(Plain())) is Plain
    assert blank(types.SimpleNamespace(a=1)) == types.SimpleNamespace()


def test_a_class_overrides_what_differs_from_its_base():
    assert overrides(OwnCopy, object, COPY_HOOKS)
    assert not overrides(Plain, object, COPY_HOOKS)
    assert overrides(Lazy, list, ("__iter__",))
    assert not overrides(Named, list, ("__iter__", "__setitem__"))
    assert overrides(dataclasses.make_dataclass("Pair", ["a"]), object, ("__eq__",))


def test_an_image_is_told_from_what_is_none():
    image = Image.new("RGB", (2, 2))
    assert is_image(image)
    assert is_from_pillow(type(image))
    assert not is_image(np.zeros((2, 2, 3)))
    assert not is_from_pillow(np.ndarray)


class OwnImage(Image.Image):
    """A user's own class of images: what a copy of it shares is not known."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: torch.zeros(2), True),
        (lambda folder: torch.nn.Parameter(torch.zeros(2)), False),
        (lambda folder: torch.zeros(2, device="meta"), False),
        (lambda folder: torch.zeros(2).to_sparse(), False),
        (lambda folder: np.zeros(2)[1:], True),
        (lambda folder: np.memmap(folder / "values", dtype=float, shape=(2,), mode="w+")[1:], False),
        (lambda folder: Image.new("L", (2, 2)), True),
        (lambda folder: OwnImage(), False),
        (lambda folder: bytearray(b"ab"), True),
        (lambda folder: "ab", False),
    ],
)
def test_main_memory_is_neither_on_a_device_nor_in_a_file(make, expected, tmp_path):
    assert is_in_main_memory(make(tmp_path)) is expected


def test_an_opened_image_is_not_in_main_memory_before_it_is_decoded(tmp_path):
    Image.new("L", (2, 2)).save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as image:
        assert not is_in_main_memory(image)
        image.load()
        assert is_in_main_memory(image)


class Passes:
    def __iter__(self):
        return iter(())


class Wrong:
    def state_dict(self, num_workers):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "expected"),
    [(Ends(1), True), (Passes(), False), (Wrong(), False), ([torch.zeros(1)], False), (torch.nn.Linear(1, 1), True)],
)
def test_a_source_saves_a_state_if_its_methods_can_be_called_for_it(loader, expected):
    assert is_stateful(loader) is expected


class Numbers(Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 4


class NamedSubset(Subset):
    name = "train"


class OwnSubset(Subset):
    def __getitem__(self, index):
        return -super().__getitem__(index)

    def __getitems__(self, indices):  # torch demands it of a subclass that has the other one
        return [self[index] for index in indices]


class OwnCalls(Subset):
    def __getitems__(self, indices):
        return [0 for _ in indices]


class OwnConcat(ConcatDataset):
    def __getitem__(self, index):
        return 0


@pytest.mark.parametrize(
    ("make", "subset", "concat"),
    [
        (lambda: Subset(Numbers(), [0, 2]), True, False),
        (lambda: NamedSubset(Numbers(), [0, 2]), True, False),
        (lambda: OwnSubset(Numbers(), [0, 2]), False, False),
        (lambda: OwnCalls(Numbers(), [0, 2]), False, False),
        (lambda: ConcatDataset([Numbers(), Numbers()]), False, True),
        (lambda: OwnConcat([Numbers(), Numbers()]), False, False),
        (Numbers, False, False),
        (lambda: [1, 2], False, False),
    ],
)
def test_only_one_that_reads_as_its_base_routes(make, subset, concat):
    assert (is_subset(make()), is_concat(make())) == (subset, concat)
