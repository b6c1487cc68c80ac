"""What an object is made of, what of it can be copied part by part, and whether it saves its own state.

Some can only be shared: what is open (a file, a connection), what holds it, what is not in ordinary memory, and what has a
copying rule of its own.
"""

from __future__ import annotations

import inspect
import mmap
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset

__all__ = [
    "FOLLOWED",
    "attributes_of",
    "blank",
    "image_class",
    "is_closed_holder",
    "is_concat",
    "is_container",
    "is_made_of_attributes",
    "is_memory",
    "is_plain",
    "is_standard",
    "is_stateful",
    "is_subset",
    "routes_as",
    "slots_of",
]

FOLLOWED = (Dataset, Sampler, DataLoader)  # copied part by part, whatever they hold

_LONG = 256  # containers with more members hold samples, nothing that is open
_CONTAINERS = (list, tuple, set, dict, OrderedDict, defaultdict, Counter, deque)
_SLOTS: dict[type, frozenset[str]] = {}
_COPY_HOOKS = ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")


def image_class() -> Any:
    """``PIL.Image.Image`` where something has imported it: without, no example can hold one."""
    module = sys.modules.get("PIL.Image")
    return None if module is None else module.Image


def is_plain(kind: type) -> bool:
    """Whether an instance is its ``__dict__`` and nothing else."""
    return (
        getattr(kind, "__new__") is object.__new__  # noqa: B009 - mypy compares the signatures
        and getattr(kind, "__dictoffset__", 0) != 0
        and not any(base.__dict__.get("__slots__") for base in kind.__mro__)
    )


def is_made_of_attributes(kind: type) -> bool:
    """Whether an instance is what is in its ``__dict__``, in slots, or in both, and nothing else."""
    if kind is types.SimpleNamespace:
        return True
    has_some = getattr(kind, "__dictoffset__", 0) != 0 or bool(slots_of(kind))
    return getattr(kind, "__new__") is object.__new__ and has_some  # noqa: B009 - mypy compares the signatures


def attributes_of(value: Any) -> dict[str, Any]:
    """Those in its ``__dict__`` and those in slots."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def slots_of(kind: type) -> frozenset[str]:
    """Names of the slots of a class and of those that it is derived from."""
    found = _SLOTS.get(kind)
    if found is None:
        members = (item for base in kind.__mro__ if "__slots__" in vars(base) for item in vars(base).items())
        found = frozenset(name for name, member in members if isinstance(member, types.MemberDescriptorType))
        _SLOTS[kind] = found
    return found


def blank(value: Any) -> Any:
    """An instance of its class without attributes, which does not run ``__del__``: what it will hold is the original's."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return types.SimpleNamespace()
    if hasattr(kind, "__del__"):
        names = {"__del__": _leave_open, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        kind = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(names))
    return object.__new__(kind)


def _leave_open(copied: Any) -> None:
    """The ``__del__`` of a copy."""


def is_container(kind: type) -> bool:
    """Whether an instance is its members and perhaps attributes: a list or the like, or of a subclass that adds only those."""
    if kind in _CONTAINERS or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return True
    base = next((base for base in (list, dict) if issubclass(kind, base)), None)
    names = ("__iter__", "__setitem__", *_COPY_HOOKS)
    return base is not None and all(getattr(kind, name, None) is getattr(base, name, None) for name in names)


def is_memory(value: Any) -> bool:
    """Whether it is a tensor, array or image in ordinary memory: on no device, and in no file."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout is torch.strided and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, np.ndarray):
        return not _is_mapped(value)
    image = image_class()
    if image is not None and isinstance(value, image):
        return type(value).__module__.startswith("PIL.") and getattr(value, "fp", None) is None
    return type(value) in (bytearray, array)


def _is_mapped(value: Any) -> bool:
    while value is not None:
        if isinstance(value, (np.memmap, mmap.mmap)):
            return True
        value = value.obj if isinstance(value, memoryview) else getattr(value, "base", None)
    return False


def is_closed_holder(value: Any) -> bool:
    """Whether an object may open something later: no copying rule of its own, and nothing open yet."""
    kind = type(value)
    if is_standard(kind):
        return False
    if kind is not types.SimpleNamespace and any(
        getattr(kind, hook, None) is not getattr(object, hook, None) for hook in _COPY_HOOKS
    ):
        return False
    return not _is_open(value, {id(value)})


def is_standard(kind: type) -> bool:
    """Whether a class is of the standard library, and more than a name for what users put in."""
    return kind is not types.SimpleNamespace and kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _is_open(value: Any, seen: set[int]) -> bool:
    """Whether an object holds a file, a connection or the like: something built in that can be closed."""
    for item in attributes_of(value).values():
        members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]
        for member in islice(members, _LONG):
            if id(member) in seen or isinstance(member, FOLLOWED):  # those are copied whatever they hold
                continue
            seen.add(id(member))
            if _is_open(member, seen) if is_made_of_attributes(type(member)) else _can_be_closed(member):
                return True
    return False


def _can_be_closed(value: Any) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "close", None))


def is_stateful(source: Any) -> bool:
    """Whether a loader or stream saves its own state: has ``state_dict()`` and ``load_state_dict(state)``."""
    return all(_takes(getattr(source, name, None), count) for name, count in (("state_dict", 0), ("load_state_dict", 1)))


def _takes(method: Any, count: int) -> bool:
    """Whether something can be called with so many arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * count)
    except (TypeError, ValueError):  # ValueError: built in, without a signature
        return False
    return True


def is_subset(dataset: Any) -> TypeGuard[Subset[Any]]:
    """Whether ``dataset`` does nothing but choose indices of the data set inside."""
    return routes_as(dataset, Subset, ("__getitem__", "__getitems__"))


def is_concat(dataset: Any) -> TypeGuard[ConcatDataset[Any]]:
    """Whether ``dataset`` does nothing but string other data sets together."""
    return routes_as(dataset, ConcatDataset, ("__getitem__", "__getitems__"))


def routes_as(dataset: Any, base: type, methods: tuple[str, ...]) -> bool:
    """Whether ``dataset`` is a ``base`` that overrides none of the methods."""
    return isinstance(dataset, base) and all(
        getattr(type(dataset), method, None) is getattr(base, method, None) for method in methods
    )
