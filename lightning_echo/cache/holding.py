"""What a cache can hold of a data set, and which of these saves the most time per byte.

A cache holds the output of the data set at one of three cuts. The insertion point decides which cuts are possible: the cut of
the cache must not come after that of the insertion point.

============================= ======= ========== =========
an echo reuses                ``raw`` ``loaded`` ``whole``
============================= ======= ========== =========
raw items                     yes     no         no
loaded examples               yes     yes        no
augmented examples, batches   yes     yes        yes
============================= ======= ========== =========

The hold never changes a batch. So ``"auto"`` may measure, and may choose another hold in the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from lightning_echo.cache.kept import HOLDS
from lightning_echo.cache.reads import Held
from lightning_echo.data.copies import copy_example, throw_away_copy
from lightning_echo.data.elsewhere import NotRead
from lightning_echo.data.randomness import preserved_random_states
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.describe import ReadRefused, SplitRefused
from lightning_echo.split.prove import (
    Split,
    check_deterministic,
    find_split,
    make_decoding,
    make_stages,
    prove_decoding,
    prove_single_loads,
    weighed,
    whole_batch,
)
from lightning_echo.split.staged import Stages, add_decoding, size_of_examples, uncut_stages

AUTO, RAW, LOADED, WHOLE = HOLDS
_TIMED = 3  # examples
_RECORD_BYTES = 128  # what a record adds to the bytes of its example, about


class WholeRefused(SplitRefused):
    """A data set cannot be held whole."""

    where = "held whole"
    hint = f"Its examples must be the same each time: use cache.hold={LOADED!r} or {RAW!r}, or leave the cache out"


@dataclass(frozen=True)
class Hold:
    """What a cache can hold of a data set."""

    name: str
    make: Callable[[Any, Stages], Held]  # from a data set and the stages of the insertion point; sent to the workers
    example_bytes: int  # that one example takes in the cache: the mean of a few examples that are spread over the data
    what: str  # is held, for humans
    is_of_point: bool  # whether the insertion point reuses exactly what is held
    split: Split | None = None  # where the data set is cut; None: whole examples are held
    seconds: float = 0.0  # to read one example up to what is held; 0 if that was not measured (see `measured`)


def holds_of(dataset: Any, indices: Sequence[Any] | None, split: Split | None, name: str) -> list[Hold]:
    """Returns what a cache can hold, the earliest cut first. There is at least one, or else it raises ``ValueError``.

    ``indices`` are those that can be read (None: all). ``split`` is where the insertion point splits the data set; None: it
    reuses whole examples, or batches. ``name`` is the hold that the user asks for; ``"auto"``: all that fit the insertion point.
    """
    fits = {RAW: True, LOADED: split is None or not split.raw, WHOLE: split is None}
    if name != AUTO and not fits[name]:
        raise ValueError(
            f"cache.hold={name!r} does not fit the insertion point, at which an echo reuses [{', '.join(split.reused)}]: "  # type: ignore[union-attr]
            f"what is held must come before that. Use {' or '.join(repr(other) for other, does in fits.items() if does)}, or a "
            "later insertion point"
        )
    if name == WHOLE:
        return [_whole(dataset, range(len(dataset)) if indices is None else indices)]
    found: list[Hold] = []
    refusals: list[SplitRefused] = []
    for kind in (RAW, LOADED):
        if fits[kind] and name in (kind, AUTO):
            try:
                found.append(_split_hold(dataset, indices, split, kind, is_asked=name == kind))
            except SplitRefused as refused:
                refusals.append(refused)
    if not found:
        raise ValueError(
            f"cache is impossible here: {refusals[-1].reason}. Make the data set a StagedDataset, or name a cut with "
            "StagedDataset.of(dataset, augment=...). If its __getitem__ returns the same each time, without any random numbers, "
            f"say so by cache.hold={WHOLE!r}"
        ) from refusals[-1]
    refusals.clear()  # their tracebacks refer to this frame and others: they would keep the data set until garbage collection
    return found


def find_holds(
    dataset: Any,
    indices: Sequence[Any] | None,
    split: Split | None,
    name: str,
    make_stages: Callable[[Any], Stages],
    size: int,
) -> list[Hold] | ValueError:
    """Returns the holds of `holds_of`, `measured`, or its refusal. It runs where the data may be read (data/elsewhere.py)."""
    every = range(len(dataset)) if indices is None else indices
    why, _ = whole_batch(dataset, indices)
    if why:
        return no_hold(why)
    try:
        holds = holds_of(dataset, indices, split, name)
    except ValueError as refused:
        return refused
    return measured(dataset, holds, make_stages, every, size)


def no_hold(why: str) -> ValueError:
    return ValueError(f"cache is impossible here: {why}. Mend that, or leave the cache out")


def holds_found(found: list[Hold] | ValueError | NotRead) -> list[Hold]:
    """Returns the holds of `find_holds`, or raises its refusal or the data set's own error."""
    if isinstance(found, NotRead):
        raise found.error or no_hold(found.reason)
    if isinstance(found, ValueError):
        raise found
    return found


# ---------------------------------------------------------------------- one hold


def _whole(dataset: Any, indices: Sequence[Any]) -> Hold:
    try:
        of_two = check_deterministic(dataset, [indices[0], indices[-1]])
        prove_single_loads(dataset, uncut_stages, [indices[0], indices[-1]])
    except SplitRefused as refused:
        raise WholeRefused(refused.reason) from refused
    size = size_of_examples(dataset, uncut_stages, indices) or of_two
    return Hold(WHOLE, _make_whole, size.packed + _RECORD_BYTES, "what __getitem__ returns", is_of_point=True)


def _make_whole(dataset: Any, stages: Stages) -> Held:
    return Held(WatchedStages(uncut_stages(dataset), dataset, refusal=WholeRefused))


def _split_hold(dataset: Any, indices: Sequence[Any] | None, split: Split | None, kind: str, *, is_asked: bool) -> Hold:
    ends = range(len(dataset)) if indices is None else indices
    is_of_point = split is not None and split.raw == (kind == RAW)
    found = split
    if found is None or not is_of_point:
        found = weighed(dataset, find_split(dataset, indices, raw=kind == RAW), indices)
    prove_single_loads(dataset, partial(make_stages, conventions=found.conventions, raw=found.raw), [ends[0], ends[-1]])
    make: Callable[[Any, Stages], Held] = _make_of_point
    if not is_of_point:
        if split is not None:
            prove_decoding(dataset, found, split, indices)
        refusal = (ReadRefused if kind == RAW else SplitRefused) if is_asked else None
        make = partial(_make_before_point, cut=found, point=split, refusal=refusal)
    return Hold(kind, make, found.packed_bytes + _RECORD_BYTES, ", ".join(found.reused), is_of_point, found)


def _make_of_point(dataset: Any, stages: Stages) -> Held:
    assert isinstance(stages, WatchedStages)
    return Held(stages)


def _make_before_point(dataset: Any, stages: Stages, cut: Split, point: Split | None, refusal: type[SplitRefused] | None) -> Held:
    """Returns the `Held` if the insertion point reuses the whole example (``point`` is None), or loads what is held raw."""
    if point is not None:
        made = make_decoding(dataset, cut, point)
        return Held(WatchedStages(made, dataset, refusal=refusal), made.augment, may_draw=False)
    watched = WatchedStages(make_stages(dataset, cut.conventions, raw=cut.raw), dataset, refusal=refusal)
    return Held(watched, watched.augment)


# ---------------------------------------------------------------------- looking at a few examples


def read_held(
    dataset: Any, hold: Hold, make_stages: Callable[[Any], Stages], indices: Sequence[Any]
) -> tuple[list[Any], list[float]]:
    """Reads examples from a temporary copy of the data set. Returns the held part of each, or `WHOLE` (check.py), and seconds."""
    examples, seconds = [], []
    with preserved_random_states():
        copied = throw_away_copy(dataset)
        stages = hold.make(copied, make_stages(copied)).stages
        add_decoding(stages)
        for index in indices:
            started = perf_counter()
            stages.begin()
            example = stages.load(index)
            if stages.must_repeat():
                example = stages.load(index)
            stages.end()
            examples.append(copy_example(example))  # since the next one may be read into the same memory
            seconds.append(perf_counter() - started)
    return examples, seconds


def measured(
    dataset: Any, holds: Sequence[Hold], make_stages: Callable[[Any], Stages], indices: Sequence[Any], size: int
) -> list[Hold]:
    """Returns the same holds with the seconds that reading takes, if `quickest` will need them for a cache of ``size`` bytes."""
    if len(holds) == 1 or holds[-1].example_bytes * len(indices) <= size:
        return list(holds)
    timed = []
    for place, hold in enumerate(holds):
        # Each hold is timed on its own examples, because an example is read faster the second time.
        mine = indices[place * _TIMED : (place + 1) * _TIMED] or indices[:_TIMED]
        _, seconds = read_held(dataset, hold, make_stages, mine)
        timed.append(replace(hold, seconds=median(seconds)))
    return timed


def quickest(holds: Sequence[Hold], count: int, size: int) -> Hold:
    """Returns the hold that saves the most seconds per byte; the last hold if all ``count`` examples fit into ``size`` bytes."""
    holds = [hold for hold in holds if hold.example_bytes <= size] or list(holds)  # without those that hold not even one
    last = holds[-1]
    if last.example_bytes * count <= size:
        return last
    return max(holds, key=lambda hold: hold.seconds / max(hold.example_bytes, 1))
