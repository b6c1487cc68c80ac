"""What the tests of splits share: under the same seeds, a data set is what its stages have to return."""

import copy
import pickle
import random
import warnings

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import StagedDataset

CROP_AND_FLIP = v2.Compose([v2.Resize(8), v2.RandomCrop(5), v2.RandomHorizontalFlip()])


def seed(value):
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def same(left, right):
    """Equal in type and value: the test's own comparison."""
    assert type(left) is type(right), (left, right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
        assert vars(left) == vars(right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        all(same(left[key], right[key]) for key in left)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        all(same(*pair) for pair in zip(left, right, strict=True))
    elif isinstance(left, Image.Image):
        assert (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes())
    elif isinstance(left, np.ndarray):
        assert np.array_equal(left, right)
    else:
        assert left == right
    return True


def behaves_like(dataset, stages, uses=2):
    """Whether each use of each example, loaded once, is what the data set returns under the same seeds."""
    for index in range(len(dataset)):
        example = stages.load(index)
        for use in range(uses):
            seed(100 * index + use)
            plain = dataset[index]
            seed(100 * index + use)
            assert same(stages.augment(index, copy.deepcopy(example)), plain)
    return True


def sent(value):
    """Returns what a worker gets that is started with spawn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.4 warns of every tensor in a pickle
        return pickle.loads(pickle.dumps(value))


def proved(dataset, *, raw=False, is_sent=False):
    """Returns the split of a data set, and its stages as a worker makes them, which behave like the data set."""
    split = find_split(dataset, raw=raw)
    assert split.raw == raw
    stages = make_stages(sent(dataset) if is_sent else dataset, sent(split.conventions), raw=raw)
    assert behaves_like(dataset, stages)
    return split, stages


class Arrays(Dataset):
    """Small images in memory with a ``transform``, not torchvision's class."""

    def __init__(self, size=6, transform=None, **attributes):
        self.images = torch.arange(size * 3 * 6 * 6, dtype=torch.uint8).view(size, 3, 6, 6)
        self.transform = transform
        vars(self).update(attributes)

    def image(self, index):
        if not 0 <= index < len(self.images):
            raise IndexError(index)
        return self.images[index]

    def __getitem__(self, index):
        image = self.image(index)
        if self.transform is not None:
            image = self.transform(image)
        return image, int(index)

    def __len__(self):
        return len(self.images)


def of_getitem(getitem, kind=Arrays, **attributes):
    return type("Own", (kind,), {"__getitem__": getitem})(**attributes)


def CALLED(image):
    return image + torch.rand(())


def noisy(example):
    return example + np.random.rand()


def flip_or_not(example):
    image, label = example
    return (image.flip(-1), label) if random.random() < 0.5 else (image, label)


class Staged(StagedDataset):
    def load(self, index):
        return torch.full((2,), float(index)), index

    def augment(self, example):
        return example[0] + torch.rand(2), example[1]

    def __len__(self):
        return 5
