"""Every read is checked: a data set that does something else with its transforms than its convention says is found out."""

import contextlib
import copy
import pickle
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import v2

from lightning_echo.split.check import ReadCheck
from lightning_echo.split.describe import Convention, SplitRefused


class Data:
    """Calls its transforms as ``getitem`` does."""

    def __init__(self, getitem, convention=Convention.transform, names=("transform",), **options):
        check = ReadCheck(convention, names, **options)
        self.getitem = getitem
        for name in names:
            setattr(self, name, check.recorder(name))
        self.load = check.checked(lambda index: self.getitem(self, index))
        self.load_many = check.checked_many(lambda indices: [self.getitem(self, index) for index in indices])


ONE, PAIR, JOINT = ("transform",), ("transform", "target_transform"), ("transforms",)


def looks(look, times=1):
    """Looks at the result before it is returned; if that raises, it begins again."""

    def getitem(self, index):
        for _ in range(times):
            with contextlib.suppress(Exception):  # the data set's own way
                image = self.transform(torch.zeros(2))
                look(image)
                return image, index
        return None

    return getitem


class Caching(dict):
    """Keeps what the transform returned, as data sets that cache do."""

    def __call__(self, data, index):
        if index not in self:
            self[index] = data.transform(f"image {index}")
        return self[index], index


def retrying(self, index):
    image = self.transform("image")
    return self.getitem(self, index - 1) if image is not None and index else (image, index)


ELSEWHERE = "does not return the result of its transform where"
UNFITTING = {
    "twice": (lambda self, i: (self.transform(self.transform("image")), i), "calls its transform 2 times"),
    "elsewhere": (lambda self, i: (i, self.transform("image")), ELSEWHERE),
    "in a dictionary": (lambda self, i: {"image": self.transform("image")}, ELSEWHERE),
    "in both places": (lambda self, i: (self.transform("image"),) * 2, "keeps what its transform returns"),
    "dropped": (lambda self, i: self.transform("image") and None, "looks at what its transform returns"),
    "dropped unseen": (lambda self, i: [self.transform("image"), i][1:], ELSEWHERE),
    "an image and a mask": (lambda self, i: self.transform("image", "mask"), ELSEWHERE),
    "nothing": (lambda self, i: (self.transform(), i), ELSEWHERE),
    "by keyword": (lambda self, i: (self.transform(img="image")["img"], i), r"by keyword \(img\)"),
    "a tuple": (lambda self, i: self.transform(("image", i)), ELSEWHERE),
    "empty": (lambda self, i: (self.transform("image"),)[:0], ELSEWHERE),
    "a retry": (retrying, "calls its transform 4 times"),
    "after a look": (looks(lambda image: image.sum()), r"looks at what its transform returns \(sum\)"),
    "after looks in vain": (looks(lambda image: image.sum() == 0, times=3), r"looks at .* \(sum\)"),
    "kept": (Caching(), "keeps what its transform returns"),
}
OTHER_CONVENTIONS = {
    "by position where the convention names the values": (
        lambda self, i: (self.transform("image"), i),
        *(ELSEWHERE, Convention.transform_image, ONE),
    ),
    "exchanged": (lambda self, i: (self.target_transform(i), self.transform("image")), ELSEWHERE, Convention.transform, PAIR),
    "another transform": (
        lambda self, i: (self.transform("image"), i),
        *("calls its transform 1 times where 0 would be expected", Convention.transforms_joint),
    ),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", [*UNFITTING, *OTHER_CONVENTIONS])
def test_what_does_not_fit_is_refused_with_the_reason(name, many):
    getitem, reason, *convention = {**UNFITTING, **OTHER_CONVENTIONS}[name]
    if isinstance(getitem, Caching):
        getitem.clear()
    data = Data(getitem, *convention)
    with pytest.raises(SplitRefused, match=reason):
        data.load_many([3]) if many else data.load(3)


def test_one_that_does_not_fit_is_enough_to_refuse_a_batch():
    data = Data(lambda self, index: (self.transform("image") if index % 5 == 0 else "image", index))
    assert data.load_many([0, 5, 10]) == [("image", 0), ("image", 5), ("image", 10)]
    with pytest.raises(SplitRefused, match="calls its transform 2 times where 3 would be expected"):
        data.load_many([0, 5, 7])
    with pytest.raises(SplitRefused, match="calls its transform 0 times where 1 would be expected"):
        data.load(7)
    assert data.load(10) == ("image", 10)  # it was refused alone


ASKING = {
    "an attribute": lambda x: x.shape,
    "hasattr": lambda x: hasattr(x, "mode"),
    "setting": lambda x: setattr(x, "label", 1),
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "isinstance abc": lambda x: isinstance(x, Mapping),
    "truth": bool,
    "equality": lambda x: x == 0,
    "membership": lambda x: x in [1],
    "hash": lambda x: {x: 1},
    "length": len,
    "iteration": list,
    "an element": lambda x: x[0],
    "setting an element": lambda x: x.__setitem__(0, 1),
    "arithmetic": lambda x: x / 255,
    "arithmetic from the left": lambda x: 1 - x,
    "in place": lambda x: [y := x, y := y.__iadd__(1)],
    "a tensor's arithmetic": lambda x: torch.zeros(2) + x,
    "an array's arithmetic": lambda x: np.zeros(2) * x,
    "abs": abs,
    "format": lambda x: f"{x}",
    "calling": lambda x: x(),
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.tensor": torch.tensor,
    "torch.sum": torch.sum,
    "np.asarray": np.asarray,
    "np.array of objects": lambda x: np.array(x, dtype=object),
    "Image.fromarray": Image.fromarray,
    "to_image": v2.functional.to_image,
    "a transform": v2.Resize(3),
    "collate": lambda x: default_collate([x]),
}


@pytest.mark.parametrize("way", ASKING)
def test_whoever_looks_is_noticed_also_where_the_error_is_caught(way):
    def getitem(self, index):
        image = self.transform(torch.zeros(2))
        with contextlib.suppress(BaseException):
            ASKING[way](image)
        return image, index

    with pytest.raises(SplitRefused, match="looks at what its transform returns"):
        Data(getitem).load(0)


@pytest.mark.parametrize("ask", [lambda x: x is None, type, id, callable, lambda x: issubclass(type(x), torch.Tensor)])
def test_what_asks_the_object_nothing_is_not_noticed_as_documented(ask):
    def getitem(self, index):
        image = self.transform("image")
        ask(image)
        return image, index

    assert Data(getitem).load(0) == ("image", 0)
