"""What an object is made of: whether it can be copied part by part, what it holds, and what its class overrides.

These cannot be copied part by part: open files and connections, objects that hold one, memory of devices and of mapped files,
and objects whose class has a copying rule of its own.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import mmap
import struct
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import islice
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset

LOADING_TYPES = (Dataset, Sampler, DataLoader)  # these are copied part by part, whatever they hold
COPY_HOOKS = ("__deepcopy__", "__reduce__", "__reduce_ex__")  # with these, a class defines how its objects are copied

_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_POINTER_BYTES = struct.calcsize("P")
_LONG = 256  # containers with more members hold samples, and no open files
_CONTAINERS = (list, tuple, set, dict, OrderedDict, defaultdict, Counter, deque)
_SLOTS: dict[type, frozenset[str]] = {}


# --- options -----------------------------------------------------------------------------------------------

_C = TypeVar("_C", bound=type)


def names_options(cls: _C) -> _C:
    """Class decorator: an unknown keyword is refused with the options that there are, and the one that may be meant.

    Not for a dataclass: jsonargparse reads the source of its ``__init__``.

    >>> @names_options
    ... class Heater:
    ...     def __init__(self, degrees, hours=1): ...
    >>> Heater(20, hour=2)
    Traceback (most recent call last):
    TypeError: Heater has no option hour; did you mean hours? It has degrees, hours
    """
    init: Any = cls.__init__  # type: ignore[misc]
    known = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        if unknown := [name for name in options if name not in known]:
            close = difflib.get_close_matches(unknown[0], known, 1)
            meant = f"; did you mean {close[0]}?" if close else "."
            raise TypeError(f"{cls.__name__} has no option {', '.join(unknown)}{meant} It has {', '.join(known)}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def in_words(value: Any) -> str:
    """Returns a value that is refused, for a message. A class in the place of an instance is the usual mistake.

    >>> in_words(4), in_words(dict), in_words(in_words)
    ('4', 'the class dict: pass an instance, dict(...)', 'the function in_words')
    """
    if isinstance(value, types.FunctionType):
        return f"the function {value.__name__}"
    return f"the class {value.__name__}: pass an instance, {value.__name__}(...)" if isinstance(value, type) else repr(value)


# --- classes -----------------------------------------------------------------------------------------------


def overrides(kind: type, base: type, names: tuple[str, ...]) -> bool:
    """Returns whether a class has one of these attributes, and it is not the one of ``base``."""
    return any(getattr(kind, name, None) is not getattr(base, name, None) for name in names)


def has_dict(kind: type) -> bool:
    return getattr(kind, "__dictoffset__", 0) != 0


def is_plain(kind: type) -> bool:
    """Returns whether an instance consists of its ``__dict__`` and nothing else."""
    has_slots = any(base.__dict__.get("__slots__") for base in kind.__mro__)
    return _is_made_by_object(kind) and has_dict(kind) and not has_slots


def is_made_of_attributes(kind: type) -> bool:
    """Returns whether an instance consists of its ``__dict__`` and its slots, and nothing else."""
    return kind is types.SimpleNamespace or (_is_made_by_object(kind) and (has_dict(kind) or bool(slots_of(kind))))


def _is_made_by_object(kind: type) -> bool:
    """Returns whether ``object`` makes the instances, and these have no memory of their own besides ``__dict__`` and slots.

    From Python 3.12 on ``object`` also makes the instances of classes in C, such as open files. Memory that is not accounted for
    shows that a class is one of them. Python refuses to pickle it for the same reason.
    """
    return getattr(kind, "__new__") is object.__new__ and not has_hidden_memory(kind)  # noqa: B009 - mypy compares the signatures


def has_hidden_memory(kind: type) -> bool:
    # A negative offset: the pointer lies before the instance.
    pointers = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    pointers += sum(len(_slots_in(base)) for base in kind.__mro__)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + _POINTER_BYTES * pointers


def slots_of(kind: type) -> frozenset[str]:
    found = _SLOTS.get(kind)
    if found is None:
        found = _SLOTS[kind] = frozenset(name for base in kind.__mro__ for name in _slots_in(base))
    return found


def _slots_in(base: type) -> list[str]:
    if "__slots__" not in vars(base):
        return []
    return [name for name, member in vars(base).items() if isinstance(member, types.MemberDescriptorType)]


def is_container(kind: type) -> bool:
    """Returns whether an instance consists of its members and perhaps attributes, as a list or a subclass without own rules."""
    if kind in _CONTAINERS or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return True
    base = next((base for base in (list, dict) if issubclass(kind, base)), None)
    return base is not None and not overrides(kind, base, ("__iter__", "__setitem__", "__copy__", *COPY_HOOKS))


def is_standard(kind: type) -> bool:
    """Returns whether a class is of the standard library, and does more than hold what users put into it."""
    return kind is not types.SimpleNamespace and kind.__module__.partition(".")[0] in sys.stdlib_module_names


# --- objects -----------------------------------------------------------------------------------------------


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes in the ``__dict__`` of an object and in its slots. It runs no code of the object's class."""
    slots = {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def blank(value: Any) -> Any:
    """Returns an object of the same class without attributes. It never runs ``__del__``: it will hold what is not its own."""
    kind = type(value)
    if kind is types.SimpleNamespace:
        return types.SimpleNamespace()
    if hasattr(kind, "__del__"):
        names = {"__del__": lambda copied: None, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        kind = types.new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(names))
    return object.__new__(kind)


def image_class() -> Any:
    """Returns ``PIL.Image.Image``; None if nothing has imported it, since then no example can hold an image."""
    module = sys.modules.get("PIL.Image")
    return None if module is None else module.Image


def is_image(value: Any) -> bool:
    image = image_class()
    return image is not None and isinstance(value, image)


def is_from_pillow(kind: type) -> bool:
    return kind.__module__.startswith("PIL.")


def is_in_main_memory(value: Any) -> bool:
    """Returns whether an object is a tensor, an array or an image in main memory, and not on a device or in a file."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout is torch.strided and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, np.ndarray):
        return not is_mapped(value)
    if is_image(value):
        return is_from_pillow(type(value)) and getattr(value, "fp", None) is None
    return type(value) in (bytearray, array)


def is_mapped(value: Any) -> bool:
    """Returns whether an array or a buffer lies in a mapped file."""
    while value is not None:
        if isinstance(value, (np.memmap, mmap.mmap)):
            return True
        value = value.obj if isinstance(value, memoryview) else getattr(value, "base", None)
    return False


def is_safe_to_copy(value: Any) -> bool:
    """Returns whether a copy with the same attributes is safe: its class has no own copying rule, and it holds no open file."""
    kind = type(value)
    if is_standard(kind) or (kind is not types.SimpleNamespace and overrides(kind, object, ("__copy__", *COPY_HOOKS))):
        return False
    return not _is_open(value, {id(value)})


def _is_open(value: Any, seen: set[int]) -> bool:
    """Returns whether an object holds an open file, a connection or another built-in object that can be closed."""
    for item in attributes_of(value).values():
        members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]
        for member in islice(members, _LONG):
            if id(member) in seen or isinstance(member, LOADING_TYPES):
                continue
            seen.add(id(member))
            if is_made_of_attributes(type(member)):
                is_open = _is_open(member, seen)
            else:
                is_open = not isinstance(member, type) and callable(getattr(member, "close", None))
            if is_open:
                return True
    return False


# --- data sets and loaders ---------------------------------------------------------------------------------


def is_stateful(source: Any) -> bool:
    """Returns whether a loader or stream saves its own state, by ``state_dict()`` and ``load_state_dict(state)``.

    The loaders of accelerate have both methods, whatever is inside. They fail, or give a state from which the order of the pass
    is drawn again.
    """
    if getattr(source, "base_dataloader", None) is not None:
        return False
    for name, arguments in (("state_dict", ()), ("load_state_dict", (None,))):
        method = getattr(source, name, None)
        if not callable(method):
            return False
        try:
            inspect.signature(method).bind(*arguments)
        except (TypeError, ValueError):  # ValueError: built in, without a signature
            return False
    return True


def is_of_lightning(function: Any) -> bool:
    """Returns whether a ``worker_init_fn`` is Lightning's own, which seeds the workers of one rank."""
    module = getattr(getattr(function, "func", None), "__module__", None) or ""
    return isinstance(function, functools.partial) and module.partition(".")[0] in _LIGHTNING


def is_subset(dataset: Any) -> TypeGuard[Subset[Any]]:
    """Returns whether ``dataset`` only chooses indices of the data set inside."""
    return routes_as(dataset, Subset, ("__getitem__", "__getitems__"))


def is_concat(dataset: Any) -> TypeGuard[ConcatDataset[Any]]:
    """Returns whether ``dataset`` only puts other data sets one after the other."""
    return routes_as(dataset, ConcatDataset, ("__getitem__", "__getitems__"))


def routes_as(dataset: Any, base: type, methods: tuple[str, ...]) -> bool:
    """Returns whether ``dataset`` is a ``base`` that overrides none of the methods."""
    return isinstance(dataset, base) and not overrides(type(dataset), base, methods)
