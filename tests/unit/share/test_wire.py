"""The folder of readers and its locks; messages: what goes through, and what ends a connection."""

import json
import os
import socket
import stat

import pytest

from lightning_echo.share import config as wire
from lightning_echo.share.config import (
    MOST_BYTES,
    Gone,
    StarterLock,
    WireError,
    check_peer,
    names,
    receive,
    said_last,
    send,
    shared_folder,
    socket_of,
)


@pytest.fixture
def pair():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        yield here, there


def test_a_message_and_a_descriptor_go_through(pair, tmp_path):
    here, there = pair
    with open(tmp_path / "file", "w+") as file:
        file.write("held")
        file.flush()
        send(here, {"at": 7}, [file.fileno()])
    message, (descriptor,) = receive(there)
    assert message == {"at": 7}
    assert os.pread(descriptor, 10, 0) == b"held"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_messages_stay_apart_and_an_end_is_told_on_both_sides(pair):
    here, there = pair
    send(here, {"at": 1})
    send(here, {"at": 2})
    assert [receive(there)[0]["at"] for _ in range(2)] == [1, 2]
    there.close()
    with pytest.raises(Gone):
        receive(here)
    with pytest.raises(Gone):
        send(here, {"at": 1})


def test_the_last_message_of_a_side_that_has_not_read_everything_arrives(pair):
    left, right = pair
    send(right, {"at": 7})
    send(left, {"failed": "why"})
    left.close()
    assert said_last(right, "failed") == {"failed": "why"}
    assert receive(right) == ({"failed": "why"}, [])
    with pytest.raises(Gone):
        receive(right)


@pytest.mark.parametrize("data", [b"{", b"[1]", b"7", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 10_000])
def test_what_is_no_message_is_refused(pair, data):
    here, there = pair
    here.send(data)
    with pytest.raises(WireError):
        receive(there)


def test_a_message_too_long_is_refused(pair):
    here, there = pair
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_BYTES)
    here.send(json.dumps({"a": "x" * MOST_BYTES}).encode())
    with pytest.raises(WireError, match="longer than 65,536 bytes"):
        receive(there)


def test_descriptors_that_nobody_wants_are_closed(pair, tmp_path):
    here, there = pair
    before = set(os.listdir("/proc/self/fd"))
    with open(tmp_path / "file", "w") as file:
        socket.send_fds(here, [b"{"], [file.fileno()])
    with pytest.raises(WireError):
        receive(there)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_process_of_another_user_is_refused(pair, monkeypatch):
    assert check_peer(pair[0]) == os.getpid()
    monkeypatch.setattr(wire.os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="and this one of user 12345"):
        check_peer(pair[0])


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    monkeypatch.delenv("LIGHTNING_ECHO_SHARED", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_it_is_made_for_the_user_alone_without_a_runtime_folder_among_the_temporary_files(runtime, monkeypatch):
    folder = shared_folder()
    assert (folder, stat.S_IMODE(folder.stat().st_mode)) == (runtime / "lightning_echo", 0o700)
    for name in ("b.sock", "a.sock", "c.lock"):
        (shared_folder() / name).touch()
    assert names() == ["a", "b"]
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(runtime))
    assert shared_folder() == runtime / f"lightning_echo-{os.getuid()}"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_that_others_may_use_and_a_link_are_refused(runtime, tmp_path, is_link):
    (runtime / ("elsewhere" if is_link else "lightning_echo")).mkdir(mode=0o700 if is_link else 0o755)
    if is_link:
        (runtime / "lightning_echo").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder of yours alone"):
        shared_folder()


def test_a_path_too_long_for_a_socket_is_refused_with_a_hint(monkeypatch, tmp_path):
    folder = tmp_path / ("f" * 100)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(folder))
    with pytest.raises(ValueError, match="take a shorter name, or set LIGHTNING_ECHO_SHARED"):
        socket_of("sweep")


def test_a_lock_has_one_holder_also_among_threads(runtime):
    one, other = StarterLock("sweep"), StarterLock("sweep")
    assert one.try_to_hold()
    assert one.try_to_hold()
    assert not other.try_to_hold()
    with one:
        pass
    assert not one.is_held
    assert other.try_to_hold()
    other.release()
    other.release()
