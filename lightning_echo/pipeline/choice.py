"""Where a loader is echoed: at the insertion point that the user asks for, or for ``auto`` at the earliest that is possible."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lightning_echo.cache.holding import Hold, find_holds, holds_found, no_hold
from lightning_echo.cache.kept import CacheConfig
from lightning_echo.data.copies import nbytes
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.pipeline.kinds import Indexed, Kind, Stream
from lightning_echo.pipeline.pipelines import Choice
from lightning_echo.pipeline.reads import most_open_files
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.describe import ReadRefused, SplitRefused
from lightning_echo.split.prove import (
    Split,
    find_split,
    holds_iteration,
    ignores_index,
    make_stages,
    needs_one_call,
    read_plainly,
    weighed,
    whole_batch,
)
from lightning_echo.split.reading import AUTO_IN_FLIGHT, ReadPart, find_part, may_be_on
from lightning_echo.split.staged import batched, size_of_examples, uncut_stages

_ECHOES_REPEAT = "if the data set augments, its echoes repeat that augmentation, which a StagedDataset can redo for each use"

# An example of at most this size is read again, to see whether its data set ignores the index.
_MOST_COMPARED_BYTES = 64 * 2**20


def choose_later(reason: str) -> Choice:
    """Returns the choice of the earliest point at which no data set is cut. ``reason``: why ``auto`` takes it."""
    return _uncut(earliest(Needs.examples), reason)


def choose(
    kind: Kind,
    point: InsertionPoint,
    cache: CacheConfig | None = None,
    in_flight: int | str = 1,
    *,
    says_why: bool = False,
) -> Choice:
    """Returns the insertion point to use. All examples are read in one other process (``data/elsewhere.py``).

    ``point`` is the user's; for ``auto`` it is the earliest that is possible, from ``before_augmentation`` on. ``cache`` has the
    options of a cache; None: the choice has no ``holds``. ``in_flight`` is the number of reads that may be under way, or
    ``"auto"``; 1: the choice has no ``reading``. ``says_why``: whether `Choice.no_reading` is wanted.

    Raises a ValueError if the point, the cache or the number of reads is impossible with this loader, or the data set's own error
    if the point or the cache needs its examples.
    """
    is_auto = point is InsertionPoint.auto
    if not is_auto and point not in points_from(kind.needs):
        raise ValueError(f"{point.option} is impossible here: {kind.why_later}. Use {_ways_out(kind.needs)}")
    later = earliest(kind.needs if kind.why_later else Needs.examples) if is_auto else point
    reason = kind.why_later if is_auto else ""
    if in_flight != 1:
        _check_open_files(kind, in_flight)
    if in_flight not in (1, AUTO_IN_FLIGHT) and not isinstance(kind, Indexed):
        raise _no_reads(in_flight, f"the loader does not say what it reads next ({kind.why_later})")
    if isinstance(kind, Stream):
        return _uncut(later, reason)
    may_read_ahead = in_flight != 1 and isinstance(kind, Indexed)
    if may_read_ahead and in_flight == AUTO_IN_FLIGHT:
        # Without workers, the training's own process would read earlier than without threads what may still change.
        may_read_ahead = kind.num_workers > 0 and (says_why or may_be_on(kind.loader.dataset))
    cuts = not kind.why_later and point not in points_from(Needs.examples)
    index = kind.readable_index
    if (
        not may_read_ahead
        and not cuts
        and index is None
        and cache is None
        and (later.by_batches or batched(kind.loader.dataset) is None)
    ):
        return _uncut(later, reason, caution=_caution(kind))
    hold = None if cache is None else (cache.hold, cache.bytes_of())
    reads = (in_flight, kind.num_workers) if may_read_ahead else None
    asked = _Asked(point, cuts, index, kind.readable_indices, hold, kind.loader.collate_fn, reads)
    found = read_elsewhere(kind.loader, _look, asked)
    if isinstance(found, NotRead):
        if index is None and found.error is not None:
            sampler = type(kind.sampler).__name__
            found = NotRead(f"its sampler ({sampler}) seems to yield no integers: {found.reason}")
        if cache is not None:
            holds_found(found)
        if cuts and not is_auto:
            raise found.error or ValueError(f"{point.option} is impossible here: {found.reason}. Use {_ways_out(Needs.examples)}")
        if in_flight not in (1, AUTO_IN_FLIGHT):
            raise found.error or _no_reads(in_flight, found.reason)
        why = reason or (f"{found.reason}; {_ECHOES_REPEAT}" if is_auto else "")
        return _uncut(later, why, caution=_caution(kind))
    # "": the point that the user asks for is refused, and nothing else was looked at.
    if isinstance(found.reading, str) and found.reading and in_flight not in (1, AUTO_IN_FLIGHT):
        raise _no_reads(in_flight, found.reading)
    is_none = isinstance(found.reading, str)
    chosen = _chosen(kind, point, later, reason, found)
    return replace(chosen, no_reading=found.reading) if is_none else replace(chosen, reading=found.reading)


def choose_reading(kind: Kind, in_flight: int | str) -> ReadPart | None:
    """Returns what threads may read ahead where whole examples are read. It raises the same errors as `choose`."""
    if in_flight == 1:
        return None
    _check_open_files(kind, in_flight)
    found: ReadPart | str | NotRead = f"the loader does not say what it reads next ({kind.why_later})"
    if isinstance(kind, Indexed):
        if in_flight == AUTO_IN_FLIGHT and not (kind.num_workers and may_be_on(kind.loader.dataset)):
            return None
        found = read_elsewhere(kind.loader, find_part, kind.readable_indices, [None], in_flight, kind.num_workers)
    if isinstance(found, ReadPart):
        return found
    if in_flight != AUTO_IN_FLIGHT:
        raise _no_reads(in_flight, found) if isinstance(found, str) else (found.error or _no_reads(in_flight, found.reason))
    return None


def _no_reads(in_flight: int | str, reason: str) -> ValueError:
    return ValueError(f"reads_in_flight={in_flight} is impossible here: {reason}. Use reads_in_flight=1, or {AUTO_IN_FLIGHT!r}")


def _check_open_files(kind: Kind, in_flight: int | str) -> None:
    """Raises a ValueError if the threads of a worker may open more files than the system allows."""
    workers, most = max(kind.num_workers, 1), most_open_files()
    if in_flight != AUTO_IN_FLIGHT and int(in_flight) // workers > most:
        raise ValueError(
            f"reads_in_flight={in_flight} needs {int(in_flight) // workers} open files in each of {workers} processes, and the "
            f"system allows {most} beside others (ulimit -n). Use at most {most * workers}, or raise that limit"
        )


def _chosen(kind: Kind, point: InsertionPoint, later: InsertionPoint, reason: str, found: _Found) -> Choice:
    """Returns the choice that follows from the findings.

    ``later`` is the point to use if the data set is not split. ``reason`` is why ``auto`` takes it; empty if because the data set
    cannot be split.
    """
    holds, is_auto = holds_found(found.holds), point is InsertionPoint.auto
    if found.whole_batch and not later.by_batches:
        if not is_auto:
            raise ValueError(f"{point.option} is impossible here: {found.whole_batch}. Use {_ways_out(Needs.batches)}")
        later, reason = earliest(Needs.batches), found.whole_batch
    split = found.split
    if isinstance(split, Split):
        return Choice(
            earliest(Needs.raw_items if split.raw else Needs.split),
            "",
            partial(_watched_stages, split=split, is_asked=not is_auto),
            split.reused,
            split.redone,
            split.example_bytes,
            split=split,
            holds=holds,
        )
    if split is not None and not is_auto:
        raise ValueError(f"{point.option} is impossible here: {split}") from split
    if split is not None:
        reason = f"{split.reason}; {_ECHOES_REPEAT}"
    item_bytes = found.example_bytes * ((kind.loader.batch_size or 1) if later.by_batches else 1)
    caution = _caution(kind, ignores_index=found.ignores_index)
    return replace(_uncut(later, reason, item_bytes, caution), holds=holds)


def _caution(kind: Kind, *, ignores_index: bool = False) -> str:
    """Returns why a resumed run gets other examples; empty if no reason is known."""
    dataset = getattr(kind.loader, "dataset", None)
    if not (ignores_index or (isinstance(kind, Indexed) and holds_iteration(dataset))):
        return ""
    return (
        f"{type(dataset).__name__} returns what comes next, whatever index it is asked for: an example that is read again after "
        "a resume is another one"
    )


# --- in the process that reads ---------------------------------------------------------------------------------------


class _Asked(NamedTuple):
    """The questions to the process that reads a few examples."""

    point: InsertionPoint
    cuts: bool  # whether the data set is to be split at `point`, if possible
    first: int | None  # an index that may be read; None: none is known
    indices: Any  # all of them; None: all indices
    hold: tuple[str, int] | None  # the stages that a cache is asked to hold, and its bytes
    collate_fn: Any
    reads: tuple[int | str, int] | None = None  # what the user asks for as reads in flight, and the number of workers


class _Found(NamedTuple):
    """The findings from reading a few examples."""

    split: Split | SplitRefused | None  # where the data set can be split, or why not; None: not asked, and it is not split
    example_bytes: int  # memory of the largest example that was read, of a data set that is not split; 0 if none was read
    ignores_index: bool  # whether such a data set returns what comes next, whatever its index
    holds: list[Hold] | ValueError  # what a cache can hold, or why nothing; empty if that was not asked
    reading: ReadPart | str = ""  # what threads may read ahead, or why nothing; empty if that was not asked
    whole_batch: str = ""  # why the result of one call of the data set cannot be taken apart; empty if it can


def _look(dataset: Any, asked: _Asked) -> _Found:
    """Reads a few examples, in a process that ends afterwards. An error of the data set that does not come again is ignored."""
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
        no_holds: list[Hold] | ValueError = [] if asked.hold is None else no_hold(why)
        return _Found(None, example_bytes, False, no_holds, whole_batch=why, reading="" if asked.reads is None else why)
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
    reading: ReadPart | str = ""
    if asked.reads is not None:
        cuts = [hold.split for hold in holds] if isinstance(holds, list) else []
        try:
            reading = find_part(dataset, indices, cuts or [split if isinstance(split, Split) else None], *asked.reads)
        except Exception as error:  # the data set's own: without reads in flight, this example may never be read
            reading = f"reading an example raised {type(error).__name__}: {error}"
    return _Found(split, example_bytes, ignores, holds, reading)


# --- the kinds of loaders --------------------------------------------------------------------------------------------


def _ways_out(needs: Needs) -> str:
    """Returns, in words, the insertion points that the user may ask for with such a loader."""
    names = [repr(point.value) for point in points_from(needs) if point.properties.for_auto]
    return f"{', '.join(names)} or {InsertionPoint.auto.value!r}"


def _uncut(point: InsertionPoint, reason: str, item_bytes: int = 0, caution: str = "") -> Choice:
    """Returns a choice that leaves the data set as it is. Reading and decoding are then one stage, "load"."""
    reused = ["load", *(stage for stage in point.properties.reused if stage not in ("read", "decode"))]
    return Choice(point, reason, uncut_stages, tuple(reused), point.properties.redone, item_bytes, caution)


def _watched_stages(dataset: Any, split: Split, is_asked: bool) -> WatchedStages:
    """Makes the stages that a worker runs. If the user asked for the point, an example that does not fit is an error."""
    refusal = ReadRefused if split.raw else SplitRefused
    stages = make_stages(dataset, split.conventions, raw=split.raw)
    return WatchedStages(stages, dataset, refusal=refusal if is_asked else None, may_fail=not is_asked)
