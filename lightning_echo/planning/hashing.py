"""Hashes of integers, the same on every machine. All seeds are made from them."""

from __future__ import annotations

__all__ = ["mix", "named_seed"]

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """Returns a 64-bit hash of integers (splitmix64 finaliser), the same on every machine."""
    value = 0
    for number in numbers:
        value = (value + number + _ODD) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def named_seed(seed: int, name: str) -> int:
    """Returns a different seed of 63 bits for each name, the same on every machine. For an empty name: the seed itself."""
    return mix(seed, *name.encode()) >> 1 if name else seed
