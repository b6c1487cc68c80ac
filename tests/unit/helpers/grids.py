"""Thins grids of parameters: chooses a few cases that cover all values, or all pairs of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)


def values_of(arguments: Mapping[str, object]) -> list[tuple[str, int]]:
    """Returns the values of a case, each with the name of its argument. A dictionary is as many arguments as it has keys.

    A value is told by its identity, since it need not be hashable: cases that share it have the same object.

    Example:
        >>> [name for name, _ in values_of({"workers": 2, "setting": {"factor": 3, "reuse": "each"}})]
        ['setting factor', 'setting reuse', 'workers ']
    """
    parts = (
        (f"{name} {part}", value)
        for name, whole in arguments.items()
        for part, value in (whole.items() if isinstance(whole, dict) else [("", whole)])
    )
    return sorted((name, id(value)) for name, value in parts)


def covering(grid: Mapping[Case, Sequence[Hashable]], size: int, chosen: Sequence[Case] = ()) -> list[Case]:
    """Returns cases that cover every combination of ``size`` values that the grid has.

    The choice is greedy: each step takes the case that covers the most missing combinations; among equals, the one whose values
    occur least.

    Args:
        grid: The values of each case, in the same order of arguments.
        size: 1 to cover all values, 2 to cover all pairs.
        chosen: Cases to start from. They come first in the result.

    Example:
        >>> covering({"ab": "ab", "aB": "aB", "Ab": "Ab", "AB": "AB"}, 1)
        ['ab', 'AB']
    """
    found, rest = list(chosen), [case for case in grid if case not in chosen]
    has = {case: set(combinations(values, size)) for case, values in grid.items()}
    missing = set().union(*has.values()).difference(*(has[case] for case in found))
    occurs = Counter(value for case in found for value in grid[case])
    while missing:
        best = max(rest, key=lambda case: (len(has[case] & missing), -sum(occurs[value] for value in grid[case])))
        rest.remove(best)
        found.append(best)
        missing -= has[best]
        occurs.update(grid[best])
    return found
