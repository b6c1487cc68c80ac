"""Random states: the three global ones, the generators that data sets hold, and how a worker seeds all of them for each use."""

from __future__ import annotations

import ctypes
import functools
import inspect
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_echo.data.objects import LOADING_TYPES, attributes_of, is_concat, is_container, is_standard, is_subset, slots_of
from lightning_echo.plan.plan import mix

# ---------------------------------------------------------------------- randomness
# The global random states are those of torch, numpy and ``random``: seeded from the plan in the workers, put back in the training
# process. In torch, only the CPU generator is seeded: ``torch.manual_seed`` would also reseed every GPU, and nothing would put
# that back.

_MT19937_BYTES = 2500  # numpy's mt19937_state: 624 words of 32 bits and a position


class RandomStates(NamedTuple):
    """The states of the global generators, by the names of their packages."""

    torch: Any
    numpy: Any
    random: Any


def random_states() -> RandomStates:
    return RandomStates(torch.default_generator.get_state(), np.random.get_state(), random.getstate())


def seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    states = random_states()
    try:
        yield
    finally:
        _set_states(states)


class PreservingIterator:
    """Iterates, and puts the three global random states back after each item.

    It is used only if items are read, because numpy takes longer to read its state than a whole echo takes.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> PreservingIterator:
        return self

    def __next__(self) -> Any:
        with preserved_random_states():
            return next(self._items)


class OwnRandomStates:
    """Separate random states for a user's iterator that runs in the training process. They are in use inside a ``with`` block.

    They continue where the last ``with`` block left them. It would not be enough to put the training's states back: while the
    training draws nothing, the iterator would draw the same numbers again and again.
    """

    def __init__(self) -> None:
        self._states: RandomStates | None = None

    def __enter__(self) -> None:
        self._outside = random_states()
        if self._states is not None:
            _set_states(self._states)

    def __exit__(self, *exception: object) -> None:
        self._states = random_states()
        _set_states(self._outside)


class DrawingTrap:
    """Notices whether random numbers are drawn, from a global generator or from those whose states the given functions return.

    `set` puts the global generators into a known state. `drawn_from` looks at them afterwards. For ``random`` it only looks at
    the next number, since the state is a tuple of 625 numbers. Both together take 8 microseconds. Comparing copies of the states
    would take 100.
    """

    def __init__(self, states: Sequence[Callable[[], Any]] = ()) -> None:
        self._others, self._before = states, list[bytes]()
        with preserved_random_states():
            self.set()
            self._expected = self._found()

    def set(self) -> None:
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        if self._others:
            self._before = [pickle.dumps(state()) for state in self._others]

    def drawn_from(self) -> str:
        """Returns the names of the generators that were used since `set`. The caller must then seed the global generators."""
        found = self._found()
        names = [name for name, one, other in zip(RandomStates._fields, self._expected, found, strict=True) if one != other]
        if self._others and self._before != [pickle.dumps(state()) for state in self._others]:
            names.append("a generator that the data set holds")
        return " and ".join(names)

    def _found(self) -> tuple[bytes, bytes, int]:
        # numpy's own function for the state takes 40 microseconds.
        of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, but not in the __all__ of the stubs
        return (
            torch.default_generator.get_state().numpy().tobytes(),
            ctypes.string_at(of_numpy.ctypes.state_address, _MT19937_BYTES),
            random.getrandbits(64),
        )


def quick_states() -> tuple[bytes, bytes, Any]:
    """Returns the states of the three global generators as `put_back` takes them. It takes 17 microseconds, `random_states` 110.

    The state of numpy is that of its bit generator alone, without a normal number that it may have kept.
    """
    of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # see `DrawingTrap`
    state = ctypes.string_at(of_numpy.ctypes.state_address, _MT19937_BYTES)
    return torch.default_generator.get_state().numpy().tobytes(), state, random.getstate()


def put_back(states: tuple[bytes, bytes, Any]) -> None:
    """Sets the three global generators to `quick_states`."""
    torch.default_generator.set_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))
    of_numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]  # see `DrawingTrap`
    ctypes.memmove(of_numpy.ctypes.state_address, states[1], _MT19937_BYTES)
    random.setstate(states[2])


def _set_states(states: RandomStates) -> None:
    torch.default_generator.set_state(states.torch)
    np.random.set_state(states.numpy)
    random.setstate(states.random)


# ---------------------------------------------------------------------- generators
# When a data set is split, the stage that is reused must not draw from any generator that the data set holds: neither from its
# own, nor from those of the objects, data sets and transforms inside it, nor from those that the functions of the user's modules
# refer to: globals, variables of enclosing functions, defaults. The transforms that the split takes out are left out here. A
# `Place` does not hold the generator itself, because seeding puts a new generator in its place (MONAI, Albumentations).
#
# Nothing is copied or called. Only the first few members of a container are examined. A generator that is made at a read is found
# by another search.

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
# The generators behind the functions of their modules, which `RandomStates` watches.
_GLOBAL = (random.random.__self__, np.random.rand.__self__, torch.default_generator)  # type: ignore[attr-defined]
# Attributes of a data set that hold transforms.
TRANSFORMS = ("transform", "target_transform", "transforms", "_transform", "_target_transform", "_transforms", "_augment_one")

_FEW = 16  # largest number of members of a container that are examined
_DEEP = 12  # levels of objects in objects that are followed
_MOST_OBJECTS = 10_000  # largest number of objects that are examined, together


class Place(NamedTuple):
    """Where something is held: the attribute, index or key of an object or container. Without a name it is the owner itself."""

    owner: Any
    name: Any

    @property
    def held(self) -> Any:
        """The object that is held there at the moment; None if there is none."""
        if self.name is None:
            return self.owner
        if is_container(type(self.owner)) and isinstance(self.owner, list | tuple | dict):
            try:
                return self.owner[self.name]
            except LookupError:
                return None
        kind, attributes = type(self.owner), getattr(self.owner, "__dict__", {})
        if self.name in attributes:
            return attributes[self.name]
        return getattr(self.owner if self.name in slots_of(kind) else kind, self.name, None)

    def state(self) -> Any:
        return generator_state(self.held)


def places_of_generators(*datasets: Any) -> list[Place]:
    """Returns the places of random generators in data sets and in what they hold, one place for each generator."""
    found: dict[int, Place] = {}
    seen: dict[int, Any] = {}
    left: deque[tuple[Any, int, bool]] = deque((dataset, 0, True) for dataset in datasets)
    while left and len(seen) < _MOST_OBJECTS:
        value, depth, is_split = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        for place, part, leads_on in _parts(value, depth, is_split):
            if isinstance(part, GENERATORS):
                if not any(part is own for own in _GLOBAL):
                    found.setdefault(id(part), place)
            elif depth < _DEEP:
                left.append((part, depth + 1, leads_on))
    return list(found.values())


def generator_state(generator: Any) -> Any:
    """Returns the state of a random generator; None if it has no state (the operating system's) or is not a generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState | torch.Generator):
        return generator.get_state()
    has_state = isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom)
    return generator.getstate() if has_state else None


def _parts(value: Any, depth: int, is_split: bool) -> Iterator[tuple[Place, Any, bool]]:
    """Yields the place of each part of an object, the part, and whether it is split, if it is a data set."""
    if is_container(type(value)):
        if isinstance(value, list | tuple | dict):
            members = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((Place(value, name), member, is_split) for name, member in islice(members, _FEW))
        else:
            yield from ((Place(member, None), member, False) for member in islice(value, _FEW))
    elif isinstance(value, types.MethodType | types.BuiltinMethodType):
        yield Place(value.__self__, None), value.__self__, False
    elif isinstance(value, functools.partial):
        yield from ((Place(part, None), part, False) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif depth == 0 or isinstance(value, LOADING_TYPES) or not is_standard(type(value)):
        yield from _attributes(value, is_split)


def _attributes(value: Any, is_split: bool) -> Iterator[tuple[Place, Any, bool]]:
    if isinstance(value, type):
        return
    attributes = attributes_of(value)
    leads_on = is_split and (is_subset(value) or is_concat(value))
    for name, part in attributes.items():
        if not (is_split and name in TRANSFORMS):
            yield Place(value, name), part, leads_on
    for base in type(value).__mro__:
        for name, part in base.__dict__.items():
            if isinstance(part, GENERATORS):  # all instances share it
                if name not in attributes:
                    yield Place(value, name), part, False
            elif (function := _function_in(part)) is not None:
                yield Place(function, None), function, False


def _function_in(member: Any) -> types.FunctionType | None:
    """Returns the function of a member of a class, if it is of a user's module."""
    if isinstance(member, property):
        member = member.fget
    member = getattr(member, "__wrapped__", getattr(member, "__func__", member))  # a cached function, a static or class method
    return member if isinstance(member, types.FunctionType) and _is_users(member.__module__) else None


def _of_function(function: types.FunctionType) -> Iterator[tuple[Place, Any, bool]]:
    """Yields what a function of a user's module refers to, in the form of `_parts`."""
    if not _is_users(function.__module__):
        return
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            held.append(cell.cell_contents)
    yield from ((Place(part, None), part, False) for part in held)
    names, scope = _names_in(function.__code__), function.__globals__
    scopes = [scope, *(vars(scope[name]) for name in names if isinstance(scope.get(name), types.ModuleType))]
    for names_of_scope in scopes:
        if not _is_users(names_of_scope.get("__name__")):
            continue
        for name in names & names_of_scope.keys():
            part = _function_in(names_of_scope[name]) or names_of_scope[name]
            if not isinstance(part, types.ModuleType | type):
                yield Place(names_of_scope, name) if isinstance(part, GENERATORS) else Place(part, None), part, False


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the names that code and the functions defined in it use for globals and attributes."""
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*inner)


@lru_cache(maxsize=1024)
def _is_users(module: str | None) -> bool:
    """Returns whether a module is of the user's program, and not of an installed package."""
    if module is None or module.partition(".")[0] in sys.stdlib_module_names | {"lightning_echo"}:
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


# ---------------------------------------------------------------------- seeding

BATCH, EXAMPLE = 1, 2  # purposes of a seed
_DEEP_IN_DATA = 8  # levels of data sets, containers and transforms that are followed


class Seeding:
    """Seeds the three global generators, and those of transforms and data sets that have a method for it (see `seeders`).

    ``key`` is the seed of this rank.
    """

    def __init__(self, dataset: Any, key: int) -> None:
        self._key = key
        self._seeders = list(seeders(dataset).values())

    def seed(self, purpose: int, number: int) -> None:
        """Seeds all generators for a batch (`BATCH`) or for reading an example (`EXAMPLE`), each of them differently."""
        seed = mix(self._key, purpose, number)
        seed_all(seed)
        for place, seed_one in enumerate(self._seeders):  # each gets another seed, since no two may draw the same numbers
            seed_one(seed + place & 0x7FFFFFFF)


class NoSeeding:
    """Takes the place of a `Seeding` if no random numbers are drawn."""

    def seed(self, purpose: int, number: int) -> None: ...


def seeders(dataset: Any) -> dict[int, Callable[[int], Any]]:
    """Returns functions that seed the generators of transforms and data sets, by the ``id`` of the object that has the method.

    The methods are Albumentations' ``set_random_seed(seed)`` and MONAI's ``set_random_state(seed=seed)``, of all objects in a
    chain of data sets that have one. The method of a stream itself is not called. All workers must keep the same seed there: they
    shuffle the examples in the same way, and then divide them among themselves (MONAI's ``ShuffleBuffer``).
    """
    found: dict[int, Callable[[int], Any]] = {}
    seen: dict[int, Any] = {}
    left = deque([(dataset, 0)])
    while left:
        value, depth = left.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        seeder = None if isinstance(value, IterableDataset) else _seeder_of(value)
        if seeder is not None:
            found[id(value)] = seeder
        is_dataset = depth == 0 or isinstance(value, Dataset)
        if depth < _DEEP_IN_DATA and (is_dataset or seeder is None):  # a transform seeds its members itself
            left += [(part, depth + 1) for part in _seeded_parts(value, is_dataset)]
    return found


def _seeded_parts(value: Any, is_dataset: bool) -> Iterable[Any]:
    if is_dataset:
        return list(getattr(value, "__dict__", {}).values())
    if type(value) in (list, tuple):  # exactly these types: a subclass may read data when it is iterated
        return list(value[:_FEW])
    if type(value) is dict:
        return islice(value.values(), _FEW)
    members = value if isinstance(value, torch.nn.Sequential) else getattr(value, "__dict__", {}).get("transforms")
    return list(members)[:_FEW] if isinstance(members, torch.nn.Sequential | list | tuple) else ()


def _seeder_of(value: Any) -> Callable[[int], Any] | None:
    kind = type(value)  # not the object itself, which may have an attribute for any name
    if callable(getattr(kind, "set_random_seed", None)):
        seeder: Callable[[int], Any] = value.set_random_seed
        return seeder
    if callable(method := getattr(kind, "set_random_state", None)) and "seed" in inspect.signature(method).parameters:
        return lambda seed: value.set_random_state(seed=seed)
    return None
