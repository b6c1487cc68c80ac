"""Spreading: no index returns within a distance where one pass ends and the next begins.

With echoing an index of one pass may still be live when the next pass begins. So each pass is rearranged a
little: among the indices that have not been seen for ``distance`` slots, the one that comes first in its own order is taken
next. Only the first slots of a pass move, and unless it is short its end stays the same, so that a pass can be found without
those before it: what fills it up is then the start of its own order. Until echoing begins nothing moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from typing import Any

__all__ = ["identity", "spread"]


def identity(entry: Any) -> Any:
    """What is equal for two entries of a sampler that are the same index; tensors are hashed by their place, lists not at all."""
    if hasattr(entry, "tolist"):
        entry = entry.tolist()
    if isinstance(entry, list | tuple):
        return tuple(map(identity, entry))
    return entry if isinstance(entry, Hashable) else repr(entry)


def spread(entries: Iterable[Any], seen: dict[Any, int], distance: int) -> tuple[list[int], list[Any]]:
    """Rearranges the start of a pass so that no index returns within ``distance`` slots.

    Args:
        entries: The pass in its own order.
        seen: For the last ``distance`` slots of the pass before: `identity` of an index -> slots from there to the end of that
            pass (>= 1).
        distance: Least number of slots between two uses of an index.

    Returns:
        For each rearranged slot the place of its entry in the pass's own order, and the entries that were looked at (as
        many). From there on the pass goes on in its own order.
    """
    source, looked_at, places = iter(entries), list[Any](), list[int]()
    waiting: list[tuple[int, int]] = []  # (slot from which the entry may stand, its place)
    ready: list[int] = []
    while len(places) < distance or ready or waiting:
        while waiting and waiting[0][0] <= len(places):
            heappush(ready, heappop(waiting)[1])
        if ready:
            places.append(heappop(ready))
            continue
        for entry in source:
            place = len(looked_at)
            looked_at.append(entry)
            slots_ago = seen.get(identity(entry))
            free_from = 0 if slots_ago is None else distance - slots_ago
            if free_from <= len(places):
                places.append(place)
                break
            heappush(waiting, (free_from, place))
        else:
            if not waiting:
                break
            places.append(heappop(waiting)[1])  # the sampler itself asked for it again so soon
    return places, looked_at
