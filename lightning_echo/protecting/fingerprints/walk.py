"""What objects hold, as texts by the path of the attribute. No code of the user's runs: their classes are bypassed."""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import EnumMeta
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_echo.protecting.fingerprints.contents import (
    OPENED,
    SIMPLE,
    Memory,
    digest_of_texts,
    short,
    text_of_atom,
    text_of_atoms,
    text_of_generator,
)
from lightning_echo.protecting.generators import GENERATORS
from lightning_echo.protecting.objects import is_made_of_attributes

__all__ = ["Walk", "attributes", "full_name", "members_of_class", "module_of"]

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
_OF_A_SAMPLER = {"generator", "epoch"}  # a reader gives it a generator, and tells it the pass
_PARENT = ("omegaconf", "_parent")  # leads to the whole configuration


def module_of(kind: type) -> str:
    """Returns the name of a class's module. The main module has one name, also in a spawned process."""
    module = type.__getattribute__(kind, "__module__")
    return ("__main__" if module == "__mp_main__" else module) if isinstance(module, str) else ""


def full_name(kind: type) -> str:
    """Returns module and name of a class, without the module if that is builtins or the main module."""
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
    """Returns what a class itself defines, by name."""
    return dict(type.__getattribute__(kind, "__dict__"))


class Walk:
    """Walks through objects, and notes a text for each path.

    Args:
        ignore: Names of attributes, or whole paths, that are left out.
        quickly: As in `Memory`.
        meet: Called with each class of an object, and with each class and function that is held.

    Attributes:
        texts: Path and text, in the order in which they were met.
    """

    def __init__(self, ignore: Iterable[str], *, quickly: bool, meet: Callable[[Any], None]) -> None:
        self.texts: list[tuple[str, str]] = []
        self._ignore, self._meet, self._memory = frozenset(ignore), meet, Memory(quickly=quickly)
        self._known: dict[int, tuple[str, Any]] = {}  # id -> path, and the object, so that the id is not used again

    def add(self, path: str, value: Any) -> None:
        """Notes an object and what it holds."""
        self._add(path, value, 0)

    def is_ignored(self, path: str) -> bool:
        """Returns whether an attribute is left out: by its name, or by its whole path, which is not a data set's inside it."""
        return path in self._ignore or path.rpartition(".")[2] in self._ignore

    def _add(self, path: str, value: Any, depth: int) -> None:
        start = len(self.texts)
        try:
            self._add_any(path, value, depth)
        except Exception as error:  # an object may be anything: it counts by its class
            del self.texts[start:]
            self.texts.append((path, f"{OPENED}{full_name(type(value))} ({type(error).__name__})"))

    def _add_any(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if (text := text_of_atom(value)) is not None:
            self.texts.append((path, text))
        elif kind is not tuple and (known := self._known.get(id(value))) is not None:
            self.texts.append((path, f"the same as {known[0]}"))
        elif depth > _DEEP or len(self._known) > _MOST_OBJECTS:
            self.texts.append((path, full_name(kind)))
        else:
            self._known[id(value)] = path, value
            self._add_object(path, value, depth)

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
        elif type(kind) is EnumMeta or issubclass(type(kind), EnumMeta):
            held = attributes(value)
            self.texts.append((path, f"{full_name(kind)}.{held.get('_name_')} {short(repr(text_of_atom(held.get('_value_'))))}"))
        elif (parts := _parts_of_function(value)) is not None:
            self._add_function(path, value, parts, depth)
        elif (table := _columns_of_table(value)) is not None:
            self.texts.append((path, f"{full_name(kind)} of {len(table)} columns"))
            for name, column in table:
                self._add(f"{path}[{name}]", column, depth + 1)
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
            self.texts.append((path, f"{OPENED}{full_name(kind)}"))  # it keeps what it is in memory of its own
            return
        if not is_container:
            self.texts.append((path, full_name(kind)))
        left_out = _left_out(kind)
        for name in sorted(held):
            if name not in left_out and not self.is_ignored(f"{path}.{name}"):
                self._add(f"{path}.{name}", held[name], depth + 1)

    def _add_function(self, path: str, value: Any, parts: list[tuple[str, Any]], depth: int) -> None:
        kind = type(value)
        if kind is types.FunctionType:
            self._meet(value)
            self.texts.append((path, f"function {value.__qualname__}"))
        else:
            self.texts.append((path, full_name(kind)))
        for name, part in parts:
            if not self.is_ignored(f"{path}.{name}"):
                self._add(f"{path}.{name}", part, depth + 1)

    def _add_container(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        name = kind.__name__ if kind in _CONTAINERS else full_name(kind)
        if issubclass(kind, (dict, types.MappingProxyType)):
            items = dict.items(value) if issubclass(kind, dict) else value.items()
            pairs = list(items)
            self._add_pairs(path, pairs, name, depth)
        elif issubclass(kind, (set, frozenset)):
            members = list((set if issubclass(kind, set) else frozenset).__iter__(value))
            texts = sorted(repr(one) if type(one) in SIMPLE else self._folded(one, depth) for one in members)
            self.texts.append((path, f"{name} of {len(members):,} ({digest_of_texts(texts)})"))
        else:
            base: Any = next(base for base in (list, tuple, deque) if issubclass(kind, base))
            self._add_members(path, list(base.__iter__(value)), name, depth)
        if kind not in _CONTAINERS:
            self._add_attributes(path, value, depth, is_container=True)

    def _add_pairs(self, path: str, pairs: list[tuple[Any, Any]], name: str, depth: int) -> None:
        keys = [key for key, _ in pairs]
        if len(pairs) <= _FEW and all(type(key) in (str, int) for key in keys):
            self.texts.append((path, short(f"{name} of {', '.join(map(repr, keys))}")))
            for key, member in pairs:
                if not self.is_ignored(f"{path}.{key}"):
                    self._add(f"{path}[{key!r}]", member, depth + 1)
            return
        self._add_members(path, keys, f"{name} with keys", depth)
        self._add_members(f"{path}.values()", [member for _, member in pairs], name, depth)

    def _add_members(self, path: str, members: Sequence[Any], name: str, depth: int) -> None:
        """Notes the members of a container: in one text if they are plain values or many, else each by itself."""
        if (digest := text_of_atoms(members)) is not None:
            shown = short(repr(members)) if len(members) <= _FEW else ""
            is_shown = shown == repr(members) if shown else False
            self.texts.append((path, f"{name} {shown}" if is_shown else f"{name} of {len(members):,} ({digest})"))
        elif len(members) <= _FEW:
            self.texts.append((path, f"{name} of {len(members)}"))
            for place, member in enumerate(members):
                self._add(f"{path}[{place}]", member, depth + 1)
        else:
            count = min(len(members), _MOST_MEMBERS)
            chosen = [members[place * (len(members) - 1) // (count - 1)] for place in range(count)]
            digest = digest_of_texts([self._folded(member, depth) for member in chosen])
            some = "" if count == len(members) else f" of {count:,} of them"
            self.texts.append((path, f"{name} of {len(members):,} ({digest}{some})"))

    def _folded(self, member: Any, depth: int) -> str:
        """Returns what a member holds as one text."""
        start = len(self.texts)
        self._add("", member, depth + 1)
        text = "\n".join(f"{path}={text}" for path, text in self.texts[start:])
        del self.texts[start:]
        return text


def _parts_of_function(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the objects that a function has with it, by name; None for an object of another kind."""
    kind = type(value)
    if kind is types.FunctionType:
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        enclosed = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
        defaults = [("__defaults__", value.__defaults__), ("__kwdefaults__", value.__kwdefaults__)]
        held = [(name, each) for name, each in vars(value).items() if name != "__wrapped__"]
        return [(name, part) for name, part in (*enclosed, *defaults, *held) if part is not None]
    if kind is types.MethodType:
        return [("__func__", value.__func__), ("__self__", value.__self__)]
    if issubclass(kind, functools.partial):
        return [("func", value.func), ("args", value.args), *sorted(value.keywords.items())]
    if kind is functools._lru_cache_wrapper:
        return [("__wrapped__", value.__wrapped__)]
    if kind in (staticmethod, classmethod):
        return [("__func__", value.__func__)]
    if kind is property:
        return [("fget", value.fget)]
    if kind is functools.cached_property:
        return [("func", value.func)]
    if kind is functools.partialmethod:
        return [("func", value.func), ("args", value.args), *sorted(value.keywords.items())]
    if kind in (types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, np.ufunc):
        owner = getattr(value, "__self__", None)
        is_bound = owner is not None and type(owner) is not types.ModuleType
        return [("__name__", value.__name__), *([("__self__", owner)] if is_bound else [])]
    if kind is types.ModuleType or issubclass(kind, types.ModuleType):
        return [("__name__", attributes(value).get("__name__"))]
    if kind in (operator.itemgetter, operator.attrgetter, operator.methodcaller):
        return [("arguments", value.__reduce__()[1:])]
    if kind is slice:
        return [("start", value.start), ("stop", value.stop), ("step", value.step)]
    return None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


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


def _left_out(kind: type) -> set[str]:
    """Returns the names of the attributes that decide nothing."""
    names = {
        name
        for base in type.mro(kind)
        for name, member in members_of_class(base).items()
        if type(member) is functools.cached_property
    }
    if issubclass(kind, DataLoader):
        names |= _OF_A_LOADER
    if issubclass(kind, Sampler):
        names |= _OF_A_SAMPLER
    if module_of(kind).partition(".")[0] == _PARENT[0]:
        names.add(_PARENT[1])
    return names
