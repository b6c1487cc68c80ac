"""Random generators that data sets hold, by the place where they are held.

When a data set is split, the stage that is reused must not draw from any of them: neither from the data set's own, nor from those
of the objects, data sets and transforms inside it. The transforms that the split takes out are left out here. A `Place` does not
hold the generator itself, because seeding puts a new generator in its place (MONAI, Albumentations).

Nothing is copied or called. Only the first few members of a container are examined.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_echo.protecting.objects import (
    LOADING_TYPES,
    attributes_of,
    is_concat,
    is_container,
    is_standard,
    is_subset,
    slots_of,
)

__all__ = ["GENERATORS", "TRANSFORMS", "Place", "generator_state", "places_of_generators"]

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# Attributes of a data set that hold transforms.
TRANSFORMS = ("transform", "target_transform", "transforms", "_transform", "_target_transform", "_transforms", "_augment_one")

_FEW = 16  # largest number of members of a container that are examined
_DEEP = 12  # levels of objects in objects that are followed
_MOST_OBJECTS = 10_000  # largest number of objects that are examined, together


class Place(NamedTuple):
    """Where something is held.

    Attributes:
        owner: An object or container that holds it.
        name: The name of the attribute, or the index or key in the container; None: it is the owner itself.
    """

    owner: Any
    name: Any

    @property
    def held(self) -> Any:
        """The object that is held there now; None if there is none."""
        if self.name is None:
            return self.owner
        if is_container(type(self.owner)) and isinstance(self.owner, list | tuple | dict):
            try:
                return self.owner[self.name]
            except LookupError:
                return None
        kind, attributes = type(self.owner), getattr(self.owner, "__dict__", {})
        if self.name in attributes:
            return attributes[self.name]
        return getattr(self.owner if self.name in slots_of(kind) else kind, self.name, None)

    def state(self) -> Any:
        """Returns the state of the generator that is held there now; None if there is none."""
        return generator_state(self.held)


def places_of_generators(dataset: Any) -> list[Place]:
    """Returns the places of random generators in a data set and in what it holds, one place for each generator."""
    found: dict[int, Place] = {}
    seen: dict[int, Any] = {}
    left: deque[tuple[Any, int, bool]] = deque([(dataset, 0, True)])
    while left and len(seen) < _MOST_OBJECTS:
        value, depth, is_split = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for place, part, leads_on in _parts(value, depth, is_split):
            if isinstance(part, GENERATORS):
                found.setdefault(id(part), place)
            elif depth < _DEEP:
                left.append((part, depth + 1, leads_on))
    return list(found.values())


def generator_state(generator: Any) -> Any:
    """Returns the state of a random generator; None if it has no state (the operating system's) or is no generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState | torch.Generator):
        return generator.get_state()
    has_state = isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom)
    return generator.getstate() if has_state else None


def _parts(value: Any, depth: int, is_split: bool) -> Iterator[tuple[Place, Any, bool]]:
    """Yields the place of each part of an object, the part, and whether it is split, if it is a data set."""
    if is_container(type(value)):
        if isinstance(value, list | tuple | dict):
            members = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((Place(value, name), member, is_split) for name, member in islice(members, _FEW))
        else:
            yield from ((Place(member, None), member, False) for member in islice(value, _FEW))
    elif isinstance(value, types.MethodType | types.BuiltinMethodType):
        yield Place(value.__self__, None), value.__self__, False
    elif isinstance(value, functools.partial):
        yield from ((Place(part, None), part, False) for part in (value.func, *value.args, *value.keywords.values()))
    elif depth == 0 or isinstance(value, LOADING_TYPES) or not is_standard(type(value)):
        yield from _attributes(value, is_split)


def _attributes(value: Any, is_split: bool) -> Iterator[tuple[Place, Any, bool]]:
    if isinstance(value, type):
        return
    attributes = attributes_of(value)
    leads_on = is_split and (is_subset(value) or is_concat(value))
    for name, part in attributes.items():
        if not (is_split and name in TRANSFORMS):
            yield Place(value, name), part, leads_on
    for base in type(value).__mro__:
        for name, part in base.__dict__.items():  # a generator that all instances share
            if isinstance(part, GENERATORS) and name not in attributes:
                yield Place(value, name), part, False
