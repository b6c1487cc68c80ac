"""The knowledge about a training loader: how the package sees it, its insertion points, its first batch, and its memory."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
import sys
import time
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.utils.data import DataLoader
from yaml import YAMLError

from lightning_echo.cache.holding import AUTO as ANY_HOLD
from lightning_echo.cache.holding import Hold, holds_of
from lightning_echo.data.copies import bytes_in_words, nbytes
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.datamodule import EchoDataModule
from lightning_echo.doctor.machine import Figure, Finding, Status, error, ok, warning
from lightning_echo.insertion import POINTS, InsertionPoint, Needs, earliest
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.setting import Setting
from lightning_echo.measure.control import number_of, three_digits
from lightning_echo.pipeline.choice import choose
from lightning_echo.pipeline.kinds import Indexed, Kind, Stream, kind_of
from lightning_echo.pipeline.pipelines import Choice
from lightning_echo.pipeline.reads import BusyTime
from lightning_echo.plan.plan import Reuse
from lightning_echo.split.describe import SplitRefused
from lightning_echo.split.prove import Split, has_length, read_plainly, seeded, seeded_copy
from lightning_echo.split.reading import AUTO_IN_FLIGHT, ReadPart, find_part
from lightning_echo.split.staged import batched, read_batch, sample_places
from lightning_echo.training.loaders import leaves_of
from lightning_echo.training.package import classes

# ---------------------------------------------------------------------- target
# The user's data, found by name or built from a configuration, and its training loaders.
#
# There are two kinds of errors. A `ValueError` means that the command is wrong: there is no such module, or no such file. A
# `UserCodeError` means that the user's own code has raised an exception, which is a finding.


class UserCodeError(Exception):
    """The user's code has raised ``error`` while it was ``doing`` something."""

    def __init__(self, doing: str, error: Exception) -> None:
        super().__init__(f"{doing} raised {in_short(error)}")
        self.doing, self.error = doing, error


def in_short(error: BaseException) -> str:
    """Returns the type and the message of an exception, in one line. Of a worker's traceback, only the last line is left.

    >>> in_short(KeyError("image"))
    "KeyError: 'image'"
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines) if len(lines) < 3 else f"{lines[0]} {lines[-1]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Turns any exception of the user's code into a `UserCodeError`, for ``doing`` such as ``"setup('fit') of ImageData"``."""
    try:
        yield
    except Exception as error:  # the user's code may raise anything
        raise UserCodeError(doing, error) from error


def data_of(name: str | None, config: str | None = None) -> Any:
    """Returns the user's data: a data module, a loader, or a collection of loaders; a ValueError if there is no such object.

    Args:
        name: ``module:name`` of a LightningDataModule, of its class, of a loader, or of a function that returns one of these. The
            module may also be in the present folder. With a configuration: a class, whose arguments are under ``data:``.
        config: A YAML file of a LightningCLI. Only ``data:`` is used.
    """
    found = None if name is None else _look_up(name)
    if config is not None:
        return _built(_section(config), config, found)
    if inspect.isclass(found) or inspect.isfunction(found):
        try:
            signature = inspect.signature(found)
            signature.bind()
        except TypeError:
            raise ValueError(
                f"{name!r} needs arguments, {signature}: give a function that needs none, or a file that holds them under data: "
                "--config train.yaml"
            ) from None
        except ValueError:  # built in, without a signature
            pass
        with users_code(f"{found.__name__}()"):
            found = found()
    if not (isinstance(found, classes("LightningDataModule")) or hasattr(found, "__iter__")) or isinstance(found, str):
        raise ValueError(
            f"{name!r} must be a LightningDataModule, its class, a loader, or a function that returns a loader, "
            f"got {type(found).__name__}"
        )
    return found


def training_loaders(data: Any) -> dict[str, Any]:
    """Returns the training loaders by name, without echoing. A data module is prepared and set up before."""
    data = data.datamodule if isinstance(data, EchoDataModule) else data
    if isinstance(data, classes("LightningDataModule")):
        name = type(data).__name__
        with users_code(f"prepare_data() of {name}"):
            data.prepare_data()
        with users_code(f"setup('fit') of {name}"):
            data.setup("fit")
    if isinstance(data, classes("LightningDataModule") + classes("LightningModule")):
        with users_code(f"train_dataloader() of {type(data).__name__}"):
            data = data.train_dataloader()
    with users_code("looking for the loaders in what train_dataloader() returned"):
        leaves = leaves_of(data)
    return {name: leaf.loader if isinstance(leaf, EchoLoader) else leaf for name, leaf in leaves.items()}


# ---------------------------------------------------------------------- by name


def _look_up(name: str) -> Any:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"the data must be given as module:name, e.g. my_data:ImageData, got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with users_code(f"import of {module}"):
            found: Any = import_module(module)
    except UserCodeError as failed:
        missing = failed.error.name if isinstance(failed.error, ModuleNotFoundError) else None
        if not missing or not f"{module}.".startswith(f"{missing}."):  # an import in the module fails
            raise
        raise ValueError(
            f"there is no module {module!r}: run the command in the folder that holds it, or give its full name"
        ) from failed.error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module} has no {attribute!r}: give a name that it defines")
        found = getattr(found, part)
    return found


# ---------------------------------------------------------------------- by configuration


def _section(path: str) -> dict[str, Any]:
    """Returns the section ``data:``, with each ``${...}`` in it resolved."""
    try:
        document = OmegaConf.load(path)
        for key in ("data", "fit.data"):  # the second is for a file that holds the options of several subcommands
            found: Any = OmegaConf.select(document, key)
            if found is not None:
                found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
                break
        else:
            raise ValueError(f"--config {path}: there is no data: in it, with the class_path and the init_args of a data module")
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"--config {path}: {in_short(error)}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path}: data: must be a mapping with class_path and init_args, got {found!r}")
    return found


def _built(section: dict[str, Any], path: str, known: Any) -> pl.LightningDataModule:
    """Builds a data module as a LightningCLI does. ``known`` is its class if the file does not name it."""
    arguments = section
    if known is None:
        module, _, name = str(section.get("class_path", "")).rpartition(".")
        if not module:
            raise ValueError(
                f"--config {path}: data: has no class_path such as my_data.ImageData: name the class of the data module, too, "
                f"lightning-echo doctor my_data:ImageData --config {path}"
            )
        known, arguments = _look_up(f"{module}:{name}"), section.get("init_args") or {}
    if not (inspect.isclass(known) and issubclass(known, classes("LightningDataModule"))):
        raise ValueError(f"--config {path}: the data must be of a class of LightningDataModule, got {known!r}")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(known, "data")
    try:
        parsed = parser.parse_object({"data": arguments})
    except (ArgumentError, TypeError, KeyError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
    with users_code(f"making the data module of {path}"):
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the name before jsonargparse 4.49
        built: pl.LightningDataModule = instantiate(parsed).data
    return built


# ---------------------------------------------------------------------- looking
# The insertion points come first: for them, examples are read in other processes (data/elsewhere.py). Then the user's loader
# itself is iterated for one batch, as a training would do it. Its data set may keep traces of that, such as an open file.

_TIMING_SECONDS = 1.0
_FACTOR = 2.0  # any factor above 1: the default buffer hardly depends on it
_NO_BATCH = object()
_WAY_OUT = ". Use "
_IMPOSSIBLE = " is impossible here: "


@dataclass(frozen=True)
class ReadTime:
    """The seconds that an example takes, and those of them in which its process waits: medians of a few examples."""

    seconds: float
    waits: float


@dataclass(frozen=True)
class FirstBatch:
    """The first batch of a loader: seconds until it arrived, the start of the workers included; its bytes and tensors."""

    seconds: float
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Looked:
    """The knowledge about a loader. ``choice`` is that of ``auto``; without one, an example cannot be read (``unreadable``).

    ``buffer_size`` is the default at that point, in items. ``possible`` has the choice for each point that is possible, and
    ``refused`` the reasons of the others. ``holds`` are the forms that a cache can hold; if it can hold nothing, ``no_cache`` has
    the reason. ``reading`` is what threads may read ahead, or why nothing; ``read_time`` is None if it is not known how long an
    example takes.
    """

    kind: Kind
    choice: Choice | None
    buffer_size: int
    possible: dict[InsertionPoint, Choice]
    refused: dict[InsertionPoint, str]
    holds: tuple[Hold, ...] = ()
    no_cache: str = ""
    reading: ReadPart | str = ""
    read_time: ReadTime | None = None
    unreadable: UserCodeError | None = None

    @property
    def loader(self) -> Any:
        return self.kind.loader

    @property
    def dataset(self) -> Any:
        return getattr(self.loader, "dataset", None)

    @property
    def is_dataloader(self) -> bool:
        return isinstance(self.loader, DataLoader)

    @property
    def examples(self) -> int | None:
        if not isinstance(self.kind, Indexed):
            return None
        indices = self.kind.readable_indices
        return len(self.dataset) if indices is None else len(indices)


def look(loader: Any) -> Looked:
    """Returns the knowledge about a loader, without iterating it.

    It raises a TypeError or a ValueError, with the reason, if the package cannot echo this loader, whatever its options.
    """
    kind = kind_of(loader)
    if not isinstance(kind, Indexed):  # then no example is read
        return Looked(kind, **_look_there(None, loader))
    index = kind.readable_index
    read: Any = None if index is None else read_elsewhere(loader, _time_reads, index, kind.readable_indices)
    seen = read if isinstance(read, NotRead) else read_elsewhere(loader, _look_there, loader)
    if isinstance(seen, NotRead):
        failed = UserCodeError(f"reading an example of {type(loader.dataset).__name__}", seen.error or RuntimeError(seen.reason))
        return Looked(kind, None, 0, {}, {}, no_cache="an example cannot be read", unreadable=failed)
    return Looked(kind, **seen, read_time=read)


def _time_reads(dataset: Any, index: Any, indices: Sequence[Any] | None) -> ReadTime | None:
    """Reads an example, which may open files, and then times others; None if there are no others."""
    read_plainly(dataset, [index])
    if indices is None:
        indices = range(len(dataset)) if has_length(dataset) else []
    others = [indices[place] for place in sample_places(len(indices))[1:]]
    spent, waited, began = list[float](), list[float](), time.perf_counter()
    with seeded(), closing(BusyTime()) as busy:
        copied = seeded_copy(dataset)
        read_batch(copied, [index])  # a copy may open its files again
        for other in others if batched(dataset) is None else []:
            before, busy_before = time.perf_counter(), busy.seconds()
            read_batch(copied, [other])
            spent.append(time.perf_counter() - before)
            waited.append(max(spent[-1] - (busy.seconds() - busy_before), 0.0))
            if time.perf_counter() - began > _TIMING_SECONDS:
                break
    return ReadTime(median(spent), median(waited)) if spent else None


def _look_there(dataset: Any, loader: Any) -> dict[str, Any]:
    """Returns fields of a `Looked`, by name."""
    kind = kind_of(loader)
    setting = Setting(loader, InsertionPoint.auto, None, _FACTOR, (1, 0), reuse=Reuse.memory)
    holds, no_cache = _holds_of(kind, setting.choice)
    possible, refused = _points_of(kind)
    reading: ReadPart | str = kind.why_later or "the loader does not say what it reads next"
    if isinstance(kind, Indexed):
        reading = _part_read_ahead(dataset, kind, [hold.split for hold in holds] or [setting.choice.split])
    return {
        "choice": setting.choice,
        "buffer_size": setting.buffer_size,
        "possible": possible,
        "refused": refused,
        "holds": holds,
        "no_cache": no_cache,
        "reading": reading,
    }


def _part_read_ahead(dataset: Any, kind: Indexed, cuts: Sequence[Split | None]) -> ReadPart | str:
    try:
        return find_part(dataset, kind.readable_indices, cuts, AUTO_IN_FLIGHT, kind.num_workers)
    except Exception as error:  # an error of the data set
        return f"reading an example raised {type(error).__name__}: {error}"


def first_batch(loader: Iterable[Any], clock: Callable[[], float] = time.perf_counter) -> FirstBatch:
    """Iterates a loader for one batch; a missing batch raises a UserCodeError, too."""
    started = clock()
    with users_code("reading the first batch"):
        batch = next(iter(loader), _NO_BATCH)
        if batch is _NO_BATCH:
            raise LookupError("the loader ends before its first batch")
    return FirstBatch(clock() - started, nbytes(batch), _count_tensors(batch))


def _points_of(kind: Kind) -> tuple[dict[InsertionPoint, Choice], dict[InsertionPoint, str]]:
    possible: dict[InsertionPoint, Choice] = {}
    refused: dict[InsertionPoint, str] = {}
    for point in POINTS:
        try:
            possible[point] = choose(kind, point)
        except ValueError as error:
            reason = str(error).partition(_IMPOSSIBLE)[2]
            refused[point] = (
                error.__cause__.reason if isinstance(error.__cause__, SplitRefused) else reason.partition(_WAY_OUT)[0]
            )
        except Exception as error:  # an error of the data set: its sampler may yield indices of another kind
            refused[point] = f"reading an example raised {type(error).__name__}: {error}"
    return possible, refused


def _holds_of(kind: Kind, choice: Choice) -> tuple[tuple[Hold, ...], str]:
    if not isinstance(kind, Indexed):
        return (), "its examples have no index by which they could be found again"
    try:
        return tuple(holds_of(kind.loader.dataset, kind.readable_indices, choice.split, ANY_HOLD)), ""
    except ValueError as error:
        message, impossible, reason = str(error).partition(_IMPOSSIBLE)
        return (), reason if impossible else message
    except Exception as error:  # an error of the data set: its sampler may yield indices of another kind
        return (), f"reading an example raised {type(error).__name__}: {error}"


def _count_tensors(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return 1
    members = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(_count_tensors, members))


# ---------------------------------------------------------------------- loader checks

_ON_DEVICE = "Augment on the device, in on_after_batch_transfer, or make it a data set that is read by index."
_STAGED = "Make it a StagedDataset, or name the cut: StagedDataset.of(dataset, augment=...)."


def check_loader(looked: Looked, cores: int) -> list[Finding]:
    """Returns the findings about a loader before it is iterated. ``cores`` can keep that many workers busy."""
    found = [_kind(looked), _workers(looked, cores), _pickled(looked)]
    if looked.unreadable is not None:
        hint = "Mend it; the full traceback is that of next(iter(loader)) with num_workers=0."
        return [*found, error("example", f"{looked.unreadable}.", hint)]
    assert looked.choice is not None
    chosen, possible = looked.choice.point.value, ", ".join(point.value for point in looked.possible)
    figures: dict[str, Figure] = {
        point.value: point in looked.possible for point in InsertionPoint if point is not InsertionPoint.auto
    }
    points = ok("insertion_points", f"Insertion points: {possible}. auto takes {chosen}.", **figures, auto=chosen)
    return [*found, _split(looked), points, _reads_ahead(looked), *_core_rate(looked, cores)]


def check_first_batch(first: FirstBatch | UserCodeError, batch_size: int | None = None) -> Finding:
    """Returns the finding about the first batch, or about the error that the user's code raised in its place."""
    if isinstance(first, UserCodeError):
        return error("first_batch", f"{first}.", "Mend it; with num_workers=0 the traceback is the shortest.", seconds=None)
    each = f", about {bytes_in_words(first.bytes / batch_size)} for an example" if batch_size else ""
    weight = f"Its tensors ({first.tensors}) have {bytes_in_words(first.bytes)}{each}."
    sentence = f"The first batch took {first.seconds:.3g} seconds. {weight}"
    return ok("first_batch", sentence, seconds=first.seconds, batch_bytes=first.bytes, tensors=first.tensors)


def _kind(looked: Looked) -> Finding:
    loader, name = looked.loader, type(looked.loader).__name__
    if not looked.is_dataloader:
        return ok("loader", f"The loader is a {name}.", kind=name, batches=looked.kind.length)
    held = "a stream" if isinstance(looked.kind, Stream) else "examples"
    if looked.examples is not None:
        held = f"{looked.examples:,} examples"
    sentence = f"The loader is a {name} over {type(loader.dataset).__name__} ({held}), batch_size={loader.batch_size}."
    return ok("loader", sentence, kind=name, examples=looked.examples, batch_size=loader.batch_size, batches=looked.kind.length)


def _workers(looked: Looked, cores: int) -> Finding:
    workers, figures = looked.kind.num_workers, {"num_workers": looked.kind.num_workers, "cores": cores}
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
    bytes = 0

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
    context = getattr(looked.loader, "multiprocessing_context", None)
    if context is not None:
        method = str(context.get_start_method())
    else:  # this does not fix the default of this process
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    figures: dict[str, Any] = {"bytes": None if failed else size, "start_method": method, "shareable": not failed_for_sharing}
    if not failed:
        return ok(
            "pickle", f"It can be pickled ({bytes_in_words(size)}): workers may be spawned, and reading be shared.", **figures
        )
    sharing = "and reading cannot be shared" if failed_for_sharing else "but reading can be shared"
    sentence = f"It cannot be pickled ({failed}): workers can only be forked, {sharing}."
    hint = "Define functions at the top of a module instead of lambdas, and open files at the first read instead of in __init__."
    status = Status.error if looked.kind.num_workers > 0 and method != "fork" else Status.warning
    return Finding("pickle", status, sentence, hint, figures)


def _try(parts: dict[str, Any], dump: Callable[[Any, Any], object]) -> tuple[int, str]:
    """Returns the number of bytes of all parts, and the part that cannot be pickled; empty if all can be pickled."""
    file = _Counted()
    for name, value in parts.items():
        try:
            dump(value, file)
        except Exception as problem:  # an object of the user's may raise anything when it is pickled
            return file.bytes, f"{name}: {in_short(problem)}"
    return file.bytes, ""


# ---------------------------------------------------------------------- cuts and points


def _split(looked: Looked) -> Finding:
    early, raw = (earliest(needs) for needs in (Needs.split, Needs.raw_items))
    found, after_reading = looked.possible.get(early), raw in looked.possible
    figures: dict[str, Any] = {early.value: found is not None, raw.value: after_reading}
    if found is not None:
        also = " It can be cut after reading, too." if after_reading else ""
        reused, redone = (", ".join(stages) or "nothing" for stages in (found.reused, found.redone))
        return ok("split", f"The data set can be split: an echo reuses {reused} and redoes {redone}.{also}", **figures)
    sentence = f"The data set cannot be split before its augmentation: {looked.refused[early].rstrip('.')}."
    hint = _STAGED if isinstance(looked.kind, Indexed) else _ON_DEVICE
    return warning("split", sentence, f"If it augments, echoes would repeat that augmentation. {hint}", **figures)


_WAITS_SECONDS = 0.0005  # a read that waits longer is worth a thread (as in ``pipeline/reads.py``)
_OVERLAP = "Do what it says. Then many reads wait at the same time, where one now waits for the one before."


def _reads_ahead(looked: Looked) -> Finding:
    """Returns the finding whether threads can read ahead. It is a warning if reads wait and the user can let threads read."""
    took, part = looked.read_time, looked.reading
    waits = took is not None and took.waits > _WAITS_SECONDS
    figures: dict[str, Any] = {
        "possible": isinstance(part, ReadPart),
        "read_seconds": None if took is None else took.seconds,
        "waiting_seconds": None if took is None else took.waits,
    }
    time_of_one = ""
    if took is not None and waits:
        time_of_one = f" An example took {1e3 * took.seconds:.3g} ms, {1e3 * took.waits:.3g} of them waiting."
    if isinstance(part, ReadPart):
        sentence = f"Threads can read ahead (reads_in_flight): what they run is {part.part.value}.{time_of_one}"
        return ok("reads_in_flight", sentence, **figures)
    sentence = f"Threads may not read ahead (reads_in_flight): {part.rstrip('.')}.{time_of_one}"
    could_be = isinstance(looked.kind, Indexed) and batched(looked.dataset) is None
    return (
        warning("reads_in_flight", sentence, _OVERLAP, **figures)
        if waits and could_be
        else ok("reads_in_flight", sentence, **figures)
    )


def _core_rate(looked: Looked, cores: int) -> list[Finding]:
    """Returns the finding how many examples the cores make; nothing if that was not measured."""
    took = looked.read_time
    busy = 0.0 if took is None else took.seconds - took.waits
    if busy <= 0:
        return []
    rate, of_all = (three_digits(float(f"{number / busy:.2g}")) for number in (1, cores))
    sentence = (
        f"An example takes {1e3 * busy:.3g} ms of processor time: a core makes about {rate} in a second, "
        f"{number_of(cores, 'core', 'cores')} {of_all}, without collation and training."
    )
    figures = {"cpu_seconds": busy, "examples_per_second_of_core": 1 / busy, "examples_per_second": cores / busy}
    return [ok("core_rate", sentence, **figures)]


# ---------------------------------------------------------------------- memory checks

_MOST_OF_FREE = 0.75  # share that a cache may take, as the analysis advises; the rest is for the buffer and for the training
_WEIGHED = {
    earliest(Needs.raw_items): "as it is read",
    earliest(Needs.split): "decoded",
    earliest(Needs.examples): "after all transforms",
}


def check_memory(looked: Looked, free_bytes: int | None) -> list[Finding]:
    if looked.choice is None:
        return []
    return [_weight(looked), _buffer(looked, looked.choice, free_bytes), _cache(looked, free_bytes)]


def check_queues(looked: Looked, first: FirstBatch, free_shared_bytes: int | None) -> Finding | None:
    """Returns the finding whether the prefetched batches fit into the free bytes of ``/dev/shm``; None if no worker uses it."""
    batches = looked.kind.prefetched_batches
    if not batches or free_shared_bytes is None or not first.tensors:
        return None
    needed = batches * first.bytes
    figures = {"batches": batches, "needed_bytes": needed, "free_bytes": free_shared_bytes}
    sentence = (
        f"Workers prefetch {batches} batches, {bytes_in_words(needed)}; /dev/shm has {bytes_in_words(free_shared_bytes)} free."
    )
    if needed > free_shared_bytes:
        hint = (
            "Workers would die with 'Bus error': enlarge /dev/shm (docker run --shm-size=8g), or set a smaller num_workers, "
            "prefetch_factor or batch_size."
        )
        return error("prefetched_batches", sentence, hint, **figures)
    return ok("prefetched_batches", sentence, **figures)


def _weight(looked: Looked) -> Finding:
    known = {words: looked.possible[point].item_bytes for point, words in _WEIGHED.items() if point in looked.possible}
    known = {words: size for words, size in known.items() if size}
    figures: dict[str, Figure] = {
        f"{point.value}_bytes": looked.possible[point].item_bytes or None if point in looked.possible else None
        for point in _WEIGHED
    }
    if not known:
        return ok("example_bytes", "What an example weighs is not known before a batch is read.", **figures)
    listed = ", ".join(f"{bytes_in_words(size)} {words}" for words, size in known.items())
    return ok("example_bytes", f"An example weighs {listed}.", **figures)


def _buffer(looked: Looked, choice: Choice, free_bytes: int | None) -> Finding:
    size, item, point = looked.buffer_size, choice.item_bytes, choice.point
    what = "batches" if point.by_batches else "examples"
    sentence = f"The default buffer at {point.value} holds {size:,} {what}"
    figures: dict[str, Any] = {"items": size, "item_bytes": item or None, "items_in_free_memory": None}
    if not item or free_bytes is None:
        return ok("buffer", f"{sentence}.", **figures)
    figures["items_in_free_memory"] = fitting = free_bytes // item
    return ok("buffer", f"{sentence} ({bytes_in_words(size * item)}); the free memory has room for {fitting:,}.", **figures)


def _cache(looked: Looked, free_bytes: int | None) -> Finding:
    if not looked.holds:
        return ok("cache", f"A cache can hold nothing of it: {looked.no_cache.rstrip('.')}.", possible=False)
    examples = looked.examples or 0
    figures: dict[str, Any] = {"possible": True, "examples": examples}
    lines, fits = [], False
    for hold in looked.holds:
        whole = hold.example_bytes * examples
        figures[f"{hold.name}_bytes"] = whole
        line = f"hold='{hold.name}' takes {bytes_in_words(whole)}"
        if free_bytes is not None and whole:
            share = min(_MOST_OF_FREE * free_bytes / whole, 1.0)
            figures[f"{hold.name}_fraction"] = share
            fits = fits or share == 1
            line += f", of which {100 * share:.0f}% fit"
        lines.append(line)
    sentence = f"A cache of all {examples:,} examples: {'; '.join(lines)}."
    if free_bytes is not None and not fits:
        hint = "A cache would hold a part of it; every example that it holds is one that need not be read."
        return warning("cache", sentence, hint, **figures)
    return ok("cache", sentence, **figures)
