"""Copies of data sets and loaders: a shallow copy for taking transforms out, and temporary copies for reading.

A data set belongs to its user and is never modified. `shallow_copy` returns an object of the same class with the same attributes.
Transforms can be taken out of that object.

`ThrowAwayCopies` are deeper. They are for a proof that reads examples before the training, and for an analysis that trains.
Reading leaves traces:

* A data set, or an object that it holds, may open a file at its first read. (No worker inherits that of a proof, which runs in a
  process that ends, see `elsewhere.py`.)
* Examples that a data set keeps in memory may be edited in place when they are read.
* Counters and random generators change.

So plain objects (also with slots), containers, tensors, arrays, images and random generators inside are copied, too. Transforms
are copied deeply. Methods and partial functions of these objects become those of the copies.

These objects are shared with the original:

* large objects, after the copies have reached the limit on bytes of tensors, arrays and images, or on members of containers; and
  objects that are too deep;
* open files, connections and similar objects, and objects that hold one; but data sets, samplers and loaders that hold one are
  copied;
* memory maps, memory of devices, and objects of the standard library, because a copied lock, event or thread would wait forever;
* objects with their own copying rule (pandas, arrow), because that rule may read all their data;
* objects that functions refer to: globals, attributes of classes, variables of enclosing functions.

A copy never runs its class's ``__del__``, because that would close what the original still uses.
"""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo.protecting.generators import GENERATORS, TRANSFORMS
from lightning_echo.protecting.memory import nbytes
from lightning_echo.protecting.objects import (
    LOADING_TYPES,
    attributes_of,
    blank,
    is_container,
    is_in_main_memory,
    is_made_of_attributes,
    is_plain,
    is_safe_to_copy,
    slots_of,
)
from lightning_echo.protecting.protect import copy_example

__all__ = ["ThrowAwayCopies", "shallow_copy", "throw_away_copy"]

_MOST_MEMBERS = 100_000  # largest number of members of containers that are copied, together
_MOST_BYTES = 256 * 2**20  # largest number of bytes of tensors, arrays and images that are copied, together
_DEEP = 12  # levels of objects in objects that are followed

_ATOMS = (int, str, float, bool, bytes, type(None))  # most objects are of these types
_PERSISTENT_WORKERS = "_iterator"  # of a DataLoader


def shallow_copy(dataset: Any) -> Any:
    """Returns a data set of the same class with the same attributes.

    It avoids ``copy.copy`` if possible: a ``__getstate__`` written for pickling drops what a ``worker_init_fn`` has opened.
    """
    if not is_plain(type(dataset)):
        return copy.copy(dataset)
    copied = blank(dataset)
    copied.__dict__.update(vars(dataset))
    return copied


class ThrowAwayCopies:
    """Temporary copies of objects. Using them does not change the originals. What two originals share, their copies share, too.

    Args:
        most_members: Largest number of members of containers that are copied, together.
        most_bytes: Largest number of bytes of tensors, arrays and images that are copied, together.

    Attributes:
        too_large: Class and attribute of objects that are shared because they are too large.
    """

    def __init__(self, most_members: int, most_bytes: int) -> None:
        self.too_large: list[str] = []
        self._members_left, self._bytes_left = most_members, most_bytes
        self._memo: dict[int, Any] = {}  # in the format of copy.deepcopy; a copy is the copy of itself
        self._alive: list[Any] = []  # the objects whose ids are in the memo: an id must not be used again
        self._where = ""

    def of(self, value: Any, sharing: Iterable[Any] = ()) -> Any:
        """Returns the copy of an object, or the object itself if it cannot be copied. The objects that it holds do not matter.

        Args:
            value: A data set, a loader, or anything else.
            sharing: Parts of it that are not copied.
        """
        for shared in sharing:
            self._remember(shared, shared)
        known = self._memo.get(id(value))
        if known is not None:
            return known
        self._where = type(value).__name__
        if is_made_of_attributes(type(value)):
            return self._copy_object(value, 0)
        copied = self._copy(value, 0)
        return self._remember(value, copy.copy(value)) if copied is value and hasattr(value, "__getitem__") else copied

    def _copy(self, value: Any, depth: int) -> Any:
        if type(value) in _ATOMS:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, GENERATORS):
            return value if isinstance(value, random.SystemRandom) else self._remember(value, copy.deepcopy(value))
        if is_container(type(value)):
            return self._copy_container(value, depth + 1) if depth < _DEEP else value
        if is_in_main_memory(value):
            return self._copy_memory(value, depth)
        if isinstance(value, types.MethodType):
            owner = self._copy(value.__self__, depth)
            return value if owner is value.__self__ else self._remember(value, types.MethodType(value.__func__, owner))
        if type(value) is functools.partial:
            func, args, keywords = (self._copy(part, depth) for part in (value.func, value.args, value.keywords))
            return self._remember(value, functools.partial(func, *args, **keywords))
        if is_made_of_attributes(type(value)) and (
            isinstance(value, LOADING_TYPES) or (depth < _DEEP and is_safe_to_copy(value))
        ):
            return self._copy_object(value, depth + 1)
        return value

    def _copy_container(self, value: Any, depth: int) -> Any:
        if len(value) > self._members_left:
            return self._share(value)
        self._members_left -= len(value)
        if not isinstance(value, (list, dict, deque)):
            members = [self._copy(item, depth) for item in value]
            return self._remember(value, tuple.__new__(type(value), members) if isinstance(value, tuple) else set(members))
        copied = self._remember(value, copy.copy(value))  # before the members, which may refer back to it
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            copied[key] = self._copy(item, depth)
        for name, item in getattr(value, "__dict__", {}).items():
            copied.__dict__[name] = self._copy(item, depth)
        return copied

    def _copy_memory(self, value: Any, depth: int) -> Any:
        size = getattr(value, "nbytes", None) or nbytes(value)
        if size > self._bytes_left:
            return self._share(value)
        self._bytes_left -= size
        if type(value) is torch.Tensor:
            return self._remember(value, value.detach().clone())
        if type(value) is not np.ndarray:
            return self._remember(value, copy_example(value))
        copied = self._remember(value, value.copy())
        if value.dtype == object:
            for place, item in enumerate(value.flat):
                copied.flat[place] = self._copy(item, depth + 1)
        return copied

    def _copy_object(self, value: Any, depth: int) -> Any:
        copied, outside = self._remember(value, blank(value)), self._where  # before the attributes, which may refer back to it
        in_slots = slots_of(type(value))
        for name, item in attributes_of(value).items():
            self._where = f"{type(value).__name__}.{name}"
            if isinstance(value, DataLoader) and name == _PERSISTENT_WORKERS:
                item = None  # they read what the original holds
            deeply = name in TRANSFORMS and (depth == 0 or isinstance(value, Dataset))
            item = self._copy_deeply(item) if deeply else self._copy(item, depth)
            if name in in_slots:
                object.__setattr__(copied, name, item)
            else:
                copied.__dict__[name] = item
        self._where = outside
        return copied

    def _copy_deeply(self, transform: Any) -> Any:
        memo = dict(self._memo)
        try:
            copied = copy.deepcopy(transform, memo)
        except Exception:  # it holds a lock or something similar, and is copied as far as possible
            return self._copy(transform, 1)
        self._memo = memo
        return copied

    def _remember(self, value: Any, copied: Any) -> Any:
        self._memo[id(value)] = self._memo[id(copied)] = copied
        self._alive += value, copied
        return copied

    def _share(self, value: Any) -> Any:
        if self._where not in self.too_large:
            self.too_large.append(self._where)
        return value


def throw_away_copy(dataset: Any) -> Any:
    """Returns a temporary copy of a data set. Reading it does not change the original."""
    return ThrowAwayCopies(_MOST_MEMBERS, _MOST_BYTES).of(dataset)
