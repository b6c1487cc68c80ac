"""A random permutation that can be entered anywhere: no list of its length is ever made."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lightning_echo.planning.hashing import mix

__all__ = ["Slots", "permute"]

Slots = npt.NDArray[np.uint64]
_ROUNDS = 4


def permute(slots: Slots, length: int, key: int) -> Slots:
    """A random permutation of ``range(length)``, evaluated at ``slots`` only.

    A Feistel network on the digits of a number in base ``ceil(sqrt(length))``, walked on until it falls inside the range.
    """
    columns = math.isqrt(length - 1) + 1
    rows = -(-length // columns)
    values: Slots = slots.copy()
    outside: npt.NDArray[np.bool_] = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], np.uint64(columns), np.uint64(rows), key)
        outside = values >= length
    return values


def _feistel(values: Slots, columns: np.uint64, rows: np.uint64, key: int) -> Slots:
    row: Slots
    column: Slots
    row, column = np.divmod(values, columns)
    for i in range(_ROUNDS):
        column = (column + _hash(row, mix(key, 2 * i))) % columns
        row = (row + _hash(column, mix(key, 2 * i + 1))) % rows
    mixed: Slots = column + columns * row
    return mixed


def _hash(values: Slots, key: int) -> Slots:
    mixed: Slots = (values ^ np.uint64(key)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(32))) >> np.uint64(1)
    return mixed
