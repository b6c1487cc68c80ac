"""Copies of data sets: one to take the transforms out of, one to throw away.

A data set belongs to its user and is never modified. `shallow_copy` gives an object of the same class with
the same attributes, on which transforms can be taken out. `ThrowAwayCopy` goes deeper, for a proof that reads
examples before training: a file that a data set opens at its first read must not be inherited by the workers
(with fork they corrupt each other's reads, with spawn it cannot be pickled), also when an object that the
data set holds opens it; and examples that a data set keeps in memory may be edited in place when they are
read. So plain objects, containers, tensors, arrays and random generators inside are copied as well, transforms
deeply. What is open already is shared, and so is what is too large: beyond 256 MiB of tensors and arrays, and
beyond 100,000 members of containers, in all. Objects of the standard library are shared too: a copied lock,
event or thread would wait forever.

A copy never runs its class's ``__del__``: it would close what the original still uses.
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections import OrderedDict, defaultdict
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_FEW = 16  # members of containers in which generators are looked for
_LONG = 256  # containers with more members hold samples, nothing that is open
_MOST_MEMBERS = 100_000  # of containers that are copied, in all
_MOST_BYTES = 256 * 2**20  # of tensors and arrays that are copied, in all
_DEEP = 12  # levels of objects in objects that are followed

# Attributes of a data set that hold transforms, which may draw from a generator of their own.
_TRANSFORMS = ("transform", "target_transform", "transforms", "_augment_one")

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_DICTS = (dict, OrderedDict, defaultdict)
_COPY_HOOKS = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")


def shallow_copy(dataset: Any) -> Any:
    """Returns a data set of the same class with the same attributes.

    Not ``copy.copy`` where it can be helped: a ``__getstate__`` written for pickling drops what a
    ``worker_init_fn`` has opened.
    """
    if not _is_plain(type(dataset)):
        return copy.copy(dataset)
    copied = blank(dataset)
    copied.__dict__.update(vars(dataset))
    return copied


class ThrowAwayCopy:
    """A copy of ``dataset`` that can be read without a trace in the original.

    Attributes:
        dataset: the copy.
        generators: the copies of the generators that it holds, those of transforms left out.
    """

    def __init__(self, dataset: Any) -> None:
        self.generators: list[Any] = []
        self._memo: dict[int, Any] = {}  # in the format of copy.deepcopy
        self._members_left, self._bytes_left = _MOST_MEMBERS, _MOST_BYTES
        self.dataset = self._copy_object(dataset, 0) if _is_plain(type(dataset)) else copy.copy(dataset)

    def _copy(self, value: Any, depth: int) -> Any:
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, _GENERATORS):
            copied = copy.deepcopy(value)
            self.generators.append(copied)
        elif type(value) in (list, tuple, set, *_DICTS) and depth < _DEEP:
            copied = self._copy_container(value, depth + 1)
        elif type(value) in (torch.Tensor, np.ndarray):
            copied = self._copy_array(value)
        elif _is_plain(type(value)) and (isinstance(value, Dataset) or _is_closed_holder(value, depth)):
            return self._copy_object(value, depth + 1)
        else:
            return value
        self._memo[id(value)] = copied
        return copied

    def _copy_container(self, value: Any, depth: int) -> Any:
        if len(value) > self._members_left:
            return value
        self._members_left -= len(value)
        if isinstance(value, (list, dict)):
            copied = self._memo[id(value)] = copy.copy(value)  # before the members, which may refer back to it
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                copied[key] = self._copy(item, depth)
            return copied
        return type(value)(self._copy(item, depth) for item in value)

    def _copy_array(self, value: Any) -> Any:
        if value.nbytes > self._bytes_left or (isinstance(value, torch.Tensor) and value.device.type != "cpu"):
            return value
        self._bytes_left -= value.nbytes
        return value.detach().clone() if isinstance(value, torch.Tensor) else value.copy()

    def _copy_object(self, value: Any, depth: int) -> Any:
        copied = self._memo[id(value)] = blank(value)  # before the attributes, which may refer back to it
        for name, item in vars(value).items():
            deeply = name in _TRANSFORMS and (depth == 0 or isinstance(value, Dataset))
            copied.__dict__[name] = self._copy_deeply(item) if deeply else self._copy(item, depth)
        return copied

    def _copy_deeply(self, transform: Any) -> Any:
        memo = dict(self._memo)
        try:
            copied = copy.deepcopy(transform, memo)
        except Exception:  # it holds a lock or the like: as far as it goes
            return self._copy(transform, 1)
        self._memo = memo
        return copied


def generators_in(dataset: Any) -> list[Any]:
    """Returns the random generators that a data set and those inside it hold, in plain objects too; transforms left out.

    As `ThrowAwayCopy` finds them, but without copying anything, and of containers the first few members only.
    """
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    left = [(dataset, 0)]
    while left:
        value, depth = left.pop()
        if id(value) in seen or depth > _DEEP:
            continue
        seen[id(value)] = value
        if isinstance(value, _GENERATORS):
            found[id(value)] = value
        elif type(value) in (list, tuple, set, *_DICTS):
            members = value.values() if isinstance(value, dict) else value
            left += [(member, depth + 1) for member in islice(members, _FEW)]
        elif isinstance(value, Dataset) or depth == 0 or (_is_plain(type(value)) and _is_ours_to_follow(type(value))):
            attributes = getattr(value, "__dict__", {})
            holds_transforms = depth == 0 or isinstance(value, Dataset)
            left += [(item, depth + 1) for name, item in attributes.items() if not (holds_transforms and name in _TRANSFORMS)]
    return list(found.values())


def generator_state(generator: Any) -> Any:
    """Returns the state of a private generator, None if it has none (the operating system's)."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, (np.random.RandomState, torch.Generator)):
        return generator.get_state()
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


def _is_plain(kind: type) -> bool:
    """Whether an instance is its ``__dict__`` and nothing else."""
    return (
        getattr(kind, "__new__") is object.__new__  # noqa: B009 - mypy compares the signatures
        and getattr(kind, "__dictoffset__", 0) != 0
        and not any(base.__dict__.get("__slots__") for base in kind.__mro__)
    )


def _is_closed_holder(value: Any, depth: int) -> bool:
    """Whether an object may open something later: no copying rule of its own, and nothing open yet."""
    return (
        depth < _DEEP
        and _is_ours_to_follow(type(value))
        and all(getattr(type(value), hook, None) is getattr(object, hook, None) for hook in _COPY_HOOKS)
        and not _is_open(value, {id(value)})
    )


def _is_ours_to_follow(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def _is_open(value: Any, seen: set[int]) -> bool:
    """Whether an object holds a file, a connection or the like: something built in that can be closed."""
    for item in list(vars(value).values()):
        members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]
        for member in islice(members, _LONG):
            if id(member) in seen:
                continue
            seen.add(id(member))
            if _is_open(member, seen) if _is_plain(type(member)) else _can_be_closed(member):
                return True
    return False


def _can_be_closed(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "close", None))


def blank(value: Any) -> Any:
    """Returns an object of the same class without attributes, whose ``__del__`` does nothing."""
    kind = type(value)
    if hasattr(kind, "__del__"):
        names = {"__del__": _leave_open, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        kind = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(names))
    return object.__new__(kind)


def _leave_open(copied: Any) -> None:
    """The ``__del__`` of a copy: what it holds is the original's."""
