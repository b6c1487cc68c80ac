"""What objects hold, as short texts by the path of the attribute. No code of the user's classes runs: it is bypassed."""

from __future__ import annotations

import ctypes
import datetime
import decimal
import fractions
import functools
import hashlib
import marshal
import operator
import pathlib
import re
import types
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import EnumMeta
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_echo.data.objects import is_from_pillow, is_image, is_made_of_attributes, is_mapped
from lightning_echo.data.randomness import GENERATORS

# ---------------------------------------------------------------------- contents
# Short values stand as they are, anything else as its size and a digest.

OPENED = "open: "
"""Begins the text of what is only compared by its class, since it may be opened or made later."""

TRAINED = " that is trained"
"""Is in the text of a tensor that takes gradients."""

SIMPLE = (bool, int, float, complex, str, bytes, type(None))

_MOST_TEXT = 80  # characters
_DIGEST_BYTES = 8
_CHUNK = 2**16  # members that are digested at once
_BY_REPR = (
    range,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.datetime,
    datetime.timedelta,
    datetime.timezone,
    uuid.UUID,
    type(...),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_WHOLE_BYTES = 256 * 2**20  # up to so many bytes all of a tensor or array is compared
_WHOLE_BYTES_QUICKLY = 16 * 2**20
_MAPPED_BYTES = 2**20  # the same for memory maps, which are read from a disk
_BLOCKS, _BLOCK_BYTES = 256, 2**20  # of a larger one
_BLOCKS_QUICKLY, _BLOCK_BYTES_QUICKLY = 256, 2**14
_BLOCKS_MAPPED, _BLOCK_BYTES_MAPPED = 64, 2**12
_ROWS = 256  # of a larger one that is not contiguous
_MOST_CHOSEN_SEED = 2**32  # a larger one is drawn by the system


def short(text: str) -> str:
    """Returns a text of at most about 100 characters. Different texts stay different."""
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[: _MOST_TEXT // 2]}... ({len(text):,} characters, {_hex(text.encode('utf-8', 'surrogatepass'))})"


def digest_of_texts(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def text_of_atom(value: Any) -> str | None:
    """Returns the text of a value without parts; None if its type is not known."""
    kind = type(value)
    if kind is bytes and len(value) > _MOST_TEXT:
        return f"{len(value):,} bytes ({_hex(value)})"
    if kind in SIMPLE or kind in _BY_REPR or issubclass(kind, np.dtype):
        return short(repr(value))
    if issubclass(kind, datetime.datetime):  # also pandas's
        return short(datetime.datetime.isoformat(value))
    if issubclass(kind, pathlib.PurePath):
        return short(repr(pathlib.PurePath.__str__(value)))
    if kind is re.Pattern:
        return short(f"{value.pattern!r} ({value.flags})")
    if issubclass(kind, np.generic):
        return f"{kind.__name__} {short(repr(value)) if kind is not np.void else _hex(value.tobytes())}"
    if issubclass(kind, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure)):
        return f"{kind.__name__} ({_hex(bytes(memoryview(value).cast('B')))})"
    return None


def text_of_generator(value: Any) -> str:
    """Returns the class of a random generator, and its seed if somebody has chosen it."""
    kind = type(value)
    seed: Any = None
    if issubclass(kind, torch.Generator):
        seed = value.initial_seed()
    elif issubclass(kind, np.random.Generator):
        seed = getattr(value.bit_generator.seed_seq, "entropy", None)
    is_chosen = type(seed) is int and seed < _MOST_CHOSEN_SEED
    return f"{kind.__name__} of seed {seed}" if is_chosen else kind.__name__


def text_of_atoms(values: Sequence[Any]) -> str | None:
    """Returns a digest of many plain values, or of lists or tuples of them; None if there are others among them.

    It takes about 0.1 s for a million pairs. Equal strings give equal digests, whether or not they are one object.
    """
    kinds = set(map(type, values))
    if len(kinds) == 1 and issubclass(kind := kinds.pop(), np.generic) and not issubclass(kind, (np.void, np.object_)):
        array = np.array(values)
        return _hex(f"{array.dtype} {array.shape}".encode(), array.tobytes())
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for start in range(0, len(values), _CHUNK):
        chunk = list(values[start : start + _CHUNK])
        kinds = set(map(type, chunk))
        nested = kinds & {list, tuple}
        if not kinds <= {*SIMPLE, list, tuple}:
            return None
        if nested and not set(map(type, chain.from_iterable(one for one in chunk if type(one) in nested))) <= {*SIMPLE}:
            return None
        digest.update(marshal.dumps(chunk, 2))  # version 2 does not show whether two members are one object
    return digest.hexdigest()


class Memory:
    """The texts of tensors, arrays and images.

    ``quickly``: compare by checksums and by tensors' version counters, for two looks of one process.
    """

    def __init__(self, *, quickly: bool) -> None:
        self._quickly = quickly
        self._whole_bytes = _WHOLE_BYTES_QUICKLY if quickly else _WHOLE_BYTES
        self._left = 8 * self._whole_bytes  # beyond that, of each further object only blocks are compared

    def text(self, value: Any) -> str | None:
        """Returns the text of a tensor, an array or an image; None for other objects, and for arrays of objects."""
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return self._of_tensor(value)
        if issubclass(kind, np.ndarray):
            return None if value.dtype.hasobject else self._of_array(value)
        if kind in (bytearray, memoryview) or (kind.__module__, kind.__name__) == ("array", "array"):
            return f"{kind.__name__} ({self.digest(np.frombuffer(value, np.uint8))})"
        if is_image(value) and is_from_pillow(kind) and getattr(value, "fp", None) is None:
            return f"image {value.mode} {value.size} ({self.digest(np.frombuffer(value.tobytes(), np.uint8))})"
        return None

    def _of_tensor(self, value: torch.Tensor) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            trained, value = TRAINED if value.requires_grad else "", value.detach()
            what = f"tensor {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{trained}"
            if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
                version = f", version {value._version}" if self._quickly and not value.is_inference() else ""
                return f"{OPENED}{what} on {value.device}, {value.layout}{version}"
            if not value.numel():
                return what
            if self._quickly and not value.ndim and value.is_shared():  # type: ignore[no-untyped-call]
                return f"{what} in shared memory"  # a word to running workers, such as a stream's epoch
            where = ""
            if self._quickly and not value.is_inference():
                where = f"version {value._version} at {value.data_ptr():x}, "
            value = self._rows(value.resolve_conj().resolve_neg(), value.is_contiguous()).contiguous()
            return f"{what} ({where}{self.digest(value.reshape(-1).view(torch.uint8).numpy())})"

    def _of_array(self, value: Any) -> str:
        what = f"array {short(str(value.dtype))} {value.shape}"
        if not value.size:
            return what
        mapped = is_mapped(value)
        value = np.ascontiguousarray(self._rows(np.asarray(value), value.flags.c_contiguous))
        return f"{what} ({self.digest(value.reshape(-1).view(np.uint8), is_mapped=mapped)})"

    def _rows(self, value: Any, is_contiguous: bool) -> Any:
        """Returns some rows of a value that is too large to be copied, or all of it."""
        is_small = is_contiguous or value.nbytes <= self._whole_bytes
        return value if is_small else value[:: len(value) // _ROWS + 1]

    def digest(self, data: Any, *, is_mapped: bool = False) -> str:
        """Returns a digest of a flat array of bytes, or of blocks that are spread over it."""
        whole = min(_MAPPED_BYTES if is_mapped else self._whole_bytes, max(self._left, 2**16))
        blocks = [data]
        if len(data) > whole:
            count, size = (_BLOCKS_QUICKLY, _BLOCK_BYTES_QUICKLY) if self._quickly else (_BLOCKS, _BLOCK_BYTES)
            if is_mapped or not self._left:
                count, size = _BLOCKS_MAPPED, _BLOCK_BYTES_MAPPED
            size = min(size, len(data) // count)
            blocks = [data[place * (len(data) - size) // (count - 1) :][:size] for place in range(count)]
        self._left = max(self._left - sum(map(len, blocks)), 0)
        if self._quickly:
            checksum = 0
            for block in blocks:
                checksum = zlib.crc32(block, checksum)
            found = f"{checksum:08x}"
        else:
            found = _hex(*blocks)
        return found if len(blocks) == 1 else f"{found} of {len(blocks)} blocks"


def _hex(*parts: Any) -> str:
    digest = hashlib.sha1(usedforsecurity=False)  # the fastest one of hashlib
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[: 2 * _DIGEST_BYTES]


# ---------------------------------------------------------------------- walk

_FEW = 32  # members of a container that get a text each
_MOST_MEMBERS = 20_000  # members of a container that are looked at, if they are not plain values
_MOST_OBJECTS = 1_000_000
_DEEP = 40
_CONTAINERS = (list, tuple, set, frozenset, dict, deque, types.MappingProxyType)
_LIVE_MODULES = {  # of the standard library: what can be open, locked or running
    *("_asyncio", "_io", "_thread", "_weakref", "asyncio", "concurrent", "contextvars", "http", "io", "logging", "mmap"),
    *("queue", "select", "selectors", "shelve", "socket", "sqlite3", "ssl", "subprocess", "tarfile", "tempfile", "threading"),
    *("multiprocessing", "urllib", "weakref", "zipfile"),
}
_LIVE_NAMES = ("Trainer", "LightningModule", "Callback", "Logger")
_LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")
_OF_A_LOADER = {  # how a loader works, which decides nothing about its examples
    *("num_workers", "prefetch_factor", "pin_memory", "pin_memory_device", "timeout", "persistent_workers", "generator"),
    *("_DataLoader__multiprocessing_context", "_DataLoader__initialized", "_IterableDataset_len_called", "_iterator", "in_order"),
}
_OF_A_SAMPLER = {"generator", "epoch"}  # a reader sets its generator and its pass


def module_of(kind: type) -> str:
    """Returns the name of a class's module. The main module has one name, also in a spawned process."""
    module = type.__getattribute__(kind, "__module__")
    return ("__main__" if module == "__mp_main__" else module) if isinstance(module, str) else ""


def full_name(kind: type) -> str:
    module, name = module_of(kind), type.__getattribute__(kind, "__qualname__")
    return str(name) if module in ("builtins", "__main__") else f"{module}.{name}"


def attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object by name. It runs no code: no property, no ``__getattr__``."""
    found: dict[str, Any] = {}
    for base in type.mro(type(value)) if not issubclass(type(value), type) else ():
        own = type.__getattribute__(base, "__dict__")
        if type(held := own.get("__dict__")) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            found = {**held.__get__(value), **found}
        for name in own if "__slots__" in own else ():
            if type(member := own[name]) is types.MemberDescriptorType:
                with suppress(AttributeError):  # the slot is empty
                    found.setdefault(name, member.__get__(value))
    return {name: held for name, held in found.items() if type(name) is str}


def members_of_class(kind: type) -> dict[str, Any]:
    return dict(type.__getattribute__(kind, "__dict__"))


class Walk:
    """Walks through objects, and notes a text for each path in `texts`, in the order in which it meets them.

    ``ignore`` has names of attributes, or whole paths. ``meet`` is called with each class of an object, and with each class and
    function that is held.
    """

    def __init__(self, ignore: Iterable[str], *, quickly: bool, meet: Callable[[Any], None]) -> None:
        self.texts: list[tuple[str, str]] = []
        self._ignore, self._meet, self._memory = frozenset(ignore), meet, Memory(quickly=quickly)
        self._known: dict[int, tuple[str, Any]] = {}  # id -> path, and the object, so that the id is not used again

    def is_ignored(self, path: str) -> bool:
        """Returns whether an attribute is left out: by its name, or by its whole path, which is not a data set's inside it."""
        return path in self._ignore or path.rpartition(".")[2] in self._ignore

    def add(self, path: str, value: Any, depth: int = 0) -> None:
        start, kind = len(self.texts), type(value)
        try:
            if (text := text_of_atom(value)) is not None:
                self.texts.append((path, text))
            elif kind is not tuple and (known := self._known.get(id(value))) is not None:
                self.texts.append((path, f"the same as {known[0]}"))
            elif depth > _DEEP or len(self._known) > _MOST_OBJECTS:
                self.texts.append((path, full_name(kind)))
            else:
                self._known[id(value)] = path, value
                self._add_object(path, value, depth)
        except Exception as error:  # an object may be anything: it counts by its class
            del self.texts[start:]
            self.texts.append((path, f"{OPENED}{full_name(kind)} ({type(error).__name__})"))

    def _add_object(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, type):
            self._meet(value)
            self.texts.append((path, f"class {full_name(value)}"))
        elif issubclass(kind, GENERATORS):
            self.texts.append((path, text_of_generator(value)))
        elif (text := self._memory.text(value)) is not None:
            self._meet(kind)
            self.texts.append((path, text))
        elif issubclass(kind, np.ndarray):  # of objects
            self.texts.append((path, f"{kind.__name__} {value.shape}"))
            self._add_members(path, np.asarray(value).ravel().tolist(), "array", depth)
        elif issubclass(type(kind), EnumMeta):
            held = attributes(value)
            self.texts.append((path, f"{full_name(kind)}.{held.get('_name_')} {short(repr(text_of_atom(held.get('_value_'))))}"))
        elif (parts := _parts_of_function(value)) is not None:
            is_function = kind is types.FunctionType
            if is_function:
                self._meet(value)
            self.texts.append((path, f"function {value.__qualname__}" if is_function else full_name(kind)))
            for name, part in parts:
                if not self.is_ignored(f"{path}.{name}"):
                    self.add(f"{path}.{name}", part, depth + 1)
        elif (table := _columns_of_table(value)) is not None:
            self.texts.append((path, f"{full_name(kind)} of {len(table)} columns"))
            for name, column in table:
                self.add(f"{path}[{name}]", column, depth + 1)
        elif issubclass(kind, _CONTAINERS):
            self._add_container(path, value, depth)
        elif _is_live(kind):
            self.texts.append((path, f"{OPENED}{full_name(kind)}"))
        else:
            self._add_attributes(path, value, depth)

    def _add_attributes(self, path: str, value: Any, depth: int, *, is_container: bool = False) -> None:
        kind, held = type(value), attributes(value)
        self._meet(kind)
        if not held and not is_container and not is_made_of_attributes(kind):
            self.texts.append((path, f"{OPENED}{full_name(kind)}"))  # its contents are in memory of its own
            return
        if not is_container:
            self.texts.append((path, full_name(kind)))
        members = [member for base in type.mro(kind) for member in members_of_class(base).items()]
        left_out = {name for name, member in members if type(member) is functools.cached_property}  # these decide nothing
        for base, names in ((DataLoader, _OF_A_LOADER), (Sampler, _OF_A_SAMPLER)):
            left_out |= names if issubclass(kind, base) else set()
        if module_of(kind).partition(".")[0] == "omegaconf":
            left_out.add("_parent")  # leads to the whole configuration
        for name in sorted(held):
            if name not in left_out and not self.is_ignored(f"{path}.{name}"):
                self.add(f"{path}.{name}", held[name], depth + 1)

    def _add_container(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        name = kind.__name__ if kind in _CONTAINERS else full_name(kind)
        if issubclass(kind, (dict, types.MappingProxyType)):
            pairs = list(dict.items(value) if issubclass(kind, dict) else value.items())
            keys = [key for key, _ in pairs]
            if len(pairs) <= _FEW and all(type(key) in (str, int) for key in keys):
                self.texts.append((path, short(f"{name} of {', '.join(map(repr, keys))}")))
                for key, member in pairs:
                    if not self.is_ignored(f"{path}.{key}"):
                        self.add(f"{path}[{key!r}]", member, depth + 1)
            else:
                self._add_members(path, keys, f"{name} with keys", depth)
                self._add_members(f"{path}.values()", [member for _, member in pairs], name, depth)
        elif issubclass(kind, (set, frozenset)):
            members = list((set if issubclass(kind, set) else frozenset).__iter__(value))
            texts = sorted(repr(one) if type(one) in SIMPLE else self._folded(one, depth) for one in members)
            self.texts.append((path, f"{name} of {len(members):,} ({digest_of_texts(texts)})"))
        else:
            base: Any = next(base for base in (list, tuple, deque) if issubclass(kind, base))
            self._add_members(path, list(base.__iter__(value)), name, depth)
        if kind not in _CONTAINERS:
            self._add_attributes(path, value, depth, is_container=True)

    def _add_members(self, path: str, members: Sequence[Any], name: str, depth: int) -> None:
        """Notes the members of a container: in one text if they are plain values or many, else each by itself."""
        if (digest := text_of_atoms(members)) is not None:
            shown = short(repr(members)) if len(members) <= _FEW else ""
            is_shown = shown == repr(members) if shown else False
            self.texts.append((path, f"{name} {shown}" if is_shown else f"{name} of {len(members):,} ({digest})"))
        elif len(members) <= _FEW:
            self.texts.append((path, f"{name} of {len(members)}"))
            for place, member in enumerate(members):
                self.add(f"{path}[{place}]", member, depth + 1)
        else:
            count = min(len(members), _MOST_MEMBERS)
            chosen = [members[place * (len(members) - 1) // (count - 1)] for place in range(count)]
            digest = digest_of_texts([self._folded(member, depth) for member in chosen])
            some = "" if count == len(members) else f" of {count:,} of them"
            self.texts.append((path, f"{name} of {len(members):,} ({digest}{some})"))

    def _folded(self, member: Any, depth: int) -> str:
        start = len(self.texts)
        self.add("", member, depth + 1)
        text = "\n".join(f"{path}={text}" for path, text in self.texts[start:])
        del self.texts[start:]
        return text


def digest_of_object(value: Any) -> str:
    """Returns a digest of what an object holds. Equal objects have equal digests, in other processes, too.

    >>> digest_of_object({"image": torch.zeros(2), "label": 1}) == digest_of_object({"image": torch.zeros(2), "label": 2})
    False
    """
    walk = Walk((), quickly=False, meet=lambda kind: None)
    walk.add("", value)
    return digest_of_texts(chain.from_iterable(walk.texts))


# Of what holds an object, the attributes that lead to it.
_PARTS_BY_NAME = {
    types.MethodType: ("__func__", "__self__"),
    functools._lru_cache_wrapper: ("__wrapped__",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    functools.cached_property: ("func",),
    slice: ("start", "stop", "step"),
}


def _parts_of_function(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the objects that a function holds, by name; None for an object of another kind."""
    kind = type(value)
    if kind is types.FunctionType:
        found = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            with suppress(ValueError):  # it is empty
                found.append((name, cell.cell_contents))
        found += [("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]
        found += [(name, held) for name, held in vars(value).items() if name != "__wrapped__"]
        return [(name, part) for name, part in found if part is not None]
    for known, names in _PARTS_BY_NAME.items():
        if kind is known:
            return [(name, getattr(value, name)) for name in names]
    if issubclass(kind, functools.partial) or kind is functools.partialmethod:
        return [("func", value.func), ("args", value.args), *sorted(value.keywords.items())]
    if kind in (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, np.ufunc):
        owner = getattr(value, "__self__", None)
        is_bound = owner is not None and type(owner) is not types.ModuleType
        return [("__name__", value.__name__), *([("__self__", owner)] if is_bound else [])]
    if issubclass(kind, types.ModuleType):
        return [("__name__", attributes(value).get("__name__"))]
    if kind in (operator.itemgetter, operator.attrgetter, operator.methodcaller):
        return [("arguments", value.__reduce__()[1:])]
    return None


def _columns_of_table(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the columns of a table of pandas or Arrow, by name, as arrays; None for other objects."""
    for base in type.mro(type(value)):
        library, name = module_of(base).partition(".")[0], base.__name__
        if library == "pandas" and name == "DataFrame":
            pandas: Any = base
            columns = [(short(repr(each)), np.asarray(pandas._ixs(value, place, 1))) for place, each in enumerate(value.columns)]
            return [("index", np.asarray(value.index)), *columns]
        if library == "pandas" and name in ("Series", "Index"):
            return [("", np.asarray(value)), *([("index", np.asarray(value.index))] if name == "Series" else [])]
        if library == "pyarrow" and name in ("Table", "RecordBatch"):
            return [(name, column) for name, column in zip(value.schema.names, value.columns, strict=True)]
        if library == "pyarrow" and name == "ChunkedArray":
            return [("type", str(value.type)), *((f"chunk {place}", chunk) for place, chunk in enumerate(value.chunks))]
        if library == "pyarrow" and name == "Array":
            buffers = [buffer for buffer in value.buffers() if buffer is not None]
            place = (str(value.type), len(value), value.offset)
            return [("place", place), *((str(number), memoryview(buffer)) for number, buffer in enumerate(buffers))]
    return None


def _is_live(kind: type) -> bool:
    """Returns whether objects of a class can be open, locked or running, so that they count by their class only."""
    if kind in (types.GeneratorType, types.CoroutineType, types.FrameType, types.TracebackType, types.AsyncGeneratorType):
        return True
    bases = [(module_of(base).partition(".")[0], base.__name__) for base in type.mro(kind)]
    if any(module in _LIGHTNING and name in _LIVE_NAMES for module, name in bases):
        return True
    if issubclass(kind, (Dataset, Sampler, DataLoader)) or module_of(kind) == "multiprocessing.sharedctypes":
        return False
    return any(module in _LIVE_MODULES for module, _ in bases)
