"""What an object is made of: told by its class alone, without running code of the object."""

import io
import types

import pytest
import torch
from data_cases import Plain, Slotted
from own_states import Ends
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split

from lightning_echo.data.objects import has_dict, is_concat, is_made_of_attributes, is_plain, is_stateful, is_subset


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
