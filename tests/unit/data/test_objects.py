"""What an object is made of: told by its class alone, without running code of the object."""

import io
import types

import numpy as np
import pytest
import torch
from data_cases import Plain, Slotted
from own_states import Ends
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from lightning_echo.data.objects import (
    attributes_of,
    has_dict,
    is_concat,
    is_in_main_memory,
    is_made_of_attributes,
    is_plain,
    is_stateful,
    is_subset,
    slots_of,
)


class Both(Slotted):
    """Slots of its base, and a ``__dict__``."""


class Private:
    """Python stores the slot under the name ``_Private__a``; ``b`` has no value."""

    __slots__ = ("__a", "__weakref__", "b")

    def __init__(self):
        self.__a = 1


class Shadowing(Slotted):
    __slots__ = ("value",)


class OwnNew(Plain):
    def __new__(cls):
        return super().__new__(cls)


@pytest.mark.parametrize(
    ("kind", "plain", "of_attributes", "with_dict"),
    [
        (Plain, True, True, True),
        (Slotted, False, True, False),
        (Both, False, True, True),
        (Private, False, True, False),
        (Shadowing, False, True, False),
        (OwnNew, False, False, True),
        (io.BufferedReader, False, False, True),  # in C; from Python 3.12 on, object makes it
        (torch.nn.Linear, True, True, True),
        (DataLoader, True, True, True),
        (types.SimpleNamespace, False, True, True),
        (list, False, False, False),
    ],
)
def test_a_class_says_where_its_objects_hold_what_they_hold(kind, plain, of_attributes, with_dict):
    assert (is_plain(kind), is_made_of_attributes(kind), has_dict(kind)) == (plain, of_attributes, with_dict)


@pytest.mark.parametrize("kind", [np.ufunc, io.FileIO])
def test_a_class_in_c_with_memory_of_its_own_is_not_made_of_attributes(kind):
    """Even if ``object`` makes its instances: those of ufunc on every Python, those of files from 3.12 on."""
    assert not is_plain(kind)
    assert not is_made_of_attributes(kind)


def test_attributes_are_found_in_the_dictionary_and_in_slots():
    both = Both(1, 2)
    both.c = 3
    assert (attributes_of(both), slots_of(Both)) == ({"value": 1, "label": 2, "c": 3}, {"value", "label"})
    assert (attributes_of(Private()), slots_of(Private)) == ({"_Private__a": 1}, {"_Private__a", "b"})


def test_an_opened_image_is_not_in_main_memory_before_it_is_decoded_and_one_of_an_own_class_never(tmp_path):
    Image.new("L", (2, 2)).save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as image:
        assert not is_in_main_memory(image)
        image.load()
        assert is_in_main_memory(image)
    assert not is_in_main_memory(type("Own", (Image.Image,), {})())


class Wrong:
    def state_dict(self, num_workers):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("loader", "expected"), [(Ends(1), True), (Wrong(), False), ([torch.zeros(1)], False), (torch.nn.Linear(1, 1), True)]
)
def test_a_source_saves_a_state_if_its_methods_can_be_called_for_it(loader, expected):
    assert is_stateful(loader) is expected


def own(base, *names):
    return type("Own", (base,), {name: lambda self, index: 0 for name in names})


@pytest.mark.parametrize(
    ("dataset", "subset", "concat"),
    [
        (Subset([1, 2], [0]), True, False),
        (random_split([1, 2], [1, 1])[0], True, False),
        (own(Subset)([1, 2], [0]), True, False),
        (own(Subset, "__getitem__", "__getitems__")([1, 2], [0]), False, False),
        (own(Subset, "__getitems__")([1, 2], [0]), False, False),
        (ConcatDataset([[1], [2]]), False, True),
        (own(ConcatDataset, "__getitem__")([[1], [2]]), False, False),
        ([1, 2], False, False),
    ],
)
def test_only_one_that_reads_as_its_base_routes(dataset, subset, concat):
    assert (is_subset(dataset), is_concat(dataset)) == (subset, concat)
