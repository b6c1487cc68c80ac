"""A saved state with one field less, or with one that is of another type."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all keys of all dictionaries in a state."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from places(value, (*path, number))


def changed(state: Any, path: tuple[Any, ...], value: Any = None, *, removes: bool = False) -> Any:
    """A copy of a state in which the field at a path has another value, or is missing."""
    if not path:
        return value
    key, *rest = path
    found = dict(state) if isinstance(state, Mapping) else list(state)
    if removes and not rest:
        del found[key]
    else:
        found[key] = changed(copy.copy(state[key]), tuple(rest), value, removes=removes)
    return found
