"""A Python that starts in a tenth of a second with torch and Lightning loaded, for the programs that tests start.

`start` runs a server that imports once, and writes an executable file to use in place of ``sys.executable``. When that file runs
a script, ``-c`` or ``-m``, the server forks: the fork gets the arguments, environment, working folder and open files of the
caller. The executable waits for the fork, forwards signals to it, and exits as the fork did. If it is killed, so is the fork.

The executable runs the real interpreter wherever a fork would behave differently: with other options of the interpreter, with
other values of variables that are read only at start, and in another namespace, control group or under other limits.
"""

from __future__ import annotations

import array
import atexit
import importlib
import inspect
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NoReturn

from huge_pages import prepare_forks

LOADED = ("torch", "torchvision", "torchmetrics", "lightning.pytorch", "lightning_echo", "lightning_echo.share.process")
# Variables that an interpreter or a library reads only at start.
READ_ONCE = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTHONWARNINGS",
    "PYTHONDEVMODE",
    "MPLBACKEND",
    "PYTHONUTF8",
)
_NUMBERS = struct.Struct("<i")


def _surroundings():  # type: ignore[no-untyped-def]  # its source is in the launcher, too
    """Returns the namespaces, control group and limits of this process."""
    names = sorted(os.listdir("/proc/self/ns"))
    limits = [resource.getrlimit(each) for name, each in vars(resource).items() if name.startswith("RLIMIT_")]
    with open("/proc/self/cgroup") as groups:
        return [*(os.readlink(f"/proc/self/ns/{name}") for name in names), groups.read(), str(limits)]


_LAUNCHER = """#!{python} -IS
import _socket, array, json, os, resource, signal, sys
{surroundings}
arguments, environment = sys.argv[1:], dict(os.environ)
def run_real():
    os.execv({python!r}, [{python!r}, *arguments])
first = next((each for each in arguments if each not in ("-u", "-B")), "-")
if first.startswith("-") and first not in ("-c", "-m") or any(environment.get(n) != v for n, v in {read_once!r}.items()):
    run_real()
if _surroundings() != {here!r}:
    run_real()
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    server.connect({address!r})
except OSError:
    run_real()
open_files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if int(name) != server.fileno() and os.fstat(int(name)):
            open_files.append(int(name))
    except OSError:
        pass
ignored = [number for number in (1, 2, 15) if signal.getsignal(number) == signal.SIG_IGN]
leads = os.getsid(0) == os.getpid()
asked = json.dumps([arguments, environment, os.getcwd(), open_files, ignored, leads, os.umask(0o022)]).encode()
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", open_files))]
server.sendmsg([len(asked).to_bytes(4, "little")], rights)
server.sendall(asked)
def forward(number, frame):
    server.send(bytes([number]))
for number in (1, 2, 10, 12, 15):
    if number not in ignored:
        signal.signal(number, forward)
nothing = os.open(os.devnull, os.O_RDWR)
for number in open_files:
    os.dup2(nothing, number) if number < 3 else os.close(number)
answer = server.recv(4)
status = int.from_bytes(answer, "little", signed=True) if len(answer) == 4 else 1
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != 9 else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@contextmanager
def start() -> Iterator[str]:
    """Starts a server. Gives the path of the executable file; ends the server when the ``with`` block ends."""
    with tempfile.TemporaryDirectory(prefix="fast-python-") as folder:
        path = Path(folder, "python")
        read_once = {name: os.environ.get(name) for name in READ_ONCE}
        address = f"{folder}/server"
        options = {"python": sys.executable, "address": address, "read_once": read_once, "here": _surroundings()}
        options["surroundings"] = inspect.getsource(_surroundings)
        path.write_text(_LAUNCHER.format(**options))
        path.chmod(0o700)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(address)
        listener.listen(128)  # connections wait here until the server has imported
        log = open(f"{folder}/log", "wb")  # noqa: SIM115 (it is closed below)
        command = [sys.executable, __file__, str(listener.fileno()), str(path)]
        server = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        listener.close()
        log.close()
        try:
            yield str(path)
        finally:
            server.kill()
            server.wait()


class _Server:
    """Forks, reaps and forwards signals, in one thread: forking a process with several threads is not safe."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.parent = os.getppid()
        self.wakes, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(self.wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        self.connections = dict[
            int, tuple[socket.socket, int, bool]
        ]()  # by descriptor: connection, pid, whether it leads a session

    def next_program(self) -> Callable[[], Any]:
        """Serves until this process is a fork. Returns what the fork is to run."""
        while os.getppid() == self.parent:
            watched = [self.listener.fileno(), self.wakes, *self.connections]
            ready, _, _ = select.select(watched, [], [], 2.0)
            self.reap()
            for fd in ready:
                if fd == self.wakes:
                    with suppress(BlockingIOError):
                        os.read(self.wakes, 4096)
                elif fd == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    if (program := self.fork_for(connection)) is not None:
                        return program
                elif fd in self.connections:
                    self.hear(fd)
        return sys.exit

    def hear(self, fd: int) -> None:
        connection, pid, leads = self.connections[fd]
        with suppress(ProcessLookupError, ConnectionResetError):
            if numbers := connection.recv(16):
                for number in numbers:
                    os.kill(pid, number)
                return
        del self.connections[fd]  # the launcher was killed
        connection.close()
        with suppress(ProcessLookupError):
            (os.killpg if leads else os.kill)(pid, signal.SIGKILL)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for fd, (connection, its_pid, _) in list(self.connections.items()):
                if its_pid == pid:
                    del self.connections[fd]
                    with connection, suppress(BrokenPipeError, ConnectionResetError):
                        connection.sendall(_NUMBERS.pack(os.waitstatus_to_exitcode(status)))

    def fork_for(self, connection: socket.socket) -> Callable[[], Any] | None:
        """Forks. Returns what to run in the fork, None in the server."""
        head, rights, *_ = connection.recvmsg(4, socket.CMSG_SPACE(4 * 253))
        received = array.array("i")
        for _, _, data in rights:
            received.frombytes(data[: len(data) // 4 * 4])
        size, asked = int.from_bytes(head, "little"), b""
        while len(asked) < size and (more := connection.recv(size - len(asked))):
            asked += more
        if not size or len(asked) < size:  # the launcher was killed
            connection.close()
            return None
        arguments, environment, folder, targets, ignored, leads, umask = json.loads(asked)
        if pid := os.fork():
            for fd in received:
                os.close(fd)
            self.connections[connection.fileno()] = connection, pid, leads
            return None
        for mine in (self.listener, connection, *(each for each, _, _ in self.connections.values())):
            mine.detach()  # otherwise its destructor closes a file of the program that gets the same number
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (1, 2, 15):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in ignored else usual)
        if leads:
            os.setsid()
        os.umask(umask)
        _take_files(received.tolist(), targets)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        return _program_of(arguments, environment)


def _take_files(received: list[int], targets: list[int]) -> None:
    """Replaces the open files of this process by those of the caller, under the same numbers."""
    above = max([*received, *targets, 2]) + 1
    moved = [os.dup2(fd, above + place, inheritable=False) for place, fd in enumerate(received)]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd < above:
            with suppress(OSError):
                os.close(fd)
    os.closerange(above + len(moved), above + len(moved) + 256)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


def _program_of(arguments: list[str], environment: dict[str, str]) -> Callable[[], Any]:
    import random

    import numpy as np

    random.seed()
    np.random.seed()
    kind, *rest = arguments
    while kind in ("-u", "-B"):
        if kind == "-B":
            sys.dont_write_bytecode = True
        else:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)
        kind, *rest = rest
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if kind == "-m":
        name, *rest = rest
        sys.argv, sys.path[:0] = ["-m", *rest], [os.getcwd(), *paths]
        return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if kind == "-c":
        text, *rest = rest
        sys.argv, sys.path[:0] = ["-c", *rest], ["", *paths]
        return lambda: exec(compile(text, "<string>", "exec"), main.__dict__)
    if os.path.isdir(kind):
        sys.argv, sys.path[:0] = [kind, *rest], [kind, *paths]
        return lambda: runpy.run_path(kind, run_name="__main__")
    main.__file__ = kind
    sys.argv, sys.path[:0] = [kind, *rest], [os.path.dirname(os.path.realpath(kind)), *paths]
    return lambda: exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _run(program: Callable[[], Any]) -> NoReturn:
    """Runs a program, then exits like an interpreter, but without the teardown of modules, which takes seconds."""
    status = 0
    try:
        program()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        below = error.__traceback__
        while below is not None and below.tb_frame.f_code.co_filename == __file__:
            below = below.tb_next
        sys.excepthook(type(error), error.with_traceback(below), below)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _serve(fd: int, executable: str) -> None:
    begun_with = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    for name in LOADED:
        importlib.import_module(name)
    del sys.path[: 1 + len(begun_with)]
    sys.executable = executable
    spawn.set_executable(executable)
    prepare_forks()
    program = _Server(socket.socket(fileno=fd)).next_program()
    _run(program)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
