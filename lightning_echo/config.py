"""`EchoConfig`: the options of an `EchoLoader` as a value, the checks of each option, and the options of a command line."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeAlias, get_type_hints

from lightning_echo.cache.kept import CacheConfig, read_cache_config
from lightning_echo.data.copies import bytes_from_words
from lightning_echo.data.objects import in_words
from lightning_echo.insertion import InsertionPoint
from lightning_echo.measure.control import Controller, check_on_demand
from lightning_echo.measure.page import check_matplotlib
from lightning_echo.pipeline.journal import Replay
from lightning_echo.plan.plan import MOST_FACTOR, Reuse
from lightning_echo.share.config import ShareConfig, read_share_config
from lightning_echo.split.reading import AUTO_IN_FLIGHT, MOST_IN_FLIGHT

# ---------------------------------------------------------------------- config
# A user may give options in three forms: as an `EchoConfig`; as a mapping from option names to values (a dict, OmegaConf's
# ``DictConfig``); for a collection, as a mapping from the loaders' names to one of these.

AUTO_FACTOR = "auto"  # on demand where that is possible; otherwise a controller decides on the factor
DEMAND = "demand"  # a batch echoes for the fresh examples that have not arrived
MAX_FACTOR = 8.0  # uses per fresh example on demand, if the user gives no other bound

# A command line takes the first type that fits: as a string, 0.5 would not be a share of the memory.
CacheOptions: TypeAlias = int | float | str | Mapping[str, Any] | CacheConfig | None
ShareOptions: TypeAlias = str | Mapping[str, Any] | ShareConfig | None


@dataclass
class EchoConfig:
    """The options of echoing. They are plain values, so that ``OmegaConf.structured(EchoConfig)`` and checkpoints can hold them.

    The options of `EchoCallback`, `EchoDataModule` and `EchoLoader` are the same. The class is not frozen, because OmegaConf
    would make a frozen one read-only. If you change a value later, it is checked where it is used.

    Args:
        factor: Echo factor: the uses per fresh example on average, a real number >= 1. 1 is the plain loader. ``"demand"``: no
            factor is fixed. If no fresh example has arrived, the training trains on one from memory instead of waiting.
            ``"auto"``: the same where it is possible, for all loaders of a collection or for none. Otherwise an `EchoCallback`
            begins with 1, and then a `TargetIdle` with ``max_factor`` decides on the factor. The log says which, and why.
            A `Replay` repeats a run on demand to the bit. The attribute holds it as a string.
        insertion_point: Where the echo stage stands: the name of an `InsertionPoint`. ``"auto"`` takes the earliest one that the
            loader allows, beginning with ``"before_augmentation"``. ``"after_transfer"`` needs a Trainer with an
            `EchoDataModule` or `EchoCallback`, which put the batches on the device.
        buffer_size: The largest number of live examples per rank (of live batches for ``after_batching`` and
            ``after_transfer``). Or the memory that they may take: a string with a unit (``"4GiB"``) is the memory of each rank. A
            float between 0 and 1 is a share of the free memory, which the ranks of a node divide among themselves. With a larger
            buffer, the model learns from fewer fresh examples.

            The default for ``reuse="memory"``:

            * It is a tenth of the free memory (of the device for ``after_transfer``), rounded down so that the number of batches
              is a power of two. It is at most half of a pass.
            * It is 64 batches if it is not known how much memory an example takes.
            * It is half of a pass if the cache and that tenth together hold all examples.

            The default for ``reuse="each"`` is 16 batches, or 4 in device memory. It is at most a quarter of a pass, at least
            two batches per worker, and at most a tenth of the free memory. If a buffer of ``reuse="each"`` hardly holds a batch,
            single examples get up to three uses more or fewer than the factor.
        reuse: Which examples are used again. The share of fresh examples is the same with both:

            * ``"memory"``: echoes are drawn from all examples that the buffer holds. When the buffer is full, the oldest example
              leaves it first. In this project's runs, training took 0.69 to 0.82 times the time of ``"each"``
              (docs/evidence.md).
            * ``"each"``: each fresh example is used ``factor`` times, as in the paper.
        epoch_length: How many steps an epoch has. An epoch of a loader without a length ends when a pass ends.

            * ``"fixed"``: as many as without echoing. Over a stream with a state and without a length, from the second epoch on.
            * ``"full_pass"``: ``round(factor * steps)``, so that the epoch delivers as many fresh examples as one pass holds. An
              epoch of a stream ends when the stream ends.
        seed: Seed of the order, the draws and the augmentation. Default: the seed of ``seed_everything``, otherwise the seed of
            the loader's ``generator``, otherwise a random one that is drawn once.
        cache: A cache that keeps examples, so that they are read once: its size (``"8GiB"``, or ``0.5`` for that share of the
            free memory), a `CacheConfig`, or a mapping of its options. The attribute holds plain values: the size alone, or the
            options that differ from their defaults. With ``factor=1`` there is only a cache, and no echoing. With ``share``, it
            is the reader's, and all trainings that share give the same.
        share: The name under which this training shares the reading with others on this machine. Or a `ShareConfig`, or a
            mapping of its options. The attribute holds plain values: the name alone, or the options that differ from their
            defaults. With ``factor=1`` the training shares, and does not echo.
        reads_in_flight: How many reads may be under way at once on a rank: 1 (one after the other in each worker), a larger
            number, or ``"auto"``: up to 64, while reads wait for the storage. Threads in the workers read the examples that come
            next. Batches are the same, whatever the number. With ``factor=1`` nothing is echoed.

            * What threads run is ``read`` alone, if the data set has ``read`` and ``decode`` (`StagedDataset`) or is a
              torchvision ``ImageFolder``. If only the paths of its files are known, threads read the files into the page cache.
            * A number lets threads run the data set's own ``read``, or its ``load`` or ``__getitem__`` if it has no ``read``.
              So does the attribute ``reads_concurrently = True`` of a data set, for ``"auto"``. Without either, threads run no
              code of the data set's.
            * At most a twentieth of the free memory, and at most 1 GiB, is read ahead on a rank.

            Default: ``"auto"``, wherever another option has the loader rebuilt.
        max_factor: On demand: the most uses per fresh example on average, a real number >= 1. The largest factor of ``"auto"``
            (of a collection the smallest that its loaders are given). Default: 8.

    Raises:
        TypeError: A value has a wrong type.
        ValueError: A value is impossible.

    Example:
        >>> EchoConfig(factor=4)  # doctest: +NORMALIZE_WHITESPACE
        EchoConfig(factor=4.0, insertion_point='auto', buffer_size=None, reuse='memory', epoch_length='fixed', seed=None,
                   cache=None, share=None, reads_in_flight=None, max_factor=None)
        >>> EchoConfig(cache=CacheConfig("8GiB")).cache, EchoConfig(cache=CacheConfig("8GiB", hold="raw")).cache
        ('8GiB', {'size': '8GiB', 'hold': 'raw'})
    """

    factor: int | float | str = 1.0  # OmegaConf refuses an integer where a union does not name it; a `Replay` becomes a string
    insertion_point: str = InsertionPoint.auto.value
    buffer_size: int | float | str | None = None
    reuse: str = "memory"
    epoch_length: str = "fixed"
    seed: int | None = None
    cache: Any = None  # OmegaConf 2.3 refuses a union with a mapping or a dataclass
    share: Any = None  # the same
    reads_in_flight: int | str | None = None
    max_factor: int | float | None = None

    def __post_init__(self) -> None:
        if (replay := Replay.of(self.factor)) is not None:
            self.factor = str(replay)
        elif isinstance(self.factor, str) and self.factor not in (AUTO_FACTOR, DEMAND):
            raise TypeError(
                f"factor must be a real number >= 1 (1: no echoing), 'demand', a Replay or 'auto', got {self.factor!r}; a "
                "controller is given by the argument controller"
            )
        self.factor = str(self.factor) if isinstance(self.factor, str) else check_factor(self.factor)
        self.max_factor = check_max_factor(self.factor, self.max_factor)
        self.insertion_point = check_point(self.insertion_point).value
        self.buffer_size = check_buffer_size(self.buffer_size)
        self.reuse = check_reuse(self.reuse).value
        self.epoch_length = check_epoch_length(self.epoch_length)
        self.seed = check_seed(self.seed)
        self.cache = _plain(read_cache_config(self.cache), "size")
        self.share = _plain(read_share_config(self.share), "name")
        self.reads_in_flight = check_reads_in_flight(self.reads_in_flight)

    @property
    def first_factor(self) -> float:
        """The factor that a loader begins with; on demand the bound of it. With ``"auto"`` it is 1 until there is a loader."""
        return 1.0 if self.factor == AUTO_FACTOR else check_demand(self.factor, self.max_factor)[1]

    def as_options(self) -> dict[str, Any]:
        """Returns the options by name, without those that a subclass adds: ``EchoLoader(loader, **config.as_options())``."""
        return {field.name: getattr(self, field.name) for field in fields(EchoConfig)}


# OmegaConf asks the class for the types of its fields. jsonargparse asks the constructor, where these are types and not strings,
# and takes --...echo.cache.size only where the type may have options.
EchoConfig.__init__.__annotations__ = {**get_type_hints(EchoConfig.__init__), "cache": CacheOptions, "share": ShareOptions}

Options: TypeAlias = EchoConfig | dict[str, EchoConfig]  # of all loaders, or by name of those that are echoed


def read_options(argument: str, given: Any) -> Options | None:
    """Returns the options that a user has given in any of the three forms; None if nothing is given.

    ``argument`` names the user's argument in messages, here and below.

    Example:
        >>> read_options("echo", {"factor": 2}).factor, read_options("echo", {"text": {"factor": 2}})["text"].factor
        (2.0, 2.0)
    """
    if given is None or isinstance(given, EchoConfig):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument} must be an EchoConfig, a dict or DictConfig of its options, a dict of these by names of loaders, or "
            f"None, got {type(given).__name__} {given!r}: EchoConfig(factor=4)"
        )
    if not given or _is_by_name(given):
        return read_loaders(argument, given)
    return config_of(argument, given)


def read_loaders(argument: str, given: Any) -> dict[str, EchoConfig]:
    """Returns the options of a collection by the loaders' names, each given as an `EchoConfig` or a mapping."""
    example = f'{argument}={{"labelled": EchoConfig(factor=4)}}'
    if not isinstance(given, Mapping):
        raise TypeError(f"{argument} must map names of loaders to an EchoConfig each, got {given!r}: {example}")
    if not given:
        raise ValueError(f"{argument} is empty, so that nothing would be echoed: {example}")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, EchoConfig | Mapping):
            raise TypeError(
                f"{argument} must map names of loaders to an EchoConfig each, got {name!r}: {type(value).__name__} {value!r}: "
                f"{example}; positions in a list are the names '0' and '1', and so on"
            )
    return {name: config_of(f"{argument}[{name!r}]", value) for name, value in given.items()}


def config_of(argument: str, value: EchoConfig | Mapping[str, Any]) -> EchoConfig:
    """Returns the options of one loader as an `EchoConfig`; a TypeError if there is no option of such a name."""
    if isinstance(value, EchoConfig):
        return value
    known = [field.name for field in fields(EchoConfig)]
    if unknown := [str(name) for name in value if name not in known]:
        raise TypeError(f"{argument} has no option {', '.join(map(repr, unknown))}: its options are {', '.join(known)}")
    return EchoConfig(**value)


def given_options(**values: Any) -> dict[str, Any]:
    """Returns the options that differ from their defaults: those that the user has given. The default of a factor is None here.

    Example:
        >>> given_options(factor=None, insertion_point="auto", seed=7)
        {'seed': 7}
    """
    defaults = {field.name: field.default for field in fields(EchoConfig)} | {"factor": None}
    return {name: value for name, value in values.items() if value != defaults[name]}


def is_auto(argument: str, given: Options) -> bool:
    """Returns whether the factor is ``"auto"``: of all loaders, or of none."""
    configs = given if isinstance(given, dict) else {"": given}
    named = [name for name, config in configs.items() if config.factor == AUTO_FACTOR]
    if named and len(named) < len(configs):
        raise ValueError(
            f"{argument} has factor='auto' for {', '.join(map(repr, named))} alone, but a controller decides on one factor for "
            "all loaders that are echoed: give all of them 'auto', or each a number"
        )
    return bool(named)


def callback_options(options: dict[str, Any], echo: Any) -> tuple[Options | None, bool]:
    """Returns the options that a user has given to an `EchoCallback`, and whether their factor is ``"auto"``.

    The options are None if the user gave none, or nothing but ``factor="auto"``.
    """
    if options and echo is not None:
        listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ValueError(
            f"EchoCallback has options in echo={echo!r} and in {listed}: give all of them in one of the two, as in "
            "EchoCallback(factor=4, buffer_size=64)"
        )
    given: Options | None = EchoConfig(**options) if options else read_options("echo", echo)
    if given is None:
        return None, False
    asks_for_auto = is_auto("echo", given)
    return (None if given == EchoConfig(AUTO_FACTOR) else given), asks_for_auto


def _is_by_name(given: Mapping[Any, Any]) -> bool:
    """Whether the keys of a mapping are names of loaders, and not names of options.

    A loader's options are an `EchoConfig` or a mapping. Of the options, only ``cache`` and ``share`` may be a mapping.
    """
    nested = {name for name, value in given.items() if isinstance(value, EchoConfig | Mapping)}
    if not nested or not nested <= {"cache", "share"}:
        return bool(nested)
    if any(isinstance(given[name], EchoConfig) for name in nested):
        return True
    # Loaders of these names: all that is given are mappings of a loader's options.
    known = {field.name for field in fields(EchoConfig)}
    return nested == set(given) and all(known & set(given[name]) for name in nested)


def _plain(config: CacheConfig | ShareConfig | None, main: str) -> Any:
    """Returns the options of a cache or of sharing as plain values: None, the main one alone, or a dict of those that are not
    defaults.
    """
    if config is None:
        return None
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    chosen = {field.name: values[field.name] for field in fields(config) if values[field.name] != field.default}
    if isinstance(chosen.get("path"), os.PathLike):
        chosen["path"] = os.fspath(chosen["path"])
    return chosen if len(chosen) > 1 else values[main]


# ---------------------------------------------------------------------- options
# Each message names the argument, the expected value, the given value and the fix. Each check raises a TypeError for a wrong
# type, and a ValueError for an impossible value.
#
# `check_factor` checks every factor that a user or a controller gives. Before that, `Decision` refuses a controller's factor that
# is not a finite number of 1 or more (``measure/control.py``). Only the loader knows whether its buffer is large enough for a
# factor (`EchoLoader.check_factor`). A state with a bad factor is refused as a whole (``schema.py``).

EPOCH_LENGTHS = ("fixed", "full_pass")
_BUFFER_SIZES = (
    'an integer (live examples per rank), a string with a unit such as "4GiB", or a share of the free memory such as 0.2'
)


def check_factor(factor: Any) -> float:
    """Returns the echo factor as a float."""
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise TypeError(f"factor must be a real number >= 1 (1: no echoing), got {in_words(factor)}")
    value = float(factor)
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"factor must be a finite number >= 1, got {factor!r}; use 1 to switch echoing off")
    if value > MOST_FACTOR:
        raise ValueError(f"factor must be at most {MOST_FACTOR:,}, got {factor!r}; beyond 4 to 8 it seldom helps")
    return value


def check_max_factor(factor: Any, max_factor: Any) -> float | None:
    """Returns the bound of a factor that is decided on demand as a float; None for the default."""
    if max_factor is None:
        return None
    if Replay.of(factor) is not None:
        raise ValueError(f"max_factor={max_factor!r} is impossible with a Replay: its journal has the bound. Leave it out")
    if factor not in (DEMAND, AUTO_FACTOR):
        raise ValueError(
            f"max_factor={max_factor!r} is the bound of factor='demand' and of 'auto', got factor={factor!r}; the bound of a "
            "controller is its own: TargetIdle(max_factor=8)"
        )
    try:
        return check_factor(max_factor)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("factor", "max_factor", 1)) from None


def check_demand(factor: Any, max_factor: Any) -> tuple[bool, float]:
    """Returns whether a loader echoes on demand, and its factor: the bound of it on demand."""
    bound = check_max_factor(factor, max_factor)
    if factor == DEMAND or Replay.of(factor) is not None:  # a journal has its own bound, which is read later
        return True, MAX_FACTOR if bound is None else bound
    if factor == AUTO_FACTOR:
        raise ValueError(
            "factor='auto' is impossible here: an EchoLoader alone cannot let TargetIdle() decide where echo on demand is "
            "impossible. Give 'demand' or a number, or the plain loader to a Trainer with EchoCallback(factor='auto')"
        )
    if isinstance(factor, str):
        raise TypeError(f"factor must be a real number >= 1 (1: no echoing), 'demand' or a Replay, got {factor!r}")
    return False, check_factor(factor)


def check_point(point: Any) -> InsertionPoint:
    try:
        return InsertionPoint(point)
    except ValueError:
        known = ", ".join(repr(member.value) for member in InsertionPoint)
        raise ValueError(f"insertion_point must be one of {known}, got {point!r}") from None


def check_buffer_size(buffer_size: Any) -> int | float | str | None:
    """Returns the buffer size as a plain value, also if it is a number of numpy; None for the default."""
    if buffer_size is None:
        return None
    if isinstance(buffer_size, str):
        if not bytes_from_words(buffer_size):
            raise ValueError(f"buffer_size must be {_BUFFER_SIZES}, got {buffer_size!r}")
        return str(buffer_size)
    if isinstance(buffer_size, bool) or not isinstance(buffer_size, Real):
        raise TypeError(f"buffer_size must be {_BUFFER_SIZES} or None, got {buffer_size!r}")
    if isinstance(buffer_size, Integral):
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {buffer_size}; leave it out for the default")
        return int(buffer_size)
    if not 0 < float(buffer_size) < 1:
        raise ValueError(
            f"buffer_size must be between 0 and 1 if it is a share of the free memory, got {buffer_size!r}; give {_BUFFER_SIZES}"
        )
    return float(buffer_size)


def check_reads_in_flight(reads: Any) -> int | str | None:
    """Returns the number of reads that may be under way on a rank, ``"auto"``, or None for the default."""
    if reads is None:
        return None
    expected = (
        f"reads_in_flight must be an integer from 1 (one read after the other) to {MOST_IN_FLIGHT:,}, or {AUTO_IN_FLIGHT!r}"
    )
    if isinstance(reads, str):
        if reads != AUTO_IN_FLIGHT:
            raise ValueError(f"{expected}, got {reads!r}")
        return AUTO_IN_FLIGHT
    if isinstance(reads, bool) or not isinstance(reads, Real):
        raise TypeError(f"{expected}, got {in_words(reads)}")
    if not isinstance(reads, Integral) or not 1 <= int(reads) <= MOST_IN_FLIGHT:
        raise ValueError(f"{expected}, got {reads!r}")
    return int(reads)


def check_epoch_length(epoch_length: Any) -> str:
    if epoch_length not in EPOCH_LENGTHS:
        raise ValueError(f"epoch_length must be 'fixed' or 'full_pass', got {epoch_length!r}")
    return str(epoch_length)


def check_reuse(reuse: Any) -> Reuse:
    try:
        return Reuse(reuse)
    except ValueError:
        raise ValueError(
            "reuse must be 'each' (each fresh example is used factor times) or 'memory' (echoes are drawn from all examples that "
            f"the buffer holds), got {reuse!r}"
        ) from None


def check_ranks(num_replicas: Any, rank: Any) -> tuple[int, int] | None:
    """Returns the number of ranks and the number of this rank; None: ask ``torch.distributed``."""
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None:
        raise ValueError(
            f"num_replicas and rank must be given together, got num_replicas={num_replicas!r} and rank={rank!r}; leave both out "
            "to ask torch.distributed, or give 1 and 0 to switch sharding off"
        )
    for name, value in (("num_replicas", num_replicas), ("rank", rank)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, got {value!r}; leave both out to ask torch.distributed")
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ValueError(f"rank must be in 0 .. num_replicas - 1, got rank={rank!r} and num_replicas={num_replicas!r}")
    return int(num_replicas), int(rank)


def check_seed(seed: Any) -> int | None:
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be an integer, or None (see EchoLoader for what is taken then), got {seed!r}")
    return int(seed)


# ---------------------------------------------------------------------- callback


def check_callback(
    controller: Controller | None, options: dict[str, Any], echo: Any, summary: bool, plot: bool
) -> tuple[Options | None, bool]:
    """Checks the arguments of an `EchoCallback`. Returns its options, and whether their factor is ``"auto"``.

    The options are None if it only measures, or if there is nothing but that factor.
    """
    if controller is not None and not isinstance(controller, Controller):
        raise TypeError(
            f"controller must be a Controller such as TargetIdle(), or None, got {in_words(controller)}; a factor is given "
            "by EchoCallback(factor=...), a rule of your own by a subclass of Controller"
        )
    config, asks_for_auto = callback_options(options, echo)
    if asks_for_auto and controller is not None:
        raise ValueError(
            "factor='auto' chooses between echo on demand and TargetIdle(), but "
            f"controller={controller!r} is given, too: leave one of the two out"
        )
    each = config.values() if isinstance(config, dict) else [] if config is None else [config]
    if controller is not None and any(one.factor == DEMAND for one in each):
        check_on_demand(controller)
    for name, value in (("summary", summary), ("plot", plot)):
        if not isinstance(value, bool):  # "false" would be true
            raise TypeError(f"{name} must be True or False, got {type(value).__name__} {value!r}")
    if plot:
        check_matplotlib("plot=True: figures")
    return config, asks_for_auto


@dataclass
class EchoOptions(EchoConfig):
    """Data echoing: every fresh example is used factor times on average. By default nothing is echoed, only measured.

    Args:
        factor: Uses per fresh example, a real number >= 1; 1 means no echoing. 'demand': no factor is fixed; if no fresh example
            has arrived, the training trains on one from memory instead of waiting. 'auto': the same where it is possible;
            otherwise a TargetIdle with max_factor decides on the factor from epoch to epoch.
        insertion_point: Where the echo stage stands: after_read, before_augmentation, after_augmentation, after_batching,
            after_transfer, or auto.
        buffer_size: The largest number of live examples per rank (of live batches for after_batching and after_transfer). Or the
            memory that they may take: a size such as 4GiB for each rank, or 0.2 (that share of the free memory). Default: chosen.
        reuse: Which examples are used again. 'each': each fresh example factor times. 'memory': any example that the buffer
            holds.
        epoch_length: 'fixed': as many steps as without echoing. 'full_pass': as many fresh examples as one pass over the data
            holds.
        seed: Seed of the order, the draws and the augmentation. Default: the seed of seed_everything, otherwise one is chosen.
        cache: A cache that keeps examples, so that they are read once: its size such as 8GiB, or 0.5 (that share of the free
            memory). Or the options of a CacheConfig by name: cache.size, cache.hold, and so on.
        share: Trainings on this machine that give the same name read their data once. Or the options of a ShareConfig by name:
            share.name, share.behind, and so on.
        reads_in_flight: How many reads may be under way at once on a rank, for a storage that takes long to answer: an integer
            from 1, or 'auto': up to 64, while reads wait. Default: 'auto', wherever another option has the loader rebuilt.
        max_factor: With factor 'demand' or 'auto': the most uses per fresh example on average, a real number >= 1. Default: 8.
        controller: Decides on the factor from epoch to epoch, e.g. TargetIdle.
        loaders: For a collection of loaders, in place of the options above: the options of each loader that is echoed, by name.
        enabled: False switches echoing off, whatever the other options are. The run is still measured.
        summary: Whether to print a summary at the end of fit.
        plot: Whether to log a picture of the run at the end of fit: to TensorBoard, Weights & Biases, MLflow.
    """

    cache: CacheOptions = None
    share: ShareOptions = None
    controller: Controller | None = None
    loaders: dict[str, EchoConfig] | None = None
    enabled: bool = True
    summary: bool = True
    plot: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loaders is not None:
            self.loaders = read_loaders("loaders", self.loaders)
            if EchoConfig(**self.as_options()) != EchoConfig():
                raise ValueError("loaders has the options of each loader: leave factor and the other options out")
        check_callback(**self.callback_arguments(), options={})  # refuses what does not go together

    def callback_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the `EchoCallback` that these options ask for. With nothing but defaults it only measures."""
        always = {"summary": self.summary, "plot": self.plot}
        if not self.enabled:
            return {"controller": None, "echo": None, **always}
        config = EchoConfig(**self.as_options())
        echo = (None if config == EchoConfig() else config) if self.loaders is None else self.loaders
        return {"controller": self.controller, "echo": echo, **always}
