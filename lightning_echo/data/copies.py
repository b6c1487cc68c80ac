"""Copies of the user's objects: shallow ones without transforms, temporary ones to read from, one of an example for each use."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import random
import re
import sys
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_echo.data.objects import (
    COPY_HOOKS,
    LOADING_TYPES,
    attributes_of,
    blank,
    has_dict,
    image_class,
    is_container,
    is_from_pillow,
    is_image,
    is_in_main_memory,
    is_made_of_attributes,
    is_plain,
    is_safe_to_copy,
    overrides,
    slots_of,
)
from lightning_echo.data.randomness import GENERATORS, TRANSFORMS

# ---------------------------------------------------------------------- memory

_UNITS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}


def nbytes(value: Any, *, is_packed: bool = False, seen: set[int] | None = None) -> int:
    """Returns an estimate of the memory in bytes that an example takes while it is live.

    For tensors and arrays their own elements count, not the storage that they view. An object that is held twice counts once:
    ``seen`` has the ids of those that were counted. With ``is_packed``, the pixels of images count without padding, as in a file;
    in memory, Pillow pads some.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        members = value.flat if value.dtype == object else ()
        return int(value.nbytes) + sum(nbytes(item, is_packed=is_packed, seen=seen) for item in members)
    if is_image(value):
        pixel = 1 if value.mode in ("1", "L", "P") else 2 if value.mode.startswith("I;16") else 4
        if is_packed and value.mode in ("RGB", "YCbCr", "LAB", "HSV"):
            pixel = 3  # in memory, Pillow pads these to four
        return int(value.width * value.height * pixel)
    own = sys.getsizeof(value, 64)
    if isinstance(value, IMMUTABLE):
        return own
    if isinstance(value, dict):
        own += sum(nbytes(part, is_packed=is_packed, seen=seen) for item in value.items() for part in item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        own += sum(nbytes(item, is_packed=is_packed, seen=seen) for item in value)
    if hasattr(value, "__dict__"):
        own += sum(nbytes(item, is_packed=is_packed, seen=seen) for item in vars(value).values())
    elif dataclasses.is_dataclass(value):  # with slots
        names = [field.name for field in dataclasses.fields(value)]
        own += sum(nbytes(getattr(value, name, None), is_packed=is_packed, seen=seen) for name in names)
    return own


def bytes_in_words(number: float) -> str:
    """Returns a human-readable number of bytes.

    >>> bytes_in_words(1000), bytes_in_words(3 * 2**19), bytes_in_words(2**33), bytes_in_words(1016 * 2**10)
    ('1,000 bytes', '1.5 MiB', '8 GiB', '1,016 KiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            size = number / 2**power
            return f"{size:,.0f} {unit}" if size >= 100 else f"{size:.3g} {unit}"
    return f"{number:,.0f} bytes"


def bytes_from_words(text: str) -> int | None:
    """Returns the bytes of a number with a unit; None for any other text.

    >>> bytes_from_words("8GiB") == 2**33, bytes_from_words("1.5 kB"), bytes_from_words("8G"), bytes_from_words("8 apples")
    (True, 1500, 8000000000, None)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*", text)
    if match is None or (unit := match[2].lower()) not in _UNITS:
        return None
    return int(float(match[1]) * _UNITS[unit])


# ---------------------------------------------------------------------- copies
# A data set belongs to its user and is never modified. `shallow_copy` is for taking transforms out. `ThrowAwayCopies` are deeper:
# for a proof that reads examples before the training, and for an analysis that trains. Reading leaves traces:
#
# * A data set, or an object that it holds, may open a file at its first read. (No worker inherits that of a proof, which runs in
#   a process that ends, see `elsewhere.py`.)
# * Examples that a data set keeps in memory may be edited in place when they are read.
# * Counters and random generators change.
#
# So plain objects (also with slots), containers, tensors, arrays, images and random generators inside are copied, too. Transforms
# are copied deeply. Methods and partial functions of these objects become those of the copies.
#
# These objects are shared with the original:
#
# * large objects, after the copies have reached the limit on bytes or on members of containers; and objects that are too deep;
# * open files, connections and similar objects, and objects that hold one; but data sets, samplers and loaders that hold one are
#   copied;
# * memory maps, memory of devices, and objects of the standard library, because a copied lock, event or thread would wait
#   forever;
# * objects with their own copying rule (pandas, arrow), because that rule may read all their data;
# * objects that functions refer to: globals, attributes of classes, variables of enclosing functions.
#
# A copy never runs its class's ``__del__``, because that would close what the original still uses.

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

    The limits hold for all copies together: members of containers, and bytes of tensors, arrays and images. ``too_large`` names
    class and attribute of objects that are shared because they are too large.
    """

    def __init__(self, most_members: int, most_bytes: int) -> None:
        self.too_large: list[str] = []
        self._members_left, self._bytes_left = most_members, most_bytes
        self._memo: dict[int, Any] = {}  # in the format of copy.deepcopy; a copy is the copy of itself
        self._alive: list[Any] = []  # the objects whose ids are in the memo: an id must not be used again
        self._where = ""

    def of(self, value: Any, sharing: Iterable[Any] = ()) -> Any:
        """Returns the copy of an object, whatever it holds, or the object itself if it cannot be copied.

        The parts in ``sharing`` are not copied.
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
            if name in TRANSFORMS and (depth == 0 or isinstance(value, Dataset)):
                memo = dict(self._memo)
                try:
                    item, self._memo = copy.deepcopy(item, memo), memo
                except Exception:  # it holds a lock or something similar, and is copied as far as possible
                    item = self._copy(item, 1)
            else:
                item = self._copy(item, depth)
            if name in in_slots:
                object.__setattr__(copied, name, item)
            else:
                copied.__dict__[name] = item
        self._where = outside
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
    return ThrowAwayCopies(_MOST_MEMBERS, _MOST_BYTES).of(dataset)


# ---------------------------------------------------------------------- protect
# As long as a live example may be used again, the augmentation, the collate function and the model get a copy of it. Any of them
# may edit the copy in place: a flip writes to ``target["boxes"][:, [0, 2]]``, a collate function pops a key, a training step
# reaches the worker's memory through a shared tensor. The copies are made by `LiveExamples` (``pipeline/worker.py``, ``_hold``
# and ``_reuse``), by the loaders of whole batches (``pipeline/batches.py``), and for streams in ``pipeline/streams.py``. It would
# not be enough to watch for edits: a tensor's version counter does not see numpy views, popped keys or edits made in another
# process.
#
# This runs once per use, so it must be fast. It is a table from exact type to copier, filled when a type is first met:
#
# * Immutable values are returned as they are.
# * Tensors, arrays, images and built-in containers are copied by the fastest call that keeps class and metadata.
# * Plain objects (dataclasses, frozen ones too) get a new instance with copied attributes.
# * All other objects are copied by ``copy.deepcopy``. Before that, its memo gets fast copies of the parts. What a class's
#   ``__getstate__`` leaves out is shared with the copy.
#
# An object that an example holds twice is copied once, so the copy also holds one object twice. Two tensors or arrays over the
# same memory become two with memory of their own.

Memo = dict[int, Any]
"""Copies by the ``id`` of the original, in the format of ``copy.deepcopy``."""

_BEGUN = -1  # a key that is not an id: it leads to the objects whose parts are being copied
_Copier = Callable[[Any, Memo], Any]


def copy_example(value: Any, memo: Memo | None = None) -> Any:
    """Returns a copy of an example that shares nothing mutable with it.

    Tensors keep class, metadata (TVTensors), layout and pinning. The copy of a tensor of an autograd graph is a leaf. Raises
    ``TypeError`` for an example that holds something that cannot be copied, such as a lock or an open file. ``memo`` has objects
    that are used in place of copies of certain parts. The copies that are made are added to it.

    >>> example = {"image": torch.zeros(2), "boxes": [[0, 1]]}
    >>> handed_out = copy_example(example)
    >>> handed_out["image"].add_(1), handed_out["boxes"][0].append(7), handed_out.pop("boxes")
    (tensor([1., 1.]), None, [[0, 1, 7]])
    >>> example
    {'image': tensor([0., 0.]), 'boxes': [[0, 1]]}
    """
    return _copy(value, {} if memo is None else memo)


def _copy(value: Any, memo: Memo) -> Any:
    kind = type(value)
    copier = _COPIERS.get(kind)
    if copier is None:
        copier = _COPIERS[kind] = _copier_for(kind)
    if copier is _unchanged:
        return value
    known = memo.get(id(value))
    if known is not None:
        return known
    copied = copier(value, memo)
    memo[id(value)] = copied
    return copied


# --- copiers -----------------------------------------------------------------------------------------------


def _unchanged(value: Any, memo: Memo) -> Any:
    return value


def _copy_tensor(value: torch.Tensor, memo: Memo) -> torch.Tensor:
    if torch.cuda.is_initialized() and value.is_pinned():  # type: ignore[no-untyped-call]
        # A delivered batch was pinned for a fast transfer, and its echo must be transferred as fast. In torch 2.4, is_pinned
        # alone would open a CUDA context in every worker.
        copied = torch.empty_like(value, pin_memory=True).copy_(value.detach())
    else:
        copied = value.detach().clone() if value.requires_grad else value.clone()
    if value.requires_grad:
        copied.requires_grad_()
    if value.__dict__:
        copied.__dict__.update(copy_attributes(value, memo))
    return copied


def _copy_tensor_subclass(value: torch.Tensor, memo: Memo) -> torch.Tensor:
    # Beneath __torch_function__, because a subclass may unwrap its results or lose metadata there, and
    # because that costs more than the copy itself.
    with torch._C.DisableTorchFunctionSubclass():
        copied = _copy_tensor(value, memo)
        if type(copied) is not type(value):
            attributes = copied.__dict__
            copied = copied.as_subclass(type(value))
            copied.__dict__.update(attributes)
    return copied


def _copy_array(value: np.ndarray[Any, Any], memo: Memo) -> Any:
    if value.dtype.hasobject:
        return _deepcopy(value, memo)
    copied = value.copy(order="K")
    if type(value) is not np.ndarray and hasattr(copied, "__dict__"):
        copied.__dict__.update(copy_attributes(copied, memo))  # attributes that a subclass has passed on are still shared
    return copied


def _copy_image(value: Any, memo: Memo) -> Any:
    copied = value.copy()
    if value.format is not None:
        copied.format = value.format  # Image.copy drops it, and some loaders need it
    return copied


def _copy_list(value: list[Any], memo: Memo) -> list[Any]:
    copied: list[Any] = []
    memo[id(value)] = copied  # before the members, which may refer back to it
    copied.extend([_copy(item, memo) for item in value])
    return copied


def _copy_dict(value: dict[Any, Any], memo: Memo) -> dict[Any, Any]:
    copied: dict[Any, Any] = {}
    memo[id(value)] = copied
    for key, item in value.items():
        copied[key] = _copy(item, memo)
    return copied


def _copy_plain_object(value: Any, memo: Memo) -> Any:
    copied = object.__new__(type(value))
    memo[id(value)] = copied
    copied.__dict__.update(copy_attributes(value, memo))  # not setattr: a frozen dataclass refuses it
    return copied


def _deepcopy(value: Any, memo: Memo) -> Any:
    """Copies an object by the rules of its class. ``deepcopy`` finds the copies of its parts in the memo."""
    kind = type(value)
    begun: set[int] = memo.setdefault(_BEGUN, set())
    if id(value) not in begun:  # else a part refers back to the whole, which deepcopy alone can do
        begun.add(id(value))
        parts: list[Any] = []  # only what `value` holds: a memo must not contain temporary objects
        if isinstance(value, dict):
            parts += dict.values(value)
        elif isinstance(value, list):
            parts += list.__iter__(value)
        elif isinstance(value, tuple):
            parts += tuple.__iter__(value)
        if hasattr(value, "__dict__") and not _has_copy_hook(kind):
            parts += vars(value).values()  # a hook may keep objects out that must not be copied: a lock, a file
        for item in parts:
            _copy(item, memo)
    try:
        copied = copy.deepcopy(value, memo)
    except Exception as error:
        raise TypeError(
            f"an example holds a {kind.__module__}.{kind.__qualname__}, which cannot be copied "
            f"({error}); data echoing hands out copies, so that in-place edits never reach an echo: return "
            "tensors, arrays, images or plain containers from the data set, or give the class a __deepcopy__"
        ) from error
    if copied is value or not has_dict(kind) or hasattr(kind, "__deepcopy__"):
        return copied
    if overrides(kind, object, ("__getstate__",)):  # it is written for pickling, and may leave attributes out: a lock, a cache
        for name, item in vars(value).items():
            copied.__dict__.setdefault(name, item)
    return copied


def copy_attributes(value: Any, memo: Memo) -> dict[str, Any]:
    return {name: _copy(item, memo) for name, item in vars(value).items()}


# --- which copier for which type ---------------------------------------------------------------------------

IMMUTABLE: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, type(Ellipsis), type(NotImplemented)),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum, re.Pattern),
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype),
)
# Subclasses of these carry attributes of their own only if they have a __dict__ (a str subclass may).
_ATTRIBUTE_FREE = (enum.Enum, type, types.FunctionType, types.ModuleType, datetime.tzinfo, pathlib.PurePath)

_COPIERS: dict[type, _Copier] = {
    torch.Tensor: _copy_tensor,
    np.ndarray: _copy_array,
    list: _copy_list,
    dict: _copy_dict,
    tuple: lambda value, memo: tuple([_copy(item, memo) for item in value]),
    set: lambda value, memo: {_copy(item, memo) for item in value},
    frozenset: lambda value, memo: frozenset([_copy(item, memo) for item in value]),
    bytearray: lambda value, memo: bytearray(value),
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, torch.Size), _unchanged),
}


def _copier_for(kind: type) -> _Copier:
    if issubclass(kind, IMMUTABLE) and (issubclass(kind, _ATTRIBUTE_FREE) or not has_dict(kind)):
        return _unchanged
    if issubclass(kind, np.generic) and not issubclass(kind, np.void):  # a void is a record: it can be edited
        return _unchanged
    if issubclass(kind, torch.Tensor):
        return _deepcopy if _has_own_deepcopy(kind, torch.Tensor) else _copy_tensor_subclass
    if issubclass(kind, np.ndarray) and not _has_own_deepcopy(kind, np.ndarray):
        return _copy_array
    image = image_class()
    if image is not None and issubclass(kind, image) and is_from_pillow(kind):
        return _copy_image
    if issubclass(kind, tuple) and hasattr(kind, "_fields") and not has_dict(kind):
        return lambda value, memo: tuple.__new__(kind, [_copy(item, memo) for item in value])
    if is_plain(kind) and not _has_copy_hook(kind):
        return _copy_plain_object
    return _deepcopy


def _has_own_deepcopy(kind: type, base: type) -> bool:
    """Returns whether a subclass has its own way of copying. Torchvision's TVTensors have one, but it only clones."""
    own: Any = getattr(kind, "__deepcopy__", None)
    return own is not getattr(base, "__deepcopy__", None) and not own.__module__.startswith("torchvision.")


def _has_copy_hook(kind: type) -> bool:
    return kind in copyreg.dispatch_table or overrides(kind, object, (*COPY_HOOKS, "__getstate__", "__setstate__"))
