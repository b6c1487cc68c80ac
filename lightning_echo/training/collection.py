"""What a ``train_dataloader`` may return, as a tree: a loader, or a collection of loaders, and its leaves by name.

A collection is what Lightning takes for one: a dict, list or tuple of loaders, nested or not, or a ``CombinedLoader`` around one
(which says how they are combined). The name of a leaf is its key (or field), or its position from ``"0"`` on, joined by ``/``
where collections are nested: ``"labelled"``, ``"0"``, ``"scans/1"``. A loader that stands alone has the empty name.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader

__all__ = ["is_collection", "is_sized", "leaves_of", "parts_at_leaves", "with_leaves"]

_DICTS = (dict, OrderedDict, defaultdict)


def is_collection(loaders: Any) -> bool:
    """Whether Lightning would combine what is in it."""
    if isinstance(loaders, CombinedLoader):
        return True
    children = dict(_children(loaders))
    return not all(isinstance(child, int | float | str) for child in children.values())  # plain values: a sequence of batches


def leaves_of(loaders: Any) -> dict[str, Any]:
    """The loaders in a collection by name, in Lightning's order; a single loader has the name ``""``.

    Raises:
        ValueError: Two of them have the same name.

    Example:
        >>> leaves_of({"scans": [range(3), range(4)], "text": range(5)})
        {'scans/0': range(0, 3), 'scans/1': range(0, 4), 'text': range(0, 5)}
    """
    found: dict[str, Any] = {}
    for name, leaf in _walk(loaders, ""):
        if name in found:
            raise ValueError(
                f"two loaders of the collection are named {name!r}: names are keys and positions, joined by '/'. Use other keys"
            )
        found[name] = leaf
    return found


def is_sized(loaders: Any) -> bool:
    """Whether every loader has a length.

    Example:
        >>> is_sized(range(3)), is_sized({"a": range(3), "b": map(str, range(3))})
        (True, False)
    """
    return None not in [sized_len(leaf) for leaf in leaves_of(loaders).values()]


def with_leaves(loaders: Any, leaves: Mapping[str, Any]) -> Any:
    """The same collection with other leaves, by name; of the same types, in the same order, combined in the same way.

    Example:
        >>> with_leaves({"scans": [range(3), range(4)], "text": range(5)}, {"scans/0": "a", "scans/1": "b", "text": "c"})
        {'scans': ['a', 'b'], 'text': 'c'}
    """
    if isinstance(loaders, CombinedLoader):
        combined = copy(loaders)
        combined.flattened = [leaves[name] for name, _ in _walk(loaders, "")]
        return combined
    return _map(loaders, "", lambda name: leaves[name])


def parts_at_leaves(loaders: Any, batch: Any) -> list[Any]:
    """The batches in what a collection of loaders yields; the whole where it is not of the same structure.

    Example:
        >>> parts_at_leaves({"scans": [range(3), range(4)], "text": range(5)}, {"scans": [[0, 1], None], "text": [0]})
        [[0, 1], None, [0]]
    """
    return _parts(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders, batch)


def _parts(node: Any, batch: Any) -> list[Any]:
    if isinstance(node, CombinedLoader) or not is_collection(node):
        return [batch]
    children, parts = _children(node), _children(batch)
    if [key for key, _ in parts] != [key for key, _ in children]:
        return [batch]
    return [leaf for (_, child), (_, part) in zip(children, parts, strict=True) for leaf in _parts(child, part)]


def _map(node: Any, name: str, new: Callable[[str], Any]) -> Any:
    if not is_collection(node) or isinstance(node, CombinedLoader):
        return new(name)
    children = [_map(child, _join(name, key), new) for key, child in _children(node)]
    if type(node) in _DICTS:
        changed = copy(node)  # keeps the factory of a defaultdict
        changed.update(zip(node, children, strict=True))
        return changed
    return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)


def _walk(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, CombinedLoader) and not name:
        node = node.iterables  # one within a collection is a single loader to Lightning
    if isinstance(node, CombinedLoader) or not is_collection(node):
        yield name, node
        return
    for key, child in _children(node):
        yield from _walk(child, _join(name, key))


def _children(node: Any) -> list[tuple[Any, Any]]:
    """Keys and children of a container that Lightning looks into; nothing of anything else."""
    if type(node) in _DICTS:
        return list(node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    return list(enumerate(node)) if type(node) in (list, tuple) else []


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)
