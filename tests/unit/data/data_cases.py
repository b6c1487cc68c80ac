"""What examples and data sets of these tests consist of."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Dataset

Pair = namedtuple("Pair", "value label")


class Plain:
    def __init__(self, value):
        self.value = value


@dataclass
class Sample:
    value: object
    label: int = 3


@dataclass(slots=True)
class Slotted:
    value: object
    label: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    value: object
    label: int = 3


class SlotsAndMore(Slotted):
    """Has a ``__dict__``, too."""

    def __init__(self, extra):
        super().__init__([0])
        self.extra = extra


class Tagged(dict):
    """Has attributes, too, as in data libraries."""


def tagged(value):
    made = Tagged(label=3)
    made.tag = value
    return made


def objects(*members):
    made = np.empty(len(members), dtype=object)
    for place, member in enumerate(members):
        made[place] = member
    return made


class Holding(Dataset):
    """Three examples, and the attributes that it is given."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __getitem__(self, index):
        return index

    def __len__(self):
        return 3
