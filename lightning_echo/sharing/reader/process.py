"""What the reader's process runs.

The training that starts the process sends the parts of its loader through a pipe, which is the standard input of the process. It
never sends them over the socket. The process leaves its parent, so that it outlives the parent. When it is ready, it writes one
line to the pipe ``STATUS``; another one if it cannot begin. If that pipe ends without a line, the process was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import cloudpickle

from lightning_echo.fetching.source import Source
from lightning_echo.sharing.folder import socket_of
from lightning_echo.sharing.reader.loader_parts import loader_of
from lightning_echo.sharing.reader.server import Elsewhere, Server
from lightning_echo.sharing.same_data import difference_of_code
from lightning_echo.sharing.wire import new_socket

__all__ = ["FAILED", "READY", "Payload", "left_parent", "main", "run_reader", "seed_of", "serve_payload", "telling_of_failure"]

READY, FAILED = b"ready\n", b"failed\n"
_HEADER = struct.Struct("<Q")


class Payload(NamedTuple):
    """What a training sends.

    Attributes:
        paths: Its ``sys.path``, since its modules must be found.
        options: ``window_bytes``, ``linger_seconds``, ``print``; ``starter``: who has sent it; ``expected``: how many trainings
            a reader had that has died; ``cluster``: where this node is in a cluster whose nodes share one reader.
        loader: Parts of the loader, pickled by cloudpickle.
    """

    paths: list[str]
    options: dict[str, Any]
    loader: bytes

    def to_bytes(self) -> bytes:
        """Returns the bytes that go through the pipe."""
        header = json.dumps({"paths": self.paths, "options": self.options}).encode()
        return _HEADER.pack(len(header)) + header + self.loader

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        """Undoes `to_bytes`."""
        (size,) = _HEADER.unpack_from(data)
        header = json.loads(data[_HEADER.size : _HEADER.size + size])
        return cls(header["paths"], header["options"], data[_HEADER.size + size :])


def main(name: str, status: int) -> None:
    """Reads the payload, leaves the parent, and serves.

    Args:
        name: The name that is shared.
        status: Descriptor of the pipe to the training that waits.
    """
    with telling_of_failure(status):
        serve_payload(name, status, left_parent())


@contextmanager
def telling_of_failure(status: int) -> Iterator[None]:
    """Reports a failure of this process to the training that waits for it. A process that is killed reports nothing.

    Raises:
        SystemExit: This process has failed.
    """
    try:
        yield
    except BaseException:
        traceback.print_exc()  # first, because the error of the training quotes the end of this log
        with suppress(BrokenPipeError):  # the training has heard that this process is ready, and waits no more
            os.write(status, FAILED)
        sys.exit(1)


def left_parent() -> Payload:
    """Reads the payload, and goes on in a process that has left its parent."""
    payload = Payload.from_bytes(sys.stdin.buffer.read())
    if os.fork():
        os._exit(0)  # so that the training does not wait for this process
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, force=True)
    sys.path[:] = payload.paths
    return payload


def serve_payload(
    name: str, status: int, payload: Payload, elsewhere: Elsewhere | None = None, gather_seconds: float = 0.0
) -> None:
    """Runs the reader of a name, with what a training has sent.

    Args:
        name: The name.
        status: Descriptor of the pipe to the training that waits.
        payload: What the training has sent.
        elsewhere: As in `Server`.
        gather_seconds: As in `Server`.
    """
    parts, options = cloudpickle.loads(payload.loader), payload.options
    if differs := difference_of_code(options["print"], parts):
        raise RuntimeError(
            f"this process imports modules again, and then {differs} (the training's, and this one). Set what a module holds "
            "where it is imported, or give it to the data set as an argument. If it decides nothing about examples, name it: "
            'ShareConfig(ignore=("log_dir",))'
        )
    source = Source(loader_of(parts, seed_of(name)))

    def say() -> None:
        os.write(status, READY)

    run_reader(
        name,
        source,
        data_print=options["print"],
        window_bytes=options["window_bytes"],
        linger_seconds=options["linger_seconds"],
        expected=options["expected"],
        starter=options["starter"],
        when_ready=say,
        elsewhere=elsewhere,
        gather_seconds=gather_seconds,
    )


def run_reader(
    name: str,
    source: Source,
    *,
    data_print: dict[str, str],
    window_bytes: int,
    linger_seconds: float,
    expected: int = 0,
    starter: str = "serve",
    when_ready: Callable[[], None] = lambda: None,
    elsewhere: Elsewhere | None = None,
    gather_seconds: float = 0.0,
) -> None:
    """Runs the reader of a name, until the last training has left.

    Args:
        name: The name.
        source: The loader.
        data_print: What is compared of the data.
        window_bytes: Memory for examples, in bytes.
        linger_seconds: How long to stay after the last training has left, in seconds.
        expected: As in `Server`.
        starter: As in `Server`.
        when_ready: Called when trainings can come.
        elsewhere: As in `Server`.
        gather_seconds: As in `Server`.

    Raises:
        RuntimeError: The workers cannot go on.
    """
    path = socket_of(name)
    new_path = os.path.join(os.path.dirname(path), f"{os.getpid():x}")  # not longer than the path itself, see unix(7)
    with suppress(FileNotFoundError):  # of a process that died here
        os.unlink(new_path)
    listener = new_socket()
    listener.bind(new_path)
    listener.listen(socket.SOMAXCONN)
    made = os.stat(new_path).st_ino
    follows = os.path.exists(path)  # a reader removes it when it ends, but not when it dies
    os.rename(new_path, path)  # replaces in one step the socket of a reader that has died
    server = Server(
        listener,
        source,
        seed=seed_of(name),
        data_print=data_print,
        window_bytes=window_bytes,
        linger_seconds=linger_seconds,
        follows=follows,
        expected=expected,
        starter=starter,
        when_over=partial(_remove, path, made),
        elsewhere=elsewhere,
        gather_seconds=gather_seconds,
    )
    when_ready()
    server.run()


def _remove(path: str, made: int) -> None:
    """Removes the socket, unless the next reader has replaced it."""
    try:
        if os.stat(path).st_ino == made:
            os.unlink(path)
    except FileNotFoundError:  # the folder was cleaned up
        pass


def seed_of(name: str) -> int:
    """Returns the seed for the order and all random numbers. It follows from the name, so each reader of a name has the same.

    >>> seed_of("sweep") == seed_of("sweep"), seed_of("sweep") == seed_of("other")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
