"""`ShareConfig`: the name under which a training shares its reading, and what happens if it is slower or starts later."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Integral, Real
from typing import Any

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.protecting.memory import bytes_from_words

__all__ = ["BEHIND", "CLUSTERS", "JOIN", "ShareConfig", "read_share_config"]

BEHIND = ("wait", "skip")
CLUSTERS = (None, "ray")
JOIN = ("now", "pass")
_LEAST_BYTES = 2**12
_WINDOW = 'a string with a unit such as "1GiB", a share of the free memory such as 0.1, or a number of bytes'


@dataclass(frozen=True)
class ShareConfig:
    """The options of sharing (CoorDL's coordinated preparation: Mohan et al. 2021, arXiv 2007.06775, section 4.3).

    Args:
        name: Trainings of one user on one machine that give the same name share one reader.
        behind: What happens if this training falls so far behind that the window is full. ``"wait"``: the reader waits for it,
            and it gets every example. ``"skip"``: the reader goes on, and this training counts the examples that it missed.
        join: Where this training begins if other trainings have begun before. ``"now"``: where the fastest one is. ``"pass"``: at
            the next pass.
        wait_for: Number of trainings that the reader waits for before it begins.
        wait_seconds: How long it waits for them, in seconds. Then it begins with those that are there, and a warning says so.
        window: Memory for examples that are prepared and that not all trainings have taken. A string is a size with a unit
            (``"1GiB"``). A float between 0 and 1 is a share of the free memory. An integer is a number of bytes, at least 4096.
            The training that starts the reader sets the window.
        restart: Whether a training starts another reader if the reader dies. If that one dies at the same example, there is an
            error. Data that is not read by index (a stream, a loader of whole batches) cannot be continued in the middle of a
            pass. There, ``True`` ends the training with an error when the reader dies, and ``"pass"`` continues with the next
            pass.
        linger_seconds: How long the reader stays after the last training has left, in seconds.
        cluster: Which nodes share one reader. None: each node has its own. ``"ray"``: one node of the Ray cluster reads, and the
            readers of the other nodes get its examples over Ray. This needs ``behind="wait"``, data that is read by index, and
            trainings that Ray runs. ``wait_for`` and ``window`` then apply to each node.
        ignore: Names of attributes of the data set, the sampler and the transforms that may differ between the trainings, such as
            ``("log_dir",)``, or whole paths as an error names them. Every training gets what the data set of the first training
            makes. Give it to all trainings.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: An option has an impossible value, or two options exclude each other.

    Example:
        >>> ShareConfig("sweep", behind="skip").window
        '1GiB'
    """

    name: str
    _: KW_ONLY
    behind: str = "wait"
    join: str = "now"
    wait_for: int = 1
    wait_seconds: float = 60.0
    window: int | float | str = "1GiB"
    restart: bool | str = True
    linger_seconds: float = 30.0
    cluster: str | None = None
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"share must be a name, a ShareConfig or a dict of its options, got {self.name!r}")
        if not re.fullmatch(r"[\w.-]{1,64}", self.name, re.ASCII) or self.name.startswith("."):
            raise ValueError(
                f"share.name must be 1 to 64 letters, digits, '_', '-' or '.', not beginning with '.', got {self.name[:80]!r}"
            )
        for option, known in (("behind", BEHIND), ("join", JOIN), ("cluster", CLUSTERS)):
            if (value := getattr(self, option)) not in known:
                raise ValueError(f"share.{option} must be {' or '.join(map(repr, known))}, got {value!r}")
        if self.cluster is not None and self.behind != "wait":
            raise ValueError(
                f"share.behind={self.behind!r} is impossible with share.cluster={self.cluster!r}: readers wait for other nodes. "
                "Use behind='wait', or leave cluster out, so that each node has a reader of its own"
            )
        if self.restart != "pass" and not isinstance(self.restart, bool):
            raise TypeError(f"share.restart must be True, False or 'pass', got {self.restart!r}")
        if isinstance(self.wait_for, bool) or not isinstance(self.wait_for, Integral) or self.wait_for < 1:
            raise ValueError(f"share.wait_for must be a number of trainings, 1 or more, got {self.wait_for!r}")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise TypeError(f'share.ignore must be names of attributes, such as ["log_dir"], got {self.ignore!r}')
        for option in ("wait_seconds", "linger_seconds"):
            value = getattr(self, option)
            is_time = isinstance(value, Real) and not isinstance(value, bool)
            if not is_time or not 0 <= value < float("inf"):
                raise ValueError(f"share.{option} must be a number of seconds, 0 or more, got {value!r}")
        self._check_window()

    def _check_window(self) -> None:
        window = self.window
        if isinstance(window, str):
            size = bytes_from_words(window)
        elif isinstance(window, bool) or not isinstance(window, Real):
            raise TypeError(f"share.window must be {_WINDOW}, got {window!r}")
        elif isinstance(window, Integral):
            size = int(window)
        else:
            size = _LEAST_BYTES if 0 < float(window) < 1 else None
        if size is None:
            raise ValueError(f"share.window must be {_WINDOW}, got {window!r}")
        if size < _LEAST_BYTES:
            raise ValueError(f"share.window must be at least {_LEAST_BYTES:,} bytes, got {window!r}")

    def window_bytes(self) -> int:
        """Returns the size of the window in bytes. If it is a share, that is of the memory that is free now.

        Raises:
            ValueError: ``window`` is a share, and the system does not tell how much memory is free.
        """
        if isinstance(self.window, str):
            size = bytes_from_words(self.window)
            assert size is not None  # checked above
            return size
        if isinstance(self.window, Integral):
            return int(self.window)
        free = free_memory_bytes()
        if free is None:
            raise ValueError(
                f"share.window={self.window!r} is a share of the free memory, which this system does not tell: give bytes"
            )
        return max(int(free * self.window), _LEAST_BYTES)


def read_share_config(value: Any) -> ShareConfig | None:
    """Returns the options of sharing, from any form in which users may give them; None for no sharing.

    Args:
        value: A `ShareConfig`, a name, a mapping of the fields of a `ShareConfig` (also OmegaConf's), or None.

    Raises:
        TypeError: ``value`` is none of these, or a field has a wrong type.
        ValueError: A field is unknown, missing, or has an impossible value.

    Example:
        >>> read_share_config({"name": "sweep", "wait_for": 3}).wait_for
        3
    """
    if value is None or isinstance(value, ShareConfig):
        return value
    if isinstance(value, Mapping):
        known = [field.name for field in fields(ShareConfig)]
        if unknown := [str(key) for key in value if key not in known]:
            raise ValueError(f"share has unknown options {', '.join(unknown)}: known are {', '.join(known)}")
        if "name" not in value:
            raise ValueError('share needs a name, such as "sweep"')
        return ShareConfig(**{str(key): value[key] for key in value})
    return ShareConfig(value)
