"""The code that makes examples, and the module globals and class attributes that it names, as texts by name.

It begins with the classes and functions that a data set holds, and continues with what their code names. Of a class counts what
reading can reach: special methods, what a class of an installed package calls (a method that it has, too), and whatever the code
that is reached names. If that code calls ``getattr``, everything counts.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning_echo.protecting.fingerprints.contents import digest_of_texts
from lightning_echo.protecting.fingerprints.walk import Walk, attributes, full_name, members_of_class, module_of

__all__ = ["LOADED_LATER", "Code"]

LOADED_LATER = "module "
"""Begins the path of a module that code imports when it runs."""

_OURS = ("lightning_echo", "numpy", "torch")  # also if they are installed from a folder
_HOOKS = {"load", "augment", "read", "decode", "set_epoch"}  # of a data set or sampler, called by this package
_ANY_NAME = {"getattr", "vars", "__dict__"}
_LEFT_OUT = {"__annotate__", "__annotate_func__", "__classdictcell__", "__slotnames__", "_abc_impl"}
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}


class _Named(NamedTuple):
    """What code names.

    Attributes:
        globals: Names of globals, each with the attributes that are read of it, one after the other.
        imports: Modules that the code imports, each with a name that it takes from it.
        attributes: Names of attributes.
    """

    globals: frozenset[tuple[str, ...]]
    imports: frozenset[tuple[str, str]]
    attributes: frozenset[str]


class Code:
    """The texts of code, and of what it names.

    Args:
        ignore: As in `Walk`.
        quickly: As in `Walk`. Then the code itself is left out, since it does not change while a process runs.
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
        """Looks at all that was met, and at what that names."""
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
                if name in _LEFT_OUT or (_is_special(name) and not issubclass(type(member), _FUNCTIONS)):
                    continue
                if name in known or _is_special(name):
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
    """Returns whether a module belongs to Python, to an installed package or to this one.

    Args:
        module: Its name.
        file: Its file, if the module itself is not loaded.
    """
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


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@functools.lru_cache(maxsize=4096)
def _digest(code: types.CodeType) -> str:
    """Returns a digest of what code does. Its file and its line numbers do not count."""
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
    """Returns what code names, and the code in it."""
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
