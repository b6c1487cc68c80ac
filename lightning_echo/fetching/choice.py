"""Where a loader is echoed: the insertion point asked for if the loader allows it, for ``auto`` the earliest that it allows."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.protecting.weight import nbytes
from lightning_echo.splitting.cut import ReadRefused, SplitRefused
from lightning_echo.splitting.fallback import WatchedStages
from lightning_echo.splitting.prove import ignores_index, read_plainly
from lightning_echo.splitting.splits import Split, find_split, make_stages
from lightning_echo.splitting.stages import Stages, uncut_stages

__all__ = ["Choice", "choose", "reads_whole_batches"]

_ECHOES_REPEAT = "if the data set augments, its echoes repeat that, and StagedDataset can have it redone"

_MOST_COMPARED_BYTES = 64 * 2**20  # of an example that is read again, to see whether its data set ignores the index


@dataclass(frozen=True)
class Choice:
    """The insertion point that was chosen.

    Attributes:
        point: The point, never ``auto``.
        reason: Why ``auto`` did not take an earlier one; empty if it took the earliest, or was not asked.
        make_stages: Makes the stages in a worker.
        reused: What an echo reuses, for people.
        redone: What each use redoes.
        item_bytes: Estimated memory of a live example, or of a live batch where batches are reused; 0 if unknown.
        caution: What about the data set makes a resumed run another one; empty if nothing is known.
    """

    point: InsertionPoint
    reason: str
    make_stages: Callable[[Any], Stages]
    reused: tuple[str, ...]
    redone: tuple[str, ...]
    item_bytes: int
    caution: str = ""


def choose(source: Source, point: InsertionPoint) -> Choice:
    """The insertion point to use: the one asked for if the loader allows it.

    For ``auto`` the earliest that it allows, from ``before_augmentation`` on.

    Raises:
        ValueError: The point asked for is impossible; the message says why and what to do.
    """
    if source.streams:
        return _choose_of_stream(point)
    if not source.rebuilds or source.own_batches:
        reason = _why_batches_only(source)
        if point is InsertionPoint.auto:
            return _whole(source, earliest(Needs.batches), reason)
        if point not in points_from(Needs.batches):
            raise ValueError(f"{point.option} is impossible here: {reason}. Use {_ways_out(Needs.batches)}")
        return _whole(source, point, "")
    if point in points_from(Needs.examples):
        return _whole(source, point, "")
    try:
        split = find_split(source.loader.dataset, _readable_indices(source), raw=point is earliest(Needs.raw_items))
    except SplitRefused as refused:
        if point is not InsertionPoint.auto:
            raise ValueError(f"{point.option} is impossible here: {refused}") from refused
        return _whole(source, earliest(Needs.examples), f"{refused.reason}; {_ECHOES_REPEAT}")
    except Exception as error:
        if point is not InsertionPoint.auto or source.readable_index is not None:
            raise
        raised = f"{type(error).__name__}: {error}"
        reason = f"its sampler ({type(source.sampler).__name__}) seems to yield no integers, since reading by one raised {raised}"
        if source.prepared_in_workers:
            reason = f"no example can be read before worker_init_fn has run ({raised})"
        return _whole(source, earliest(Needs.examples), f"{reason}; {_ECHOES_REPEAT}")
    return _split(split, is_asked=point is not InsertionPoint.auto)


def _choose_of_stream(point: InsertionPoint) -> Choice:
    reason = "the data set is a stream, which has no index"
    if point is InsertionPoint.auto:
        point = earliest(Needs.examples)
        return Choice(point, reason, uncut_stages, *_of_whole(point), 0)
    if point not in points_from(Needs.examples):
        raise ValueError(f"{point.option} is impossible here: {reason}. Use {_ways_out(Needs.examples)}")
    return Choice(point, "", uncut_stages, *_of_whole(point), 0)


def _ways_out(needs: Needs) -> str:
    """What may be asked for of such a loader, for people."""
    names = [repr(point.value) for point in points_from(needs) if point.properties.for_auto]
    return f"{', '.join(names)} or {InsertionPoint.auto.value!r}"


def _of_whole(point: InsertionPoint) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is reused and what is redone of examples that are left whole: reading and decoding are one."""
    reused = [stage for stage in point.properties.reused if stage not in ("read", "decode")]
    return ("load", *reused), point.properties.redone


def _why_batches_only(source: Source) -> str:
    loader = source.loader
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is an iterable of batches, of which single examples are not known"
    if loader.batch_sampler is None:
        return "the loader has batch_size=None: what it calls an example is opaque"
    if source.rebuilds:
        return (
            "the loader has a batch_sampler of its own, and what makes up a batch is that sampler's decision: give batch_size "
            "and a sampler for an earlier point, or augment on the device, which is redone for each use"
        )
    return f"{type(loader).__name__} has an __iter__ of its own, which a rebuilt loader would not run"


def _readable_indices(source: Source) -> Any:
    """Indices that may be read to look at an example; None: all."""
    indices = source.sampler.indices if type(source.sampler) is SubsetRandomSampler else None
    return indices if isinstance(indices, Sized) and len(indices) else None


def _whole(source: Source, point: InsertionPoint, reason: str) -> Choice:
    reused, redone = _of_whole(point)
    item_bytes, caution = 0, ""
    if (index := source.readable_index) is not None:
        dataset = source.loader.dataset
        example_bytes = nbytes(read_plainly(dataset, [index]).examples[0])
        item_bytes = example_bytes * (source.loader.batch_size if point.by_batches else 1)
        indices = _readable_indices(source)
        other = index + 1 if indices is None else indices[-1]  # no length is asked for: a data set need not have one
        if other != index and example_bytes <= _MOST_COMPARED_BYTES and ignores_index(dataset, index, other):
            caution = (
                f"{type(dataset).__name__} returns what comes next, whatever index it is asked for: "
                "an example that is read again after a resume is another one"
            )
    return Choice(point, reason, uncut_stages, reused, redone, item_bytes, caution)


def _split(split: Split, *, is_asked: bool) -> Choice:
    return Choice(
        earliest(Needs.raw_items if split.raw else Needs.split),
        "",
        partial(_watched_stages, split=split, is_asked=is_asked),
        split.reused,
        split.redone,
        split.example_bytes,
    )


def _watched_stages(dataset: Any, split: Split, is_asked: bool) -> WatchedStages:
    """What a worker runs; where the point was asked for, an example that does not fit is an error."""
    refusal = ReadRefused if split.raw else SplitRefused
    stages = make_stages(dataset, split.conventions, raw=split.raw)
    return WatchedStages(stages, dataset, refusal=refusal if is_asked else None)


def reads_whole_batches(source: Source, choice: Choice) -> bool:
    """Whether the workers read the fresh examples of a batch in one call."""
    return choice.make_stages(source.loader.dataset).load_many is not None
