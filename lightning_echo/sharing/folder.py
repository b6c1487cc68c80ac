"""The user's folder in which readers are found. It has their sockets, locks and logs, under the names that are shared.

It is the first of these:

1. ``$LIGHTNING_ECHO_SHARED``, if that is set (for containers: a mounted folder),
2. ``lightning_echo`` in ``$XDG_RUNTIME_DIR``, if that is a folder of this user,
3. ``lightning_echo-<uid>`` in the folder for temporary files.

Only this user may read or write it (mode 0700).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["FileLock", "log_of", "names", "shared_folder", "socket_of", "sockets_elsewhere", "starter_lock_of"]

_MOST_PATH_BYTES = 107  # of a Unix socket, see unix(7)


def shared_folder() -> Path:
    """Returns the folder, and makes it if it is not there.

    Raises:
        PermissionError: The folder belongs to another user, or other users may use it.
    """
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
    """Returns the path of a reader's socket.

    Raises:
        ValueError: The path is too long for a socket.
    """
    path = str(shared_folder() / f"{name}.sock")
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ValueError(
            f"share.name={name!r} makes a path of {len(os.fsencode(path))} bytes ({path}), and a socket's may have "
            f"{_MOST_PATH_BYTES}: take a shorter name, or set LIGHTNING_ECHO_SHARED to a shorter folder"
        )
    return path


def sockets_elsewhere(name: str) -> list[str]:
    """Returns the paths of sockets of this name in other folders in which a reader lives, as far as the system shows them.

    If ``$LIGHTNING_ECHO_SHARED`` is set, the folder was chosen, and there are none.
    """
    if os.environ.get("LIGHTNING_ECHO_SHARED"):
        return []
    folders = set()
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
        folders = {os.path.dirname(fields[7].rstrip("\n")) for line in lines if len(fields := line.split(maxsplit=7)) > 7}
    paths = [os.path.join(folder, f"{name}.sock") for folder in sorted(folders - {str(shared_folder()), ""})]
    return [path for path in paths if os.path.exists(path)]


def starter_lock_of(name: str) -> str:
    """Returns the path of the lock that decides which training starts a reader."""
    return str(shared_folder() / f"{name}.lock")


def log_of(name: str) -> str:
    """Returns the path of a reader's log."""
    return str(shared_folder() / f"{name}.log")


def names() -> list[str]:
    """Returns the names under which there is a socket."""
    return sorted(path.stem for path in shared_folder().glob("*.sock"))


class FileLock:
    """A lock between processes and threads. The system releases it when its holder dies (``flock``, one descriptor each).

    Args:
        path: The file of the lock. It is not removed.

    Attributes:
        is_held: Whether this object holds it.
    """

    def __init__(self, path: str) -> None:
        self._path, self.is_held = path, False
        self._descriptor = -1

    def try_to_hold(self) -> bool:
        """Takes the lock if it is free. Returns whether this object holds it now."""
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
        """Releases the lock."""
        if self.is_held:
            self.is_held = False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing is not enough: a child that was forked has the descriptor, too
            os.close(self._descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
