"""The options of a loader are checked here. Each message names the argument, what was expected, what was given and the way out.

`check_factor` checks every factor that a user or a controller gives. Before that, `Decision` refuses a controller's factor that
is no finite number of 1 or more (``measuring/control.py``). Only the loader knows whether its buffer is large enough for a factor
(`EchoLoader.check_factor`). A state with a bad factor is refused as a whole (``schema.py``).
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from lightning_echo.insertion import InsertionPoint
from lightning_echo.planning.ratio import MOST_FACTOR
from lightning_echo.planning.shape import Reuse
from lightning_echo.protecting.memory import bytes_from_words

__all__ = [
    "EPOCH_LENGTHS",
    "check_buffer_size",
    "check_epoch_length",
    "check_factor",
    "check_point",
    "check_ranks",
    "check_reuse",
    "check_seed",
]

EPOCH_LENGTHS = ("fixed", "full_pass")
_BUFFER_SIZES = (
    'an integer (live examples per rank), a string with a unit such as "4GiB", or a share of the free memory such as 0.2'
)


def check_factor(factor: Any) -> float:
    """Returns the echo factor as a float.

    Raises:
        TypeError: The factor is not a number.
        ValueError: The factor is below 1, not finite, or above the limit.
    """
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise TypeError(f"factor must be a real number >= 1 (1: no echoing), got {factor!r}")
    value = float(factor)
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"factor must be a finite number >= 1, got {factor!r}; use 1 to switch echoing off")
    if value > MOST_FACTOR:
        raise ValueError(f"factor must be at most {MOST_FACTOR:,}, got {factor!r}; beyond 4 to 8 it seldom helps")
    return value


def check_point(point: Any) -> InsertionPoint:
    """Returns the insertion point as an enum member.

    Raises:
        ValueError: There is no such insertion point.
    """
    try:
        return InsertionPoint(point)
    except ValueError:
        known = ", ".join(repr(member.value) for member in InsertionPoint)
        raise ValueError(f"insertion_point must be one of {known}, got {point!r}") from None


def check_buffer_size(buffer_size: Any) -> int | float | str | None:
    """Returns the buffer size as a plain value, also if it is a number of numpy; None for the default.

    Raises:
        TypeError: The size is neither a number nor a string.
        ValueError: The size is impossible as a number of examples, as a share, or as a number of bytes.
    """
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


def check_epoch_length(epoch_length: Any) -> str:
    """Returns ``epoch_length`` itself.

    Raises:
        ValueError: It is neither ``"fixed"`` nor ``"full_pass"``.
    """
    if epoch_length not in EPOCH_LENGTHS:
        raise ValueError(f"epoch_length must be 'fixed' or 'full_pass', got {epoch_length!r}")
    return str(epoch_length)


def check_reuse(reuse: Any) -> Reuse:
    """Returns the rule of reuse as an enum member.

    Raises:
        ValueError: There is no such rule.
    """
    try:
        return Reuse(reuse)
    except ValueError:
        raise ValueError(
            "reuse must be 'each' (each fresh example is used factor times) or 'memory' (echoes are drawn from all examples that "
            f"the buffer holds), got {reuse!r}"
        ) from None


def check_ranks(num_replicas: Any, rank: Any) -> tuple[int, int] | None:
    """Returns the number of ranks and the number of this rank; None: ask ``torch.distributed``.

    Raises:
        TypeError: One of the two is not an integer.
        ValueError: Only one of the two is given, or there is no such rank.
    """
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
    """Returns the seed; None for the default.

    Raises:
        TypeError: The seed is not an integer.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be an integer, or None (see EchoLoader for what is taken then), got {seed!r}")
    return int(seed)
