"""Where a loader is echoed: at the insertion point that the user asks for, or for ``auto`` at the earliest that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from lightning_echo.caching.cache_config import CacheConfig
from lightning_echo.caching.holding import Hold, find_holds, holds_found, no_hold
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.protecting.elsewhere import NotRead, read_elsewhere
from lightning_echo.protecting.memory import nbytes
from lightning_echo.splitting.calls import needs_one_call, whole_batch
from lightning_echo.splitting.cut import ReadRefused, SplitRefused
from lightning_echo.splitting.fallback import WatchedStages
from lightning_echo.splitting.prove import holds_iteration, ignores_index, read_plainly
from lightning_echo.splitting.sizes import size_of_examples
from lightning_echo.splitting.splits import Split, find_split, make_stages, weighed
from lightning_echo.splitting.staged import batched
from lightning_echo.splitting.stages import Stages, uncut_stages

__all__ = ["Choice", "choose", "reads_whole_batches"]

_ECHOES_REPEAT = "if the data set augments, its echoes repeat that augmentation, which a StagedDataset can redo for each use"

# An example of at most this size is read again, to see whether its data set ignores the index.
_MOST_COMPARED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Choice:
    """The insertion point that was chosen.

    Attributes:
        point: The point, never ``auto``.
        reason: Why ``auto`` did not choose an earlier point; empty if it chose the earliest, or if the user asked for the point.
        make_stages: Makes the stages of a data set, in a worker.
        reused: Names of the stages that an echo reuses, for people.
        redone: Names of the stages that each use redoes, for people.
        item_bytes: Estimated memory of a live item, in bytes; 0 if unknown. An item is an example, or a batch if whole batches
            are echoed.
        caution: Why a resumed run gets other examples from this data set; empty if no reason is known.
        split: Where the data set is split; None if it is not.
        holds: What a cache can hold, the earliest cut first; empty if that was not asked.
    """

    point: InsertionPoint
    reason: str
    make_stages: Callable[[Any], Stages]
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    item_bytes: int
    caution: str = ""
    split: Split | None = None
    holds: Sequence[Hold] = ()


def choose_later(reason: str) -> Choice:
    """Returns the choice of the earliest point at which no data set is cut, because of a ``reason`` that ``auto`` has."""
    return _uncut(earliest(Needs.examples), reason)


def choose(source: Source, point: InsertionPoint, cache: CacheConfig | None = None) -> Choice:
    """Returns the insertion point to use.

    Examples are read in another process (protecting/elsewhere.py), all in the same one.

    Args:
        source: The user's loader.
        point: The point that the user asks for; ``auto`` for the earliest that is possible, from ``before_augmentation`` on.
        cache: The options of a cache; None: it is not asked what a cache can hold.

    Raises:
        ValueError: The point, or the cache, is impossible with this loader. The message says why, and what to do.
        Exception: The data set itself raises it when it is read, and the user asks for a point, or a cache, that needs this.
    """
    if source.streams:
        return _choose_for_stream(point)
    is_auto, cuts, reason = point is InsertionPoint.auto, point not in points_from(Needs.examples), ""
    later = earliest(Needs.examples) if is_auto else point
    if not source.rebuilds or source.own_batches:
        if not is_auto and point not in points_from(Needs.batches):
            raise ValueError(f"{point.option} is impossible here: {_why_batches_only(source)}. Use {_ways_out(Needs.batches)}")
        cuts, later = False, earliest(Needs.batches) if is_auto else point
        reason = _why_batches_only(source) if is_auto else ""
    index = source.readable_index
    if not cuts and index is None and cache is None and (later.by_batches or batched(source.loader.dataset) is None):
        return _uncut(later, reason, caution=_caution(source))
    hold = None if cache is None else (cache.hold, cache.bytes_of())
    asked = _Asked(point, cuts, index, source.readable_indices, hold, source.loader.collate_fn)
    found = read_elsewhere(source.loader, _look, asked)
    if isinstance(found, NotRead):
        if index is None and found.error is not None:
            sampler = type(source.sampler).__name__
            found = NotRead(f"its sampler ({sampler}) seems to yield no integers: {found.reason}")
        if cache is not None:
            holds_found(found)
        if cuts and not is_auto:
            raise found.error or ValueError(f"{point.option} is impossible here: {found.reason}. Use {_ways_out(Needs.examples)}")
        why = reason or (f"{found.reason}; {_ECHOES_REPEAT}" if is_auto else "")
        return _uncut(later, why, caution=_caution(source))
    return _chosen(source, point, later, reason, found)


def _chosen(source: Source, point: InsertionPoint, later: InsertionPoint, reason: str, found: _Found) -> Choice:
    """Returns the choice that follows from what was found.

    Args:
        source: The user's loader.
        point: The point that the user asks for.
        later: The point to use if the data set is not split.
        reason: Why ``auto`` takes that; empty if it is because the data set cannot be split.
        found: What was found.
    """
    holds, is_auto = holds_found(found.holds), point is InsertionPoint.auto
    if found.whole_batch and not later.by_batches:
        if not is_auto:
            raise ValueError(f"{point.option} is impossible here: {found.whole_batch}. Use {_ways_out(Needs.batches)}")
        later, reason = earliest(Needs.batches), found.whole_batch
    if isinstance(found.split, Split):
        return replace(_cut(found.split, is_asked=not is_auto), holds=holds)
    if found.split is not None and not is_auto:
        raise ValueError(f"{point.option} is impossible here: {found.split}") from found.split
    if found.split is not None:
        reason = f"{found.split.reason}; {_ECHOES_REPEAT}"
    item_bytes = found.example_bytes * ((source.loader.batch_size or 1) if later.by_batches else 1)
    caution = _caution(source, ignores_index=found.ignores_index)
    return replace(_uncut(later, reason, item_bytes, caution), holds=holds)


def _caution(source: Source, *, ignores_index: bool = False) -> str:
    """Returns why a resumed run gets other examples; empty if no reason is known.

    Args:
        source: The user's loader.
        ignores_index: Whether its data set was found to ignore its index.
    """
    dataset = getattr(source.loader, "dataset", None)
    if not (ignores_index or (source.rebuilds and holds_iteration(dataset))):
        return ""
    return (
        f"{type(dataset).__name__} returns what comes next, whatever index it is asked for: an example that is read again after "
        "a resume is another one"
    )


# --- in the process that reads ---------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """What is asked of the process that reads a few examples.

    Attributes:
        point: The point that the user asks for.
        cuts: Whether the data set is to be split there, if possible.
        first: An index that may be read; None: none is known.
        indices: The indices that may be read; None: all.
        hold: What a cache is asked to hold, and its bytes; None without a cache.
        collate_fn: The collate function.
    """

    point: InsertionPoint
    cuts: bool
    first: int | None
    indices: Any
    hold: tuple[str, int] | None
    collate_fn: Any


class _Found(NamedTuple):
    """What was found by reading a few examples.

    Attributes:
        split: Where the data set can be split, or why not; None: that was not asked, and the data set is not split.
        example_bytes: Memory of the largest example that was read, of a data set that is not split, in bytes; 0 if none was read.
        ignores_index: Whether such a data set returns what comes next, whatever its index.
        holds: What a cache can hold, or why nothing; empty if that was not asked.
        whole_batch: Why what the data set reads in one call cannot be taken apart; empty if it can.
    """

    split: Split | SplitRefused | None
    example_bytes: int
    ignores_index: bool
    holds: list[Hold] | ValueError
    whole_batch: str = ""


def _look(dataset: Any, asked: _Asked) -> _Found:
    """Reads a few examples, in a process that ends afterwards. An error of the data set that does not come again is none."""
    try:
        return _look_once(dataset, asked)
    except Exception:
        return _look_once(dataset, asked)


def _look_once(dataset: Any, asked: _Asked) -> _Found:
    is_asked, indices = asked.point is not InsertionPoint.auto, asked.indices
    split: Split | SplitRefused | None = None
    why, example_bytes = whole_batch(dataset, indices)
    if not why and not asked.point.by_batches and asked.hold is None:  # a cache has a proof of its own
        why = needs_one_call(dataset, indices, asked.collate_fn)
    if why:
        return _Found(None, example_bytes, False, [] if asked.hold is None else no_hold(why), why)
    if asked.cuts:
        try:
            split = weighed(dataset, find_split(dataset, indices, raw=asked.point is earliest(Needs.raw_items)), indices)
        except SplitRefused as refused:
            split = refused
            if is_asked:
                return _Found(split, 0, False, [])
    ignores = False
    if asked.first is not None and not isinstance(split, Split):
        example_bytes = nbytes(read_plainly(dataset, [asked.first]).examples[0])
        other = asked.first + 1 if indices is None else indices[-1]  # not by the length: a data set need not have one
        if other != asked.first and example_bytes <= _MOST_COMPARED_BYTES:
            ignores = ignores_index(dataset, asked.first, other)
            spread = size_of_examples(dataset, uncut_stages, indices)
            example_bytes = max(example_bytes, 0 if spread is None else spread.largest)
    holds: list[Hold] | ValueError = []
    if asked.hold is not None:
        found = split if isinstance(split, Split) else None
        make = uncut_stages if found is None else partial(_watched_stages, split=found, is_asked=is_asked)
        holds = find_holds(dataset, indices, found, asked.hold[0], make, asked.hold[1])
    return _Found(split, example_bytes, ignores, holds)


# --- the kinds of loaders --------------------------------------------------------------------------------------------


def _choose_for_stream(point: InsertionPoint) -> Choice:
    reason = "the data set is a stream, which has no index"
    if point is InsertionPoint.auto:
        return _uncut(earliest(Needs.examples), reason)
    if point not in points_from(Needs.examples):
        raise ValueError(f"{point.option} is impossible here: {reason}. Use {_ways_out(Needs.examples)}")
    return _uncut(point, "")


def _ways_out(needs: Needs) -> str:
    """Returns, in words, the insertion points that the user may ask for with such a loader."""
    names = [repr(point.value) for point in points_from(needs) if point.properties.for_auto]
    return f"{', '.join(names)} or {InsertionPoint.auto.value!r}"


def _why_batches_only(source: Source) -> str:
    """Returns why only whole batches of this loader can be echoed."""
    loader = source.loader
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is an iterable of batches, and does not tell which examples are in them"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None, and only its data set knows which examples are in what it yields"
    if source.rebuilds:
        return (
            "the loader has a batch_sampler of its own, which decides what is in a batch: give the loader batch_size and a "
            "sampler for an earlier point, or augment on the device, which is redone for each use"
        )
    return f"{type(loader).__name__} has an __iter__ of its own, which a rebuilt loader would not run"


def _uncut(point: InsertionPoint, reason: str, item_bytes: int = 0, caution: str = "") -> Choice:
    """Returns a choice that leaves the data set as it is. Reading and decoding are then one stage, "load"."""
    reused = ["load", *(stage for stage in point.properties.reused if stage not in ("read", "decode"))]
    return Choice(point, reason, uncut_stages, tuple(reused), point.properties.redone, item_bytes, caution)


def _cut(split: Split, *, is_asked: bool) -> Choice:
    """Returns a choice that cuts the data set. ``is_asked`` says whether the user asked for the point."""
    return Choice(
        earliest(Needs.raw_items if split.raw else Needs.split),
        "",
        partial(_watched_stages, split=split, is_asked=is_asked),
        split.reused,
        split.redone,
        split.example_bytes,
        split=split,
    )


def _watched_stages(dataset: Any, split: Split, is_asked: bool) -> WatchedStages:
    """Makes the stages that a worker runs. If the user asked for the point, an example that does not fit is an error."""
    refusal = ReadRefused if split.raw else SplitRefused
    stages = make_stages(dataset, split.conventions, raw=split.raw)
    return WatchedStages(stages, dataset, refusal=refusal if is_asked else None, may_fail=not is_asked)


def reads_whole_batches(source: Source, choice: Choice) -> bool:
    """Returns whether the workers read the fresh examples of a batch in one call."""
    return choice.make_stages(source.loader.dataset).load_many is not None
