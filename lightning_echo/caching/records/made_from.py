"""What the records of a cache are made from. Two caches hold the same if the fingerprints of this are the same.

* The data sets that read examples. One that only passes an index on (``Subset``, ``ConcatDataset``) does not count: the keys of a
  cache are those of the data sets inside (keys.py).
* Of a data set that holds transforms, those before the cut. What is redone after each lookup does not count, so that another
  augmentation empties no cache. If a data set has the stages as methods, the code of ``augment`` (for raw items also that of
  ``decode``) does not count, but all attributes do, since a method may use any of them.
* The user's ``worker_init_fn``, if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from lightning_echo.protecting.fingerprints.fingerprint import Fingerprint, fingerprint
from lightning_echo.protecting.fingerprints.walk import full_name
from lightning_echo.protecting.objects import is_of_lightning
from lightning_echo.splitting.chains import members_before_cut
from lightning_echo.splitting.cut import CutLeaf, cut
from lightning_echo.splitting.describe import Convention, Description, Role, data_sets_inside, describe
from lightning_echo.splitting.splits import Split
from lightning_echo.splitting.staged import AugmentedDataset

__all__ = ["HINT", "MadeFrom", "made_from"]

HINT = "; cache.ignore leaves out what decides no example"
"""Follows a difference of two fingerprints in a message."""

_STEPS = {Role.subset: ".dataset", Role.concat: ".datasets[{}]", Role.named_cut: "._inner"}
_REDONE = {  # methods that run after the cut, and the attributes of a named cut that hold them
    Convention.protocol: (("augment",), ("_augment_one",)),
    Convention.read: (("load", "decode", "augment"), ("_decode_one", "_augment_one")),
}


class MadeFrom(NamedTuple):
    """What records are made from.

    Attributes:
        parts: Objects by name. The names begin the paths of a fingerprint.
        ignore: Attributes and code that do not count, see `fingerprint`.
        readers: The data sets that read, in the order of their keys.
    """

    parts: dict[str, Any]
    ignore: tuple[str, ...]
    readers: tuple[Any, ...]

    def fingerprint(self) -> Fingerprint:
        """Returns the fingerprint of all this."""
        return fingerprint(self.parts, self.ignore)


def made_from(dataset: Any, split: Split | None, ignore: Iterable[str] = (), worker_init_fn: Any = None) -> MadeFrom:
    """Returns what the records of a cache are made from. No example is read.

    Args:
        dataset: A map-style data set.
        split: Where it is cut; None: whole examples are held.
        ignore: What the user leaves out, see `fingerprint`.
        worker_init_fn: The user's function that prepares each worker.

    Raises:
        SplitRefused: The data set can no longer be split there.

    Example:
        >>> from torch.utils.data import Subset
        >>> one, other = (made_from(Subset(["a", "b", "c"], indices), None) for indices in ([0, 1], [0, 2]))
        >>> one.fingerprint() == other.fingerprint()
        True
    """
    where = None if split is None else cut(describe(dataset), split.conventions, raw=split.raw)
    description = describe(dataset) if where is None else where.description
    readers = {part.number: (each, part) for each, part in _readers(dataset, description)}
    parts: dict[str, Any] = {}
    left_out = list(ignore)
    leaves = {} if where is None else {leaf.description.number: leaf for leaf in where.leaves}
    for place, (reader, described) in enumerate(readers.values()):
        name = "dataset" if len(readers) == 1 else f"dataset {place}"
        parts[name] = reader
        for path, each, leaf in _cuts(reader, described, name, leaves) if leaves else ():
            left_out += _redone(path, each, leaf)
            parts.update(_transforms_before_cut(path, each, leaf))
    if worker_init_fn is not None and not is_of_lightning(worker_init_fn):
        parts["worker_init_fn"] = worker_init_fn
    return MadeFrom(parts, tuple(left_out), tuple(reader for reader, _ in readers.values()))


def _readers(dataset: Any, description: Description) -> Iterator[tuple[Any, Description]]:
    if description.role not in (Role.subset, Role.concat):
        yield dataset, description
        return
    for part, described in zip(data_sets_inside(dataset, description.role), description.inside, strict=True):
        yield from _readers(part, described)


def _cuts(
    dataset: Any, description: Description, path: str, leaves: dict[int, CutLeaf]
) -> Iterator[tuple[str, Any, CutLeaf | None]]:
    """Returns path, data set and cut of each leaf; and the same of each named cut around one, which has no cut of its own."""
    leaf = leaves.get(description.number)
    if leaf is not None or description.role is Role.named_cut:
        yield path, dataset, leaf
    inside = data_sets_inside(dataset, description.role) if leaf is None else ()
    for place, (part, described) in enumerate(zip(inside, description.inside, strict=False)):
        yield from _cuts(part, described, path + _STEPS[description.role].format(place), leaves)


def _redone(path: str, dataset: Any, leaf: CutLeaf | None) -> Iterator[str]:
    """Returns what of a data set runs after the cut: names of its attributes and of its code."""
    if leaf is None:
        yield f"{path}._augment_one"
    elif leaf.convention in _REDONE:
        methods, held = _REDONE[leaf.convention]
        yield from (f"{path}.{name}" for name in (held if isinstance(dataset, AugmentedDataset) else methods))
        yield from (f"{full_name(base)}.{name}" for base in type.mro(type(dataset)) for name in methods)
    else:
        yield from (f"{path}.{chain.attribute}" for chain in leaf.description.chains)


def _transforms_before_cut(path: str, dataset: Any, leaf: CutLeaf | None) -> Iterator[tuple[str, Any]]:
    if leaf is None or leaf.convention in (*_REDONE, Convention.folder):
        return
    for chain in filter(attrgetter("path"), (leaf.image, leaf.target)):
        if reused := members_before_cut(attrgetter(chain.path)(dataset)):
            yield f"{path}.{chain.path}", reused
