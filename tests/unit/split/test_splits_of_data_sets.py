"""Public data sets are split as they are; what only looks as if it could be split is refused, and why is said."""

import random
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from split_cases import CALLED, CROP_AND_FLIP, Arrays, of_getitem, proved, same, seed
from torch.utils.data import IterableDataset, Subset, TensorDataset
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages

Pair = namedtuple("Pair", ["image", "label"])


class Shapes(datasets.VisionDataset):
    """A box drawn on an image, both made on the fly."""

    def __init__(self, transforms=None, **separate):
        super().__init__("", transforms=transforms, **separate)

    def __getitem__(self, index):
        image = tv_tensors.Image(torch.zeros(3, 10, 10))
        image[:, 1:3, 2:4] = 1
        boxes = tv_tensors.BoundingBoxes(torch.tensor([[2, 1, 4, 3]]), format="XYXY", canvas_size=(10, 10))
        target = {"boxes": boxes, "labels": torch.tensor([index])}
        if self.transforms is not None:
            image, target = self.transforms(image, target)
        return image, target

    def __len__(self):
        return 4


def set_later(images):
    dataset = datasets.ImageFolder(images, transform=v1.RandomRotation(10))
    dataset.transform = v1.Compose([v1.Resize(8), v1.RandomCrop(4)])
    return dataset


def of_one(images):
    """COCO and others call ``transforms`` only, so that a ``transform`` set later does nothing."""
    dataset = Shapes(transform=v2.Compose([v2.Resize((8, 8)), v2.RandomCrop(4)]), target_transform=len)
    dataset.transform = v2.RandomRotation(45)
    return dataset


def jittered(label):
    return label + random.random()


@pytest.mark.parametrize(
    ("make", "reused", "redone"),
    [
        (
            lambda images: datasets.ImageFolder(
                images, v2.Compose([v2.ToImage(), v2.RandomResizedCrop(6), v2.ToDtype(torch.float32)]), jittered
            ),
            ("load", "ToImage"),
            ("RandomResizedCrop", "ToDtype", "target jittered"),
        ),
        (
            lambda images: Arrays(transform=torch.nn.Sequential(v2.Resize(8), v2.RandomCrop(4))),
            ("load", "Resize"),
            ("RandomCrop",),
        ),
        (
            lambda images: datasets.ImageFolder(images, v1.Compose([v1.Resize((8, 8)), v1.ToTensor()])),
            *(("load", "Resize", "ToTensor"), ()),
        ),
        (datasets.ImageFolder, ("load",), ()),
        (
            lambda images: datasets.ImageFolder(images, CROP_AND_FLIP, target_transform=v2.Identity()),
            *(("load", "Resize", "target Identity"), ("RandomCrop", "RandomHorizontalFlip")),
        ),
        (set_later, ("load", "Resize"), ("RandomCrop",)),
        (of_one, ("load", "Resize"), ("RandomCrop", "target len")),
        (
            lambda images: datasets.wrap_dataset_for_transforms_v2(datasets.ImageFolder(images, transform=CROP_AND_FLIP)),
            *(("load", "Resize"), ("RandomCrop", "RandomHorizontalFlip")),
        ),
    ],
    ids=["v2", "Sequential", "deterministic", "none", "of the target", "set later", "called as one", "wrapped"],
)
def test_data_sets_of_torchvision(images, make, reused, redone):
    split, stages = proved(make(images), is_sent=True)
    assert (split.reused, split.redone) == (reused, redone)
    if not redone:
        example = stages.load(0)
        assert stages.augment(0, example) is example


def test_transforms_of_image_and_target_together():
    dataset = Shapes(v2.Compose([v2.Resize((10, 20)), v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]))
    split, stages = proved(dataset, is_sent=True)
    assert split.reused == ("load", "Resize")
    assert split.redone == ("RandomHorizontalFlip", "SanitizeBoundingBoxes")
    _, target = stages.load(0)
    assert target["boxes"].tolist() == [[4, 1, 8, 3]]  # twice as wide
    assert target["boxes"].canvas_size == (10, 20)
    seen = set()
    for use in range(20):
        seed(use)
        image, target = stages.augment(0, stages.load(0))
        flipped = bool(image[0, 2, 5] == 0)
        assert target["boxes"].tolist() == ([[12, 1, 16, 3]] if flipped else [[4, 1, 8, 3]])
        seen.add(flipped)
    assert seen == {True, False}


def landmarks(self, index):
    """As in PyTorch's data loading tutorial."""
    return self.transform({"image": self.image(index), "landmarks": np.arange(4.0) + index})


def shift(sample):
    by = np.random.randint(5)
    return {"image": sample["image"] + by, "landmarks": sample["landmarks"] + by}


def add_noise(sample):
    return sample[0] + torch.rand(()), sample[1]


def masked(self, index):
    """As in torchvision's detection tutorial."""
    transform = self.transform if self.transform is not None else self.transforms
    return transform(tv_tensors.Image(self.image(index)), {"mask": tv_tensors.Mask(torch.eye(6)), "index": index})


RESIZE_AND_FLIP = v2.Compose([v2.Resize((8, 6)), v2.RandomHorizontalFlip(0.01)])


@pytest.mark.parametrize(
    ("getitem", "attributes", "convention", "redone"),
    [
        (lambda self, i: (self.transform(self.image(i)), i, -i), {"transform": CALLED}, Convention.transform, ("CALLED",)),
        (lambda self, i: [self.transform(self.image(i)), i], {"transform": CALLED}, Convention.transform, ("CALLED",)),
        (lambda self, i: Pair(self.transform(self.image(i)), i), {"transform": CALLED}, Convention.transform, ("CALLED",)),
        (landmarks, {"transform": v1.Compose([v2.Identity(), shift])}, Convention.transform, ("shift",)),
        (masked, {"transform": RESIZE_AND_FLIP}, Convention.transform_joint, ("RandomHorizontalFlip",)),
        (masked, {"transforms": RESIZE_AND_FLIP}, Convention.transforms_joint, ("RandomHorizontalFlip",)),
        (
            lambda self, i: self.transform((self.image(i), i)),
            *({"transform": add_noise}, Convention.transform_whole, ("add_noise",)),
        ),
    ],
    ids=["first of three", "list", "namedtuple", "dict", "image and target", "transforms of both", "a whole tuple"],
)
def test_data_sets_that_follow_other_conventions(getitem, attributes, convention, redone):
    split, stages = proved(of_getitem(getitem, **attributes))
    assert (split.conventions, split.redone) == ((convention,), redone)
    if getitem is masked:
        assert stages.load(2)[1]["mask"].shape == (8, 6)  # the target was resized with the image


class Flip:
    """As Albumentations is called in most data sets."""

    def __init__(self, share):
        self.share, self.rng = share, random.Random(4)

    def __call__(self, **data):
        if self.rng.random() < self.share:
            data = {name: value.flip(-1) for name, value in data.items()}
        return {**data, "replay": None}


def segmentation(self, index):
    image = self.image(index)
    if not self.with_mask:
        return self.transform(image=image)["image"], image[0] > 100, index
    done = self.transform(image=image, mask=image[0] > 100)
    return done["image"], done["mask"], index


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_image_and_mask_by_name(with_mask, share):
    dataset = of_getitem(segmentation, transform=Flip(share), with_mask=with_mask)
    split = find_split(dataset)
    assert (split.reused, split.redone) == (("load",), ("Flip",))
    assert dataset.transform.rng.random() == random.Random(4).random()
    stages, dataset.transform.share = make_stages(dataset, split.conventions), 1.0
    image, mask = dataset.images[3], dataset.images[3][0] > 100
    assert same(stages.augment(3, stages.load(3)), (image.flip(-1), mask.flip(-1) if with_mask else mask, 3))


WRONG = {
    "twice": (lambda self, index: (self.transform(self.transform(self.image(index))), index), "2 times"),
    "through another attribute": (lambda self, index: (self.hidden(self.image(index)), index), "0 times where 1 would be"),
    "after another random one": (
        lambda self, index: (self.transform(self.hidden(self.image(index))), index),
        "draws random numbers from torch",
    ),
    "with more behind": (
        lambda self, index: (self.transform(self.image(index)).float() / 255, index),
        r"looks at what its transform returns \(float\)",
    ),
    "by keyword": (lambda self, index: (self.transform(image=self.image(index)), index), r"by keyword \(image\)"),
    "beside a draw of its own": (
        lambda self, index: (self.transform(self.image(index)), index + random.random()),
        "draws random numbers from random",
    ),
    "with what cannot be copied": (
        lambda self, index: (self.transform(self.image(index)), threading.Lock()),
        r"augmenting dataset\[0\] .* TypeError: .*_thread.lock",
    ),
}


class Rare:
    """A flip that hardly ever happens, so that equal values prove nothing."""

    def __init__(self):
        self.flip = v2.RandomHorizontalFlip(1e-6)

    def __call__(self, image):
        return self.flip(image)


@pytest.mark.parametrize("way", WRONG)
def test_a_transform_that_is_used_in_another_way_is_refused(way):
    use, reason = WRONG[way]
    with pytest.raises(SplitRefused, match=reason) as refused:
        find_split(of_getitem(use, transform=Rare(), hidden=Rare()))
    assert str(refused.value).endswith("or use insertion_point='after_augmentation'")
    assert "StagedDataset" in str(refused.value)
    assert "StagedDataset" not in refused.value.reason


def test_the_order_of_image_and_target_counts_where_both_draw():
    def getitem(self, index):
        target = self.target_transform(index)
        return self.transform(self.image(index)), target

    with pytest.raises(SplitRefused, match="it calls its target_transform before the transform of the image"):
        make_stages(of_getitem(getitem, transform=CALLED, target_transform=CALLED)).load(1)
    for transforms in ((v2.Identity(), CALLED), (CALLED, v2.Identity())):
        dataset = of_getitem(getitem, transform=transforms[0], target_transform=transforms[1])
        assert make_stages(dataset).load(1)[1] == 1


generator = random.Random(0)


class Stream(IterableDataset):
    transform = abs

    def __iter__(self):
        return iter([1])


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (TensorDataset(torch.zeros(3)), "TensorDataset has neither load"),
        (Subset([1, 2, 3], [0]), "list has neither load"),
        (Subset(Arrays(transform=abs), []), "it holds no example"),
        *[(of_getitem(lambda self, i: self.image(i), transform=value), "Own has neither") for value in ("resize", {"size": 3})],
        (Stream(), "Stream is a stream"),
        (Arrays(transform=lambda image: image + generator.randrange(10**6)), "differently when read again under the same seeds"),
    ],
    ids=["no stages", "in a subset", "empty", "a word", "a dictionary", "stream", "draws that cannot be repeated"],
)
def test_nothing_to_split_or_to_prove(dataset, reason):
    with pytest.raises(SplitRefused, match=reason):
        find_split(dataset)


def broken(self, index):
    raise OSError(f"cannot read {index}")


def picky(self, index):
    assert self.transform is CALLED  # a placeholder is not
    return self.transform(self.image(index)), index


def test_the_exceptions_of_data_set_and_transform_come_through_and_those_of_the_stages_alone_are_refusals():
    with pytest.raises(OSError, match="cannot read 0"):
        find_split(of_getitem(broken, transform=CROP_AND_FLIP))
    with pytest.raises(ZeroDivisionError):
        find_split(Arrays(transform=lambda image: image + 1 // 0))
    with pytest.raises(SplitRefused, match=r"loading dataset\[0\] .* raised Assertion") as got:
        find_split(of_getitem(picky, transform=CALLED))
    assert isinstance(got.value.__cause__, AssertionError)
