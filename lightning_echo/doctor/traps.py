"""The known traps of a training loader, as far as they can be seen without training.

A trap is a row of a table: a test of the knowledge about a loader, and the finding if it applies. Traps that stop a training, or
divide its data wrongly, come first.
"""

from __future__ import annotations

import inspect
import io
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from lightning_echo.doctor.looking import FirstBatch, Looked
from lightning_echo.doctor.machine import Finding, ok, warning
from lightning_echo.pipeline.kinds import Indexed, OwnBatches
from lightning_echo.training.package import classes, is_overridden

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
    tested = ((trap, trap.test(looked)) for trap in _TRAPS)
    found = [warning(trap.name, trap.sentence.format(seen=seen, looked=looked), trap.hint) for trap, seen in tested if seen]
    found += [*_pinned_memory(looked, around), *_file_descriptors(looked, first, around)]
    return found or [ok("traps", "None of the known traps of a training loader applies.")]


def check_hooks(data: Any) -> list[Finding]:
    own = [hook for hook in _TRANSFER_HOOKS if isinstance(data, classes("LightningDataModule")) and is_overridden(hook, data)]
    sentence = f"{type(data).__name__} defines {', '.join(own)}: the same hooks of the model are not called."
    return [warning("transfer_hooks", sentence, "Define them in one of the two.")] if own else []


# ---------------------------------------------------------------------- tests of the loader


def _undivided_stream(looked: Looked) -> bool:
    """Whether a stream does not ask in which worker it runs: each worker then yields all of its examples."""
    kind = type(looked.dataset)
    if not issubclass(kind, IterableDataset) or looked.kind.num_workers < 2 or looked.loader.worker_init_fn is not None:
        return False
    try:
        file = inspect.getsourcefile(kind)
        if file is None or Path(file).is_relative_to(sysconfig.get_paths()["purelib"]):
            return False  # a class of an installed package may be divided somewhere else in that package
        return "worker_info" not in inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):
        return False  # a module that cannot be read counts as correct


def _last_batch_of_one(looked: Looked) -> int:
    """Returns the number of examples of a pass if one is left for the last batch, else 0."""
    loader = looked.loader
    if looked.examples is None or isinstance(looked.kind, OwnBatches) or loader.drop_last or loader.batch_size == 1:
        return 0
    examples = len(looked.kind.sampler)
    return examples if examples % loader.batch_size == 1 else 0


def _open_files(looked: Looked) -> str:
    def is_open(value: Any) -> bool:
        return isinstance(value, io.IOBase) or type(value).__module__.split(".")[0] == "h5py"

    return ", ".join(name for name, value in _inherited(looked) if is_open(value))


def _many_objects(looked: Looked) -> str:
    large = [(name, len(value)) for name, value in _inherited(looked) if isinstance(value, list | dict)]
    return ", ".join(f"{name} ({number:,})" for name, number in large if number >= _MANY_OBJECTS)


def _inherited(looked: Looked) -> Iterator[tuple[str, Any]]:
    """Yields what workers inherit: the attributes of the data set and of those inside it, as most data sets hold others."""
    done: list[Any] = []
    left = [looked.dataset] if looked.kind.num_workers else []
    while left:
        part = left.pop()
        if not hasattr(part, "__dict__") or any(part is other for other in done):
            continue
        done.append(part)
        yield from ((f"{type(part).__name__}.{name}", value) for name, value in vars(part).items())
        inside = [value for value in vars(part).values() if isinstance(value, Dataset)]
        left += [*inside, *vars(part).get("datasets", ())]


# ---------------------------------------------------------------------- the table


class _Trap(NamedTuple):
    """A trap applies if ``test`` returns something true, which is ``{seen}`` in the sentence."""

    name: str
    test: Callable[[Looked], object]
    sentence: str
    hint: str


_TRAPS = (
    _Trap(
        "not_a_dataloader",
        lambda looked: not looked.is_dataloader,
        "The loader is no DataLoader: Lightning does not divide its data among ranks, so that each rank trains on all of it.",
        "With several ranks, let the loader itself yield the part of its rank. With one rank there is nothing to do.",
    ),
    _Trap(
        "iterator_attribute",
        lambda looked: not looked.is_dataloader and hasattr(looked.loader, "_iterator"),
        "The loader has an attribute _iterator, which Lightning sets to None at the end of fit.",
        "Give that attribute another name.",
    ),
    _Trap(
        "own_iteration",
        lambda looked: (
            looked.is_dataloader and type(looked.loader).__iter__ is not DataLoader.__iter__ and type(looked.loader).__name__
        ),
        "{seen} has an __iter__ of its own: only whole batches of it can be echoed.",
        "Move that work into collate_fn or the data set, and use DataLoader itself, for an earlier insertion point.",
    ),
    _Trap(
        "batch_sampler",
        lambda looked: isinstance(looked.kind, OwnBatches) and type(looked.loader.batch_sampler).__name__,
        "{seen} decides what is in a batch: only whole batches can be echoed.",
        "Give the loader batch_size and a sampler, for an earlier insertion point.",
    ),
    _Trap(
        "no_batch_size",
        lambda looked: looked.is_dataloader and looked.loader.batch_sampler is None,
        "batch_size=None: the data set makes the batches, and only whole batches can be echoed.",
        "Let the data set yield examples, and the loader make batches of them, for an earlier insertion point.",
    ),
    _Trap(
        "stream_without_length",
        lambda looked: looked.kind.reads_stream and looked.kind.length is None,
        "The stream has no length: Lightning refuses a float for limit_train_batches and val_check_interval, and a progress bar "
        "does not know the end.",
        "Give the data set a __len__ with the examples of a pass, or use integers for these options.",
    ),
    _Trap(
        "stream_not_divided",
        lambda looked: _undivided_stream(looked) and type(looked.dataset).__name__,
        "{seen} does not ask for get_worker_info(): each of the {looked.kind.num_workers} workers may yield all of its examples.",
        "Let __iter__ yield the part of its worker: torch.utils.data.get_worker_info() has its id and their number.",
    ),
    _Trap(
        "persistent_workers",
        lambda looked: looked.is_dataloader and looked.kind.num_workers and not looked.loader.persistent_workers,
        "persistent_workers=False: without echoing, each epoch restarts its workers and waits for its first batch again.",
        "Set persistent_workers=True. (Workers of an echoed loader stay alive in any case.)",
    ),
    _Trap(
        "not_shuffled",
        lambda looked: isinstance(looked.kind, Indexed) and type(looked.kind.sampler) is SequentialSampler,
        "The training loader does not shuffle: each epoch has the examples in the same order.",
        "Set shuffle=True, unless the order is meant.",
    ),
    _Trap(
        "divided_sampler",
        lambda looked: looked.kind.shards_itself and type(looked.kind.sampler).__name__,
        "{seen} divides its indices among ranks by itself. Unless it is a DistributedSampler, a cache cannot be partitioned "
        "among nodes.",
        "Leave the sampler out: Lightning and this package divide the data.",
    ),
    _Trap(
        "last_batch_of_one",
        _last_batch_of_one,
        "The last batch of a pass has one example ({seen:,} examples, batch_size={looked.loader.batch_size}): BatchNorm fails on "
        "it or learns noise.",
        "Set drop_last=True, or another batch_size.",
    ),
    _Trap(
        "open_files",
        _open_files,
        "{seen} is an open file: forked workers share its position and corrupt each other's reads.",
        "Open it at the first read, in the worker, and keep it there.",
    ),
    _Trap(
        "many_objects",
        _many_objects,
        "{seen} holds many Python objects: each worker copies their memory bit by bit, since it counts references to them.",
        "Keep them in an array or a tensor (strings: as bytes with offsets), which the workers share.",
    ),
)

# ---------------------------------------------------------------------- device and files


def _pinned_memory(looked: Looked, around: Surroundings) -> list[Finding]:
    if not looked.is_dataloader or looked.loader.pin_memory == around.has_cuda:
        return []
    if around.has_cuda:
        sentence = "pin_memory=False, and there is a CUDA device: copies to it wait for the host."
        return [warning("pin_memory", sentence, "Set pin_memory=True, unless the training runs on the CPU.")]
    sentence = "pin_memory=True, and there is no CUDA device: torch warns, and ignores it."
    return [warning("pin_memory", sentence, "Set pin_memory=torch.cuda.is_available().")]


def _file_descriptors(looked: Looked, first: FirstBatch | None, around: Surroundings) -> list[Finding]:
    if first is None or around.sharing_strategy != "file_descriptor" or around.open_files is None:
        return []
    needed = looked.kind.prefetched_batches * first.tensors
    if needed + _OTHER_FILES <= around.open_files:
        return []
    sentence = (
        f"Workers prefetch {needed:,} tensors, each of which is an open file, and this process may have {around.open_files:,}: "
        "'Too many open files', or 'received 0 items of ancdata'."
    )
    hint = (
        "Raise the limit (ulimit -n 65536), let collate_fn stack the tensors of a batch, or call "
        "torch.multiprocessing.set_sharing_strategy('file_system')."
    )
    return [warning("file_descriptors", sentence, hint, needed=needed, limit=around.open_files)]
