"""A reader for which the system has no descriptor left: it serves those that are there, and the others when it can."""

import errno
import resource
import socket
import threading

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share import server as server_module
from lightning_echo.share.attachment import Attachment
from lightning_echo.share.config import ShareConfig, new_socket, receive, send, socket_of
from lightning_echo.share.process import ReaderError
from lightning_echo.share.window import Window

FINGERPRINT = {"data set": "eight numbers"}
NONE_LEFT = OSError(errno.EMFILE, "Too many open files")


class Crowded:
    """A listening socket that accepts nothing for a while."""

    def __init__(self, listener, times):
        self._listener, self._left = listener, times

    def __getattr__(self, name):
        return getattr(self._listener, name)

    def accept(self):
        if self._left:
            self._left -= 1
            raise NONE_LEFT
        return self._listener.accept()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serves eight numbers, and returns its name."""
    monkeypatch.setattr(server_module, "_BETWEEN_ACCEPTS_SECONDS", 0.1)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    threads, listeners = [], []

    def serve(times=0):
        listener = new_socket()
        listener.bind(socket_of("numbers"))
        listener.listen()
        listeners.append(listener)
        kind = kind_of(DataLoader(range(8), num_workers=1))
        data = {"data_fingerprint": FINGERPRINT, "window_bytes": 2**14, "linger_seconds": 0.1}
        reader = server_module.Server(Crowded(listener, times), kind, seed=0, **data)
        threads.append(threading.Thread(target=reader.run))
        threads[-1].start()

    yield serve
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def attach():
    attachment = Attachment(ShareConfig("numbers"), lambda _: pytest.fail("a reader is started"), FINGERPRINT)
    attachment.enter(None)
    return attachment


def test_a_training_that_cannot_be_accepted_is_accepted_later(served, caplog):
    served(times=3)
    attachment = attach()
    assert sorted(attachment.take(item) for item in range(8)) == list(range(8))
    attachment.close()
    assert caplog.text.count("a training comes, and cannot be let in yet: [Errno 24] Too many open files") == 3


def test_a_training_that_cannot_be_given_the_window_hears_why_and_the_others_go_on(served, monkeypatch):
    served()
    first = attach()
    open_window = Window.read_only_descriptor
    monkeypatch.setattr(Window, "read_only_descriptor", lambda self: (_ for _ in ()).throw(NONE_LEFT))
    with pytest.raises(ReaderError, match=r"could not begin: OSError: \[Errno 24\] Too many open files"):
        attach()
    monkeypatch.setattr(Window, "read_only_descriptor", open_window)
    second = attach()
    assert sorted(first.take(item) for item in range(8)) == list(range(8))
    first.close()
    second.close()


def test_a_message_whose_descriptor_cannot_be_received_is_not_taken_for_one_without(tmp_path):
    """A part of the data that is lost on the way would be all of it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, open(tmp_path / "part", "w") as part:
        send(here, {"hello": {}}, [part.fileno()])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(server_module.WireError, match="or brings descriptors"):
                receive(there)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
