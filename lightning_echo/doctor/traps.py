"""The known traps of a training loader, as far as they can be seen without training.

A trap is a function of the knowledge about a loader; it returns a finding, or None if it does not apply. Traps that stop a
training, or divide its data wrongly, come first.
"""

from __future__ import annotations

import inspect
import io
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_echo.doctor.looking import FirstBatch, Looked
from lightning_echo.doctor.machine import Finding, ok, warning
from lightning_echo.pipeline.kinds import Indexed, OwnBatches

_MANY_OBJECTS = 1_000_000  # in a list or dict; each takes a reference count that a forked worker writes to
_OTHER_FILES = 200  # file descriptors that a training needs for other things
_TRANSFER_HOOKS = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")


@dataclass(frozen=True)
class Surroundings:
    """The conditions, besides the loader, that traps depend on: CUDA, torch's way of sending tensors, the limit of open files
    (None: unknown).
    """

    has_cuda: bool
    sharing_strategy: str
    open_files: int | None

    @classmethod
    def of_this_process(cls) -> Surroundings:
        limit = None
        if find_spec("resource") is not None:  # not on Windows
            resource = import_module("resource")
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            limit = None if soft == resource.RLIM_INFINITY else soft
        return cls(torch.cuda.is_available(), torch.multiprocessing.get_sharing_strategy(), limit)  # type: ignore[no-untyped-call]


def check_traps(looked: Looked, first: FirstBatch | None, around: Surroundings) -> list[Finding]:
    """Returns the findings for the traps that apply, or one finding that none does. ``first`` is None if it could not be read."""
    found = [trap(looked) for trap in _TRAPS]
    found += [_pinned_memory(looked, around), _file_descriptors(looked, first, around)]
    applying = [finding for finding in found if finding is not None]
    return applying or [ok("traps", "None of the known traps of a training loader applies.")]


def check_hooks(data: Any) -> list[Finding]:
    if not isinstance(data, pl.LightningDataModule):
        return []
    own = [hook for hook in _TRANSFER_HOOKS if is_overridden(hook, data)]
    if not own:
        return []
    return [
        warning(
            "transfer_hooks",
            f"{type(data).__name__} defines {', '.join(own)}: the same hooks of the model are not called.",
            "Define them in one of the two.",
        )
    ]


# ---------------------------------------------------------------------- what kind of loader it is


def _no_dataloader(looked: Looked) -> Finding | None:
    if looked.is_dataloader:
        return None
    return warning(
        "not_a_dataloader",
        "The loader is no DataLoader: Lightning does not divide its data among ranks, so that each rank trains on all of it.",
        "With several ranks, let the loader itself yield the part of its rank. With one rank there is nothing to do.",
    )


def _iterator_attribute(looked: Looked) -> Finding | None:
    if looked.is_dataloader or not hasattr(looked.loader, "_iterator"):
        return None
    return warning(
        "iterator_attribute",
        "The loader has an attribute _iterator, which Lightning sets to None at the end of fit.",
        "Give that attribute another name.",
    )


def _own_iteration(looked: Looked) -> Finding | None:
    if not looked.is_dataloader or type(looked.loader).__iter__ is DataLoader.__iter__:
        return None
    return warning(
        "own_iteration",
        f"{type(looked.loader).__name__} has an __iter__ of its own: only whole batches of it can be echoed.",
        "Move that work into collate_fn or the data set, and use DataLoader itself, for an earlier insertion point.",
    )


def _own_batch_sampler(looked: Looked) -> Finding | None:
    if not isinstance(looked.kind, OwnBatches):
        return None
    return warning(
        "batch_sampler",
        f"{type(looked.loader.batch_sampler).__name__} decides what is in a batch: only whole batches can be echoed.",
        "Give the loader batch_size and a sampler, for an earlier insertion point.",
    )


def _no_batch_size(looked: Looked) -> Finding | None:
    if not looked.is_dataloader or looked.loader.batch_sampler is not None:
        return None
    return warning(
        "no_batch_size",
        "batch_size=None: the data set makes the batches, and only whole batches can be echoed.",
        "Let the data set yield examples, and the loader make batches of them, for an earlier insertion point.",
    )


# ---------------------------------------------------------------------- streams


def _stream_without_length(looked: Looked) -> Finding | None:
    if not looked.kind.reads_stream or looked.kind.length is not None:
        return None
    return warning(
        "stream_without_length",
        "The stream has no length: Lightning refuses a float for limit_train_batches and val_check_interval, and a progress bar "
        "does not know the end.",
        "Give the data set a __len__ with the examples of a pass, or use integers for these options.",
    )


def _stream_not_divided(looked: Looked) -> Finding | None:
    """If a stream does not ask in which worker it runs, each worker yields all of its examples."""
    dataset = looked.dataset
    if not isinstance(dataset, IterableDataset) or looked.kind.num_workers < 2:
        return None
    if looked.loader.worker_init_fn is not None or not _is_users(type(dataset)) or "worker_info" in _module_text(type(dataset)):
        return None
    return warning(
        "stream_not_divided",
        f"{type(dataset).__name__} does not ask for get_worker_info(): each of the {looked.kind.num_workers} workers may yield "
        "all of its examples.",
        "Let __iter__ yield the part of its worker: torch.utils.data.get_worker_info() has its id and their number.",
    )


# ---------------------------------------------------------------------- workers, order and the last batch


def _short_lived_workers(looked: Looked) -> Finding | None:
    if not looked.is_dataloader or not looked.kind.num_workers or looked.loader.persistent_workers:
        return None
    return warning(
        "persistent_workers",
        "persistent_workers=False: without echoing, each epoch restarts its workers and waits for its first batch again.",
        "Set persistent_workers=True. (Workers of an echoed loader stay alive in any case.)",
    )


def _not_shuffled(looked: Looked) -> Finding | None:
    if not isinstance(looked.kind, Indexed) or type(looked.kind.sampler) is not SequentialSampler:
        return None
    return warning(
        "not_shuffled",
        "The training loader does not shuffle: each epoch has the examples in the same order.",
        "Set shuffle=True, unless the order is meant.",
    )


def _divides_itself(looked: Looked) -> Finding | None:
    if not looked.kind.shards_itself:
        return None
    return warning(
        "divided_sampler",
        f"{type(looked.kind.sampler).__name__} divides its indices among ranks by itself. Unless it is a DistributedSampler, a "
        "cache cannot be partitioned among nodes.",
        "Leave the sampler out: Lightning and this package divide the data.",
    )


def _last_batch_of_one(looked: Looked) -> Finding | None:
    examples, loader = looked.examples, looked.loader
    if examples is None or isinstance(looked.kind, OwnBatches) or loader.drop_last or loader.batch_size == 1:
        return None
    if len(looked.kind.sampler) % loader.batch_size != 1:
        return None
    return warning(
        "last_batch_of_one",
        f"The last batch of a pass has one example ({len(looked.kind.sampler):,} examples, batch_size={loader.batch_size}): "
        "BatchNorm fails on it or learns noise.",
        "Set drop_last=True, or another batch_size.",
    )


# ---------------------------------------------------------------------- what forked workers inherit


def _open_files(looked: Looked) -> Finding | None:
    if not looked.kind.num_workers:
        return None
    names = [
        f"{type(part).__name__}.{name}"
        for part in _data_sets(looked.dataset)
        for name, value in vars(part).items()
        if isinstance(value, io.IOBase) or type(value).__module__.split(".")[0] == "h5py"
    ]
    if not names:
        return None
    return warning(
        "open_files",
        f"{', '.join(names)} is an open file: forked workers share its position and corrupt each other's reads.",
        "Open it at the first read, in the worker, and keep it there.",
    )


def _many_objects(looked: Looked) -> Finding | None:
    if not looked.kind.num_workers:
        return None
    names = [
        f"{type(part).__name__}.{name} ({len(value):,})"
        for part in _data_sets(looked.dataset)
        for name, value in vars(part).items()
        if isinstance(value, list | dict) and len(value) >= _MANY_OBJECTS
    ]
    if not names:
        return None
    return warning(
        "many_objects",
        f"{', '.join(names)} holds many Python objects: each worker copies their memory bit by bit, since it counts references "
        "to them.",
        "Keep them in an array or a tensor (strings: as bytes with offsets), which the workers share.",
    )


# ---------------------------------------------------------------------- device and files


def _pinned_memory(looked: Looked, around: Surroundings) -> Finding | None:
    if not looked.is_dataloader or looked.loader.pin_memory == around.has_cuda:
        return None
    if around.has_cuda:
        sentence = "pin_memory=False, and there is a CUDA device: copies to it wait for the host."
        return warning("pin_memory", sentence, "Set pin_memory=True, unless the training runs on the CPU.")
    sentence = "pin_memory=True, and there is no CUDA device: torch warns, and ignores it."
    return warning("pin_memory", sentence, "Set pin_memory=torch.cuda.is_available().")


def _file_descriptors(looked: Looked, first: FirstBatch | None, around: Surroundings) -> Finding | None:
    if first is None or around.sharing_strategy != "file_descriptor" or around.open_files is None:
        return None
    needed = looked.kind.prefetched_batches * first.tensors
    if needed + _OTHER_FILES <= around.open_files:
        return None
    return warning(
        "file_descriptors",
        f"Workers prefetch {needed:,} tensors, each of which is an open file, and this process may have {around.open_files:,}: "
        "'Too many open files', or 'received 0 items of ancdata'.",
        "Raise the limit (ulimit -n 65536), let collate_fn stack the tensors of a batch, or call "
        "torch.multiprocessing.set_sharing_strategy('file_system').",
        needed=needed,
        limit=around.open_files,
    )


_TRAPS: tuple[Callable[[Looked], Finding | None], ...] = (
    _no_dataloader,
    _iterator_attribute,
    _own_iteration,
    _own_batch_sampler,
    _no_batch_size,
    _stream_without_length,
    _stream_not_divided,
    _short_lived_workers,
    _not_shuffled,
    _divides_itself,
    _last_batch_of_one,
    _open_files,
    _many_objects,
)


def _data_sets(dataset: Any) -> list[Any]:
    """Returns a data set and those inside it, as ``Subset``, ``ConcatDataset`` and most others hold them."""
    found: list[Any] = []
    left = [dataset]
    while left:
        part = left.pop()
        if not hasattr(part, "__dict__") or any(part is other for other in found):
            continue
        found.append(part)
        inside = [value for value in vars(part).values() if isinstance(value, Dataset)]
        left += [*inside, *vars(part).get("datasets", ())]
    return found


def _is_users(kind: type) -> bool:
    """Whether a class is the user's own. Classes of an installed package may be divided somewhere else in that package."""
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:
        return False
    return file is not None and not Path(file).is_relative_to(sysconfig.get_paths()["purelib"])


def _module_text(kind: type) -> str:
    try:
        return inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return "worker_info"  # a module that cannot be read counts as correct
