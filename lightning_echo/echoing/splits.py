"""Where a data set is split before its augmentation, and that the split is right.

Two steps, because workers must not inherit what a proof has touched:

* before training, `find_split` tries what the data set may follow by the look of it (conventions.py), proves
  it on two examples of each data set inside (proof.py), and returns what it found as a value, a `Split`;
* in each worker, at its first read, `make_stages` makes the stages anew of the data set as it is then (a
  ``worker_init_fn`` may have changed it), by the conventions in the `Split` and without reading.

``Subset`` and ``ConcatDataset`` (and ``random_split``, which returns the former) may be nested in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from lightning_echo.echoing.conventions import Convention, SplitRefused, conventions_of
from lightning_echo.echoing.leaves import leaf_stages
from lightning_echo.echoing.proof import prove, read_plainly
from lightning_echo.echoing.routing import is_concat, is_subset, locate
from lightning_echo.echoing.staged import is_staged
from lightning_echo.echoing.stages import ConcatStages, Stages, SubsetStages

__all__ = ["Convention", "Split", "SplitRefused", "find_split", "make_stages"]


@dataclass(frozen=True)
class Split:
    """Where a data set is split. Plain values, so that it can be sent to workers.

    Attributes:
        reused: what an echo reuses, for people, e.g. ``("load", "Resize")``.
        redone: what each use redoes, e.g. ``("RandomResizedCrop",)``; empty if everything is reused.
        example_bytes: estimated memory of one reused example, the largest of those that were read.
        conventions: what the data sets inside follow, in the order in which they are met.
    """

    reused: tuple[str, ...]
    redone: tuple[str, ...]
    example_bytes: int
    conventions: tuple[Convention, ...]

    def __str__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


def make_stages(dataset: Any, conventions: Sequence[Convention] | None = None, *, watched: bool = False) -> Stages:
    """Returns the stages of ``dataset`` as it is now, without reading an example and without changing it.

    Args:
        dataset: a map-style data set.
        conventions: those of a `Split`; by default the likeliest, unproved.
        watched: whether ``load`` checks how transforms are called (see `leaf_stages`).

    Raises:
        SplitRefused: nothing shows where to split.
    """
    leaves = _leaves(dataset)
    chosen = {id(leaf): convention for leaf, convention in zip(leaves, conventions or (), strict=False)}
    made: dict[int, Stages] = {}
    for leaf in leaves:
        convention = chosen.get(id(leaf)) or _candidates(leaf)[0]
        made[id(leaf)] = leaf_stages(leaf, convention, watched)
    return _routed(dataset, made)


def find_split(dataset: Any, indices: Sequence[Any] | None = None) -> Split:
    """Returns where ``dataset`` can be split, proved on examples; no trace of it is left in the data set.

    Args:
        dataset: a map-style data set.
        indices: those that can be read, where they are not ``range(len(dataset))``. The proof takes the first
            and the last that lead to each data set inside.

    Raises:
        SplitRefused: nothing shows where to split, or no way to split it is right.
        Exception: the data set itself raises it when it is read.

    >>> from lightning_echo.echoing.staged import StagedDataset
    >>> find_split(StagedDataset.of([1.0, 2.0], augment=lambda example: -example))
    ... # doctest: +NORMALIZE_WHITESPACE +ELLIPSIS
    Split(reused=('load',), redone=('augment',), example_bytes=24, conventions=(...))
    """
    leaves = _leaves(dataset)
    candidates = [_candidates(leaf) for leaf in leaves]
    chosen = [conventions[0] for conventions in candidates]
    presented = _first_and_last(dataset) if indices is None else _first_and_last_of(dataset, indices)
    sizes = []
    for place, leaf in enumerate(leaves):
        # Not there: a data set of which nothing is presented. No worker will read it.
        if presented.get(id(leaf)):
            chosen[place], size = _prove_one(dataset, candidates[place], chosen, place, presented[id(leaf)])
            sizes.append(size)
    if not sizes:
        raise SplitRefused("it holds no example to prove a split on")
    stages = make_stages(dataset, chosen)
    return Split(stages.reused, stages.redone, max(sizes), tuple(chosen))


def _prove_one(
    dataset: Any, candidates: list[Convention], chosen: list[Convention], place: int, indices: Sequence[Any]
) -> tuple[Convention, int]:
    """Returns the first candidate that proves right for the data set at ``place``, and an example's bytes."""
    plain = read_plainly(dataset, list(dict.fromkeys(indices)))
    refusals: dict[Convention, SplitRefused] = {}
    for candidate in candidates:
        conventions = [*chosen[:place], candidate, *chosen[place + 1 :]]
        try:
            return candidate, prove(dataset, partial(make_stages, conventions=conventions, watched=True), plain)
        except SplitRefused as refusal:
            refusals[candidate] = refusal
    first = refusals[candidates[0]]
    if candidates[0] is Convention.protocol and len(candidates) > 1:
        # It may only look like a StagedDataset, so that the reason that helps may be the other.
        both = [f"by {candidate.value}: {refusals[candidate].reason}" for candidate in candidates[:2]]
        raise SplitRefused("; ".join(both)) from first
    raise first


def _candidates(leaf: Any) -> list[Convention]:
    name = type(leaf).__name__
    if isinstance(leaf, IterableDataset):
        raise SplitRefused(f"{name} is a stream, which has no index")
    candidates = conventions_of(leaf)
    if not candidates:
        raise SplitRefused(f"{name} has neither load(index) and augment(example) nor a transform")
    return candidates


def _leaves(dataset: Any) -> list[Any]:
    """Returns the distinct data sets inside ``Subset`` and ``ConcatDataset``, as they are met."""
    if is_staged(dataset):
        return [dataset]
    if is_subset(dataset):
        return _leaves(dataset.dataset)
    if is_concat(dataset):
        inside = [leaf for part in dataset.datasets for leaf in _leaves(part)]
        return list({id(leaf): leaf for leaf in inside}.values())
    return [dataset]


def _routed(dataset: Any, made: dict[int, Stages]) -> Stages:
    if id(dataset) in made:
        return made[id(dataset)]
    if is_subset(dataset):
        return SubsetStages(dataset, _routed(dataset.dataset, made))
    return ConcatStages(dataset, [_routed(part, made) for part in dataset.datasets])


def _first_and_last(dataset: Any) -> dict[int, tuple[Any, Any]]:
    """Returns for each data set inside, by its id, the first and the last index that lead to it."""
    if not is_staged(dataset) and is_concat(dataset):
        found: dict[int, tuple[Any, Any]] = {}
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            for leaf, (first, last) in _first_and_last(part).items():
                found[leaf] = (found[leaf][0] if leaf in found else start + first, start + last)
            start = end
        return found
    leaves = _leaves(dataset)
    if not hasattr(type(dataset), "__len__"):
        return {id(leaves[0]): (0, 0)}
    if len(leaves) == 1:
        return {id(leaves[0]): (0, len(dataset) - 1)} if len(dataset) else {}
    return _first_and_last_of(dataset, range(len(dataset)))


def _first_and_last_of(dataset: Any, indices: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """The same, for some indices; does not look at more of them than it needs."""
    leaves = {id(leaf) for leaf in _leaves(dataset)}
    hits: list[dict[int, Any]] = [{}, {}]
    for found, order in zip(hits, (indices, reversed(indices)), strict=True):
        for index in order:
            found.setdefault(_leaf_at(dataset, index, leaves), index)
            if len(found) == len(leaves):
                break
    return {leaf: (hits[0][leaf], hits[1][leaf]) for leaf in hits[0]}


def _leaf_at(dataset: Any, index: Any, leaves: set[int]) -> int:
    while id(dataset) not in leaves:
        if is_subset(dataset):
            dataset, index = dataset.dataset, dataset.indices[index]
        else:
            part, index = locate(dataset.cumulative_sizes, int(index))
            dataset = dataset.datasets[part]
    return id(dataset)
