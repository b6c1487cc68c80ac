"""Starts a reader: a fresh interpreter that gets the parts of the training's loader through a pipe.

The process is fresh and not forked, because a fork would inherit the training's descriptors, threads and devices. Variables that
tell a process its rank in a job, or its devices, are removed from its environment. It outlives the training that starts it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.fetching.source import Source
from lightning_echo.log import LOGGER
from lightning_echo.protecting.memory import bytes_in_words
from lightning_echo.sharing.folder import log_of
from lightning_echo.sharing.reader.by_value import dumped
from lightning_echo.sharing.reader.loader_parts import parts_of
from lightning_echo.sharing.reader.process import FAILED, READY, Payload
from lightning_echo.sharing.share_config import ShareConfig

__all__ = ["ReaderError", "fitting_window", "name_of_process", "payload_of", "start_reader"]


# Without the working folder, whose files may have the names of modules. This package may not be installed.
_PROGRAM = (
    "import sys; package = sys.argv[3]; sys.path[:] = [path for path in sys.path if path]; "
    "sys.path[:0] = [package] if package not in sys.path else []; "
    "from lightning_echo.sharing.{}.process import main; main(sys.argv[1], int(sys.argv[2]))"
)
_READS = "reads for all trainings of this name"
_HEAVY_BYTES = 256 * 2**20
_LOG_TAIL = 2000  # characters of a log that an error shows
_OF_A_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID")  # of Ray: a process with these counts as a worker of Ray
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class ReaderError(RuntimeError):
    """A reader could not begin; or it has died, and no other reader follows."""


def payload_of(config: ShareConfig, source: Source, data_print: dict[str, str], cluster: dict[str, str] | None = None) -> Payload:
    """Returns what is sent to a new reader of this loader.

    Args:
        config: The options of sharing.
        source: The training's loader.
        data_print: What is compared of its data.
        cluster: Where this node is in a cluster whose nodes share one reader; None: this node has a reader of its own.

    Raises:
        TypeError: The data set, the sampler or the ``worker_init_fn`` cannot be sent to another process.
    """
    parts = parts_of(source)
    try:
        with _main_by_value():
            data = dumped(parts)
    except Exception as error:  # an object of the user's may raise anything when it is pickled
        raise TypeError(
            f"share={config.name!r} is impossible here: the data set, the sampler or worker_init_fn cannot be sent to the "
            f"reader's process ({type(error).__name__}: {error}). Let the data set open files and connections at its first read; "
            f"or {_by_hand(config.name)}, which sends nothing"
        ) from error
    if len(data) > _HEAVY_BYTES:
        warnings.warn(
            f"lightning_echo: share={config.name!r} "
            f"sends {bytes_in_words(len(data))} of data to the reader's process: they are there twice. "
            f"Better {_by_hand(config.name)}, which sends nothing; or let the data set read its files there, not when it is made",
            UserWarning,
            stacklevel=2,
        )
    options = {
        "window_bytes": fitting_window(config),
        "linger_seconds": config.linger_seconds,
        "print": data_print,
        "expected": 0,
        "cluster": cluster,
        "starter": name_of_process(),
    }
    return Payload([path for path in sys.path if path] + [os.getcwd()], options, data)


def _by_hand(name: str) -> str:
    return f"start a reader by hand: python train.py share --name {name} (EchoCLI), or lightning_echo.serve(loader, {name!r})"


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
    """Returns the name of this training, for people: its program and process."""
    return f"{os.path.basename(sys.argv[0] or 'python')} (process {os.getpid()})"


def fitting_window(config: ShareConfig) -> int:
    """Returns the size of the window: what was asked for, or half of the free memory if that is less."""
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
    """Starts a reader, and waits until trainings can come.

    Args:
        name: The name that is shared.
        payload: See `payload_of`.

    Returns:
        Whether trainings can come. If not, the reader was killed while it began.

    Raises:
        ReaderError: The reader could not begin. The message has the end of its log.
    """
    in_cluster = payload.options.get("cluster") is not None
    reads = "reads for all trainings of this name, or relays what another node reads," if in_cluster else _READS
    LOGGER.info("share=%r: a process that %s is started, which takes a few seconds", name, reads)
    program = _PROGRAM.format("cluster" if in_cluster else "reader")
    read_end, write_end = os.pipe()
    try:
        with open(log_of(name), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program, name, str(write_end), str(Path(__file__).parents[2])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env=_environment(),
                start_new_session=True,
            )
    finally:
        os.close(write_end)
    with open(read_end, "rb") as status:
        try:
            process.communicate(payload.to_bytes())
        except BrokenPipeError:  # it has died: its log says why
            process.wait()
        said = status.readline()
    if said == FAILED:
        raise ReaderError(f"the reader of share={name!r} could not begin. {log_tail(name)}")
    return said == READY


def log_tail(name: str) -> str:
    """Returns a sentence with the end of a reader's log."""
    try:
        return f"The end of its log:\n{Path(log_of(name)).read_text(errors='replace')[-_LOG_TAIL:]}"
    except OSError as error:
        return f"It has no log: {error}"


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in (*_OF_A_RANK, *_OF_A_WORKER)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
