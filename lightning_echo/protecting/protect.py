"""Copies that protect echoes from in-place edits.

A live example is used several times. As long as it may be used again, the augmentation, the collate function and the model get a
copy of it. Any of them may edit the copy in place: a flip writes to ``target["boxes"][:, [0, 2]]``, a collate function pops a
key, a training step reaches the worker's memory through a shared tensor. The next use still starts from the example as it was
read. It would not be enough to watch for edits: a tensor's version counter does not see numpy views, popped keys or edits made in
another process.

This runs once per use, so it must be fast. It is a table from exact type to copier, filled when a type is first met:

* Immutable values are returned as they are.
* Tensors, arrays, images and built-in containers are copied by the fastest call that keeps class and metadata.
* Plain objects (dataclasses, frozen ones too) get a new instance with copied attributes.
* All other objects are copied by ``copy.deepcopy``. Before that, its memo gets fast copies of the parts. What a class's
  ``__getstate__`` leaves out is shared with the copy.

An object that an example holds twice is copied once, so the copy also holds one object twice. Two tensors or arrays over the same
memory become two with memory of their own.
"""

from __future__ import annotations

import copy
import copyreg
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import types
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.objects import COPY_HOOKS, has_dict, image_class, is_from_pillow, is_plain, overrides

__all__ = ["IMMUTABLE", "copy_attributes", "copy_example"]

Memo = dict[int, Any]
"""Copies by the ``id`` of the original, in the format of ``copy.deepcopy``."""

_BEGUN = -1  # a key that is not an id: it leads to the objects whose parts are being copied
_Copier = Callable[[Any, Memo], Any]


def copy_example(value: Any, memo: Memo | None = None) -> Any:
    """Returns a copy of an example that shares nothing mutable with it.

    Args:
        value: Anything that a data set or a collate function returns. Tensors keep class, metadata (TVTensors), layout and
            pinning. The copy of a tensor of an autograd graph is a leaf.
        memo: Objects that are used in place of copies of certain parts. The copies that are made are added to it.

    Returns:
        The copy. For an immutable value, the value itself.

    Raises:
        TypeError: The example holds something that cannot be copied, such as a lock or an open file.

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


def _copy_tuple(value: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    return tuple([_copy(item, memo) for item in value])


def _copy_namedtuple(value: tuple[Any, ...], memo: Memo) -> tuple[Any, ...]:
    return tuple.__new__(type(value), [_copy(item, memo) for item in value])


def _copy_set(value: set[Any], memo: Memo) -> set[Any]:
    return {_copy(item, memo) for item in value}


def _copy_frozenset(value: frozenset[Any], memo: Memo) -> frozenset[Any]:
    return frozenset([_copy(item, memo) for item in value])


def _copy_bytearray(value: bytearray, memo: Memo) -> bytearray:
    return bytearray(value)


def _copy_plain_object(value: Any, memo: Memo) -> Any:
    copied = object.__new__(type(value))
    memo[id(value)] = copied
    copied.__dict__.update(copy_attributes(value, memo))  # not setattr: a frozen dataclass refuses it
    return copied


def _deepcopy(value: Any, memo: Memo) -> Any:
    """Copies an object by the rules of its class. Its parts are copied here before, and ``deepcopy`` finds them in the memo."""
    begun: set[int] = memo.setdefault(_BEGUN, set())
    if id(value) not in begun:  # else a part refers back to the whole, which deepcopy alone can do
        begun.add(id(value))
        for item in _parts(value):
            _copy(item, memo)
    try:
        copied = copy.deepcopy(value, memo)
    except Exception as error:
        raise TypeError(
            f"an example holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be copied "
            f"({error}); data echoing hands out copies, so that in-place edits never reach an echo: return "
            "tensors, arrays, images or plain containers from the data set, or give the class a __deepcopy__"
        ) from error
    if copied is not value and _drops_attributes(type(value)):
        for name, item in vars(value).items():
            copied.__dict__.setdefault(name, item)
    return copied


def _parts(value: Any) -> list[Any]:
    """Returns the objects of which a copy is made. They must be held by ``value``: a memo must not contain temporary objects."""
    parts: list[Any] = []
    if isinstance(value, dict):
        parts.extend(dict.values(value))
    elif isinstance(value, list):
        parts.extend(list.__iter__(value))
    elif isinstance(value, tuple):
        parts.extend(tuple.__iter__(value))
    if hasattr(value, "__dict__") and not _has_copy_hook(type(value)):
        parts.extend(vars(value).values())  # a hook may keep objects out that must not be copied: a lock, a file
    return parts


def copy_attributes(value: Any, memo: Memo) -> dict[str, Any]:
    """Returns a copy of an object's ``__dict__``, with copies of the values."""
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
    tuple: _copy_tuple,
    set: _copy_set,
    frozenset: _copy_frozenset,
    bytearray: _copy_bytearray,
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
        return _copy_namedtuple
    if is_plain(kind) and not _has_copy_hook(kind):
        return _copy_plain_object
    return _deepcopy


def _has_own_deepcopy(kind: type, base: type) -> bool:
    """Returns whether a subclass has its own way of copying. Torchvision's TVTensors have one, but it only clones."""
    own: Any = getattr(kind, "__deepcopy__", None)
    return own is not getattr(base, "__deepcopy__", None) and not own.__module__.startswith("torchvision.")


def _drops_attributes(kind: type) -> bool:
    """Returns whether a class has a ``__getstate__``, written for pickling, that may leave attributes out: a lock, a cache."""
    return has_dict(kind) and overrides(kind, object, ("__getstate__",)) and not hasattr(kind, "__deepcopy__")


def _has_copy_hook(kind: type) -> bool:
    return kind in copyreg.dispatch_table or overrides(kind, object, (*COPY_HOOKS, "__getstate__", "__setstate__"))
