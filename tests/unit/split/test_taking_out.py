"""Transforms are taken out of a copy alone: whatever a data set shares with others, nobody's object is written to.

Each kind of data set is split, and echoed by ``auto``. Before and after, all objects that it consists of are the same.
"""

import weakref
from functools import cached_property

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_echo import EchoLoader
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


class ByProperty(Wrapper):
    @property
    def transform(self):
        return self.dataset.transform

    @transform.setter
    def transform(self, value):
        self.dataset.transform = value


class ByPropertyThatWraps(ByProperty):
    """What it returns is never what was set."""

    @property
    def transform(self):
        inner = self.dataset.transform
        return lambda image: inner(image)

    @transform.setter
    def transform(self, value):
        self.dataset.transform = value


class ByGetattr(Wrapper):
    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


class BySetattr(ByGetattr):
    def __setattr__(self, name, value):
        if name == "dataset":
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class Slotted(Plain):
    """Neither a copy of it is thrown away, nor one of what holds it."""

    __slots__ = ("transform",)


class OfItsOwn(Plain):
    """A property whose setter writes to the instance alone."""

    @property
    def transform(self):
        return self._transform

    @transform.setter
    def transform(self, value):
        self._transform = value


class OfItsOwnThatWraps(OfItsOwn):
    """What it returns is never what was set."""

    @property
    def transform(self):
        return lambda image: self._transform(image)

    @transform.setter
    def transform(self, value):
        self._transform = value


class Ignoring(OfItsOwn):
    """The setter does nothing, once there is a transform."""

    @property
    def transform(self):
        return self._transform

    @transform.setter
    def transform(self, value):
        if "_transform" not in vars(self):
            self._transform = value


class Counting(OfItsOwn):
    """The setter does more than set."""

    @property
    def transform(self):
        return self._transform

    @transform.setter
    def transform(self, value):
        self._transform = value
        self.count = 1


class Refusing(OfItsOwn):
    @property
    def transform(self):
        return add

    @transform.setter
    def transform(self, value):
        if value is not add:
            raise ValueError("this one or none")


class InOptions(Plain):
    """The setter writes to a dictionary that copies share."""

    def __init__(self):
        self.options = {"transform": add}

    @property
    def transform(self):
        return self.options["transform"]

    @transform.setter
    def transform(self, value):
        self.options["transform"] = value


class Cached(Plain):
    def __getitem__(self, index):
        return self.pipeline(torch.tensor(float(index))), index

    @cached_property
    def pipeline(self):
        return self.transform


class CachedTransform(Plain):
    def __init__(self):
        pass

    @cached_property
    def transform(self):
        return add


class Bound(Plain):
    """Holds a method of itself, which a copy holds as well."""

    def __init__(self):
        super().__init__()
        self.read = self.read_one

    def read_one(self, index):
        return super().__getitem__(index)

    def __getitem__(self, index):
        return self.read(index)


class Weak(Plain):
    """Refers to itself."""

    def __init__(self):
        super().__init__()
        self.me = weakref.ref(self)

    def __getitem__(self, index):
        return self.me().transform(torch.tensor(float(index))), index


class OneState(Plain):
    """All instances share their attributes."""

    shared = {}  # noqa: RUF012

    def __new__(cls):
        made = super().__new__(cls)
        made.__dict__ = cls.shared
        return made

    def __copy__(self):
        return OneState()


class Single(Plain):
    __slots__ = ()

    def __new__(cls):
        return super().__new__(cls)

    def __copy__(self):
        return self


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


SPLIT, ZERO = None, "calls its transform 0 times"
SHARED = r"transform cannot be replaced in a copy alone: its setter needs or changes what other objects share"
KINDS = {
    "plain": (Plain, SPLIT),
    "wrapped by a property": (lambda: ByProperty(Plain()), SHARED),
    "wrapped twice by properties": (lambda: ByProperty(ByProperty(Plain())), SHARED),
    "wrapped by a property around slots": (lambda: ByProperty(Slotted()), SHARED),
    "wrapped by a property that wraps": (lambda: ByPropertyThatWraps(Plain()), SHARED),
    "wrapped by a property that wraps, around slots": (lambda: ByPropertyThatWraps(Slotted()), SHARED),
    "wrapped by getattr": (lambda: ByGetattr(Plain()), ZERO),
    "wrapped by setattr": (lambda: BySetattr(Plain()), ZERO),
    "wrapped by setattr around slots": (lambda: BySetattr(Slotted()), ZERO),
    "slots": (Slotted, SPLIT),
    "a property of its own": (OfItsOwn, SPLIT),
    "a property of its own that wraps": (OfItsOwnThatWraps, "transform cannot be replaced: it stays what it was"),
    "a property that ignores": (Ignoring, "cannot be replaced in a copy alone: its setter sets something else"),
    "a property that counts": (Counting, "cannot be replaced in a copy alone: its setter sets something else"),
    "a property that refuses": (Refusing, "cannot be replaced in a copy alone: its setter raised ValueError: this one or none"),
    "a property in options": (InOptions, SHARED),
    "a cached pipeline": (Cached, SPLIT),
    "a cached transform": (CachedTransform, SPLIT),
    "a bound method": (Bound, ZERO),
    "a weak reference": (Weak, ZERO),
    "one state for all": (OneState, "a copy of OneState is not independent of it"),
    "a single one": (Single, "a copy of Single is not independent of it"),
    "a single one in slots": (SingleInSlots, "a copy of SingleInSlots is not independent of it"),
    "of the class": (OfTheClass, SPLIT),
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
    assert dataset.transform is not None  # which may be cached from here on
    before = contents(dataset)
    if reason is SPLIT:
        split = find_split(dataset)
        stages = make_stages(dataset, split.conventions)
        assert stages.redone == ("add",)
        assert stages.load(5) == (torch.tensor(5.0), 5)
        assert stages.augment(5, stages.load(5))[0] >= 1005
    else:
        with pytest.raises(SplitRefused, match=reason):
            find_split(dataset)
    assert contents(dataset) == before

    loader = EchoLoader(DataLoader(dataset, batch_size=4), 2, seed=0)
    assert loader.insertion_point == ("before_augmentation" if reason is SPLIT else "after_augmentation")
    for images, labels in [batch for _ in range(4) for batch in loader]:
        assert ((images - labels >= 1000) & (images - labels < 1001)).all()
    assert contents(dataset) == before
    assert dataset[3][0] >= 1003  # as an evaluation over the same data


@pytest.mark.parametrize("name", [name for name, (_, reason) in KINDS.items() if reason not in (SPLIT, ZERO)])
def test_nor_in_a_worker_which_has_no_copy_to_throw_away(name):
    make, reason = KINDS[name]
    dataset = make()
    assert dataset.transform is not None
    before = contents(dataset)
    with pytest.raises(SplitRefused, match=reason):
        make_stages(dataset, [Convention.transform])
    assert contents(dataset) == before


def test_of_a_data_set_that_is_met_twice_they_are_taken_out_once():
    sets = []

    class Counted(OfItsOwn):
        @property
        def transform(self):
            return self._transform

        @transform.setter
        def transform(self, value):
            sets.append(value)
            self._transform = value

    dataset = Counted()
    sets.clear()
    make_stages(ConcatDataset([dataset, Subset(dataset, [0]), dataset]))
    assert len(sets) == 1


class Private(Dataset):
    """Keeps its transform where only it looks, as TorchIO's ``SubjectsDataset``."""

    def __init__(self, transform=add):
        self._transform = transform

    def __getitem__(self, index):
        image = torch.tensor(float(index))
        return (image if self._transform is None else self._transform(image)), index

    def __len__(self):
        return 8


class Method(Plain):
    """A method of that name applies the transform, as in MONAI's ``Dataset``."""

    def _transform(self, index):
        return Plain.__getitem__(self, index)

    def __getitem__(self, index):
        return self._transform(index)


@pytest.mark.parametrize("make", [Private, Method])
def test_a_transform_may_be_kept_in_a_private_attribute(make):
    dataset = make()
    before = contents(dataset)
    stages = make_stages(dataset, find_split(dataset).conventions)
    assert stages.redone == ("add",)
    assert stages.load(5) == (torch.tensor(5.0), 5)
    assert stages.augment(5, stages.load(5))[0] >= 1005
    assert contents(dataset) == before


def test_a_private_place_without_a_transform_is_a_place_too():
    assert find_split(Private(None)).conventions == find_split(Plain(None)).conventions
