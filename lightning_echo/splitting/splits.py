"""A data set split, before its augmentation or (``raw``) after reading: describe, cut, make and, before training, prove.

Two moments, because workers must not inherit what a proof has touched:

* before training, `find_split` tries the ways in which the data set may be cut, proves the first one that is right, on two
  examples of each data set inside, and returns what it found as a value, a `Split`;
* in each worker, at its first read, `make_stages` makes the stages of the data set as it is then (a ``worker_init_fn`` may have
  changed it), by the conventions in the `Split` and without reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_echo.splitting.cut import Cut, ReadRefused, SplitRefused, candidates, cut, leaves, led_to
from lightning_echo.splitting.describe import Convention, DataSet, Leads, describe, held_by
from lightning_echo.splitting.make import make
from lightning_echo.splitting.prove import prove, read_plainly
from lightning_echo.splitting.stages import Stages, locate

__all__ = ["Split", "find_split", "make_stages"]


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
        return make(cut(describe(dataset), conventions or (), raw=raw), dataset)


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
        described = describe(dataset)
        ways = {leaf.number: candidates(leaf, raw) for leaf in leaves(described, raw)}
        chosen = {number: found[0] for number, found in ways.items()}
        every = _ends(described, dataset, raw) if indices is None else indices
        presented = _first_and_last(described, dataset, every, raw)
        sizes = []
        for number, found in ways.items():
            # Not there: a data set of which nothing is presented. No worker will read it.
            if number in presented:
                tries = ((way, cut(described, tuple({**chosen, number: way}.values()), raw=raw)) for way in found)
                chosen[number], size = _first_proved(dataset, tries, presented[number])
                sizes.append(size)
        if not sizes:
            raise SplitRefused("it holds no example to prove a split on")
        conventions = tuple(chosen.values())
        stages = make(cut(described, conventions, raw=raw), dataset)
        return Split(stages.reused, stages.redone, max(sizes), conventions, raw)


@contextmanager
def _refused(raw: bool) -> Iterator[None]:
    """Gives a refusal the way out that belongs to where the split is wanted."""
    try:
        yield
    except SplitRefused as refused:
        if not raw or isinstance(refused, ReadRefused):
            raise
        raise ReadRefused(refused.reason) from refused.__cause__


def _first_proved(dataset: Any, tries: Iterator[tuple[Convention, Cut]], indices: Sequence[Any]) -> tuple[Convention, int]:
    """Returns the first way that proves right, and an example's bytes."""
    plain = read_plainly(dataset, list(dict.fromkeys(indices)))
    refusals: dict[Convention, SplitRefused] = {}
    for convention, where in tries:
        try:
            return convention, prove(dataset, partial(make, where), plain)
        except SplitRefused as refusal:
            refusals[convention] = refusal
    first, *others = refusals
    if first in (Convention.protocol, Convention.read) and others:
        # It may only look like a StagedDataset, so that the reason that helps may be the other.
        both = [f"by {convention.value}: {refusals[convention].reason}" for convention in (first, others[0])]
        raise SplitRefused("; ".join(both)) from refusals[first]
    raise refusals[first]


# --- which indices lead to which data set inside -------------------------------------------------------------------


def _ends(described: DataSet, dataset: Any, raw: bool) -> Sequence[Any]:
    """Returns indices in order, among them the first and the last one that lead to each data set inside."""
    held = list(zip(led_to(described, raw), held_by(dataset, described.leads), strict=False))
    if held and described.leads is Leads.named_cut:
        return _ends(*held[0], raw)
    if held and described.leads is Leads.concat:
        starts = zip(held, [0, *dataset.cumulative_sizes], strict=False)
        return [start + index for (part, inside), start in starts for index in _ends(part, inside, raw)]
    if not hasattr(type(dataset), "__len__"):
        return [0]
    every = range(len(dataset))
    if len(leaves(described, raw)) > 1:
        found = _first_and_last(described, dataset, every, raw)
        return sorted({index for indices in found.values() for index in indices})
    return [*every[:1], *every[-1:]]


def _first_and_last(described: DataSet, dataset: Any, indices: Sequence[Any], raw: bool) -> dict[int, tuple[Any, Any]]:
    """Returns for each data set inside, by its number, which of the indices lead to it: the first and the last one.

    It does not look at more of them than it needs.
    """
    count = len(leaves(described, raw))
    hits: list[dict[int, Any]] = [{}, {}]
    for found, order in zip(hits, (indices, reversed(indices)), strict=True):
        for index in order:
            found.setdefault(_leaf_at(described, dataset, index, raw), index)
            if len(found) == count:
                break
    return {leaf: (hits[0][leaf], hits[1][leaf]) for leaf in hits[0]}


def _leaf_at(described: DataSet, dataset: Any, index: Any, raw: bool) -> int:
    while parts := led_to(described, raw):
        place = 0
        if described.leads is Leads.subset:
            dataset, index = dataset.dataset, dataset.indices[index]
        elif described.leads is Leads.concat:
            place, index = locate(dataset.cumulative_sizes, int(index))
            dataset = dataset.datasets[place]
        else:
            dataset = dataset._inner
        described = parts[place]
    return described.number
