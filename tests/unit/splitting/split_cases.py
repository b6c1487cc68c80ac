"""What the tests of splits share: under the same seeds, a data set is what its stages have to return."""

import copy
import random

import numpy as np
import torch
from PIL import Image


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
