"""Public data sets are split as they are: torchvision's, and those that follow other conventions."""

import random
import threading
from collections import namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from split_cases import CALLED, CROP_AND_FLIP, Arrays, of_getitem, proved, same, seed
from torch.utils.data import Subset, random_split
from torchvision import datasets, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_echo.split.describe import Convention, SplitRefused
from lightning_echo.split.prove import find_split, make_stages

Pair = namedtuple("Pair", ["image", "label"])


def test_an_image_folder_is_cut_before_the_first_random_transform(images):
    augmentation = v1.Compose(
        [
            v1.Resize(16),
            v1.Compose([v1.CenterCrop(14), v1.RandomCrop(8)]),
            v1.ColorJitter(0.5),
            v1.ToTensor(),
            v1.Normalize([0.5] * 3, [0.5] * 3, inplace=True),
        ]
    )
    split, stages = proved(datasets.ImageFolder(images, transform=augmentation), is_sent=True)
    assert split.reused == ("load", "Resize", "CenterCrop")
    assert split.redone == ("RandomCrop", "ColorJitter", "ToTensor", "Normalize")
    assert 14 * 14 * 4 <= split.example_bytes <= 14 * 14 * 4 + 200  # Pillow holds four bytes per pixel
    image, label = stages.load(5)
    with Image.open(images / "dog" / "1.jpg") as opened:
        assert same((image, label), (v1.CenterCrop(14)(v1.Resize(16)(opened.convert("RGB"))), 1))
    crops = [stages.augment(4, (image.copy(), label))[0] for _ in range(8)]
    assert any(not torch.equal(crops[0], crop) for crop in crops[1:])


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


def test_a_subset_that_transforms_is_a_data_set_of_its_own():
    class Transformed(Subset):
        """Found in many Lightning projects: each part of a random_split with transforms of its own."""

        def __init__(self, subset, transform):
            super().__init__(subset.dataset, subset.indices)
            self.transform = transform

        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return self.transform(image), label

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    part, _ = random_split(Arrays(transform=v2.Pad(1)), [4, 2])
    split, stages = proved(Transformed(part, CROP_AND_FLIP))
    assert (split.reused, split.redone) == (("load", "Resize"), ("RandomCrop", "RandomHorizontalFlip"))
    assert stages.load(0)[0].shape == (3, 8, 8)


class Shift:
    """As Albumentations."""

    def __init__(self):
        self.rng, self.py = np.random.default_rng(5), random.Random(5)

    def __call__(self, image):
        return image * self.rng.random() + self.py.randrange(1000)


@pytest.mark.parametrize("attributes", [{}, {"lock": threading.Lock()}], ids=["copied deeply", "not copied deeply"])
def test_the_generators_of_a_transform_do_not_move_and_both_reads_start_from_the_same_state(attributes):
    shift = Shift()
    vars(shift).update(attributes)
    split = find_split(Arrays(transform=v2.Compose([v2.Resize(4), shift])))
    assert (split.reused, split.redone) == (("load", "Resize"), ("Shift",))
    assert (shift.rng.random(), shift.py.random()) == (np.random.default_rng(5).random(), random.Random(5).random())


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


def test_other_names_are_refused():
    def getitem(self, index):
        return tuple(self.transform(image=self.image(index), bboxes=[]).values())

    with pytest.raises(SplitRefused, match=r"calls its transform by keyword \(image, bboxes\)"):
        find_split(of_getitem(getitem, transform=lambda **data: data))


def test_a_data_set_that_has_no_index_zero():
    def getitem(self, key):
        return self.transform(self.image("abcdef".index(key))), key

    dataset = of_getitem(getitem, transform=CROP_AND_FLIP)
    split = find_split(dataset, indices=["b", "e", "c"])
    assert split.redone == ("RandomCrop", "RandomHorizontalFlip")
    assert make_stages(dataset, split.conventions).load("d")[1] == "d"
