"""Where two examples differ, in words. This is stricter than ``==``: types and metadata count. But NaN equals NaN.

In some classes, ``==`` compares by identity (PyTorch Geometric's ``Data``), or raises an error because tensors give no single
answer. Objects of such classes are compared by their contents. Mappings are compared by their items. Weak references are not
followed, because their objects are compared at the place that holds them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_echo.protecting.objects import attributes_of, is_from_pillow, is_image, is_plain, slots_of

__all__ = ["difference"]

_Pairs = set[tuple[int, int]]
# The keys under which MONAI notes which transform it has applied. The "id" is the object's address, which differs in each copy.
_TRACE = {"class", "id", "tracing", "do_transforms"}


def difference(left: Any, right: Any, path: str = "", seen: _Pairs | None = None) -> str | None:
    """Returns the first difference between two examples, in words; None if there is none.

    Args:
        left: Tensors, arrays, images, containers and objects of these, nested.
        right: The other example.
        path: The path from the whole examples to both parts, for the text.
        seen: Objects that are being compared already, by their ids, since a part may refer back to the whole.

    >>> difference({"image": [1.0, float("nan")]}, {"image": [1.0, float("nan")]})
    >>> difference({"image": [1.0, 2.0]}, {"image": [1.0, 3.0]})
    "at ['image'][1]: 2.0 and 3.0"
    """
    if left is right or isinstance(left, weakref.ReferenceType):
        return None
    seen = set() if seen is None else seen
    if type(left) is not type(right) and not (_is_pillows_own(left) and _is_pillows_own(right)):
        return _at(path, f"a {_name(left)} and a {_name(right)}")
    if isinstance(left, torch.Tensor):
        return _between_tensors(left, right, path, seen)
    if isinstance(left, np.ndarray):
        return _between_arrays(left, right, path, seen)
    if isinstance(left, Mapping):
        return _between_mappings(left, right, path, seen)
    if isinstance(left, (list, tuple)):
        return _between_sequences(left, right, path, seen)
    if is_image(left):
        return _between_images(left, right, path)
    if hasattr(type(left), "__dataclass_fields__") or not _has_own_equality(type(left)):
        return _between_objects(left, right, path, seen)
    return _between_values(left, right, path, seen)


def _at(path: str, text: str) -> str:
    return f"at {path}: {text}" if path else text


def _name(value: Any) -> str:
    return type(value).__name__


def _between_tensors(left: torch.Tensor, right: torch.Tensor, path: str, seen: _Pairs) -> str | None:
    for what in ("shape", "dtype", "device", "layout"):
        if getattr(left, what) != getattr(right, what):
            return _at(path, f"tensors of {what} {getattr(left, what)} and {getattr(right, what)}")
    metadata = difference(left.__dict__, right.__dict__, f"{path}.__dict__", seen)
    if metadata is not None:
        return metadata
    left, right = _as_plain(left), _as_plain(right)
    if torch.equal(left, right):
        return None
    unequal = (left != right) & ~((left != left) & (right != right))
    count = int(unequal.sum())
    return _at(path, f"tensors that differ in {count} of {left.numel()} elements") if count else None


def _as_plain(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if value.is_quantized:
        return value.dequantize()
    if value.layout is not torch.strided:
        return value.to_dense()
    return value.as_subclass(torch.Tensor)


def _between_arrays(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], path: str, seen: _Pairs) -> str | None:
    for what in ("shape", "dtype"):
        if getattr(left, what) != getattr(right, what):
            return _at(path, f"arrays of {what} {getattr(left, what)} and {getattr(right, what)}")
    if left.dtype.hasobject or left.dtype.names:
        return _between_sequences(left.ravel().tolist(), right.ravel().tolist(), path, seen)
    unequal = np.asarray(left != right)
    if left.dtype.kind in "fcmM":
        unequal = unequal & ~(np.isnat(left) & np.isnat(right) if left.dtype.kind in "mM" else np.isnan(left) & np.isnan(right))
    count = int(unequal.sum())
    return _at(path, f"arrays that differ in {count} of {left.size} elements") if count else None


def _between_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str, seen: _Pairs) -> str | None:
    keys = set(left)  # not keys(): a class may return something that is not a set (PyTorch Geometric's storages)
    if keys != set(right):
        return _at(path, f"keys {list(left)} and {list(right)}")
    left_out = {"id"} if keys >= _TRACE else set()
    return _first(difference(left[key], right[key], f"{path}[{key!r}]", seen) for key in left if key not in left_out)


def _between_sequences(left: Any, right: Any, path: str, seen: _Pairs) -> str | None:
    if len(left) != len(right):
        return _at(path, f"{_name(left)}s of {len(left)} and {len(right)} elements")
    return _first(difference(*pair, f"{path}[{place}]", seen) for place, pair in enumerate(zip(left, right, strict=True)))


def _is_pillows_own(value: Any) -> bool:
    """Returns whether a value is an image of one of Pillow's classes, which every transform treats alike.

    The class of an opened image depends on its format, and the class of its copy is ``Image``.
    """
    return is_image(value) and is_from_pillow(type(value))


def _between_images(left: Any, right: Any, path: str) -> str | None:
    for what in ("mode", "size"):
        if getattr(left, what) != getattr(right, what):
            return _at(path, f"images of {what} {getattr(left, what)} and {getattr(right, what)}")
    if left.getpalette() != right.getpalette():
        return _at(path, "images with different palettes")
    return None if left.tobytes() == right.tobytes() else _at(path, "images with different pixels")


def _between_values(left: Any, right: Any, path: str, seen: _Pairs) -> str | None:
    """Compares objects of a class that has its own ``==``."""
    try:
        if bool(left == right) or bool(left != left and right != right):
            return None
    except Exception as error:  # the value's own comparison
        if _holds_attributes_only(left):
            return _between_objects(left, right, path, seen)
        return _at(path, f"two objects of {_name(left)}, which cannot be compared ({error})")
    if _holds_attributes_only(left) and _differs_from_its_copy(left):
        return _between_objects(left, right, path, seen)
    return _at(path, f"{left!r} and {right!r}")


def _between_objects(left: Any, right: Any, path: str, seen: _Pairs) -> str | None:
    """Compares objects by their contents, if their class compares only by identity."""
    if (id(left), id(right)) in seen:
        return None
    seen.add((id(left), id(right)))
    held, others = attributes_of(left), attributes_of(right)
    names = getattr(type(left), "__dataclass_fields__", None) or held
    if not names and not hasattr(left, "__dict__") and not slots_of(type(left)):
        return _at(path, f"two objects of {_name(left)}, which cannot be compared")
    if held.keys() != others.keys():
        return _at(path, f"objects of {_name(left)} with different attributes")
    missing = object()
    pairs = ((name, _attribute(left, name, missing), _attribute(right, name, missing)) for name in names)
    return _first(difference(one, other, f"{path}.{name}", seen) for name, one, other in pairs)


def _attribute(value: Any, name: str, missing: object) -> Any:
    """Returns an attribute from the instance itself if it is there, since its class may return something else for it."""
    attributes = getattr(value, "__dict__", {})
    return attributes[name] if name in attributes else getattr(value, name, missing)


def _holds_attributes_only(value: Any) -> bool:
    """Returns whether an object has attributes only in its ``__dict__``."""
    return is_plain(type(value)) and bool(vars(value))


def _differs_from_its_copy(value: Any) -> bool:
    """Returns whether ``==`` says nothing about the contents of objects of this class."""
    try:
        return bool(value != copy.copy(value))
    except Exception:  # the class's own code: it cannot be copied, or compared
        return False


def _has_own_equality(kind: type) -> bool:
    return any("__eq__" in base.__dict__ for base in kind.__mro__[:-1])


def _first(differences: Any) -> str | None:
    return next((found for found in differences if found is not None), None)
