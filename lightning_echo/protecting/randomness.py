"""The three global random states: seeded from the plan in the workers, put back in the training process.

They are those of torch, numpy and ``random``. In torch, only the CPU generator is seeded: ``torch.manual_seed`` would also reseed
every GPU, and nothing would put that back.
"""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = [
    "DrawingTrap",
    "OwnRandomStates",
    "PreservingIterator",
    "RandomStates",
    "preserved_random_states",
    "random_states",
    "seed_all",
]

_MT19937_BYTES = 2500  # numpy's mt19937_state: 624 words of 32 bits and a position


class RandomStates(NamedTuple):
    """The states of the global generators, by the names of their packages."""

    torch: Any
    numpy: Any
    random: Any


def random_states() -> RandomStates:
    """Returns the three global random states as they are now."""
    return RandomStates(torch.default_generator.get_state(), np.random.get_state(), random.getstate())


def seed_all(seed: int) -> None:
    """Seeds the global generators of torch, numpy and ``random`` with a 64-bit number."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Puts the three global random states back, at the end of the ``with`` block, as they were at its beginning."""
    states = random_states()
    try:
        yield
    finally:
        _set_states(states)


class PreservingIterator:
    """Iterates, and puts the three global random states back after each item.

    It is used only if items are read, because numpy takes longer to read its state than a whole echo takes.

    Args:
        items: An iterator that may draw from the global random states.
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

    They go on where the last ``with`` block left them. It would not be enough to put the training's states back: while the
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
    """Notices whether random numbers are drawn, from a global generator or from one of the given ones.

    `set` puts the global generators into a known state. `drawn_from` looks at them afterwards. For ``random`` it only looks at
    the next number, since the state is a tuple of 625 numbers. Both together take 8 microseconds. Comparing copies of the states
    would take 100.

    Args:
        states: Functions that return the states of further generators.
    """

    def __init__(self, states: Sequence[Callable[[], Any]] = ()) -> None:
        self._others, self._before = states, list[bytes]()
        with preserved_random_states():
            self.set()
            self._expected = self._found()

    def set(self) -> None:
        """Begins to watch."""
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        if self._others:
            self._before = [pickle.dumps(state()) for state in self._others]

    def drawn_from(self) -> str:
        """Returns the names of the generators that were used since `set`; empty if none was used.

        The caller must seed the global generators anew.
        """
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


def _set_states(states: RandomStates) -> None:
    torch.default_generator.set_state(states.torch)
    np.random.set_state(states.numpy)
    random.setstate(states.random)
