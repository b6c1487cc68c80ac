"""`serve`, which runs a reader in the foreground of your program; and what readers tell about themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_echo.fetching.source import Source
from lightning_echo.protecting.memory import bytes_in_words
from lightning_echo.sharing.folder import FileLock, names, socket_of, starter_lock_of
from lightning_echo.sharing.loader_sharing import check_shareable
from lightning_echo.sharing.reader.loader_parts import loader_of, parts_of
from lightning_echo.sharing.reader.process import run_reader, seed_of
from lightning_echo.sharing.reader.stream_reading import first_item
from lightning_echo.sharing.same_data import print_of
from lightning_echo.sharing.share_config import ShareConfig, read_share_config
from lightning_echo.sharing.starting import fitting_window, name_of_process
from lightning_echo.sharing.wire import Gone, new_socket, receive, send

__all__ = ["lines_about", "serve", "shared_readers", "status_of"]

_ANSWER_SECONDS = 5.0
_BETWEEN_LOOKS_SECONDS = 0.5
_BETWEEN_SHOWS_SECONDS = 2.0


def serve(loader: Any, share: ShareConfig | str, *, show: Callable[[str], None] | None = None) -> None:
    """Runs the reader of a name in the foreground, until you interrupt it (Ctrl-C).

    You do not need it: the first training starts a reader in a process of its own. Use this function to watch the reader, or to
    start it yourself: for data that is too large to be sent to a process, or with more workers than a training would have.

    Args:
        loader: A ``DataLoader`` with the data set, sampler and workers of the trainings. Its batch size does not matter.
        share: The name, or a `ShareConfig`, of which only ``name``, ``window`` and ``ignore`` are used.
        show: Called every few seconds with a text that says which trainings there are, and where they are.

    Raises:
        TypeError: ``loader`` is no loader, or ``share`` is neither a name nor a `ShareConfig`.
        ValueError: The loader cannot be shared, or there is a reader of this name already.
        RuntimeError: The workers cannot go on.

    Example:
        >>> serve([[0, 1], [2, 3]], None)
        Traceback (most recent call last):
        TypeError: share must be a name or a ShareConfig, got None
    """
    config = read_share_config(share)
    if config is None:
        raise TypeError("share must be a name or a ShareConfig, got None")
    source = Source(loader)
    check_shareable(config, source)
    data_print = print_of(source, config.ignore)
    lock = FileLock(starter_lock_of(config.name))
    if not lock.try_to_hold() or status_of(config.name) is not None:
        lock.release()
        raise ValueError(f"there is a reader of share={config.name!r} already: end it first, or give another name")
    with lock, suppress(KeyboardInterrupt), _shown(config.name, show):
        run_reader(
            config.name,
            Source(loader_of(parts_of(source), seed_of(config.name))),
            data_print=data_print,
            window_bytes=fitting_window(config),
            linger_seconds=float("inf"),
            starter=f"serve in {name_of_process()}",
            when_ready=lock.release,
        )


@contextmanager
def _shown(name: str, show: Callable[[str], None] | None) -> Iterator[None]:
    """Shows what the reader does, in a thread, until the ``with`` block ends."""
    over = threading.Event()

    def run() -> None:
        written, text = 0, ""
        while not over.wait(_BETWEEN_SHOWS_SECONDS):
            if (said := status_of(name)) is not None and show is not None:
                rate = max(said["written"] - written, 0) / _BETWEEN_SHOWS_SECONDS
                written, before, text = said["written"], text, "\n".join(lines_about(name, said, rate))
                if text != before:
                    show(text)

    thread = threading.Thread(target=run, name="lightning_echo-shown", daemon=True)
    if show is not None:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if show is not None:
            thread.join()


def status_of(name: str) -> dict[str, Any] | None:
    """Returns what the reader of a name tells about itself; None if there is no such reader, or it does not answer."""
    with new_socket() as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(socket_of(name))
            send(connection, {"status": 1})
            said: dict[str, Any] = receive(connection)[0]["status"]
        except (Gone, OSError):
            return None
    return said


def shared_readers() -> str:
    """Returns the text of ``lightning-echo shared``: what all readers of this user do."""
    before = {name: said for name in names() if (said := status_of(name)) is not None}
    if not before:
        return "nobody reads for several trainings"
    time.sleep(_BETWEEN_LOOKS_SECONDS)
    now = {name: said for name in before if (said := status_of(name)) is not None}
    return "\n".join(
        line
        for name, said in now.items()
        for line in lines_about(name, said, (said["written"] - before[name]["written"]) / _BETWEEN_LOOKS_SECONDS)
    )


def lines_about(name: str, said: dict[str, Any], examples_per_second: float) -> list[str]:
    """Returns lines of text, for people, that say what a reader does.

    Args:
        name: The name that is shared.
        said: What the reader tells about itself.
        examples_per_second: How fast it reads.

    Example:
        >>> said = {"pid": 7, "data": "Images of 1,000", "count": 1, "length": 1000, "window_bytes": 2**30, "is_full": True}
        >>> training = {"label": "a.py (process 9)", "behind": "wait", "at": 1500}
        >>> for line in lines_about("sweep", {**said, "trainings": [training], "slowest": "a.py (process 9)"}, 80.0):
        ...     print(line)
        sweep: process 7 reads Images of 1,000 for 1 training, 80 examples/s, window 1 GiB; waits for a.py (process 9)
          a.py (process 9): pass 1, 50 %, behind="wait"
    """
    count = said["count"]
    waits = f"; waits for {said['slowest']}" if said["is_full"] and said["slowest"] else ""
    head = (
        f"{name}: process {said['pid']} reads {said['data']} for {count} training{'' if count == 1 else 's'}, "
        f"{examples_per_second:.3g} examples/s, window {bytes_in_words(said['window_bytes'])}{waits}"
    )
    return [head, *(f"  {_line_about(training, said['length'])}" for training in said["trainings"])]


def _line_about(training: dict[str, Any], length: int) -> str:
    if training["at"] is None:
        return f"{training['label']}: waits for other trainings"
    if not length:
        return f'{training["label"]}: item {training["at"] % first_item(1)}, behind="{training["behind"]}"'
    number, taken = divmod(training["at"], length)
    return f'{training["label"]}: pass {number}, {100 * taken // length} %, behind="{training["behind"]}"'
