"""Decodes, as part of loading, images that a data set has only opened.

Pillow decodes a file when its pixels are first used: by a transform, or by the copy that is made for an echo. Before that, an
echo would reuse an open file. And decoding, which happens once per fresh example, would be counted as work for each use.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from lightning_echo.protecting.objects import image_class
from lightning_echo.splitting.stages import Stages

__all__ = ["add_decoding", "decoded"]

_FEW = 16  # only so many members of an example are searched: many members are values, not images


def add_decoding(stages: Stages) -> None:
    """Changes stages so that ``load`` also decodes images.

    >>> from lightning_echo.splitting.stages import uncut_stages
    >>> stages = uncut_stages([10, 20])
    >>> add_decoding(stages)
    >>> stages.load(1)
    20
    """
    load, load_many = stages.load, stages.load_many
    stages.load = lambda index: decoded(load(index))
    if load_many is None:
        return

    def load_decoded(indices: list[Any]) -> list[Any]:
        examples = load_many(indices)
        if isinstance(examples, list | tuple):  # if not, it is a whole batch
            for example in examples:
                decoded(example)
        return examples

    stages.load_many = load_decoded


def decoded(example: Any) -> Any:
    """Returns the same example with its images decoded: the example itself, or members of a sequence or dictionary."""
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
