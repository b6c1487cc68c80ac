"""Images that a data set only opened are decoded where they are read.

Pillow decodes a file when somebody first looks at its pixels: a transform, or the copy that an echo is made of. An echo would
reuse an open file until then, and what decoding costs, once per fresh example, would count as something that each use redoes.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from lightning_echo.protecting.objects import image_class
from lightning_echo.splitting.stages import Stages

__all__ = ["decoded", "decoding"]

_FEW = 16  # members of an example that are looked at: more are values, not images


def decoding(stages: Stages) -> Stages:
    """Makes stages decode what they load, and returns them.

    Args:
        stages: changed.

    >>> from lightning_echo.splitting.stages import WholeDataset
    >>> decoding(WholeDataset([10, 20])).load(1)
    20
    """
    load, load_many = stages.load, stages.load_many
    stages.load = lambda index: decoded(load(index))
    if load_many is not None:
        stages.load_many = lambda indices: [decoded(example) for example in load_many(indices)]
    return stages


def decoded(example: Any) -> Any:
    """Returns an example, its images decoded: itself, or in a sequence or dictionary."""
    image = image_class()
    if image is None:
        return example
    if isinstance(example, image):
        example.load()
    elif isinstance(example, (tuple, list, dict)):
        for member in islice(example.values() if isinstance(example, dict) else example, _FEW):
            if isinstance(member, image):
                member.load()
    return example
