"""An HTTP server that waits before it answers, in a process of its own, and how much it answers.

``python -m slow_server FOLDER SECONDS`` serves the files of a folder from memory, on the loopback. It prints its port.
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"
_PROCESSES = 2  # of the plain client: as many as the loaders have workers

Fetch = Callable[[str], bytes]


@contextmanager
def served(folder: Path, seconds: float) -> Iterator[list[str]]:
    """Serves the files of a folder; each answer waits so long. Yields their addresses."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "slow_server", str(folder), str(seconds)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"http://{_LOOPBACK}:{int(server.stdout.readline())}"
            yield [f"{address}/{file.name}" for file in sorted(folder.iterdir())]
        finally:
            server.kill()


# ---------------------------------------------------------------------- clients

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for the loopback, whatever the environment says
_ASKING = threading.local()


def by_urllib(url: str) -> bytes:
    """A connection for each file, as with ``urllib.request.urlopen``."""
    with _OPENER.open(url) as answer:
        body: bytes = answer.read()
        return body


def by_fsspec(url: str) -> bytes:
    body: bytes = import_module("fsspec").filesystem("http").cat_file(url)
    return body


def by_kept_connection(url: str) -> bytes:
    """A connection for each thread."""
    if not hasattr(_ASKING, "connection"):
        _ASKING.connection = http.client.HTTPConnection(_LOOPBACK, urlsplit(url).port)
    _ASKING.connection.request("GET", urlsplit(url).path)
    body: bytes = _ASKING.connection.getresponse().read()
    return body


def answers_per_second(urls: Sequence[str], fetch: Fetch, threads: int, seconds: float) -> float:
    """What threads in two processes get that ask, and do nothing with the answer. A quarter of the time more comes first."""
    with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("fork")) as processes:
        asked = [processes.submit(_ask, urls, fetch, threads // _PROCESSES, seconds) for _ in range(_PROCESSES)]
        return sum(each.result() for each in asked)


def _ask(urls: Sequence[str], fetch: Fetch, threads: int, seconds: float) -> float:
    counts, is_over = [0] * threads, threading.Event()

    def run(number: int) -> None:
        for url in cycle(urls):
            if is_over.is_set():
                return
            fetch(url)
            counts[number] += 1

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    time.sleep(seconds / 4)
    before, start = sum(counts), time.perf_counter()
    time.sleep(seconds)
    found = (sum(counts) - before) / (time.perf_counter() - start)
    is_over.set()
    for thread in running:
        thread.join()
    return found


# ---------------------------------------------------------------------- the server


class _Answering(asyncio.Protocol):
    """A connection: it stays if the client does not ask for its end."""

    def __init__(self, bodies: dict[str, bytes], seconds: float) -> None:
        self._bodies, self._seconds = bodies, seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, self._received = self._received.partition(b"\r\n\r\n")
            asyncio.get_running_loop().call_later(self._seconds, self._answer, head)

    def _answer(self, head: bytes) -> None:
        name = head.split(b" ", 2)[1].decode().lstrip("/")
        body = self._bodies.get(name)
        status = "404 Not Found" if body is None else "200 OK"
        self._transport.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body or b'')}\r\n\r\n".encode() + (body or b""))
        if b"connection: close" in head.lower():
            self._transport.close()


async def _serve(folder: Path, seconds: float) -> None:
    bodies = {file.name: file.read_bytes() for file in folder.iterdir()}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Answering(bodies, seconds), _LOOPBACK, 0, backlog=_BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), float(sys.argv[2])))
