"""The four steps in a row: a data set is described and cut, its stages are made, and, before training, they are proved.

This happens at two times, because workers must not inherit what a proof has touched:

* Before training, in a process that ends afterwards (``protecting/elsewhere.py``), `find_split` tries the conventions that the
  data set may follow, with two examples of each leaf. It returns the first one that proves right, as a `Split`, which is a plain
  value.
* In each worker, at its first read, `make_stages` makes the stages of the data set as it is then (a ``worker_init_fn`` may have
  changed it). It takes the conventions from the `Split`, and reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_echo.splitting.cut import Cut, ReadRefused, SplitRefused, candidates, cut, leaves, pruned
from lightning_echo.splitting.describe import Convention, describe
from lightning_echo.splitting.make import make
from lightning_echo.splitting.prove import indices_to_read, prove, prove_equal_loads, read_plainly
from lightning_echo.splitting.sizes import ExampleSize, size_of_examples, sizes_joined
from lightning_echo.splitting.stages import Stages

__all__ = ["Split", "find_split", "make_decoding", "make_stages", "prove_decoding", "weighed"]


@dataclass(frozen=True)
class Split:
    """Where a data set is split. It consists of plain values, so that it can be sent to workers.

    Attributes:
        reused: What an echo reuses, for people, e.g. ``("load", "Resize")``.
        redone: What runs for each use, e.g. ``("RandomResizedCrop",)``; empty if everything is reused.
        example_bytes: Estimated memory of one reused example (or raw item), in bytes: the largest of those that were read.
        conventions: The conventions of the leaves, in the order in which they are met.
        raw: Whether the data set is split after reading. If not, it is split before its augmentation.
        packed_bytes: What one takes in a cache, in bytes: their mean, packed (see `nbytes`).
    """

    reused: tuple[str, ...]
    redone: tuple[str, ...]
    example_bytes: int
    conventions: tuple[Convention, ...]
    raw: bool = False
    packed_bytes: int = 0

    def __str__(self) -> str:
        return f"reuse [{', '.join(self.reused)}], redo [{', '.join(self.redone)}]"


def make_stages(dataset: Any, conventions: Sequence[Convention] | None = None, *, raw: bool = False) -> Stages:
    """Returns the stages of ``dataset`` as it is now, without reading an example and without changing it.

    Args:
        dataset: A map-style data set.
        conventions: The conventions of a `Split`. Default: the likeliest ones, without a proof.
        raw: Whether to split after reading.

    Raises:
        SplitRefused: Nothing shows where to split.
    """
    with _refused(raw):
        return make(cut(describe(dataset), conventions or (), raw=raw), dataset)


def make_decoding(dataset: Any, raw: Split, loaded: Split) -> Stages:
    """Returns stages between two splits of ``dataset``: ``load`` reads, and ``augment`` turns that into what ``loaded`` loads.

    Args:
        dataset: A map-style data set, which was split in both ways.
        raw: Its split after reading.
        loaded: Its split before the augmentation.

    Raises:
        SplitRefused: The data set is not the one that was split.
    """
    description = describe(dataset)
    return make(cut(description, raw.conventions, raw=True), dataset, until=cut(description, loaded.conventions, raw=False))


def prove_decoding(dataset: Any, raw: Split, loaded: Split, indices: Sequence[Any] | None = None) -> None:
    """Checks, on the examples on which splits are proved, that `make_decoding` gives what ``loaded`` loads.

    Args:
        dataset: A map-style data set. Temporary copies of it are read.
        raw: Its split after reading.
        loaded: Its split before the augmentation.
        indices: As in `find_split`.

    Raises:
        SplitRefused: `make_decoding` gives something else.
    """
    description = describe(dataset)
    to_read = {
        index
        for is_raw in (True, False)
        for pair in indices_to_read(pruned(description, is_raw), dataset, indices).values()
        for index in pair
    }
    prove_equal_loads(
        dataset,
        lambda copied: make_stages(copied, loaded.conventions),
        lambda copied: make_decoding(copied, raw, loaded),
        sorted(to_read),
    )


def find_split(dataset: Any, indices: Sequence[Any] | None = None, *, raw: bool = False) -> Split:
    """Returns where ``dataset`` can be split, proved on examples. The data set is not changed.

    Args:
        dataset: A map-style data set.
        indices: The indices that can be read, if they are not ``range(len(dataset))``. The proof takes, for each leaf, the first
            and the last index that lead to it.
        raw: Whether to split after reading.

    Raises:
        SplitRefused: Nothing shows where to split, or no way to split is right.
        Exception: The data set itself raises it when it is read.

    >>> from lightning_echo.splitting.staged import StagedDataset
    >>> find_split(StagedDataset.of([1.0, 2.0], augment=lambda example: -example))
    ... # doctest: +NORMALIZE_WHITESPACE +ELLIPSIS
    Split(reused=('load',), redone=('augment',), example_bytes=24, conventions=(...), raw=False, packed_bytes=24)
    """
    with _refused(raw):
        description = pruned(describe(dataset), raw)
        possible = {leaf.number: candidates(leaf, raw) for leaf in leaves(description)}
        chosen = {number: conventions[0] for number, conventions in possible.items()}
        to_read = indices_to_read(description, dataset, indices)
        sizes = []
        for number, conventions in possible.items():
            if number not in to_read:  # no index leads there, so no worker will read it
                continue
            tries = (
                (convention, cut(description, tuple({**chosen, number: convention}.values()), raw=raw))
                for convention in conventions
            )
            chosen[number], sizes_of_leaf = _first_proved(dataset, tries, to_read[number])
            sizes.append(sizes_of_leaf)
        if not sizes:
            raise SplitRefused("it holds no example to prove a split on")
        stages = make(cut(description, tuple(chosen.values()), raw=raw), dataset)
        size = sizes_joined(sizes)
        return Split(stages.reused, stages.redone, size.largest, tuple(chosen.values()), raw, size.packed)


def weighed(dataset: Any, split: Split, indices: Sequence[Any] | None = None) -> Split:
    """Returns the same split with the sizes of examples that are spread over the data. A proof knows only the first and the last.

    Args:
        dataset: The data set that was split.
        split: Where it was split.
        indices: The indices that can be read; None: all.
    """
    size = size_of_examples(dataset, partial(make_stages, conventions=split.conventions, raw=split.raw), indices)
    if size is None:
        return split
    return replace(split, example_bytes=max(split.example_bytes, size.largest), packed_bytes=size.packed)


@contextmanager
def _refused(raw: bool) -> Iterator[None]:
    """Turns the refusal of a split after reading into a `ReadRefused`, whose message says what to do in that case."""
    try:
        yield
    except SplitRefused as refused:
        if not raw:
            raise
        raise ReadRefused(refused.reason) from refused.__cause__


def _first_proved(
    dataset: Any, tries: Iterator[tuple[Convention, Cut]], indices: Sequence[Any]
) -> tuple[Convention, ExampleSize]:
    """Returns the first convention whose cut proves right, and what `prove` returns."""
    plain = read_plainly(dataset, list(dict.fromkeys(indices)))
    if all(example is None for example in plain.examples):
        raise SplitRefused(f"it returns None for {' and '.join(f'dataset[{index}]' for index in plain.indices)}")
    refusals: dict[Convention, SplitRefused] = {}
    for convention, where in tries:
        try:
            return convention, prove(dataset, partial(make, where), plain)
        except SplitRefused as refusal:
            refusals[convention] = refusal
    first, *others = refusals
    if first in (Convention.protocol, Convention.read) and others:
        # The methods may have another purpose. Then the second reason is the one that helps.
        both = [f"by {convention.value}: {refusals[convention].reason}" for convention in (first, others[0])]
        raise SplitRefused("; ".join(both)) from refusals[first]
    raise refusals[first]
