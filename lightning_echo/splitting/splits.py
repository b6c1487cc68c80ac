"""Where a data set is split, before its augmentation or (``raw``) after reading, and that the split is right.

Two steps, because workers must not inherit what a proof has touched:

* before training, `find_split` tries what the data set may follow by the look of it (conventions.py, raw.py), proves
  it on two examples of each data set inside (proof.py), and returns what it found as a value, a `Split`;
* in each worker, at its first read, `make_stages` makes the stages anew of the data set as it is then (a
  ``worker_init_fn`` may have changed it), by the conventions in the `Split` and without reading.

``Subset`` and ``ConcatDataset`` (and ``random_split``, which returns the former) may be nested in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from lightning_echo.protecting.routing import is_concat, is_subset, locate
from lightning_echo.splitting.conventions import Convention, SplitRefused, conventions_of
from lightning_echo.splitting.leaves import leaf_stages
from lightning_echo.splitting.proof import prove, read_plainly
from lightning_echo.splitting.raw import AugmentedStages, ReadRefused, raw_conventions_of, raw_stages
from lightning_echo.splitting.staged import AugmentedDataset, is_raw, is_staged
from lightning_echo.splitting.stages import ConcatStages, Stages, SubsetStages

__all__ = ["Convention", "Split", "SplitRefused", "find_split", "make_stages"]


@dataclass(frozen=True)
class Split:
    """Where a data set is split. Plain values, so that it can be sent to workers.

    Attributes:
        reused: what an echo reuses, for people, e.g. ``("load", "Resize")``.
        redone: what each use redoes, e.g. ``("RandomResizedCrop",)``; empty if everything is reused.
        example_bytes: estimated memory of one reused example (or raw item), the largest of those that were read.
        conventions: what the data sets inside follow, in the order in which they are met.
        raw: whether it is split after reading, not before its augmentation.
    """

    reused: tuple[str, ...]
    redone: tuple[str, ...]
    example_bytes: int
    conventions: tuple[Convention, ...]
    raw: bool = False

    def __str__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


def make_stages(dataset: Any, conventions: Sequence[Convention] | None = None, *, raw: bool = False) -> Stages:
    """Returns the stages of ``dataset`` as it is now, without reading an example and without changing it.

    Args:
        dataset: a map-style data set.
        conventions: those of a `Split`; by default the likeliest, unproved.
        raw: whether to split after reading.

    Raises:
        SplitRefused: nothing shows where to split.
    """
    with _refused(raw):
        leaves = _leaves(dataset, raw)
        chosen = {id(leaf): convention for leaf, convention in zip(leaves, conventions or (), strict=False)}
        made: dict[int, Stages] = {}
        for leaf in leaves:
            convention = chosen.get(id(leaf)) or _candidates(leaf, raw)[0]
            made[id(leaf)] = raw_stages(leaf, convention) if raw else leaf_stages(leaf, convention)
        return _routed(dataset, made, raw)


def find_split(dataset: Any, indices: Sequence[Any] | None = None, *, raw: bool = False) -> Split:
    """Returns where ``dataset`` can be split, proved on examples; no trace of it is left in the data set.

    Args:
        dataset: a map-style data set.
        indices: those that can be read, where they are not ``range(len(dataset))``. The proof takes the first
            and the last that lead to each data set inside.
        raw: whether to split after reading.

    Raises:
        SplitRefused: nothing shows where to split, or no way to split it is right.
        Exception: the data set itself raises it when it is read.

    >>> from lightning_echo.splitting.staged import StagedDataset
    >>> find_split(StagedDataset.of([1.0, 2.0], augment=lambda example: -example))
    ... # doctest: +NORMALIZE_WHITESPACE +ELLIPSIS
    Split(reused=('load',), redone=('augment',), example_bytes=24, conventions=(...), raw=False)
    """
    with _refused(raw):
        leaves = _leaves(dataset, raw)
        candidates = [_candidates(leaf, raw) for leaf in leaves]
        chosen = [conventions[0] for conventions in candidates]
        presented = _first_and_last(dataset, raw) if indices is None else _first_and_last_of(dataset, indices, raw)
        sizes = []
        for place, leaf in enumerate(leaves):
            # Not there: a data set of which nothing is presented. No worker will read it.
            if presented.get(id(leaf)):
                chosen[place], size = _prove_one(dataset, candidates[place], chosen, place, presented[id(leaf)], raw)
                sizes.append(size)
        if not sizes:
            raise SplitRefused("it holds no example to prove a split on")
        stages = make_stages(dataset, chosen, raw=raw)
        return Split(stages.reused, stages.redone, max(sizes), tuple(chosen), raw)


@contextmanager
def _refused(raw: bool) -> Iterator[None]:
    """Gives a refusal the way out that belongs to where the split is wanted."""
    try:
        yield
    except SplitRefused as refused:
        if not raw or isinstance(refused, ReadRefused):
            raise
        raise ReadRefused(refused.reason) from refused.__cause__


def _prove_one(
    dataset: Any, candidates: list[Convention], chosen: list[Convention], place: int, indices: Sequence[Any], raw: bool
) -> tuple[Convention, int]:
    """Returns the first candidate that proves right for the data set at ``place``, and an example's bytes."""
    plain = read_plainly(dataset, list(dict.fromkeys(indices)))
    refusals: dict[Convention, SplitRefused] = {}
    for candidate in candidates:
        conventions = [*chosen[:place], candidate, *chosen[place + 1 :]]
        try:
            return candidate, prove(dataset, partial(make_stages, conventions=conventions, raw=raw), plain)
        except SplitRefused as refusal:
            refusals[candidate] = refusal
    first = refusals[candidates[0]]
    if candidates[0] in (Convention.protocol, Convention.read) and len(candidates) > 1:
        # It may only look like a StagedDataset, so that the reason that helps may be the other.
        both = [f"by {candidate.value}: {refusals[candidate].reason}" for candidate in candidates[:2]]
        raise SplitRefused("; ".join(both)) from first
    raise first


def _candidates(leaf: Any, raw: bool) -> list[Convention]:
    name = type(leaf).__name__
    if isinstance(leaf, IterableDataset):
        raise SplitRefused(f"{name} is a stream, which has no index")
    if raw:
        return raw_conventions_of(leaf)
    candidates = conventions_of(leaf)
    if not candidates:
        raise SplitRefused(f"{name} has neither load(index) and augment(example) nor a transform")
    return candidates


def _parts(dataset: Any, raw: bool) -> list[Any]:
    """Returns the data sets that ``dataset`` only leads to; none where it is split by itself."""
    if raw and isinstance(dataset, AugmentedDataset) and not is_raw(dataset):
        return [dataset._inner]
    if is_staged(dataset):
        return []
    if is_subset(dataset):
        return [dataset.dataset]
    return list(dataset.datasets) if is_concat(dataset) else []


def _leaves(dataset: Any, raw: bool) -> list[Any]:
    """Returns the distinct data sets inside those that only lead to others, as they are met."""
    parts = _parts(dataset, raw)
    inside = [leaf for part in parts for leaf in _leaves(part, raw)] if parts else [dataset]
    return list({id(leaf): leaf for leaf in inside}.values())


def _routed(dataset: Any, made: dict[int, Stages], raw: bool) -> Stages:
    if id(dataset) in made:
        return made[id(dataset)]
    inner = [_routed(part, made, raw) for part in _parts(dataset, raw)]
    if is_subset(dataset):
        return SubsetStages(dataset, inner[0])
    return ConcatStages(dataset, inner) if is_concat(dataset) else AugmentedStages(dataset, inner[0])


def _first_and_last(dataset: Any, raw: bool) -> dict[int, tuple[Any, Any]]:
    """Returns for each data set inside, by its id, the first and the last index that lead to it."""
    parts = _parts(dataset, raw)
    if isinstance(dataset, AugmentedDataset) and parts:
        return _first_and_last(parts[0], raw)
    if is_concat(dataset) and parts:
        found: dict[int, tuple[Any, Any]] = {}
        start = 0
        for part, end in zip(parts, dataset.cumulative_sizes, strict=True):
            for leaf, (first, last) in _first_and_last(part, raw).items():
                found[leaf] = (found[leaf][0] if leaf in found else start + first, start + last)
            start = end
        return found
    leaves = _leaves(dataset, raw)
    if not hasattr(type(dataset), "__len__"):
        return {id(leaves[0]): (0, 0)}
    if len(leaves) == 1:
        return {id(leaves[0]): (0, len(dataset) - 1)} if len(dataset) else {}
    return _first_and_last_of(dataset, range(len(dataset)), raw)


def _first_and_last_of(dataset: Any, indices: Sequence[Any], raw: bool) -> dict[int, tuple[Any, Any]]:
    """The same, for some indices; does not look at more of them than it needs."""
    leaves = {id(leaf) for leaf in _leaves(dataset, raw)}
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
        elif is_concat(dataset):
            part, index = locate(dataset.cumulative_sizes, int(index))
            dataset = dataset.datasets[part]
        else:
            dataset = dataset._inner
    return id(dataset)
