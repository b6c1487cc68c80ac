"""Where two examples differ, and where the memory of two examples or batches is the same."""

from __future__ import annotations

import copy
import copyreg
import struct
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import torch

from lightning_echo.data.copies import IMMUTABLE, copy_attributes, copy_example
from lightning_echo.data.objects import (
    attributes_of,
    has_hidden_memory,
    image_class,
    is_from_pillow,
    is_image,
    is_plain,
    is_standard,
    overrides,
    slots_of,
)

# ---------------------------------------------------------------------- difference
# This is stricter than ``==``: types and metadata count. But NaN equals NaN. Mappings are compared by their items.
#
# In some classes, ``==`` compares by identity (PyTorch Geometric's ``Data``), or raises an error because tensors give no single
# answer. Objects of such classes are compared by their contents. Weak references are not followed, because their objects are
# compared at the place that holds them.

# The keys under which MONAI notes which transform it has applied. The "id" is the object's address, which differs in each copy.
_TRACE = {"class", "id", "tracing", "do_transforms"}
_SIMPLE = (type(None), bool, int, float, str, bytes)
_PICKLING = ("__reduce__", "__reduce_ex__", "__getstate__")
_WITH_NOTES = ("numpy", "torch", "pandas")  # objects of these cache computed values in attributes


@dataclass
class _Way:
    """How two examples are compared; see `difference`.

    ``pairs`` has the ids of objects whose attributes are being compared already, since a part may refer back to the whole;
    ``parted`` those that are taken apart. ``alive`` keeps what a comparison has made: an id must not be used again.
    """

    exactly: bool
    takes_apart: bool
    pairs: set[tuple[int, int]] = field(default_factory=set)
    parted: set[tuple[int, int]] = field(default_factory=set)
    alive: list[Any] = field(default_factory=list)


def difference(left: Any, right: Any, *, exactly: bool = False, takes_apart: bool = False) -> str | None:
    """Returns the first difference between two examples, in words; None if there is none.

    Args:
        exactly: Whether the right one must be as a copy of the left one: the same bits, and the same attributes in all objects,
            also those for which ``==`` does not ask.
        takes_apart: Whether objects that hide their contents are compared by what pickle would write. If not, they differ.

    >>> difference({"image": [1.0, float("nan")]}, {"image": [1.0, float("nan")]})
    >>> difference({"image": [1.0, 2.0]}, {"image": [1.0, 3.0]})
    "at ['image'][1]: 2.0 and 3.0"
    """
    return _between(left, right, "", _Way(exactly, takes_apart))


def _between(left: Any, right: Any, path: str, way: _Way) -> str | None:
    if left is right or isinstance(left, weakref.ReferenceType):
        return None
    kind = type(left)
    # Pillow's own classes are treated alike: the class of an opened image depends on its format, that of its copy is ``Image``.
    if kind is not type(right) and not all(is_image(each) and is_from_pillow(type(each)) for each in (left, right)):
        return _at(path, f"a {kind.__name__} and a {type(right).__name__}")
    if isinstance(left, torch.Tensor):
        return _between_tensors(left, right, path, way)
    if way.exactly and not is_image(left):  # of a user's class all attributes count, although it may have its own ``==``
        is_users = kind not in _SIMPLE and not is_standard(kind) and kind.__module__.partition(".")[0] not in _WITH_NOTES
        if is_users and (found := _between_members(left, right, path, way, attributes_of(left))) is not None:
            return found
    if isinstance(left, np.ndarray):
        return _between_arrays(left, right, path, way)
    if isinstance(left, Mapping):
        return _between_mappings(left, right, path, way)
    if isinstance(left, (list, tuple)):
        return _between_sequences(left, right, path, way)
    if is_image(left):
        return _between_images(left, right, path, way)
    if hasattr(kind, "__dataclass_fields__") or not any("__eq__" in base.__dict__ for base in kind.__mro__[:-1]):
        return _between_objects(left, right, path, way)
    return _between_values(left, right, path, way)


def _at(path: str, text: str) -> str:
    return f"at {path}: {text}" if path else text


def _between_tensors(left: torch.Tensor, right: torch.Tensor, path: str, way: _Way) -> str | None:
    for what in ("shape", "dtype", "device", "layout", "requires_grad"):
        if getattr(left, what) != getattr(right, what):
            return _at(path, f"tensors of {what} {getattr(left, what)} and {getattr(right, what)}")
    metadata = _between(left.__dict__, right.__dict__, f"{path}.__dict__", way)
    if metadata is not None or left.is_meta:
        return metadata
    try:
        return _between_elements(_as_plain(left), _as_plain(right), path, way)
    except Exception as error:  # a kind of tensor, or a class of the user's, that knows no such comparison
        return _between_opaque(left, right, path, way, f" ({error})")


def _between_elements(left: torch.Tensor, right: torch.Tensor, path: str, way: _Way) -> str | None:
    unequal = None
    if not way.exactly:
        with suppress(RuntimeError):  # torch cannot compare all types
            if torch.equal(left, right):
                return None
            unequal = (left != right) & ~((left != left) & (right != right))
    if unequal is None:  # the bytes of each element, in one dimension more
        one, other = (
            tensor.resolve_conj().resolve_neg().cpu().contiguous().unsqueeze(-1).view(torch.uint8) for tensor in (left, right)
        )
        unequal = (one != other).any(-1)
    count = int(unequal.sum())
    return _at(path, f"tensors that differ in {count} of {left.numel()} elements") if count else None


def _as_plain(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    if value.is_quantized:
        return value.dequantize()
    if value.layout is not torch.strided:
        return value.to_dense()
    return value.as_subclass(torch.Tensor)


def _between_arrays(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], path: str, way: _Way) -> str | None:
    for what in ("shape", "dtype"):
        if getattr(left, what) != getattr(right, what):
            return _at(path, f"arrays of {what} {getattr(left, what)} and {getattr(right, what)}")
    if way.exactly and left.dtype.metadata != right.dtype.metadata:
        return _at(path, f"arrays whose types have metadata {left.dtype.metadata} and {right.dtype.metadata}")
    if left.dtype.hasobject or (left.dtype.names and not way.exactly):
        return _between_sequences(left.ravel().tolist(), right.ravel().tolist(), path, way)
    if way.exactly:
        return None if left.tobytes() == right.tobytes() else _at(path, "arrays of different bytes")
    unequal = np.asarray(left != right)
    if left.dtype.kind in "fcmM":
        unequal = unequal & ~(np.isnat(left) & np.isnat(right) if left.dtype.kind in "mM" else np.isnan(left) & np.isnan(right))
    count = int(unequal.sum())
    return _at(path, f"arrays that differ in {count} of {left.size} elements") if count else None


def _between_mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str, way: _Way) -> str | None:
    keys = set(left)  # not keys(): a class may return something that is not a set (PyTorch Geometric's storages)
    if keys != set(right) or (way.exactly and list(left) != list(right)):
        return _at(path, f"keys {list(left)} and {list(right)}")
    left_out = {"id"} if keys >= _TRACE else set()
    return _first(_between(left[key], right[key], f"{path}[{key!r}]", way) for key in left if key not in left_out)


def _between_sequences(left: Any, right: Any, path: str, way: _Way) -> str | None:
    if len(left) != len(right):
        return _at(path, f"{type(left).__name__}s of {len(left)} and {len(right)} elements")
    return _first(_between(*pair, f"{path}[{place}]", way) for place, pair in enumerate(zip(left, right, strict=True)))


def _between_images(left: Any, right: Any, path: str, way: _Way) -> str | None:
    for what in ("mode", "size", *(("format",) if way.exactly else ())):
        if getattr(left, what) != getattr(right, what):
            return _at(path, f"images of {what} {getattr(left, what)} and {getattr(right, what)}")
    palettes = [image.palette and (image.palette.mode, image.getpalette(image.palette.mode)) for image in (left, right)]
    if palettes[0] != palettes[1]:
        return _at(path, "images with different palettes")
    if left.tobytes() != right.tobytes():
        return _at(path, "images with different pixels")
    return _between(left.info, right.info, f"{path}.info", way) if way.exactly else None


def _between_values(left: Any, right: Any, path: str, way: _Way) -> str | None:
    """Compares objects of a class that has its own ``==``."""
    if isinstance(left, (np.str_, np.bytes_)):  # for numpy, an empty one is not even equal to itself
        return None if [*left] == [*right] else _at(path, f"{left!r} and {right!r}")
    if way.exactly and type(left) is float:
        return None if struct.pack("<d", left) == struct.pack("<d", right) else _at(path, f"{left!r} and {right!r}")
    why = ""
    try:
        if bool(left == right) or bool(left != left and right != right):
            return None
    except Exception as error:  # the value's own comparison
        why = f" ({error})"
    if is_plain(type(left)) and vars(left) and (why or _differs_from_its_copy(left)):
        return _between_objects(left, right, path, way)
    return _between_opaque(left, right, path, way, why) if why else _at(path, f"{left!r} and {right!r}")


def _between_objects(left: Any, right: Any, path: str, way: _Way) -> str | None:
    """Compares objects by their contents, if their class compares only by identity."""
    if way.takes_apart and overrides(type(left), object, _PICKLING):
        return _between_parts(left, right, path, way)
    names = getattr(type(left), "__dataclass_fields__", None) or attributes_of(left)
    if not names and not hasattr(left, "__dict__") and not slots_of(type(left)):
        return _between_opaque(left, right, path, way)
    found = _between_members(left, right, path, way, names)
    if found is None and has_hidden_memory(type(left)) and not isinstance(left, FunctionType):
        return _between_parts(left, right, path, way)  # a generator of random numbers, a partial function
    return found


def _between_members(left: Any, right: Any, path: str, way: _Way, names: Iterable[str]) -> str | None:
    if (id(left), id(right)) in way.pairs:
        return None
    way.pairs.add((id(left), id(right)))
    if attributes_of(left).keys() != attributes_of(right).keys():
        return _at(path, f"objects of {type(left).__name__} with different attributes")
    missing = object()
    for name in names:
        pair: list[Any] = []
        for value in (left, right):  # from the instance itself if it is there, since its class may return something else for it
            attributes = getattr(value, "__dict__", {})
            pair.append(attributes[name] if name in attributes else getattr(value, name, missing))
        if (found := _between(pair[0], pair[1], f"{path}.{name}", way)) is not None:
            return found
    return None


def _between_opaque(left: Any, right: Any, path: str, way: _Way, why: str = "") -> str | None:
    """Compares objects that hide their contents."""
    if way.takes_apart:
        return _between_parts(left, right, path, way)
    return _at(path, f"two objects of {type(left).__name__}, which cannot be compared{why}")


def _between_parts(left: Any, right: Any, path: str, way: _Way) -> str | None:
    """Compares objects by what pickle would write of them."""
    if (id(left), id(right)) in way.parted:
        return None
    way.parted.add((id(left), id(right)))
    parts: list[Any] = []
    try:
        for value in (left, right):
            reduce = copyreg.dispatch_table.get(type(value))
            found = value.__reduce_ex__(4) if reduce is None else reduce(value)
            is_name = isinstance(found, str)
            parts.append(found if is_name else [list(part) if isinstance(part, Iterator) else part for part in found])
    except Exception as error:  # whatever a class raises that cannot be pickled
        return _at(path, f"two objects of {type(left).__name__}, which cannot be compared ({error})")
    way.alive.append(parts)
    return _between(parts[0], parts[1], path, way)


def _differs_from_its_copy(value: Any) -> bool:
    """Returns whether ``==`` ignores the contents of objects of this class."""
    try:
        return bool(value != copy.copy(value))
    except Exception:  # the class's own code: it cannot be copied, or compared
        return False


def _first(differences: Any) -> str | None:
    return next((found for found in differences if found is not None), None)


# ---------------------------------------------------------------------- aliases
# A use of such a batch has its own containers: a key that is popped from one use is still in the next. In place of each tensor it
# has an alias, which shares memory and version counter with the tensor. So an in-place edit of the alias can be seen on the
# tensor (`LentBatch.is_edited`). Changes that write no memory (``requires_grad_()``, ``.grad``, ``.data = ...``,
# ``unsqueeze_``) affect only the alias. Everything else is copied as in ``copies.py``, which also rebuilds the containers.
#
# Tensors are searched in built-in containers and in attributes. A tensor that a class keeps elsewhere is copied, too.


class LentBatch:
    """A batch that is used several times without a copy of its tensors, and notices in-place edits. No other code may hold it.

    Example:
        >>> lent = LentBatch({"x": torch.zeros(2)})
        >>> use = lent.hand_out()
        >>> lent.is_edited(), use.pop("x").add_(1), lent.is_edited(), list(lent.hand_out())
        (False, tensor([1., 1.]), True, ['x'])
    """

    __slots__ = ("_attributed", "_tensors", "_watched", "batch")

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._tensors = tensors_in(batch)
        self._attributed = [tensor for tensor in self._tensors if tensor.__dict__]
        with torch._C.DisableTorchFunctionSubclass():  # a subclass would be asked for each attribute, at ten times the cost
            # An inference tensor has no version, and it cannot be edited during training.
            self._watched = [(tensor, tensor._version) for tensor in self._tensors if not tensor.is_inference()]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def is_edited(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return any(tensor._version != version for tensor, version in self._watched)

    def hand_out(self) -> Any:
        """Returns the batch with new containers, and with aliases in place of tensors."""
        memo: dict[int, Any] = {}
        with torch._C.DisableTorchFunctionSubclass():  # subclasses may unwrap their results there
            for tensor in self._tensors:
                alias = tensor.detach()
                if type(alias) is not type(tensor):
                    alias = alias.as_subclass(type(tensor))
                memo[id(tensor)] = alias.requires_grad_() if tensor.requires_grad else alias
        for tensor in self._attributed:
            memo[id(tensor)].__dict__.update(copy_attributes(tensor, memo))
        return copy_example(self.batch, memo)


def rebuild(batch: Any) -> Any:
    """Returns the same tensors in new containers, because the ``to`` of some classes changes its own container."""
    return copy_example(batch, {id(tensor): tensor for tensor in tensors_in(batch)})


def separate(batch: Any, other: LentBatch) -> Any:
    """Returns the batch with a copy in place of each tensor that shares memory with a tensor of another batch."""
    tensors, taken = tensors_in(batch), {_memory(tensor) for tensor in other._tensors}
    apart = {id(tensor): tensor for tensor in tensors if _memory(tensor) not in taken}
    return batch if len(apart) == len(tensors) else copy_example(batch, apart)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, each once."""
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # keeps the parts alive, since the id of an object that is gone may be used again
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, IMMUTABLE) or id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, dict):
            left.extend(dict.values(part))
        elif isinstance(part, list | tuple | set | frozenset):
            left.extend(part)
        left.extend(attributes_of(part).values())
    return found


def _memory(tensor: torch.Tensor) -> Any:
    """Returns the address of the storage. A sparse or nested tensor has none: its device stands for all memory there."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return tensor.device


# ---------------------------------------------------------------------- overlaps
# A data set may return memory that an earlier example, which is still in use, has already: it may decode into a few buffers by
# turns. In a plain loader that is right, since each example is augmented, and so copied, before the next one is read. If all
# examples of a batch are loaded first, the last one overwrites the first.
#
# Overlapping memory need not be overwritten: windows of one time series overlap, too, and two examples may have the same
# embedding of their class. So the caller copies what is loaded from then on, which is right in any case.
#
# This runs for each example that is loaded, so it must be fast. It takes about 2 us for a pair of image and label.

_DEEP = 8
_Add = Callable[[Any, list[tuple[int, int]], int], None]


class Overlaps:
    """The memory of the examples of one batch, which must be in use until `clear` is called.

    Example:
        >>> overlaps, buffer = Overlaps(), torch.zeros(4)
        >>> [overlaps.add(index, example) for index, example in enumerate((buffer[:2], buffer[2:], buffer[1:3]))]
        [False, False, True]
    """

    def __init__(self) -> None:
        self._starts: list[int] = []  # of ranges that do not overlap, in their order
        self._ends: list[int] = []
        self._owners: list[Any] = []

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()
        self._owners.clear()

    def add(self, index: Any, example: Any) -> bool:
        """Adds an example. Returns whether its memory overlaps with that of another index; one index may give the same memory."""
        ranges: list[tuple[int, int]] = []
        _add(example, ranges, 0)
        starts, ends, owners, found = self._starts, self._ends, self._owners, False
        for start, end in ranges:
            place = bisect_right(starts, start)
            if (place and ends[place - 1] > start) or (place < len(starts) and starts[place] < end):
                owner = owners[place - 1] if place and ends[place - 1] > start else owners[place]
                is_same = isinstance(owner, (int, str)) and type(owner) is type(index) and bool(owner == index)
                found = found or not (owner is index or is_same)
                continue
            starts.insert(place, start)
            ends.insert(place, end)
            owners.insert(place, index)
        return found


def _add(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    kind = type(value)
    adder = _ADDERS.get(kind)
    if adder is None:
        adder = _ADDERS[kind] = _adder_for(kind)
    adder(value, ranges, depth)


def _nothing(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    pass


def _tensor(value: torch.Tensor, ranges: list[tuple[int, int]], depth: int) -> None:
    try:
        start, size = value.data_ptr(), value.numel()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, for instance, has no memory of its own
        return
    if size and start:
        if not value.is_contiguous():
            size = 1 + sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
        ranges.append((start, start + size * value.element_size()))


def _any_tensor(value: torch.Tensor, ranges: list[tuple[int, int]], depth: int) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _tensor(value, ranges, depth)


def _array(value: np.ndarray[Any, Any], ranges: list[tuple[int, int]], depth: int) -> None:
    if value.size:
        start = value.__array_interface__["data"][0]
        if value.flags.c_contiguous:
            ranges.append((start, start + value.nbytes))
        else:
            first = last = start
            for length, stride in zip(value.shape, value.strides, strict=True):
                first, last = first + min(stride * (length - 1), 0), last + max(stride * (length - 1), 0)
            ranges.append((first, last + value.itemsize))


def _buffer(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    with suppress(ValueError, BufferError):  # it is not contiguous, or released
        if not memoryview(value).readonly:
            _array(np.frombuffer(value, np.uint8), ranges, depth)


def _members(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    if depth < _DEEP:
        for member in value:
            _add(member, ranges, depth + 1)


def _values(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    if depth < _DEEP:
        for member in dict.values(value):
            _add(member, ranges, depth + 1)


def _image(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    # An image of Pillow does not show where its memory is, only that it is that of an array or a file (Image.fromarray). Two such
    # images count as in the same memory.
    place = id(_image) if getattr(value, "readonly", False) else id(value)
    ranges.append((place, place + 1))


def _object(value: Any, ranges: list[tuple[int, int]], depth: int) -> None:
    ranges.append((id(value), id(value) + 1))  # one object in two examples
    if depth < _DEEP:
        _values(attributes_of(value), ranges, depth)


_ADDERS: dict[type, _Add] = {
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes), _nothing),
    torch.Tensor: _tensor,
    np.ndarray: _array,
    tuple: _members,
    list: _members,
    dict: _values,
    bytearray: _buffer,
    memoryview: _buffer,
}


def _adder_for(kind: type) -> _Add:
    if issubclass(kind, IMMUTABLE) or issubclass(kind, np.generic):
        return _nothing
    if issubclass(kind, torch.Tensor):
        return _any_tensor
    if issubclass(kind, image_class() or ()):
        return _image
    for base, adder in ((np.ndarray, _array), (dict, _values), (tuple, _members), (list, _members), (deque, _members)):
        if issubclass(kind, base):
            return adder
    return _object
