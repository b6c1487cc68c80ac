"""Starts and runs a reader: the process is a fresh interpreter that gets the parts of the training's loader through a pipe."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import struct
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.kinds import Kind, kind_of
from lightning_echo.share.config import ShareConfig, log_of, new_socket, socket_of
from lightning_echo.share.reader_cache import ReaderCache
from lightning_echo.share.same_data import difference_of_code, dumped, loader_of, parts_of
from lightning_echo.share.server import Cluster, Elsewhere, Server

# ---------------------------------------------------------------------- process
# The training that starts the process sends the parts of its loader through a pipe, which is the standard input of the process.
# It never sends them over the socket. The process leaves its parent, so that it outlives the parent. When it is ready, it writes
# one line to the pipe ``STATUS``; another one if it cannot begin. If that pipe ends without a line, the process was killed.

READY, FAILED = b"ready\n", b"failed\n"
_HEADER = struct.Struct("<Q")


class Payload(NamedTuple):
    """The message of a training to the reader that it starts.

    ``options`` are ``window_bytes``, ``workers`` (as in `ShareConfig`), ``in_flight`` (reads), ``linger_seconds``, ``print``;
    ``starter``: the sender; ``expected``: how many trainings a reader had that has died; ``cluster``: where this node is in a
    cluster whose nodes share one reader; ``cluster_workers`` and ``cluster_resources``: how many workers there are on other
    machines at first, and what each needs beside a CPU.
    """

    paths: list[str]  # of the training's ``sys.path``, since its modules must be found
    options: dict[str, Any]
    loader: bytes  # its parts and the `ReaderCache`, pickled by cloudpickle

    def to_bytes(self) -> bytes:
        header = json.dumps({"paths": self.paths, "options": self.options}).encode()
        return _HEADER.pack(len(header)) + header + self.loader

    @classmethod
    def from_bytes(cls, data: bytes) -> Payload:
        (size,) = _HEADER.unpack_from(data)
        header = json.loads(data[_HEADER.size : _HEADER.size + size])
        return cls(header["paths"], header["options"], data[_HEADER.size + size :])


def main(name: str, status: int) -> None:
    """Reads the payload, leaves the parent, and serves. ``status`` is the descriptor of the pipe to the training that waits."""
    with telling_of_failure(status):
        serve_payload(name, status, left_parent())


@contextmanager
def telling_of_failure(status: int) -> Iterator[None]:
    """Reports a failure of this process to the training that waits for it, and exits."""
    try:
        yield
    except BaseException:
        traceback.print_exc()  # first, because the error of the training quotes the end of this log
        with suppress(BrokenPipeError):  # the training has heard that this process is ready, and waits no more
            os.write(status, FAILED)
        sys.exit(1)


def left_parent() -> Payload:
    """Reads the payload, and continues in a process that has left its parent."""
    payload = Payload.from_bytes(sys.stdin.buffer.read())
    if os.fork():
        os._exit(0)  # so that the training does not wait for this process
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, force=True)
    sys.path[:] = payload.paths
    return payload


def serve_payload(
    name: str,
    status: int,
    payload: Payload,
    elsewhere: Elsewhere | None = None,
    gather_seconds: float = 0.0,
    cluster: Cluster | None = None,
) -> None:
    """Runs the reader of a name, with the payload of a training. The last three arguments are as in `Server`."""
    (parts, cache), options = cloudpickle.loads(payload.loader), payload.options
    if differs := difference_of_code(options["fingerprint"], parts):
        raise RuntimeError(
            f"this process imports modules again, and then {differs} (the training's, and this one). Set what a module holds "
            "where it is imported, or give it to the data set as an argument. If it decides nothing about examples, name it: "
            'ShareConfig(ignore=("log_dir",))'
        )
    run_reader(
        name,
        kind_of(loader_of(parts, seed_of(name))),
        data_fingerprint=options["fingerprint"],
        window_bytes=options["window_bytes"],
        workers=options["workers"],
        in_flight=options["in_flight"],
        cache=cache,
        linger_seconds=options["linger_seconds"],
        expected=options["expected"],
        starter=options["starter"],
        when_ready=partial(os.write, status, READY),
        elsewhere=elsewhere,
        gather_seconds=gather_seconds,
        cluster=cluster,
    )


def run_reader(name: str, kind: Kind, *, when_ready: Callable[[], object] = lambda: None, **options: Any) -> None:
    """Runs the reader of a name, until the last training has left. ``options`` are those of `Server`."""
    path = socket_of(name)
    new_path = os.path.join(os.path.dirname(path), f"{os.getpid():x}")  # not longer than the path itself, see unix(7)
    with suppress(FileNotFoundError):  # left by a process that died here
        os.unlink(new_path)
    listener = new_socket()
    listener.bind(new_path)
    listener.listen(socket.SOMAXCONN)
    made = os.stat(new_path).st_ino
    follows = os.path.exists(path)  # a reader removes it when it ends, but not when it dies
    os.rename(new_path, path)  # replaces in one step the socket of a reader that has died

    def remove() -> None:
        with suppress(FileNotFoundError):  # the folder was cleaned up
            if os.stat(path).st_ino == made:  # else the next reader has replaced it
                os.unlink(path)

    server = Server(listener, kind, seed=seed_of(name), follows=follows, when_over=remove, **options)
    when_ready()
    server.run()


def seed_of(name: str) -> int:
    """Returns the seed for the order and all random numbers. It follows from the name, so each reader of a name has the same."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


# ---------------------------------------------------------------------- starting
# The process is a fresh interpreter and not forked, because a fork would inherit the training's descriptors, threads and devices.
# Variables that give a process its rank in a job, or its devices, are removed from its environment. It outlives the training that
# starts it.

# Without the working folder, whose files may have the names of modules. This package may not be installed.
_PROGRAM = (
    "import sys; package = sys.argv[3]; sys.path[:] = [path for path in sys.path if path]; "
    "sys.path[:0] = [package] if package not in sys.path else []; "
    "from lightning_echo.share.{} import main; main(sys.argv[1], int(sys.argv[2]))"
)
_READS = "reads for all trainings of this name"
_HEAVY_BYTES = 256 * 2**20
_LOG_TAIL = 2000  # characters of a log that an error shows
_OF_A_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID")  # of Ray: a process with these counts as a worker of Ray
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class ReaderError(RuntimeError):
    """A reader could not begin; or it has died, and no other reader follows."""


def payload_of(
    config: ShareConfig,
    kind: Kind,
    data_fingerprint: dict[str, str],
    cluster: dict[str, Any] | None = None,
    in_flight: int | str = 1,
    cache: ReaderCache | None = None,
) -> Payload:
    """Returns the payload for a new reader of this loader, or raises a TypeError if that cannot be sent to another process."""
    parts = parts_of(kind)
    by_hand = (
        f"start a reader by hand: python train.py share --name {config.name} (EchoCLI), or "
        f"lightning_echo.serve(loader, {config.name!r}), which sends nothing"
    )
    try:
        with _main_by_value():
            data = dumped((parts, cache))
    except Exception as error:  # an object of the user's may raise anything when it is pickled
        raise TypeError(
            f"share={config.name!r} is impossible here: {_not_sent(parts)} cannot be sent to the reader's process "
            f"({type(error).__name__}: {error}). Let the data set open files and connections at its first read; or {by_hand}"
        ) from error
    if len(data) > _HEAVY_BYTES:
        warnings.warn(
            f"lightning_echo: share={config.name!r} "
            f"sends {bytes_in_words(len(data))} of data to the reader's process: they are there twice. "
            f"Better {by_hand}; or let the data set read its files there, not when it is made",
            UserWarning,
            stacklevel=2,
        )
    options = {
        "window_bytes": fitting_window(config),
        "workers": config.workers if isinstance(config.workers, str) else int(config.workers),
        "in_flight": in_flight,
        "linger_seconds": config.linger_seconds,
        "fingerprint": data_fingerprint,
        "expected": 0,
        "cluster": cluster,
        "cluster_workers": config.cluster_range,
        "cluster_resources": dict(config.cluster_resources or {}),
        "starter": name_of_process(),
    }
    return Payload([path for path in sys.path if path] + [os.getcwd()], options, data)


def _not_sent(parts: dict[str, Any]) -> str:
    """Returns the path of what cannot be pickled, and its type: the innermost object of which that is known."""
    path, value, inside, seen = "", None, parts, set[int]()
    while found := next(((name, each) for name, each in inside.items() if not _is_sent(each)), None):
        path, value = f"{path}{found[0]}", found[1]
        inside = {} if id(value) in seen else _inside(value)
        seen.add(id(value))
    return f"{path} (type {type(value).__name__})" if path else "the data set, the sampler or worker_init_fn"


def _is_sent(value: Any) -> bool:
    try:
        with _main_by_value():
            dumped(value)
    except Exception:  # an object of the user's may raise anything
        return False
    return True


def _inside(value: Any) -> dict[str, Any]:
    """Returns what is pickled with a container or an object, by the end of its path."""
    if type(value) is dict:
        return {f"[{key!r}]": each for key, each in value.items()}
    if type(value) in (list, tuple):
        return {f"[{number}]": each for number, each in enumerate(value)}
    state: Any = None
    with suppress(Exception):  # it says here that it cannot be pickled: it is the one
        reduced: Any = value.__reduce_ex__(4)
        state = reduced[2]
    return {f".{name}": each for name, each in state.items()} if isinstance(state, dict) else {}


@contextmanager
def _main_by_value() -> Iterator[None]:
    """Lets cloudpickle send objects of a spawned process's main module in the same way as objects of ``__main__``."""
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ == "__main__":
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def name_of_process() -> str:
    return f"{os.path.basename(sys.argv[0] or 'python')} (process {os.getpid()})"


def fitting_window(config: ShareConfig) -> int:
    """Returns the size of the window: the configured one, or half of the free memory if that is less."""
    asked, free = config.window_bytes(), free_memory_bytes()
    if free is None or asked <= free // 2:
        return asked
    warnings.warn(
        f"lightning_echo: share.window={config.window!r} "
        f"is more than half of the free memory: the window has {bytes_in_words(free // 2)}",
        UserWarning,
        stacklevel=2,
    )
    return free // 2


def start_reader(name: str, payload: Payload) -> bool:
    """Starts a reader, and waits until trainings can come. Returns False if the reader was killed while it began."""
    in_cluster = payload.options.get("cluster") is not None
    reads = "reads for all trainings of this name, or relays what another node reads," if in_cluster else _READS
    LOGGER.info("share=%r: a process that %s is started, which takes a few seconds", name, reads)
    program = _PROGRAM.format("ray_workers" if in_cluster else "process")
    environment = {name: value for name, value in os.environ.items() if name not in (*_OF_A_RANK, *_OF_A_WORKER)}
    read_end, write_end = os.pipe()
    try:
        with open(log_of(name), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program, name, str(write_end), str(Path(__file__).parents[2])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env={**environment, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
    finally:
        os.close(write_end)
    with open(read_end, "rb") as status:
        try:
            process.communicate(payload.to_bytes())
        except BrokenPipeError:  # it has died: its log has the reason
            process.wait()
        line = status.readline()
    if line == FAILED:
        raise ReaderError(f"the reader of share={name!r} could not begin. {log_tail(name)}")
    return line == READY


def log_tail(name: str) -> str:
    """Returns a sentence with the end of a reader's log."""
    try:
        return f"The end of its log:\n{Path(log_of(name)).read_text(errors='replace')[-_LOG_TAIL:]}"
    except OSError as error:
        return f"It has no log: {error}"
