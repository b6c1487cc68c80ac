"""`ShareConfig`, the user's folder in which readers are found, and the messages between a reader and its trainings."""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import re
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import KW_ONLY, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from lightning_echo.data.copies import bytes_from_words
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.data.objects import in_words
from lightning_echo.share.window import MOST_FAR_LANES, MOST_LANES

# ---------------------------------------------------------------------- share config

BEHIND = ("wait", "skip")
CLUSTERS = (None, "ray")
JOIN = ("now", "pass")
WORKERS = ("sum", "starter")
_LEAST_BYTES = 2**12
_WINDOW = 'a string with a unit such as "1GiB", a share of the free memory such as 0.1, or a number of bytes'


@dataclass(frozen=True)
class ShareConfig:
    """The options of sharing (CoorDL's coordinated preparation: Mohan et al. 2021, arXiv 2007.06775, section 4.3).

    Args:
        name: Trainings of one user on one machine that give the same name share one reader.
        behind: What happens if this training falls so far behind that the window is full. ``"wait"``: the reader waits for it,
            and it gets every example. ``"skip"``: the reader continues, and this training counts the examples that it missed.
        join: Where this training begins if other trainings have begun before. ``"now"``: where the fastest one is. ``"pass"``: at
            the next pass.
        wait_for: Number of trainings that the reader waits for before it begins.
        wait_seconds: How long it waits for them, in seconds. Then it begins with those that are there, and a warning says so.
        window: Memory for examples that are prepared and that not all trainings have taken. A string is a size with a unit
            (``"1GiB"``). A float between 0 and 1 is a share of the free memory. An integer is a number of bytes, at least 4096.
            The training that starts the reader sets the window.
        late: A training that joins within a pass gets all of it if it has missed at most this share of it, 0 to 1: from the
            window, from the reader's cache, or read again. The others wait for it as soon as they are a window ahead. This is for
            ``join="now"`` and ``behind="wait"``, where data is read by index in the loader's own order (``shuffle`` True or
            False), without ``cluster``. It also holds for a run that is resumed beside others. 0: it begins where they are.
        workers: How many workers the reader has, where data is read by index. ``"sum"``: as many as the loaders of the trainings
            that are there have together. Workers begin and end with the trainings. ``"starter"``: as many as the loader of the
            training that starts the reader. Or a number, at most 128. The training that starts the reader sets it.
        restart: Whether a training starts another reader if the reader dies. If that one dies at the same example, there is an
            error. Data that is not read by index (a stream, a loader of whole batches) cannot be continued in the middle of a
            pass. There, ``True`` ends the training with an error when the reader dies, and ``"pass"`` continues with the next
            pass.
        linger_seconds: How long the reader stays after the last training has left, in seconds.
        cluster: Which nodes share one reader. None: each node has its own. ``"ray"``: one node of the Ray cluster reads, and the
            readers of the other nodes get its examples over Ray. This needs ``behind="wait"``, data that is read by index, and
            trainings that Ray runs. ``wait_for`` and ``window`` then apply to each node.
        cluster_workers: With ``cluster="ray"``: how many more workers the reader has on other machines of the cluster. They are
            Ray actors with one CPU each. A number, 1 to 96; or two, ``(low, high)``: the reader begins with ``low``, asks for
            more while the trainings wait for reading, and gives some back while they do not. None: it has none. A cluster without
            free CPUs is not an error. Of several trainings, the largest number counts.
        cluster_resources: What each of them needs beside a CPU, as in ``ray.remote(resources=...)``: for clusters that mark their
            CPU machines. The training that starts the reader sets it.
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
    late: float = 0.1
    wait_for: int = 1
    wait_seconds: float = 60.0
    window: int | float | str = "1GiB"
    workers: int | str = "sum"
    restart: bool | str = True
    linger_seconds: float = 30.0
    cluster: str | None = None
    cluster_workers: int | Sequence[int] | None = None
    cluster_resources: Mapping[str, float] | None = None
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"share must be a name, a ShareConfig or a dict of its options, got {in_words(self.name)}")
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
        self._check_cluster_workers()
        if self.restart != "pass" and not isinstance(self.restart, bool):
            raise TypeError(f"share.restart must be True, False or 'pass', got {self.restart!r}")
        if isinstance(self.wait_for, bool) or not isinstance(self.wait_for, Integral) or self.wait_for < 1:
            raise ValueError(f"share.wait_for must be a number of trainings, 1 or more, got {self.wait_for!r}")
        if self.workers not in WORKERS and (
            isinstance(self.workers, bool) or not isinstance(self.workers, Integral) or not 1 <= self.workers <= MOST_LANES
        ):
            raise ValueError(
                f"share.workers must be 'sum', 'starter' or a number of workers from 1 to {MOST_LANES}, got {self.workers!r}"
            )
        if isinstance(self.ignore, str) or not all(isinstance(name, str) for name in self.ignore):
            raise TypeError(f'share.ignore must be names of attributes, such as ["log_dir"], got {self.ignore!r}')
        for option in ("wait_seconds", "linger_seconds"):
            value = getattr(self, option)
            is_time = isinstance(value, Real) and not isinstance(value, bool)
            if not is_time or not 0 <= value < float("inf"):
                raise ValueError(f"share.{option} must be a number of seconds, 0 or more, got {value!r}")
        if isinstance(self.late, bool) or not isinstance(self.late, Real) or not 0 <= self.late <= 1:
            raise ValueError(f"share.late must be a share of a pass, 0 to 1, got {self.late!r}")
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

    def _check_cluster_workers(self) -> None:
        wanted, resources = self.cluster_workers, self.cluster_resources
        if wanted is not None:
            numbers: list[Any] = list(wanted) if isinstance(wanted, Sequence) and len(wanted) == 2 else [wanted, wanted]
            are_numbers = all(isinstance(each, Integral) and not isinstance(each, bool) for each in numbers)
            if not are_numbers or not 0 <= numbers[0] <= numbers[1] or not 1 <= numbers[1] <= MOST_FAR_LANES:
                raise ValueError(
                    f"share.cluster_workers must be a number of workers from 1 to {MOST_FAR_LANES}, or two, the first one not "
                    f"larger than the second, such as (2, 16), got {wanted!r}"
                )
        amounts = {} if resources is None else resources
        is_mapping = isinstance(amounts, Mapping)
        if not is_mapping or not all(isinstance(name, str) and _is_amount(each) for name, each in amounts.items()):
            raise ValueError(
                "share.cluster_resources must be amounts by name, each more than 0, and whole if it is more than 1, such as "
                f'{{"cpu_node": 1}}, got {resources!r}'
            )
        if known := sorted(_OF_RAY & set(amounts)):
            raise ValueError(
                f"share.cluster_resources must be resources of your own, which mark machines, got {', '.join(known)}: each of "
                "these workers has one CPU, and nothing else of Ray's own resources"
            )
        for option, value in (("cluster_workers", wanted), ("cluster_resources", resources)):
            if value and self.cluster is None:
                raise ValueError(
                    f"share.{option}={value!r} needs share.cluster='ray': these workers are Ray actors on other machines. Add "
                    "it, or set share.workers for more workers on this machine"
                )
        if resources and wanted is None:
            raise ValueError(f"share.cluster_resources={resources!r} needs share.cluster_workers, whose resources they are")

    @property
    def cluster_range(self) -> tuple[int, int]:
        """The number of workers on other machines: at first, and at most."""
        wanted = self.cluster_workers
        if wanted is None:
            return 0, 0
        low, high = wanted if isinstance(wanted, Sequence) else (wanted, wanted)
        return int(low), int(high)

    def window_bytes(self) -> int:
        """Returns the size of the window in bytes. If it is a share, that is of the memory that is free now.

        Raises:
            ValueError: ``window`` is a share, and the system does not report how much memory is free.
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


_OF_RAY = {"CPU", "GPU", "memory", "object_store_memory"}


def _is_amount(value: Any) -> bool:
    """Whether Ray takes this as an amount of a resource: more than one is whole."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    return is_number and (value <= 1 or value == int(value))


def read_share_config(value: Any) -> ShareConfig | None:
    """Returns the options of sharing from a `ShareConfig`, a name, a mapping of its fields (also OmegaConf's), or None.

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


# ---------------------------------------------------------------------- folder
# The sockets, locks and logs of readers, under their names, are in one folder of the user. It is the first of these:
#
# 1. ``$LIGHTNING_ECHO_SHARED``, if that is set (for containers: a mounted folder),
# 2. ``lightning_echo`` in ``$XDG_RUNTIME_DIR``, if that is a folder of this user,
# 3. ``lightning_echo-<uid>`` in the folder for temporary files.
#
# Only this user may read or write it (mode 0700).

_MOST_PATH_BYTES = 107  # of a Unix socket, see unix(7)


def shared_folder() -> Path:
    """Returns the folder, and makes it if needed. Raises a PermissionError if it is another user's, or other users may use it."""
    chosen, runtime = os.environ.get("LIGHTNING_ECHO_SHARED"), os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        folder = Path(chosen)
    elif runtime and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.getuid():
        folder = Path(runtime) / "lightning_echo"
    else:
        folder = Path(tempfile.gettempdir()) / f"lightning_echo-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"the folder for sharing must be a folder of yours alone (mode 0700), and {folder} is not: remove it, or set "
            "LIGHTNING_ECHO_SHARED to another one"
        )
    return folder


def socket_of(name: str) -> str:
    """Returns the path of a reader's socket. Raises a ValueError if the path is too long for a socket."""
    path = str(shared_folder() / f"{name}.sock")
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ValueError(
            f"share.name={name!r} makes a path of {len(os.fsencode(path))} bytes ({path}), and a socket's may have "
            f"{_MOST_PATH_BYTES}: take a shorter name, or set LIGHTNING_ECHO_SHARED to a shorter folder"
        )
    return path


def log_of(name: str) -> str:
    return str(shared_folder() / f"{name}.log")


def names() -> list[str]:
    return sorted(path.stem for path in shared_folder().glob("*.sock"))


class StarterLock(AbstractContextManager["StarterLock"]):
    """The lock of who starts the reader of a name. The system releases it when its holder dies (``flock``)."""

    def __init__(self, name: str) -> None:
        self._path, self.is_held = str(shared_folder() / f"{name}.lock"), False
        self._descriptor = -1

    def try_to_hold(self) -> bool:
        """Takes the lock if it is free. Returns whether this object holds it."""
        if not self.is_held:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._descriptor)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                return False
            self.is_held = True
        return True

    def release(self) -> None:
        if self.is_held:
            self.is_held = False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a child that was forked has the descriptor, too
            os.close(self._descriptor)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


# ---------------------------------------------------------------------- wire
# Messages between a reader and its trainings are JSON objects, and descriptors, over a Unix socket that keeps messages apart.
# Each side checks that the other one is a process of the same user. A message that is not a JSON object, or that is too long,
# ends its connection and nothing else. A welcome has the descriptors of one or two windows, and a hello may have that of a part.

MOST_BYTES = 2**16
_MOST_DESCRIPTORS = 2
_MOST_NUMBER = 2**62
_CREDENTIALS = struct.Struct("3i")
_Read = TypeVar("_Read")


class WireError(ValueError):
    """A peer has sent something that is not a message."""


class Gone(ConnectionError):
    """The other side has closed the connection, or its process has ended."""


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_peer(connection: socket.socket) -> int:
    """Returns the process at the other end; 0 if it is in another PID namespace. Raises a PermissionError for another user's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise PermissionError(f"the process at the other end is one of user {uid}, and this one of user {os.getuid()}")
    return int(pid)


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message. Raises `Gone`, or a BlockingIOError if the other side does not receive and the socket does not wait."""
    data = json.dumps(message, separators=(",", ":")).encode()
    assert len(data) <= MOST_BYTES, "a message of ours fits"
    try:
        if descriptors:
            socket.send_fds(connection, [data], descriptors)
        else:
            connection.send(data, socket.MSG_NOSIGNAL)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Gone("the connection is closed") from error


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns the next message, and the descriptors that came with it. Raises `Gone`, a `WireError`, or a BlockingIOError."""
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, ancillary, flags, _ = _past_reset(lambda: connection.recvmsg(MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC))
    except ConnectionResetError as error:
        raise Gone("the connection is closed") from error
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    try:
        if len(descriptors) > _MOST_DESCRIPTORS:  # their room may be rounded up
            raise WireError(f"a message may bring {_MOST_DESCRIPTORS} descriptors, got {len(descriptors)}")
        return _checked(data, flags), list(descriptors)
    except (WireError, Gone):
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def said_last(connection: socket.socket, name: str) -> dict[str, Any]:
    """Returns the next message if it has this name, and leaves it there; otherwise an empty one."""
    try:
        message = _checked(_past_reset(lambda: connection.recv(MOST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)), 0)
    except (OSError, WireError):  # OSError: nothing has come, or the connection is closed
        return {}
    return message if name in message else {}


def _past_reset(read: Callable[[], _Read]) -> _Read:
    """Reads, and retries after a reset: if the peer closed with unread messages, the reset comes before its last message."""
    try:
        return read()
    except ConnectionResetError:
        return read()


def _checked(data: bytes, flags: int) -> dict[str, Any]:
    if not data:
        raise Gone("the connection is closed")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise WireError(f"a message is longer than {MOST_BYTES:,} bytes, or brings descriptors")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message must be an object, got {type(message).__name__}")
    return message


def item_in(value: Any) -> int:
    """Returns a number in a message: an item, or a count. Raises a `WireError` for anything else, as the next two do."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_NUMBER:
        raise WireError(f"a number is wrong: {str(value)[:80]}")
    return value


def amount_in(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST_NUMBER:
        raise WireError(f"an amount is wrong: {str(value)[:80]}")
    return value


def one_of(value: Any, known: tuple[str, ...]) -> str:
    if value not in known:
        raise WireError(f"an option is wrong: {str(value)[:80]}")
    return str(value)
