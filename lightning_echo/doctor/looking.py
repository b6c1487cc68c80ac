"""What is known of a training loader: how the package sees it, each insertion point, and its first batch.

Insertion points come first. For them, examples are read in other processes (protecting/elsewhere.py). Then the user's loader
itself is iterated for one batch, as a training would do it. Its data set may keep traces of that, such as an open file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from lightning_echo.caching.holding import AUTO, Hold, holds_of
from lightning_echo.doctor.target import UserCodeError, users_code
from lightning_echo.fetching.choice import Choice, choose
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import POINTS, InsertionPoint
from lightning_echo.loading.setting import Setting
from lightning_echo.planning.shape import Reuse
from lightning_echo.protecting.elsewhere import NotRead, read_elsewhere
from lightning_echo.protecting.memory import nbytes
from lightning_echo.splitting.cut import SplitRefused
from lightning_echo.splitting.prove import read_plainly

__all__ = ["FirstBatch", "Looked", "first_batch", "look"]

_FACTOR = 2.0  # any factor above 1: the default buffer hardly depends on it
_NO_BATCH = object()
_WAY_OUT = ". Use "
_IMPOSSIBLE = " is impossible here: "


@dataclass(frozen=True)
class FirstBatch:
    """The first batch of a loader.

    Attributes:
        seconds: Seconds until it was there, with the start of the workers.
        bytes: Its size in memory, in bytes.
        tensors: Number of tensors in it.
    """

    seconds: float
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Looked:
    """What is known of a loader.

    Attributes:
        source: The loader, taken apart.
        choice: What ``auto`` chooses; None if an example cannot be read.
        buffer_size: The default buffer size at that insertion point, in items; 0 without a choice.
        possible: The choice for each insertion point that is possible.
        refused: For each other insertion point, why it is impossible.
        holds: What a cache can hold, the earliest cut first.
        no_cache: Why a cache can hold nothing; empty if it can hold something.
        unreadable: What the user's code raised when an example was read; None if it raised nothing.
    """

    source: Source
    choice: Choice | None
    buffer_size: int
    possible: dict[InsertionPoint, Choice]
    refused: dict[InsertionPoint, str]
    holds: tuple[Hold, ...] = ()
    no_cache: str = ""
    unreadable: UserCodeError | None = None

    @property
    def loader(self) -> Any:
        """The user's loader."""
        return self.source.loader

    @property
    def dataset(self) -> Any:
        """Its data set; None if the loader has none."""
        return getattr(self.loader, "dataset", None)

    @property
    def is_dataloader(self) -> bool:
        """Whether the loader is a ``DataLoader``."""
        return isinstance(self.loader, DataLoader)

    @property
    def examples(self) -> int | None:
        """Number of examples of the data set; None if it is not known."""
        if not self.source.rebuilds:
            return None
        indices = self.source.readable_indices
        return len(self.dataset) if indices is None else len(indices)


def look(loader: Any) -> Looked:
    """Returns what is known of a loader, without iterating it.

    Raises:
        TypeError, ValueError: The package cannot echo this loader, whatever its options. The message says why.
    """
    source = Source(loader)
    if not source.rebuilds:  # then no example is read
        return Looked(source, *_look_there(None, loader))
    doing = f"reading an example of {type(loader.dataset).__name__}"
    index = source.readable_index
    read = None if index is None else read_elsewhere(loader, _read_one, index)
    seen = read if isinstance(read, NotRead) else read_elsewhere(loader, _look_there, loader)
    if isinstance(seen, NotRead):
        failed = UserCodeError(doing, seen.error or RuntimeError(seen.reason))
        return Looked(source, None, 0, {}, {}, no_cache="an example cannot be read", unreadable=failed)
    return Looked(source, *seen)


class _Seen(NamedTuple):
    """What is found by reading examples. The fields are those of `Looked`."""

    choice: Choice
    buffer_size: int
    possible: dict[InsertionPoint, Choice]
    refused: dict[InsertionPoint, str]
    holds: tuple[Hold, ...]
    no_cache: str


def _read_one(dataset: Any, index: Any) -> None:
    read_plainly(dataset, [index])


def _look_there(dataset: Any, loader: Any) -> _Seen:
    source = Source(loader)
    setting = Setting(loader, InsertionPoint.auto, None, _FACTOR, (1, 0), reuse=Reuse.memory)
    holds, no_cache = _holds_of(source, setting.choice)
    return _Seen(setting.choice, setting.buffer_size, *_points_of(source), holds, no_cache)


def first_batch(loader: Iterable[Any], clock: Callable[[], float] = time.perf_counter) -> FirstBatch:
    """Iterates a loader for one batch.

    Args:
        loader: The loader.
        clock: Returns seconds.

    Raises:
        UserCodeError: The user's code has raised an exception, or there is no batch.
    """
    started = clock()
    with users_code("reading the first batch"):
        batch = next(iter(loader), _NO_BATCH)
        if batch is _NO_BATCH:
            raise LookupError("the loader ends before its first batch")
    return FirstBatch(clock() - started, nbytes(batch), _count_tensors(batch))


def _points_of(source: Source) -> tuple[dict[InsertionPoint, Choice], dict[InsertionPoint, str]]:
    possible: dict[InsertionPoint, Choice] = {}
    refused: dict[InsertionPoint, str] = {}
    for point in POINTS:
        try:
            possible[point] = choose(source, point)
        except ValueError as error:
            reason = str(error).partition(_IMPOSSIBLE)[2]
            refused[point] = (
                error.__cause__.reason if isinstance(error.__cause__, SplitRefused) else reason.partition(_WAY_OUT)[0]
            )
        except Exception as error:  # an error of the data set: its sampler may yield indices of another kind
            refused[point] = f"reading an example raised {type(error).__name__}: {error}"
    return possible, refused


def _holds_of(source: Source, choice: Choice) -> tuple[tuple[Hold, ...], str]:
    if not source.rebuilds:
        return (), "its examples have no index by which they could be found again"
    try:
        return tuple(holds_of(source.loader.dataset, source.readable_indices, choice.split, AUTO)), ""
    except ValueError as error:
        said, impossible, reason = str(error).partition(_IMPOSSIBLE)
        return (), reason if impossible else said
    except Exception as error:  # an error of the data set: its sampler may yield indices of another kind
        return (), f"reading an example raised {type(error).__name__}: {error}"


def _count_tensors(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return 1
    if isinstance(batch, dict):
        return sum(map(_count_tensors, batch.values()))
    if isinstance(batch, (list, tuple)):
        return sum(map(_count_tensors, batch))
    return 0
