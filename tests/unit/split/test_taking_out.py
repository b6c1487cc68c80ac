"""Transforms are taken out of a copy alone: whatever a data set shares with others, nobody's object is written to."""

import pytest
import torch
from torch.utils.data import Dataset

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages


def add(image):
    return image + 1000 + torch.rand(())


class Plain(Dataset):
    def __init__(self, transform=add):
        self.transform = transform

    def __getitem__(self, index):
        image = torch.tensor(float(index))
        return (image if self.transform is None else self.transform(image)), index

    def __len__(self):
        return 8


class Wrapper(Dataset):
    """Has no transform of its own, as LightlyDataset and many wrappers."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        return self.dataset[index]

    def __len__(self):
        return len(self.dataset)


class ByGetattr(Wrapper):
    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class Slotted(Plain):
    __slots__ = ("transform",)


def by_property(get, put, base=Plain):
    return type("Own", (base,), {"transform": property(get, put)})


def own(self):
    return self._transform


def put_own(self, value):
    self._transform = value


def put_inside(self, value):
    self.dataset.transform = value


def put_once(self, value):
    vars(self).setdefault("_transform", value)


def put_and_count(self, value):
    self._transform, self.count = value, 1


def refuse(self, value):
    if value is not add:
        raise ValueError("this one or none")


class SingleInSlots:
    """Its copy is itself, and it has no attributes but those in slots."""

    __slots__ = ("transform",)
    __getitem__, __len__ = Plain.__getitem__, Plain.__len__

    def __init__(self):
        self.transform = add

    def __copy__(self):
        return self


class OfTheClass(Plain):
    transform = staticmethod(add)

    def __init__(self):
        pass


class Private(Dataset):
    """Keeps its transform where only it looks, as TorchIO's ``SubjectsDataset``."""

    def __init__(self, transform=add):
        self._transform = transform

    def __getitem__(self, index):
        image = torch.tensor(float(index))
        return (image if self._transform is None else self._transform(image)), index

    __len__ = Plain.__len__


class Method(Plain):
    def _transform(self, index):
        return Plain.__getitem__(self, index)

    def __getitem__(self, index):
        return self._transform(index)


SPLIT, ZERO = None, "calls its transform 0 times"
SHARED = r"transform cannot be replaced in a copy alone: its setter needs or changes what other objects share"
ELSE = "cannot be replaced in a copy alone: its setter sets something else"
by_inside = by_property(lambda self: self.dataset.transform, put_inside, Wrapper)
KINDS = {
    "plain": (Plain, SPLIT),
    "slots": (Slotted, SPLIT),
    "of the class": (OfTheClass, SPLIT),
    "a private attribute": (Private, SPLIT),
    "a method of that name": (Method, SPLIT),
    "a property of its own": (by_property(own, put_own), SPLIT),
    "wrapped by a property": (lambda: by_inside(Plain()), SHARED),
    "wrapped twice by properties, around slots": (lambda: by_inside(by_inside(Slotted())), SHARED),
    "wrapped by getattr": (lambda: ByGetattr(Plain()), ZERO),
    "a property that wraps": (by_property(lambda self: own(self).__call__, put_own), "cannot be replaced: it stays what it was"),
    "a property that ignores": (by_property(own, put_once), ELSE),
    "a property that counts": (by_property(own, put_and_count), ELSE),
    "a property that refuses": (by_property(lambda self: add, refuse), "its setter raised ValueError: this one or none"),
    "a property without a setter": (lambda: type("Own", (Private,), {"transform": property(own)})(), "without a setter"),
    "a single one in slots": (SingleInSlots, "a copy of SingleInSlots is not independent of it"),
}


def contents(value):
    """What an object and those inside it hold, by identity."""
    found, left = {}, [value]
    while left:
        part = left.pop()
        if id(part) in found:
            continue
        held = dict(part) if isinstance(part, dict) else {**getattr(part, "__dict__", {})}
        for base in type(part).__mro__:
            for name in base.__dict__.get("__slots__", ()):
                if hasattr(part, name):
                    held[name] = getattr(part, name)
        found[id(part)] = {name: id(item) for name, item in held.items()}
        left += [item for item in held.values() if isinstance(item, (Dataset, dict))]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_no_object_of_the_users_is_written_to(name):
    make, reason = KINDS[name]
    dataset = make()
    assert getattr(dataset, "transform", None) is not None or name == "a private attribute"  # which may be cached from here on
    before = contents(dataset)
    if reason is SPLIT:
        stages = make_stages(dataset, find_split(dataset).conventions)
        assert stages.redone == ("add",)
        assert stages.load(5) == (torch.tensor(5.0), 5)
        assert stages.augment(5, stages.load(5))[0] >= 1005
    else:
        with pytest.raises(SplitRefused, match=reason):
            find_split(dataset)
    if reason not in (SPLIT, ZERO):
        with pytest.raises(SplitRefused, match=reason):
            make_stages(dataset, [Convention.transform])  # as in a worker, which has no copy to throw away
    assert contents(dataset) == before
    assert dataset[3][0] >= 1003  # as an evaluation over the same data


def test_a_private_place_without_a_transform_is_a_place_too():
    assert find_split(Private(None)).conventions == find_split(Plain(None)).conventions
