"""Reads the user's data in a process that ends afterwards, to decide something before a training.

Reading leaves traces in a process: an open file, a started thread pool, a connection, a filled cache. A process that is forked
later inherits them, and cannot use them: two workers read through one file position, and a thread pool waits forever. So nothing
is read in the training's process before its workers are there. `read_elsewhere` reads where the training would read:

* If the loader has workers: in one worker of a ``DataLoader`` with the loader's own multiprocessing context, after its own
  ``worker_init_fn``.
* If it has none: in a forked child. Where processes are not forked (Windows, macOS), nothing can be inherited, and the function
  runs in this process.

The answer comes back as bytes, and the process ends. A training does not depend on that process: if it dies, hangs or cannot
send its answer, there is no answer (`NotRead`), and the caller reports this. The process opens all files that it inherits for
reading a second time, so that it moves no file position of the training. Network connections that it inherits look closed to it:
two processes must not speak on one connection.
"""

from __future__ import annotations

import copy
import ctypes
import fcntl
import os
import pickle
import signal
import socket
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.multiprocessing import get_context
from torch.utils.data import DataLoader, get_worker_info

from lightning_echo.log import LOGGER

_FORKS = sys.platform not in ("win32", "darwin")  # macOS can fork, but its system libraries cannot be used afterwards
_STILL_SECONDS = 60.0  # a process that uses no processor and reads nothing for so long will not continue
_LOOK_SECONDS = 1.0  # between two looks at a process that has not answered
_SAID_AFTER_SECONDS = 30.0
_ENDS_IN_SECONDS = 5.0  # as torch waits for a worker
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
# Looked up here: a forked process must not wait for the lock of the dynamic loader, which a thread may have held meanwhile.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None

_here_is_elsewhere = False  # whether this process was started to read, and ends afterwards
_has_cut = False  # whether it has inherited a network connection


@dataclass(frozen=True)
class NotRead:
    """There is no answer; ``reason`` is human-readable.

    ``error`` is the error of the user's code, or None if it is not certain that it would raise this in a training, too.
    """

    reason: str
    error: Exception | None = None


def read_elsewhere(loader: DataLoader[Any], function: Callable[..., Any], *args: Any) -> Any | NotRead:
    """Calls a function that reads the user's data in a process that ends afterwards, and returns its answer.

    In a process that was started by this function, the function is called right there. The random states of this process do not
    change. The function gets the data set as it is in that process, and ``args``. If processes are spawned, it must be picklable.
    """
    if _here_is_elsewhere or not (_FORKS or loader.num_workers):
        return _Answer.of(function, loader.dataset, args, None).opened()
    try:
        start, context = (_worker, loader.multiprocessing_context) if loader.num_workers else (_child, get_context("fork"))
        context = context or get_context()
        reader, writer = context.Pipe(duplex=False)
        with reader, writer, start(loader, context, _Asked(function, args, writer, loader.worker_init_fn)) as process:
            writer.close()  # if the process dies while it writes, this end must hear it
            return _answer_of(process, reader)
    except Exception as error:  # the process could not be started, or torch has noticed first that it has died
        return NotRead(f"the process that was to read examples has failed ({type(error).__name__}: {error})")


def noting_context(context: BaseContext, processes: list[Any]) -> BaseContext:
    """Returns a copy of a multiprocessing context that adds each process that it makes to ``processes``."""
    make: Any = context.Process  # type: ignore[attr-defined]  # each of its subclasses has one

    def process(*args: Any, **kwargs: Any) -> Any:
        processes.append(make(*args, **kwargs))
        return processes[-1]

    noting = copy.copy(context)
    vars(noting)["Process"] = process
    return noting


# --- the answer ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    """The answer that comes back."""

    value: Any
    raised: tuple[Exception | None, str, str] | None = None  # the error, why there is no answer, and a traceback
    is_certain: bool = True  # whether a training would raise this error, too

    @classmethod
    def of(cls, function: Callable[..., Any], dataset: Any, args: tuple[Any, ...], prepare: Callable[[], Any] | None) -> _Answer:
        try:
            if prepare is not None:
                prepare()
            return cls(function(dataset, *args))
        except Exception as error:
            text = f"reading an example raised {type(error).__name__}: {error}"
            # It may come from being in this process: from CUDA, a file system or a connection that was inherited.
            words = str(error).lower()
            is_of_the_process = _here_is_elsewhere and (_has_cut or "cuda" in words or "fork" in words)
            return cls(None, (error, text, traceback.format_exc()), not is_of_the_process)

    def packed(self) -> bytes:
        """Returns the answer as bytes; if it cannot be pickled, an answer with the reason."""
        try:
            packed = pickle.dumps(self)
            if self.raised is not None:
                pickle.loads(packed)  # many an exception can be pickled, and not made again
            return packed
        except Exception as error:  # whatever the user's objects raise
            if self.raised is not None:
                return pickle.dumps(_Answer(None, (None, *self.raised[1:]), is_certain=False))
            return pickle.dumps(_Answer(None, (None, f"what was read cannot be sent ({error})", ""), is_certain=False))

    def opened(self) -> Any | NotRead:
        if self.raised is None:
            return self.value
        error, text, where = self.raised
        if error is not None and not _here_is_elsewhere:
            error.__cause__ = _InAnotherProcess(where)
        return NotRead(text, error if self.is_certain else None)


class _InAnotherProcess(Exception):
    """Shows the traceback of an error as its cause."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


# --- in the process --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """The question to the process. As ``worker_init_fn`` of a worker it runs after torch has set the worker up."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    writer: Any
    prepare: Callable[[int], Any] | None  # the loader's own worker_init_fn

    def __call__(self, worker: int) -> None:
        _begin()
        self._send(get_worker_info().dataset, None if self.prepare is None else partial(self.prepare, worker))  # type: ignore[union-attr]

    def in_child(self, dataset: Any) -> None:
        """Answers in a forked child that is not a worker."""
        for number in (signal.SIGTERM, signal.SIGINT):  # the training's own handlers are for the training
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)  # as in a worker: the threads that it had are not there
        _begin()
        self._send(dataset, None)

    def _send(self, dataset: Any, prepare: Callable[[], Any] | None) -> None:
        answer = _Answer.of(self.function, dataset, self.args, prepare).packed()
        with suppress(OSError):  # nobody listens any more
            self.writer.send_bytes(answer)
        self.writer.close()


def _begin() -> None:
    global _here_is_elsewhere, _has_cut
    _here_is_elsewhere = True
    if _PRCTL is None:
        return
    _PRCTL(_DIES_WITH_PARENT, int(signal.SIGKILL))
    parent = parent_process()
    if parent is not None and not parent.is_alive():  # it was killed while this process began, which nothing tells it any more
        os._exit(1)
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed, may not be opened again, or is not a connection
            descriptor = int(name)
            kind = os.fstat(descriptor).st_mode
            if stat.S_ISREG(kind):
                _open_again(descriptor)
            elif stat.S_ISSOCK(kind):
                _has_cut |= _cut(descriptor)


def _open_again(descriptor: int) -> None:
    """Gives this process a file position of its own, if the file is only read."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        own = os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
        os.close(own)


def _cut(descriptor: int) -> bool:
    """Lets a network connection look closed by the other side, in this process alone. Returns whether it was one."""
    with socket.socket(fileno=os.dup(descriptor)) as inherited:
        if inherited.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        inherited.getpeername()  # raises an OSError if there is no connection
    one, other = socket.socketpair()
    with one:
        other.close()
        os.dup2(one.fileno(), descriptor, inheritable=os.get_inheritable(descriptor))
    return True


# --- in the process that asks ----------------------------------------------------------------------------------------


@contextmanager
def _worker(loader: DataLoader[Any], context: BaseContext, asked: _Asked) -> Iterator[Any]:
    """Starts a worker, and ends it as torch does."""
    processes: list[Any] = []
    batches = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about more processes: the training's own loader gives these warnings
        try:
            batches = iter(
                DataLoader(
                    loader.dataset,
                    batch_sampler=[],  # it is asked for no batch
                    num_workers=1,
                    worker_init_fn=asked,
                    multiprocessing_context=noting_context(context, processes),
                    generator=torch.Generator(),  # not the training's: making the iterator draws from it
                )
            )
        except BaseException:
            _end(processes)
            raise
    try:
        yield processes[0]
    except BaseException:
        _end(processes)
        raise
    finally:
        del batches  # ends the worker


@contextmanager
def _child(loader: DataLoader[Any], context: BaseContext, asked: _Asked) -> Iterator[Any]:
    """Forks a child, and ends it. It may have children itself, as the training's process may."""
    process = context.Process(target=asked.in_child, args=(loader.dataset,), daemon=False)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in a worker
        process.start()
    try:
        yield process
        process.join(_ENDS_IN_SECONDS)
    finally:
        _end([process])


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _answer_of(process: Any, reader: Connection) -> Any | NotRead:
    """Waits for the answer. Raises ``RuntimeError`` if torch notices first that the process has died."""
    began = moved = time.monotonic()
    before, has_said = b"", False
    while True:
        ready = wait([reader, process.sentinel], _LOOK_SECONDS)
        if reader in ready or (ready and reader.poll()):
            try:
                with warnings.catch_warnings():
                    # torch 2.4 and 2.5 warn about how they unpickle a tensor
                    warnings.filterwarnings("ignore", "You are using `torch.load` with `weights_only=False`", FutureWarning)
                    answer: _Answer = pickle.loads(reader.recv_bytes())
            except (EOFError, OSError):
                process.join(_ENDS_IN_SECONDS)
            else:
                return answer.opened()
        if ready:
            process.join(_ENDS_IN_SECONDS)  # torch raises here what it notices, and not later
            return NotRead(f"the process that read examples has died (exit code {process.exitcode})")
        now, used = time.monotonic(), _used_by(process.pid)
        if used != before or not used:
            moved, before = now, used
        if now - moved > _STILL_SECONDS:
            _end([process])
            return NotRead(f"the process that read examples did nothing for {_STILL_SECONDS:g} seconds")
        if now - began > _SAID_AFTER_SECONDS and not has_said:
            has_said = True
            LOGGER.warning("reading a few examples before the training takes more than %d s so far", _SAID_AFTER_SECONDS)


def _used_by(process_id: int) -> bytes:
    """Returns a process's processor time and its reads, as text; empty if the system does not report them."""
    found = b""
    with suppress(OSError):
        with open(f"/proc/{process_id}/stat", "rb") as file:
            found += b" ".join(file.read().rpartition(b")")[2].split()[11:15])  # its processor time, and that of its children
        with open(f"/proc/{process_id}/io", "rb") as file:
            found += file.read()
    return found
