"""Random states: seeded from the plan for what runs in the workers, put back where it runs in the training process.

Only torch's CPU generator is seeded: ``torch.manual_seed`` would also reseed every GPU, which nothing puts back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["OwnRandomStates", "PreservingIterator", "preserved_random_states", "seed_all"]


def seed_all(seed: int) -> None:
    """Seeds torch's default generator, numpy's and ``random``'s global ones with a 64-bit number."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Puts the three global random states back as they were."""
    states = _get_states()
    try:
        yield
    finally:
        _set_states(states)


class PreservingIterator:
    """Iterates, and after each item puts the three global random states back. Reading them takes numpy longer than an echo does.

    Args:
        items: May draw from the global random states.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> PreservingIterator:
        return self

    def __next__(self) -> Any:
        with preserved_random_states():
            return next(self._items)


class OwnRandomStates:
    """Random states of the user's own iterator that runs in the training process, for as long as each ``with`` lasts.

    They go on where the last ``with`` left them. Merely putting the training's states back would let the iterator draw the
    same numbers again and again while training draws none.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        self._outside = _get_states()
        if self._states is not None:
            _set_states(self._states)

    def __exit__(self, *exception: object) -> None:
        self._states = _get_states()
        _set_states(self._outside)


def _get_states() -> tuple[Any, Any, Any]:
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
