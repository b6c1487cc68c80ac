"""Where a loader is echoed: at the insertion point that the user asks for, or for ``auto`` at the earliest that is possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.protecting.memory import nbytes
from lightning_echo.splitting.cut import ReadRefused, SplitRefused
from lightning_echo.splitting.fallback import WatchedStages
from lightning_echo.splitting.prove import ignores_index, read_plainly
from lightning_echo.splitting.splits import Split, find_split, make_stages
from lightning_echo.splitting.stages import Stages, uncut_stages

__all__ = ["Choice", "choose", "reads_whole_batches", "why_unreadable"]

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
    """

    point: InsertionPoint
    reason: str
    make_stages: Callable[[Any], Stages]
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    item_bytes: int
    caution: str = ""
    split: Split | None = None


def choose(source: Source, point: InsertionPoint) -> Choice:
    """Returns the insertion point to use.

    Args:
        source: The user's loader.
        point: The point that the user asks for; ``auto`` for the earliest that is possible, from ``before_augmentation`` on.

    Raises:
        ValueError: The point is impossible with this loader. The message says why, and what to do.
    """
    if source.streams:
        return _choose_for_stream(point)
    if not source.rebuilds or source.own_batches:
        reason = _why_batches_only(source)
        if point is InsertionPoint.auto:
            return _uncut_after_a_look(source, earliest(Needs.batches), reason)
        if point not in points_from(Needs.batches):
            raise ValueError(f"{point.option} is impossible here: {reason}. Use {_ways_out(Needs.batches)}")
        return _uncut_after_a_look(source, point, "")
    if point in points_from(Needs.examples):
        return _uncut_after_a_look(source, point, "")
    try:
        split = find_split(source.loader.dataset, source.readable_indices, raw=point is earliest(Needs.raw_items))
    except SplitRefused as refused:
        if point is not InsertionPoint.auto:
            raise ValueError(f"{point.option} is impossible here: {refused}") from refused
        return _uncut_after_a_look(source, earliest(Needs.examples), f"{refused.reason}; {_ECHOES_REPEAT}")
    except Exception as error:
        if point is not InsertionPoint.auto or source.readable_index is not None:
            raise  # if not asked for: perhaps only a worker, or a sampler with other indices, knows how to read an example
        reason = why_unreadable(source, error)
        return _uncut_after_a_look(source, earliest(Needs.examples), f"{reason}; {_ECHOES_REPEAT}")
    return _cut(split, is_asked=point is not InsertionPoint.auto)


def why_unreadable(source: Source, error: Exception) -> str:
    """Returns why no example can be read in this process, although workers may be able to read it.

    Args:
        source: The user's loader. No readable index of it is known.
        error: What the data set has raised.
    """
    raised = f"{type(error).__name__}: {error}"
    if source.prepared_in_workers:
        return f"no example can be read before worker_init_fn has run ({raised})"
    return f"its sampler ({type(source.sampler).__name__}) seems to yield no integers, since reading by one raised {raised}"


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


def _uncut_after_a_look(source: Source, point: InsertionPoint, reason: str) -> Choice:
    """Returns a choice that leaves the data set as it is. If an example can be read, it is examined before."""
    if (index := source.readable_index) is None:
        return _uncut(point, reason)
    dataset, caution = source.loader.dataset, ""
    example_bytes = nbytes(read_plainly(dataset, [index]).examples[0])
    indices = source.readable_indices
    other = index + 1 if indices is None else indices[-1]  # not by the length: a data set need not have one
    if other != index and example_bytes <= _MOST_COMPARED_BYTES and ignores_index(dataset, index, other):
        caution = (
            f"{type(dataset).__name__} returns what comes next, whatever index it is asked for: "
            "an example that is read again after a resume is another one"
        )
    return _uncut(point, reason, example_bytes * (source.loader.batch_size if point.by_batches else 1), caution)


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
    return WatchedStages(stages, dataset, refusal=refusal if is_asked else None)


def reads_whole_batches(source: Source, choice: Choice) -> bool:
    """Returns whether the workers read the fresh examples of a batch in one call."""
    return choice.make_stages(source.loader.dataset).load_many is not None
