"""Random generators that data sets hold, by the place where they are held.

When a data set is split, the stage that is reused must not draw from any of them: neither from the data set's own, nor from those
of the objects, data sets and transforms inside it, nor from those that the functions of the user's modules refer to: globals,
variables of enclosing functions, defaults. The transforms that the split takes out are left out here. A `Place` does not hold the
generator itself, because seeding puts a new generator in its place (MONAI, Albumentations).

Nothing is copied or called. Only the first few members of a container are examined. A generator that is made at a read is found
by another search.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
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
# The generators behind the functions of their modules, which randomness.py watches.
_GLOBAL = (random.random.__self__, np.random.rand.__self__, torch.default_generator)  # type: ignore[attr-defined]
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


def places_of_generators(*datasets: Any) -> list[Place]:
    """Returns the places of random generators in data sets and in what they hold, one place for each generator."""
    found: dict[int, Place] = {}
    seen: dict[int, Any] = {}
    left: deque[tuple[Any, int, bool]] = deque((dataset, 0, True) for dataset in datasets)
    while left and len(seen) < _MOST_OBJECTS:
        value, depth, is_split = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for place, part, leads_on in _parts(value, depth, is_split):
            if isinstance(part, GENERATORS):
                if not any(part is own for own in _GLOBAL):
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
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
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
        for name, part in base.__dict__.items():
            if isinstance(part, GENERATORS):  # all instances share it
                if name not in attributes:
                    yield Place(value, name), part, False
            elif (function := _function_in(part)) is not None:
                yield Place(function, None), function, False


def _function_in(member: Any) -> types.FunctionType | None:
    """Returns the function of a member of a class, if it is of a module of the user's."""
    if isinstance(member, property):
        member = member.fget
    member = getattr(member, "__wrapped__", getattr(member, "__func__", member))  # a cached function, a static or class method
    return member if isinstance(member, types.FunctionType) and _is_users(member.__module__) else None


def _of_function(function: types.FunctionType) -> Iterator[tuple[Place, Any, bool]]:
    """Yields what a function of a module of the user's refers to, in the form of `_parts`."""
    if not _is_users(function.__module__):
        return
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    yield from ((Place(part, None), part, False) for part in held)
    names, scope = _names_in(function.__code__), function.__globals__
    scopes = [scope, *(vars(scope[name]) for name in names if isinstance(scope.get(name), types.ModuleType))]
    for names_of_scope in scopes:
        if not _is_users(names_of_scope.get("__name__")):
            continue
        for name in names & names_of_scope.keys():
            part = _function_in(names_of_scope[name]) or names_of_scope[name]
            if not isinstance(part, types.ModuleType | type):
                yield Place(names_of_scope, name) if isinstance(part, GENERATORS) else Place(part, None), part, False


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the names that code and the functions defined in it use for globals and attributes."""
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*inner)


@lru_cache(maxsize=1024)
def _is_users(module: str | None) -> bool:
    """Returns whether a module is of the user's program, and not of a package that is installed."""
    if module is None or module.partition(".")[0] in sys.stdlib_module_names | {"lightning_echo"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
