"""Messages between a reader and its trainings: JSON objects, and descriptors, over a Unix socket that keeps messages apart.

Each side checks that the other one is a process of the same user. A message that is no JSON object, or that is too long, ends its
connection and nothing else. Only one message, the welcome, has descriptors.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

__all__ = ["MOST_BYTES", "Gone", "WireError", "check_peer", "new_socket", "receive", "said_last", "send"]

MOST_BYTES = 2**16
_MOST_DESCRIPTORS = 1
_CREDENTIALS = struct.Struct("3i")
_Read = TypeVar("_Read")


class WireError(ValueError):
    """A peer has sent something that is not a message."""


class Gone(ConnectionError):
    """The other side has closed the connection, or its process has ended."""


def new_socket() -> socket.socket:
    """Returns a socket that is not connected yet."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_peer(connection: socket.socket) -> int:
    """Returns the number of the process at the other end; 0 if it is in another PID namespace.

    Raises:
        PermissionError: It is a process of another user.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise PermissionError(f"the process at the other end is one of user {uid}, and this one of user {os.getuid()}")
    return int(pid)


def send(connection: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends a message.

    Raises:
        Gone: The other side has ended.
        BlockingIOError: The other side does not receive, and the socket does not wait.
    """
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
    """Returns the next message, and the descriptors that came with it.

    Raises:
        Gone: The other side has closed the connection.
        WireError: What came is no message.
        BlockingIOError: Nothing has come, and the socket does not wait.
    """
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
        raise WireError(f"a message is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message must be an object, got {type(message).__name__}")
    return message
