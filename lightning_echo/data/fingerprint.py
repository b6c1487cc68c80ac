"""The fingerprint of data: its values and the code that makes its examples; and what a user sets between two epochs."""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from lightning_echo.data.contents import OPENED, Walk, attributes, digest_of_texts, full_name, members_of_class, module_of

# ---------------------------------------------------------------------- code
# Follows the code that makes examples, and notes the module globals and class attributes that it names.
#
# It begins with the classes and functions that a data set holds, and continues with the names in their code. Of a class counts
# what reading can reach: special methods, methods that an installed package's base class has, too, and whatever the reached code
# names. If that code calls ``getattr``, everything counts.

LOADED_LATER = "module "
"""Begins the path of a module that code imports when it runs."""

_OURS = ("lightning_echo", "numpy", "torch")  # also if they are installed from a folder
_HOOKS = {"load", "augment", "read", "decode", "set_epoch"}  # of a data set or sampler, called by this package
_ANY_NAME = {"getattr", "vars", "__dict__"}
_LEFT_OUT = {"__annotate__", "__annotate_func__", "__classdictcell__", "__slotnames__", "_abc_impl"}
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}


class _Named(NamedTuple):
    """The names that code uses."""

    globals: frozenset[tuple[str, ...]]  # each with the attributes that are read of it, one after the other
    imports: frozenset[tuple[str, str]]  # modules, each with a name that is taken from it
    attributes: frozenset[str]


class Code:
    """The texts of code, and of what it names. The arguments are those of `Walk`.

    ``quickly`` leaves out the code itself, since it does not change while a process runs.
    """

    def __init__(self, ignore: Iterable[str], *, quickly: bool) -> None:
        self.texts: dict[str, str] = {}
        self._ignore, self._quickly = tuple(ignore), quickly
        self._left: deque[Any] = deque()
        self._met: dict[int, Any] = {}
        self._roots: set[str] = set()  # globals and class attributes that have a text
        self._named: set[str] = set()
        self._waiting: list[tuple[type, str, Any]] = []  # members of classes that nothing has named so far

    def meet(self, thing: Any) -> None:
        """Notes a class or a function, which `follow` looks at."""
        if id(thing) not in self._met:
            self._met[id(thing)] = thing
            self._left.append(thing)

    def follow(self) -> None:
        """Looks at all that was met, and at the names in its code."""
        while self._left or self._take_named():
            thing = self._left.popleft()
            if type(thing) is types.FunctionType:
                self._look_at_function(thing)
            else:
                self._look_at_class(thing)

    def _take_named(self) -> bool:
        """Adds members of classes that were named in the meantime. Returns whether there is more to look at."""
        waiting, self._waiting = self._waiting, []
        for kind, name, member in waiting:
            if name in self._named or self._named & _ANY_NAME:
                self._add_root(f"{full_name(kind)}.{name}", member)
            else:
                self._waiting.append((kind, name, member))
        return bool(self._left)

    def _look_at_class(self, kind: type) -> None:
        bases = type.mro(kind)
        installed = [base for base in bases if is_installed(module_of(base))]
        known = {name for base in installed for name in members_of_class(base)} | _HOOKS
        for base in bases:
            if base in installed:
                self._add_version(module_of(base))
                continue
            for name, member in members_of_class(base).items():
                is_special = name.startswith("__") and name.endswith("__")
                if name in _LEFT_OUT or (is_special and not issubclass(type(member), _FUNCTIONS)):
                    continue
                if name in known or is_special:
                    self._add_root(f"{full_name(base)}.{name}", member)
                else:
                    self._waiting.append((base, name, member))

    def _look_at_function(self, function: types.FunctionType) -> None:
        code, namespace = function.__code__, function.__globals__
        module = namespace.get("__name__")
        module = module if isinstance(module, str) else ""
        if is_installed(module, code.co_filename):
            self._add_version(module)
            return
        name = _in_module(module, function.__qualname__)
        if not self._quickly:
            self._add_text(f"code of {name}", _digest(code))
        named = _named_by(code)
        self._named |= named.attributes
        for chain in sorted(named.globals):
            if chain[0] in namespace:
                self._add_chain(module, namespace, chain)
        for imported, taken in sorted(named.imports):
            held = sys.modules.get(imported)
            if held is not None and not is_installed(imported):
                self._add_text(f"{LOADED_LATER}{imported}", "imported")
                self._add_chain(imported, attributes(held), (taken,))

    def _add_chain(self, module: str, namespace: dict[str, Any], chain: tuple[str, ...]) -> None:
        """Adds a global, or the attribute of a module that code reads."""
        name, *further = chain
        if name not in namespace:
            return
        value, path = namespace[name], _in_module(module, name)
        if issubclass(type(value), types.ModuleType):
            held = attributes(value)
            inner = held.get("__name__")
            if isinstance(inner, str) and not is_installed(inner) and further:
                self._add_chain(inner, held, tuple(further))
        elif further and not issubclass(type(value), type) and further[0] in (held := attributes(value)):
            self._add_root(f"{path}.{further[0]}", held[further[0]])
        else:
            self._add_root(path, value)

    def _add_root(self, path: str, value: Any) -> None:
        if path in self._roots:
            return
        walk = Walk(self._ignore, quickly=self._quickly, meet=self.meet)
        if walk.is_ignored(path):
            return
        self._roots.add(path)
        walk.add(path, value)
        for each, text in walk.texts:
            self._add_text(each, text)

    def _add_text(self, path: str, text: str) -> None:
        known = self.texts.get(path, text)
        self.texts[path] = text if known == text else " | ".join(sorted({*known.split(" | "), text}))

    def _add_version(self, module: str) -> None:
        top = module.partition(".")[0]
        version = attributes(sys.modules.get(top)).get("__version__")
        if isinstance(version, str):
            self.texts[f"version of {top}"] = str(version)


@functools.lru_cache(maxsize=4096)
def is_installed(module: str, file: str = "") -> bool:
    """Returns whether a module belongs to Python, to an installed package or to this one. ``file`` counts if it is not loaded."""
    top = module.partition(".")[0]
    if top in ("__main__", "__mp_main__"):
        return False
    if top in _OURS or top in sys.stdlib_module_names:
        return True
    found = attributes(sys.modules[module]).get("__file__") if module in sys.modules else file
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return isinstance(found, str) and any(found.startswith(folder) for folder in folders)


def _in_module(module: str, name: str) -> str:
    return name if module in ("__main__", "__mp_main__", "") else f"{module}.{name}"


@functools.lru_cache(maxsize=4096)
def _digest(code: types.CodeType) -> str:
    """Returns a digest of code. Its file and its line numbers do not count."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    handlers = getattr(code, "co_exceptiontable", b"")
    return digest_of_texts([code.co_code.hex(), handlers.hex(), repr(counts), repr(names), *map(_text_of, code.co_consts)])


def _text_of(constant: Any) -> str:
    if type(constant) is types.CodeType:
        return f"code {constant.co_name} {_digest(constant)}"
    if type(constant) is frozenset:
        return f"frozenset {sorted(map(_text_of, constant))}"
    if type(constant) is tuple:
        return f"tuple {list(map(_text_of, constant))}"
    return f"{type(constant).__name__} {constant!r}"


@functools.lru_cache(maxsize=4096)
def _named_by(code: types.CodeType) -> _Named:
    """Returns the names that code, and the code in it, uses."""
    chains: set[tuple[str, ...]] = set()
    imports: set[tuple[str, str]] = set()
    chain: tuple[str, ...] = ()
    imported = ""
    for step in dis.get_instructions(code):
        if chain and step.opname in _ATTRIBUTE:
            chain = (*chain, step.argval)
            continue
        if chain:
            chains.add(chain)
            chain = ()
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (step.argval,)
        elif step.opname == "IMPORT_NAME":
            imported = step.argval
        elif step.opname == "IMPORT_FROM":
            imports.add((imported, step.argval))
        elif step.opname != "STORE_FAST":
            imported = imported if step.opname in ("CACHE", "EXTENDED_ARG") else ""
    if chain:
        chains.add(chain)
    inner = [_named_by(constant) for constant in code.co_consts if type(constant) is types.CodeType]
    return _Named(
        frozenset(chains.union(*(each.globals for each in inner))),
        frozenset(imports.union(*(each.imports for each in inner))),
        frozenset(code.co_names).union(*(each.attributes for each in inner)),
    )


# ---------------------------------------------------------------------- fingerprint

_CODE = "code of "
_NOTHING = "nothing"


class Fingerprint(NamedTuple):
    """All that decides what an example is, as texts."""

    held: dict[str, str]  # the contents of the objects: a text for each path, such as "dataset.transform.p"
    code: dict[str, str]  # the code that they run, and the globals and class attributes that it names, by their names

    def digest(self) -> str:
        """Returns the fingerprint as 16 characters. What may be opened or imported later does not count."""
        held = [item for item in self.held.items() if item[1] != "None" and not item[1].startswith(OPENED)]
        code = [item for item in self.code.items() if not item[0].startswith(LOADED_LATER)]
        return digest_of_texts([part for item in (*held, *code) for part in item])

    def without(self, names: Iterable[str]) -> Fingerprint:
        """Returns the fingerprint without attributes that are given by name, or by whole path."""
        names = tuple(names)
        held, code = ({path: text for path, text in part.items() if not _is_left_out(path, names)} for part in self)
        return Fingerprint(held, code)

    def difference(self, other: Fingerprint, ignore: Iterable[str] = ()) -> str:
        """Returns the first difference, as `first_difference` does.

        Of code, only names that both have are compared: a module that is imported later is not a difference.
        """
        common = {name: text for name, text in self.code.items() if name in other.code}
        common_there = {name: other.code[name] for name in common}
        return first_difference(self.held, other.held, ignore) or first_difference(common, common_there, ignore)


def fingerprint(parts: Mapping[str, Any], ignore: Iterable[str] = ()) -> Fingerprint:
    """Returns the fingerprint of objects by name. It takes about a second per GB of arrays and tensors, at most 0.3 s for one.

    The names begin the paths. ``ignore`` has names of attributes that are left out wherever they are (``"log_dir"``), or whole
    paths.

    Example:
        >>> from torch.utils.data import Subset
        >>> one, other = (fingerprint({"dataset": Subset(["a", "b", "c"], indices)}) for indices in ([0, 1], [0, 2]))
        >>> one.difference(other)
        'dataset.indices: list [0, 1] and list [0, 2]'
    """
    held, code = _taken(parts, tuple(ignore), quickly=False)
    return Fingerprint(held, {"version of Python": "{}.{}".format(*sys.version_info), **code})


def glance(parts: Mapping[str, Any], ignore: Iterable[str] = ()) -> dict[str, str]:
    """Returns what may change in objects while this process runs, as texts by path, for `first_difference`.

    These are the attributes, members, arrays and tensors, and the globals and class attributes that the code names. Tensors count
    by memory, version counter and checksum, arrays by checksum; if they are larger than 16 MiB, of some blocks. So it is much
    quicker than `fingerprint`. The texts are comparable within one process only.
    """
    held, named = _taken(parts, tuple(ignore), quickly=True)
    return {**held, **named}


def first_difference(here: Mapping[str, str], there: Mapping[str, str], ignore: Iterable[str] = ()) -> str:
    """Returns the first difference of two mappings of texts, in words; empty if there is none.

    A file or connection that is only opened later is not a difference. ``ignore`` has names of attributes, or whole paths.

    Example:
        >>> first_difference({"data.file": "None", "data.p": "0.1"}, {"data.file": "open: h5py.File", "data.p": "0.25"})
        'data.p: 0.1 and 0.25'
    """
    names = tuple(ignore)
    for path in dict.fromkeys([*here, *there]):
        one, other = here.get(path, _NOTHING), there.get(path, _NOTHING)
        if one == other or _is_left_out(path, names):
            continue
        if any(before in ("None", _NOTHING) and after.startswith(OPENED) for before, after in ((one, other), (other, one))):
            continue
        return f"the {path} is other code" if path.startswith(_CODE) else f"{path}: {one} and {other}"
    return ""


def _is_left_out(path: str, names: Iterable[str]) -> bool:
    """Returns whether a path leads through an attribute that is given by its name, or by its whole path."""
    for name in names:
        if "." in name:
            if path == name or path.startswith((f"{name}.", f"{name}[")):
                return True
        elif f".{name}." in f".{path}." or f".{name}[" in f".{path}":
            return True
    return False


def _taken(parts: Mapping[str, Any], ignore: tuple[str, ...], *, quickly: bool) -> tuple[dict[str, str], dict[str, str]]:
    code = Code(ignore, quickly=quickly)
    walk = Walk(ignore, quickly=quickly, meet=code.meet)
    for name, part in parts.items():
        walk.add(name, part)
    code.follow()
    return dict(walk.texts), dict(sorted(code.texts.items()))


# ---------------------------------------------------------------------- changes
# A plain loader starts its workers in each epoch, so that they see what was set since then: the stage of a curriculum, pseudo
# labels, ``dataset.set_epoch``. An `EchoLoader` keeps its workers. It looks at the data when it starts them, and at the beginning
# of each epoch (`glance`). If something has changed, it starts new workers.
#
# Changes by the reading itself do not count, such as a counter of reads: whatever has changed while the first batch was made is
# left out from then on. A validation may read the same data set in this process, while the training reads it in workers, or
# through a copy. Such changes are found by reading a few examples once more (``cache/kept.py``), when a change is seen for the
# first time.
#
# With ``persistent_workers=True``, a plain loader's workers would not see a change either, so that nothing is compared.

_LONG_SECONDS = 1.0


class Changed(NamedTuple):
    """The first difference in the ``data`` (or ``collate_fn``) and in the ``order`` of torch's sampler, in words; empty: none."""

    data: str = ""
    order: str = ""


class Changes:
    """Finds out what was changed since the workers were started.

    ``parts`` returns what decides the examples, by name, and nothing if nothing is to be compared; ``sampler`` what decides the
    order. ``by_reading`` reads some examples in another process, and returns the paths of what that changes, at most once.
    """

    def __init__(
        self,
        parts: Callable[[], Mapping[str, Any]],
        sampler: Callable[[], Mapping[str, Any]] = dict,
        ignore: Iterable[str] = (),
        by_reading: Callable[[], Iterable[str]] = set,
    ) -> None:
        self._parts, self._sampler, self._ignore = parts, sampler, tuple(ignore)
        self.seconds = 0.0  # that the last look has taken
        self._by_reading: Callable[[], Iterable[str]] | None = by_reading
        self._known: dict[str, str] = {}  # the data when the workers were started
        self._known_order: dict[str, str] = {}  # the sampler then
        self.own: set[str] = set()  # paths of what reading itself changes, as far as that is known

    def watch(self, parts: Callable[[], Mapping[str, Any]]) -> None:
        """Looks from then on at the same data as another loader has it."""
        self._parts = parts

    @property
    def why_slow(self) -> str:
        """A message for the user if the looks take long; otherwise empty."""
        if self.seconds <= _LONG_SECONDS:
            return ""
        return (
            f"looking for changes of the data set takes long: {self.seconds:.1f} s in each epoch. If nothing is set on it "
            "between epochs, DataLoader(persistent_workers=True) leaves that out"
        )

    def begin(self) -> None:
        """Notes the data as it is. Call it before workers are started."""
        self._known, self._known_order = self._look()

    def note_own(self) -> None:
        """Notes what reading itself changes. Call it when the first batch is there."""
        if not self._known:
            return
        self.own |= changed_paths(self._known, self._look()[0])

    def look(self) -> Changed:
        if not self._known:
            return Changed()
        now, order = self._look()
        if self._by_reading is not None and first_difference(self._known, now, self.own):
            by_reading, self._by_reading = self._by_reading, None
            self.own.update(by_reading())
        return Changed(first_difference(self._known, now, self.own), first_difference(self._known_order, order))

    def _look(self) -> tuple[dict[str, str], dict[str, str]]:
        started, parts = perf_counter(), self._parts()
        found = (glance(parts, self._ignore), glance(self._sampler(), ignore=("data_source", "dataset"))) if parts else ({}, {})
        self.seconds = perf_counter() - started
        return found


def changed_paths(before: Mapping[str, str], now: Mapping[str, str]) -> set[str]:
    """Returns the paths whose texts differ; of a member that comes or goes, the path of its container."""
    found = set()
    for path in before.keys() | now.keys():
        if before.get(path) != now.get(path):
            is_member = path.endswith("]") and not (path in before and path in now)
            found.add(path.rpartition("[")[0] if is_member else path)  # what loses or gets a member changes itself
    return found
