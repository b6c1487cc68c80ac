"""What a loader is: its workers, whether it can be pickled, where its data set can be cut, and how long its first batch takes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle

from lightning_echo.doctor.findings import Finding, Status, error, ok, warning
from lightning_echo.doctor.looking import FirstBatch, Looked
from lightning_echo.doctor.target import UserCodeError, said
from lightning_echo.insertion import InsertionPoint, Needs, earliest
from lightning_echo.protecting.memory import bytes_in_words

__all__ = ["check_first_batch", "check_loader"]

_ON_DEVICE = "Augment on the device, in on_after_batch_transfer, or make it a data set that is read by index."
_STAGED = "Make it a StagedDataset, or name the cut: StagedDataset.of(dataset, augment=...)."


def check_loader(looked: Looked, cores: int) -> list[Finding]:
    """Returns the findings about a loader before it is iterated.

    Args:
        looked: What is known of the loader.
        cores: Number of workers that the cores can keep busy.
    """
    found = [_kind(looked), _workers(looked, cores), _pickled(looked)]
    if looked.unreadable is not None:
        way_out = "Mend it; the full traceback is that of next(iter(loader)) with num_workers=0."
        return [*found, error("example", f"{looked.unreadable}.", way_out)]
    return [*found, _split(looked), _points(looked)]


def check_first_batch(first: FirstBatch | UserCodeError, batch_size: int | None = None) -> Finding:
    """Returns the finding about the first batch.

    Args:
        first: The batch, or what the user's code raised in its place.
        batch_size: Number of examples in a batch; None if not known.
    """
    if isinstance(first, UserCodeError):
        return error("first_batch", f"{first}.", "Mend it; with num_workers=0 the traceback is the shortest.", seconds=None)
    each = f", about {bytes_in_words(first.bytes / batch_size)} for an example" if batch_size else ""
    weight = f"Its tensors ({first.tensors}) have {bytes_in_words(first.bytes)}{each}."
    sentence = f"The first batch took {first.seconds:.3g} seconds. {weight}"
    return ok("first_batch", sentence, seconds=first.seconds, batch_bytes=first.bytes, tensors=first.tensors)


def _kind(looked: Looked) -> Finding:
    loader, name = looked.loader, type(looked.loader).__name__
    if not looked.is_dataloader:
        return ok("loader", f"The loader is a {name}.", kind=name, batches=looked.source.length)
    held = f"{looked.examples:,} examples" if looked.examples is not None else "a stream" if looked.source.streams else "examples"
    sentence = f"The loader is a {name} over {type(loader.dataset).__name__} ({held}), batch_size={loader.batch_size}."
    return ok("loader", sentence, kind=name, examples=looked.examples, batch_size=loader.batch_size, batches=looked.source.length)


def _workers(looked: Looked, cores: int) -> Finding:
    workers, figures = looked.source.num_workers, {"num_workers": looked.source.num_workers, "cores": cores}
    if not looked.is_dataloader:
        return ok("workers", "Its workers, if there are any, are its own business.", **figures)
    if workers == 0 and cores > 1:
        sentence = f"num_workers=0: the training reads its data itself, and {cores - 1} of {cores} cores stay idle meanwhile."
        return warning("workers", sentence, f"Set num_workers={cores}, unless all data is in memory.", **figures)
    if workers > cores:
        sentence = f"num_workers={workers} is more than the {cores} cores of this process."
        return warning("workers", sentence, f"Set num_workers={cores}, unless reading is mostly waiting.", **figures)
    return ok("workers", f"num_workers={workers} for {cores} cores.", **figures)


# ---------------------------------------------------------------------- pickling


class _Counted:
    """A file that only counts what is written."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size


def _pickled(looked: Looked) -> Finding:
    parts = {"loader": looked.loader}
    if looked.is_dataloader:
        names = ("dataset", "collate_fn", "worker_init_fn")
        parts = {name: getattr(looked.loader, name) for name in names if getattr(looked.loader, name) is not None}
    size, failed = _try(parts, lambda value, file: pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value))
    _, failed_for_sharing = _try(parts, lambda value, file: cloudpickle.Pickler(file).dump(value))
    method, needed = _start_method(looked.loader), looked.source.num_workers > 0
    figures: dict[str, Any] = {"bytes": None if failed else size, "start_method": method, "shareable": not failed_for_sharing}
    if not failed:
        return ok(
            "pickle", f"It can be pickled ({bytes_in_words(size)}): workers may be spawned, and reading be shared.", **figures
        )
    sharing = "and reading cannot be shared" if failed_for_sharing else "but reading can be shared"
    sentence = f"It cannot be pickled ({failed}): workers can only be forked, {sharing}."
    way_out = (
        "Define functions at the top of a module instead of lambdas, and open files at the first read instead of in __init__."
    )
    status = Status.error if needed and method != "fork" else Status.warning
    return Finding("pickle", status, sentence, way_out, figures)


def _try(parts: dict[str, Any], dump: Callable[[Any, Any], object]) -> tuple[int, str]:
    """Returns the number of bytes of all parts, and the part that cannot be pickled; empty if all can be pickled."""
    file = _Counted()
    for name, value in parts.items():
        try:
            dump(value, file)
        except Exception as problem:  # an object of the user's may raise anything when it is pickled
            return file.bytes, f"{name}: {said(problem)}"
    return file.bytes, ""


def _start_method(loader: Any) -> str:
    """Returns how the workers of a loader are started. This does not fix the default of this process."""
    context = getattr(loader, "multiprocessing_context", None)
    if context is not None:
        return str(context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


# ---------------------------------------------------------------------- cuts and points


def _split(looked: Looked) -> Finding:
    early, raw = (earliest(needs) for needs in (Needs.split, Needs.raw_items))
    found, after_reading = looked.possible.get(early), raw in looked.possible
    figures: dict[str, Any] = {early.value: found is not None, raw.value: after_reading}
    if found is not None:
        also = " It can be cut after reading, too." if after_reading else ""
        sentence = f"The data set can be split: an echo reuses {_listed(found.reused)} and redoes {_listed(found.redone)}.{also}"
        return ok("split", sentence, **figures)
    sentence = f"The data set cannot be split before its augmentation: {looked.refused[early].rstrip('.')}."
    way_out = _STAGED if looked.source.rebuilds else _ON_DEVICE
    return warning("split", sentence, f"If it augments, echoes would repeat that augmentation. {way_out}", **figures)


def _points(looked: Looked) -> Finding:
    assert looked.choice is not None
    chosen = looked.choice.point
    sentence = f"Insertion points: {', '.join(point.value for point in looked.possible)}. auto takes {chosen.value}."
    figures: dict[str, Any] = {
        point.value: point in looked.possible for point in InsertionPoint if point is not InsertionPoint.auto
    }
    return ok("insertion_points", sentence, **figures, auto=chosen.value)


def _listed(stages: tuple[str, ...]) -> str:
    return ", ".join(stages) or "nothing"
