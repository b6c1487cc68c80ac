"""Every read is checked: a data set that does something else with its transforms than its convention says is found out.

What a placeholder cannot notice is listed at the end, and so is everything that it does.
"""

import contextlib
import copy
import json
import pickle
from collections import namedtuple
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_echo.split.check import LookedAt, Placeholder, ReadCheck
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


Pair = namedtuple("Pair", ["image", "label"])
PAIR, JOINT = ("transform", "target_transform"), ("transforms",)

FITTING = {
    "a pair": (lambda self, i: (self.transform(f"image {i}"), i), Convention.transform, ("transform",)),
    "alone": (lambda self, i: self.transform(f"image {i}"), Convention.transform, ("transform",)),
    "a list": (lambda self, i: [self.transform(f"image {i}"), i], Convention.transform, ("transform",)),
    "a named tuple": (lambda self, i: Pair(self.transform(f"image {i}"), i), Convention.transform, ("transform",)),
    "with a target": (
        lambda self, i: (self.transform(f"image {i}"), self.target_transform(i), "more"),
        Convention.transform,
        PAIR,
    ),
    "the target first": (
        lambda self, i: (lambda target: (self.transform(f"image {i}"), target))(self.target_transform(i)),
        Convention.transform,
        PAIR,
    ),
    "a target alone": (lambda self, i: (f"image {i}", self.target_transform(i)), Convention.transform, ("target_transform",)),
    "torchvision's pair, one by one": (
        lambda self, i: (self.transform(f"image {i}"), self.target_transform(i)),
        Convention.transform,
        (*PAIR, "transforms"),
    ),
    "torchvision's pair, as one": (
        lambda self, i: self.transforms(f"image {i}", i),
        Convention.transform,
        (*PAIR, "transforms"),
    ),
    "several values": (lambda self, i: self.transform(f"image {i}", i), Convention.transform_joint, ("transform",)),
    "the whole sample": (lambda self, i: self.transform((f"image {i}", i)), Convention.transform_whole, ("transform",)),
    "transforms of one": (lambda self, i: (self.transforms(f"image {i}"), i), Convention.transforms, JOINT),
    "transforms of several": (lambda self, i: self.transforms(f"image {i}", i), Convention.transforms_joint, JOINT),
    "by name": (
        lambda self, i: (self.transform(image=f"image {i}")["image"], i),
        Convention.transform_image,
        ("transform",),
    ),
    "two by name": (
        lambda self, i: (lambda done: (done["image"], done["mask"]))(self.transform(image=f"image {i}", mask=i)),
        Convention.transform_image_mask,
        ("transform",),
    ),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_fits_comes_back_as_if_the_transforms_did_nothing(name):
    data = Data(*FITTING[name])
    plain = {
        "alone": "image 3",
        "a list": ["image 3", 3],
        "a named tuple": Pair("image 3", 3),
        "with a target": ("image 3", 3, "more"),
    }
    expected = plain.get(name, ("image 3", 3))
    for loaded in (data.load(3), data.load_many([5, 3])[1]):
        assert loaded == expected
        assert type(loaded) is type(expected)


def looks_and_returns(look):
    def getitem(self, index):
        image = self.transform(torch.zeros(2))
        look(image)
        return image, index

    return getitem


def caught(getitem):
    def trying(self, index):
        for _ in range(3):
            try:
                return getitem(self, index)
            except Exception:  # the data set's own way
                pass
        return None

    return trying


class Caching(dict):
    """Keeps what the transform returned, as data sets that cache do."""

    def __call__(self, data, index):
        if index not in self:
            self[index] = data.transform(f"image {index}")
        return self[index], index


UNFITTING = {
    "never": (lambda self, i: ("image", i), "calls its transform 0 times where 1 would be expected"),
    "twice": (lambda self, i: (self.transform(self.transform("image")), i), "calls its transform 2 times"),
    "elsewhere": (lambda self, i: (i, self.transform("image")), "does not return the result of its transform where"),
    "in a dictionary": (lambda self, i: {"image": self.transform("image")}, "does not return the result of its transform where"),
    "in both places": (lambda self, i: (self.transform("image"),) * 2, "keeps what its transform returns"),
    "dropped": (lambda self, i: self.transform("image") and None, "looks at what its transform returns"),
    "dropped unseen": (lambda self, i: [self.transform("image"), i][1:], "does not return the result of its transform where"),
    "an image and a mask": (lambda self, i: self.transform("image", "mask"), "does not return the result of its transform where"),
    "nothing": (lambda self, i: (self.transform(), i), "does not return the result of its transform where"),
    "by keyword": (lambda self, i: (self.transform(img="image")["img"], i), r"by keyword \(img\)"),
    "a tuple": (lambda self, i: self.transform(("image", i)), "does not return the result of its transform where"),
    "empty": (lambda self, i: (self.transform("image"),)[:0], "does not return the result of its transform where"),
    "a retry": (
        lambda self, i: self.getitem(self, i - 1) if self.transform("image") is not None and i else (self.transform("image"), i),
        "calls its transform 5 times",
    ),
    "after a look": (looks_and_returns(lambda image: image.sum()), r"looks at what its transform returns \(sum\)"),
    "after a look in vain": (caught(looks_and_returns(lambda image: image.sum() == 0)), r"looks at .* \(sum\)"),
    "kept": (Caching(), "keeps what its transform returns"),
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", FITTING)
def test_an_example_for_which_no_transform_is_called_is_refused_whatever_the_convention(name, many):
    _, convention, names = FITTING[name]
    data = Data(lambda self, index: (f"image {index}", index), convention, names)
    with pytest.raises(SplitRefused, match="0 times where 1 would be expected"):
        data.load_many([3]) if many else data.load(3)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("name", UNFITTING)
def test_what_does_not_fit_is_refused_with_the_reason(name, many):
    getitem, reason = UNFITTING[name]
    if isinstance(getitem, Caching):
        getitem.clear()
    data = Data(lambda self, index: getitem(self, index))
    if name == "a retry":
        data.getitem = getitem
    with pytest.raises(SplitRefused, match=reason):
        data.load_many([3]) if many else data.load(3)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(
    ("getitem", "convention", "names"),
    [
        (lambda self, i: (self.transform("image"), i), Convention.transform_image, ("transform",)),
        (lambda self, i: (self.target_transform(i), self.transform("image")), Convention.transform, PAIR),
    ],
    ids=["by position where the convention names the values", "image and target exchanged"],
)
def test_a_result_of_another_call_than_the_convention_makes_is_refused(getitem, convention, names, many):
    data = Data(getitem, convention, names)
    with pytest.raises(SplitRefused, match="does not return the result of its transform where"):
        data.load_many([3]) if many else data.load(3)


def test_a_data_set_that_no_longer_has_the_transform_of_its_convention_is_refused_when_it_calls_another():
    """A ``worker_init_fn`` may have changed it after the proof."""
    data = Data(lambda self, index: (self.transform("image"), index), Convention.transforms_joint)
    with pytest.raises(SplitRefused, match="calls its transform 1 times where 0 would be expected"):
        data.load(3)


def test_one_that_does_not_fit_is_enough_to_refuse_a_batch():
    data = Data(lambda self, index: (self.transform("image") if index % 5 == 0 else "image", index))
    assert data.load_many([0, 5, 10]) == [("image", 0), ("image", 5), ("image", 10)]
    with pytest.raises(SplitRefused, match="calls its transform 2 times where 3 would be expected"):
        data.load_many([0, 5, 7])
    assert data.load(5) == ("image", 5)
    with pytest.raises(SplitRefused, match="calls its transform 0 times where 1 would be expected"):
        data.load(7)
    assert data.load(10) == ("image", 10)  # it was refused alone


def test_one_result_in_two_samples_of_a_batch_is_refused():
    def load_many(indices):
        results = [data.transform(index) for index in indices]
        return [(results[0], index) for index in indices]

    data = Data(None)
    check = ReadCheck(Convention.transform, ["transform"])
    data.transform = check.recorder("transform")
    with pytest.raises(SplitRefused, match="does not return the result of its transform where"):
        check.checked_many(load_many)([1, 2])


def test_the_order_of_two_transforms_counts_where_both_draw():
    getitem = FITTING["the target first"][0]
    data = Data(getitem, Convention.transform, PAIR, in_order=True)
    for load in (data.load, lambda index: data.load_many([index])):
        with pytest.raises(SplitRefused, match="target_transform before the transform of the image"):
            load(0)
    assert Data(FITTING["with a target"][0], Convention.transform, PAIR, in_order=True).load(0) == ("image 0", 0, "more")


def test_an_exception_of_the_data_set_comes_through():
    def getitem(self, index):
        self.transform("image")
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        Data(getitem).load(0)


def test_a_placeholder_that_is_found_later_says_what_is_wrong():
    kept = []
    data = Data(lambda self, index: (kept.append(self.transform("image")), index))
    with pytest.raises(SplitRefused):
        data.load(0)
    with pytest.raises(LookedAt, match=r"the data set must only return that result\. Use insertion_point='after_augmentation'"):
        default_collate(kept)


def test_without_transforms_nothing_is_checked():
    def load(index):
        return index

    check = ReadCheck(Convention.transform, [])
    assert check.checked(load) is load
    assert check.checked_many(load) is load


P = Placeholder
ASKING = {
    "an attribute": lambda x: x.shape,
    "a missing one": lambda x: getattr(x, "mode", None),
    "hasattr": lambda x: hasattr(x, "mode"),
    "setting": lambda x: setattr(x, "label", 1),
    "vars": vars,
    "isinstance tensor": lambda x: isinstance(x, torch.Tensor),
    "isinstance image": lambda x: isinstance(x, Image.Image),
    "isinstance array": lambda x: isinstance(x, np.ndarray),
    "isinstance abc": lambda x: isinstance(x, Mapping),
    "is_tensor": torch.is_tensor,
    "truth": bool,
    "not": lambda x: not x,
    "equality": lambda x: x == 0,
    "equality from the left": lambda x: 0 == x,  # noqa: SIM300
    "order": lambda x: x < 1,
    "max": lambda x: max(x, 1),
    "membership": lambda x: x in [1],
    "hash": lambda x: {x: 1},
    "length": len,
    "iteration": list,
    "unpacking": lambda x: [*x],
    "an element": lambda x: x[0],
    "setting an element": lambda x: x.__setitem__(0, 1),
    "arithmetic": lambda x: x / 255,
    "arithmetic from the left": lambda x: 1 - x,
    "in place": lambda x: [y := x, y := y.__iadd__(1)],
    "a tensor's arithmetic": lambda x: torch.zeros(2) + x,
    "an array's arithmetic": lambda x: np.zeros(2) * x,
    "abs": abs,
    "round": round,
    "float": float,
    "int": int,
    "str": str,
    "repr": repr,
    "format": lambda x: f"{x}",
    "calling": lambda x: x(),
    "with": lambda x: x.__enter__(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "json": json.dumps,
    "torch.tensor": torch.tensor,
    "torch.as_tensor": torch.as_tensor,
    "torch.stack": lambda x: torch.stack([x]),
    "torch.cat": lambda x: torch.cat([torch.zeros(2), x]),
    "torch.sum": torch.sum,
    "a tensor's element": lambda x: torch.zeros(2).__setitem__(0, x),
    "np.asarray": np.asarray,
    "np.array of several": lambda x: np.array([x, x]),
    "np.array of objects": lambda x: np.array(x, dtype=object),
    "np.sum": np.sum,
    "np.stack": lambda x: np.stack([x]),
    "Image.fromarray": Image.fromarray,
    "a TVTensor": tv_tensors.Image,
    "a TVTensor's wrap": lambda x: tv_tensors.wrap(x, like=tv_tensors.Image(torch.zeros(3, 2, 2))),
    "boxes": lambda x: tv_tensors.BoundingBoxes(x, format="XYXY", canvas_size=(2, 2)),
    "to_image": v2.functional.to_image,
    "a transform": v2.Resize(3),
    "a random transform": v2.RandomHorizontalFlip(1.0),
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
def test_what_asks_the_object_nothing_is_not_noticed(ask):
    """Said in the module; if this changes, so must that."""

    def getitem(self, index):
        image = self.transform("image")
        ask(image)
        return image, index

    assert Data(getitem).load(0) == ("image", 0)
