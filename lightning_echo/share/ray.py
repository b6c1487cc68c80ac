"""One node of a Ray cluster reads for all: all code that uses Ray, the actor that hands examples out, and the relays."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from lightning_echo.log import LOGGER
from lightning_echo.share.attachment import Attachment
from lightning_echo.share.config import ShareConfig, shared_folder
from lightning_echo.share.packing import Chunk, Piece, pack_error
from lightning_echo.share.process import Payload, ReaderError
from lightning_echo.share.reading import MOST_END_SECONDS, Reads
from lightning_echo.share.same_data import difference
from lightning_echo.share.server import Start
from lightning_echo.share.window import CHUNK, CacheState, Closed, Lane, TooLargeError, Window

# ---------------------------------------------------------------------- handing
# The actor is on the node of the reader that reads, and gives its examples to the relays of the other nodes. For each relay it
# has a *feed*, which is a training for the reader. A feed is a thread that copies example after example out of the window, a few
# megabytes ahead of its relay's requests. This section does not import Ray: Ray calls it.

MOST_AHEAD_BYTES = 8 * 2**20
"""A feed copies so much ahead, and a chunk has as much, or one example."""

MOST_SILENT_SECONDS = 30.0
"""A relay that says nothing for so long is gone, or cut off. One that follows it on its node needs less than that to come."""

_MOST_WAIT_SECONDS = 0.5  # if there is nothing, a relay gets its answer after this time
_BETWEEN_LOOKS_SECONDS = 0.5


class Handing:
    """The actor next to a reader. ``where`` is the name of its node, for people."""

    def __init__(self, name: str, node: str, where: str, data_fingerprint: dict[str, str]) -> None:
        self._name, self._node, self._where, self._fingerprint = name, node, where, data_fingerprint
        self._feeds: dict[str, _Feed] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="lightning_echo-watch", daemon=True).start()

    def meet(self, data_fingerprint: dict[str, str]) -> dict[str, str]:
        """Returns the node that reads, and how a reader's data differs from the data here; empty if it does not differ."""
        return {"node": self._node, "where": self._where, "differs": difference(data_fingerprint, self._fingerprint)}

    def enter(
        self, relay: str, label: str, item: int, goes_on: bool, join: str, cluster_workers: tuple[int, int] = (0, 0)
    ) -> None:
        """Lets a relay in, whose node is ``label``, for people. If that node had a relay before, it has died, and is dropped."""
        workers = cluster_workers if any(cluster_workers) else None
        config = ShareConfig(self._name, join=join, restart=False, cluster="ray", cluster_workers=workers)
        attachment = Attachment(config, self._no_other, self._fingerprint, tell_every=CHUNK, label=label, holds=True)
        with self._lock:
            before = [name for name, other in self._feeds.items() if other.label == label]

            def replace() -> None:  # called when the reader has let the new one in: until then, they hold the items that it needs
                for name in before:
                    self.leave(name)

            self._feeds[relay] = _Feed(attachment, label, item, goes_on, replace)

    def _no_other(self, _: bool) -> Payload:
        """Raises an error if there is no reader. The actor starts none, since that would not be on the node of its trainings."""
        raise ReaderError(f"the reader of share={self._name!r} on {self._where} has ended")

    def take(self, relay: str, needed: int) -> Any:
        """Returns the next examples of a relay as an array (see `Chunk`). It is empty if there are none within a moment.

        All items before ``needed`` are in the relay's window. The reader keeps the items from this one on, so that another relay
        can follow this one. Raises a `ReaderError` if the reader has ended, or the relay is not known.
        """
        feed = self._feed(relay)
        feed.attachment.held_from = needed
        return feed.chunk(_MOST_WAIT_SECONDS).to_array()

    def stay(self, relay: str, need_nanoseconds: int) -> tuple[int, CacheState]:
        """Notes that a relay is there. Returns how many other nodes get examples of this reader, and what its cache holds."""
        attachment = self._feed(relay).attachment
        attachment.need_nanoseconds = need_nanoseconds
        relays = len(self._feeds)
        return relays - 1 + (attachment.trainings > relays), attachment.cache

    def leave(self, relay: str) -> None:
        with self._lock:
            feed = self._feeds.pop(relay, None)
        if feed is not None:
            feed.stop()

    def _feed(self, relay: str) -> _Feed:
        with self._lock:
            feed = self._feeds.get(relay)
            if feed is None:
                raise ReaderError(f"{self._where} has let this node go, since it was silent for {MOST_SILENT_SECONDS:.0f} s")
            feed.heard = time.monotonic()
            return feed

    def _watch(self) -> None:
        """Drops relays that send nothing any more, so that the reader does not wait for them."""
        while True:
            time.sleep(_BETWEEN_LOOKS_SECONDS)
            now = time.monotonic()
            for relay in [relay for relay, feed in list(self._feeds.items()) if now - feed.heard > MOST_SILENT_SECONDS]:
                self.leave(relay)


class _Feed:
    """The examples for one relay. It calls ``when_entered`` when the reader has let it in, and owns its attachment."""

    def __init__(self, attachment: Attachment, label: str, item: int, goes_on: bool, when_entered: Callable[[], None]) -> None:
        self.attachment, self.label, self.heard = attachment, label, time.monotonic()
        self._pieces: deque[Piece] = deque()
        self._bytes = self._first = 0
        self._nanoseconds = self._cpu_nanoseconds = 0  # per example, see `Chunk`
        self._is_over = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        run = (item, goes_on, when_entered)
        threading.Thread(target=self._run, args=run, name="lightning_echo-feed", daemon=True).start()

    def _run(self, item: int, goes_on: bool, when_entered: Callable[[], None]) -> None:
        try:
            item = self._first = self.attachment.enter(item, goes_on=goes_on).item
            when_entered()
            while self._put(Piece(*self.attachment.taken(item))):
                if item % CHUNK == 0:
                    self._nanoseconds = int(1e9 * self.attachment.seconds_per_example)
                    self._cpu_nanoseconds = int(1e9 * self.attachment.cpu_seconds_per_example)
                item += 1
        except BaseException as error:  # the relay gets it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self.attachment.close()

    def _put(self, piece: Piece) -> bool:
        """Puts an example into the feed as soon as there is room. Returns whether the feed continues."""
        with self._changed:
            while self._bytes >= MOST_AHEAD_BYTES and not self._is_over:
                self._changed.wait(_BETWEEN_LOOKS_SECONDS)
            self._pieces.append(piece)
            self._bytes += len(piece.data)
            self._changed.notify_all()
            return not self._is_over

    def chunk(self, within: float) -> Chunk:
        """Returns the examples that are ready. If there are none, waits for some, at most ``within`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._failure is not None, within)
            pieces, self._pieces, self._bytes = list(self._pieces), deque(), 0
            first, self._first = self._first, self._first + len(pieces)
            self._changed.notify_all()
            if not pieces and self._failure is not None:
                raise ReaderError(str(self._failure)) from self._failure
        return Chunk(first, pieces, self._nanoseconds, self._cpu_nanoseconds)

    def stop(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self.attachment.is_stopped = True


# ---------------------------------------------------------------------- ray cluster
# All code that uses Ray. Only these functions import it. They run in the main processes of trainings and readers, never in the
# workers of a ``DataLoader``, because a call from there hangs. Every call has a time-out.

NAMESPACE = "lightning_echo"
_MOST_CALLS = 64  # at the same time in an actor; each relay makes two
_MOST_ANSWER_SECONDS = 30.0  # the actor answers within a second, or a few seconds over a slow network
_MOST_MEETING_SECONDS = 60.0  # Ray needs up to half of this time to notice that a node is lost
_BETWEEN_TRIES_SECONDS = 0.5


# ---------------------------------------------------------------------- in a training


def check_ray(name: str) -> None:
    """Raises a ModuleNotFoundError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ModuleNotFoundError(
            f"share={name!r} with share.cluster='ray' needs Ray, which is not installed: pip install 'lightning-echo[ray]'"
        )


def is_in_cluster() -> bool:
    """Returns whether this process is connected to a Ray cluster. It does not import Ray."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)  # another module may have this name
    return is_initialized is not None and bool(is_initialized())


def place_of_training(name: str) -> dict[str, Any]:
    """Returns what a process that this training starts needs to join the cluster, and the node on which they both are."""
    check_ray(name)
    import ray

    if not ray.is_initialized():
        raise ValueError(
            f"share={name!r} with share.cluster='ray' needs a training that Ray runs (Ray Tune, Ray Train, a task), or "
            "ray.init(address=...) before it, and this process is in no cluster. Leave cluster out to share on this machine alone"
        )
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        warnings.warn(
            f"lightning_echo: share={name!r} "
            "sends examples through a Ray cluster without tokens: whoever reaches its ports can read them "
            "and run programs there. Before Ray is started, set RAY_AUTH_MODE=token on all nodes, and RAY_AUTH_TOKEN_PATH to a "
            "file that has the token and that nobody else can read (chmod 600)",
            UserWarning,
            stacklevel=2,
        )
    context = ray.get_runtime_context()
    place = {"address": context.gcs_address, "node": context.get_node_id()}
    return {**place, "runtime_env": context.runtime_env.serialize()}  # where the training's modules are


# ---------------------------------------------------------------------- in a reader


class RayFar:
    """The actor of the node that reads, as a relay sees it. ``where`` is its node and ``label`` this node, for people.

    Each call ends within seconds. Calls that return a value may raise `FarLost`.
    """

    def __init__(self, actor: Any, where: str, label: str) -> None:
        self._actor, self.where, self._label = actor, where, label

    def enter(self, relay: str, start: Start) -> None:
        _answer(self._actor.enter.remote(relay, self._label, *start), self.where)

    def ask(self, relay: str, needed: int) -> Any:
        """Asks for the next chunk, and returns the argument for `chunk`. All items before ``needed`` are in the window."""
        return self._actor.take.remote(relay, needed)

    def chunk(self, asked: Any) -> Chunk:
        return Chunk.from_array(_answer(asked, self.where))

    def stay(self, relay: str, need_nanoseconds: int) -> tuple[int, CacheState]:
        nodes, cache = _answer(self._actor.stay.remote(relay, need_nanoseconds), self.where)
        return int(nodes), CacheState(*cache)

    def leave(self, relay: str) -> None:
        self._actor.leave.remote(relay)


@contextmanager
def joined(name: str, place: dict[str, str], data_fingerprint: dict[str, str]) -> Iterator[RayFar | None]:
    """Joins the cluster until the ``with`` block ends. Yields the actor of the node that reads; None if this node reads."""
    import ray

    ray.init(address=place["address"], namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    os.register_at_fork(after_in_child=_forget_ray)
    try:
        here = f"{ray.util.get_node_ip_address()} (node {place['node'][:8]})"
        actor, met = _met(name, place["node"], here, data_fingerprint)
        if met["differs"]:
            raise ValueError(
                f"share={name!r} is the name of other data on {met['where']}: {met['differs']}. Trainings that share must have "
                "the same data set, sampler, transforms and cache; give another name for other data"
            )
        yield None if met["node"] == place["node"] else RayFar(actor, met["where"], f"node {place['node'][:8]}")
    finally:
        ray.shutdown()


class _Silent:
    """Takes any call, and does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


_KEPT = list[Any]()  # in a forked process: what would close the connections of its parent if it were freed


def _forget_ray() -> None:
    """Called in a process that was forked, such as a worker of the reader: Ray's connections are those of its parent.

    When it frees a copy of an actor's handle, or of a reference to an object, Ray would write that on these connections. The
    parent's next calls would then wait for ever.
    """
    from ray._private.worker import global_worker

    _KEPT.append(global_worker.core_worker)
    global_worker.core_worker = _Silent()
    global_worker.set_mode(None)


def _met(name: str, node: str, here: str, data_fingerprint: dict[str, str]) -> tuple[Any, dict[str, str]]:
    """Returns the actor of a name, and its answer to `Handing.meet`. If there is no actor, makes one on this node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    kind = ray.remote(Handing).options(
        name=f"share-{name}",
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_concurrency=_MOST_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        runtime_env=environment_of_actor(None, LIGHTNING_ECHO_SHARED=str(shared_folder())),  # the sockets of this node
    )
    end = time.monotonic() + _MOST_MEETING_SECONDS
    while True:
        actor = kind.remote(name, node, here, data_fingerprint)
        try:
            return actor, _answer(actor.meet.remote(data_fingerprint), "the actor")
        except FarLost as error:  # it ends, since its reader has died, or its node is lost
            if time.monotonic() > end:
                raise
            LOGGER.info("tries again: %s", error)
        time.sleep(_BETWEEN_TRIES_SECONDS)


def environment_of_actor(runtime_env: str | None, **variables: str) -> dict[str, Any]:
    """Returns the ``runtime_env`` of an actor, which must find this package where this process finds it.

    ``runtime_env``: that of the training's own job, as `place_of_training` gives it.
    """
    found = dict[str, Any](json.loads(runtime_env)) if runtime_env else {}
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**found, "env_vars": {**found.get("env_vars", {}), "PYTHONPATH": paths, **variables}}


def _answer(asked: Any, where: str) -> Any:
    """Returns the answer of an actor. Raises `FarLost` if it is gone, does not answer, or its reader has ended."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(asked, timeout=_MOST_ANSWER_SECONDS)
    except GetTimeoutError as error:
        raise FarLost(f"{where} has not answered for {_MOST_ANSWER_SECONDS:.0f} s") from error
    except RayTaskError as error:
        raise FarLost(f"{where} says: {error.cause}") from error
    except RayError as error:
        raise FarLost(f"{where} is lost: {error}") from error


# ---------------------------------------------------------------------- relay
# A relay takes the place of the workers in a reader that gets its examples from another node. It has two threads. One asks for
# chunk after chunk, and writes a chunk into the window while the next one is on its way. The other reports to the other node
# every second that this node is there, and gets the number of other nodes. The window begins with the first example that comes.
# Trainings are let in only then, so they lose nothing if the other node is lost before.

_STAY_SECONDS = 1.0


class FarLost(RuntimeError):
    """The node that reads is gone, or does not answer."""


class Relay:
    """Begins to read for the server of a reader, if another node reads (`Elsewhere` in ``server.py``). ``say`` logs a message."""

    def __init__(self, far: RayFar, window_bytes: int, say: Callable[[str], None]) -> None:
        self._far, self._window_bytes, self._say = far, window_bytes, say
        self._relaying: _Relaying | None = None

    @property
    def nodes(self) -> int:
        """How many other nodes get the same examples; 0 if that is not known yet, or if this node reads for itself."""
        return 0 if self._relaying is None else self._relaying.nodes

    def begin(self, start: Start, read_here: Callable[[], Reads], when_lost: Callable[[BaseException], None]) -> Reads | None:
        """Returns the object that puts examples into a window; None if the other node has not answered yet.

        ``read_here`` makes what reads on this node. ``when_lost`` gets the error if the other node is lost, in another thread.
        """
        if self._relaying is None:
            self._relaying = _Relaying(self._far, start, self._window_bytes, when_lost)
        if not self._relaying.has_begun:
            return None
        begin = self._relaying.window.begin
        if start.goes_on and begin > start.item:
            self._say(f"this node needs item {start.item}, and the other one has items from {begin} on: it reads for itself")
            self.leave()
            return read_here()
        return self._relaying

    def leave(self) -> None:
        if self._relaying is not None:
            self._relaying.close()
            self._relaying = None


class _Relaying(Reads):
    """Puts examples of another node into a window. ``nodes`` is the number of other nodes that get the same examples."""

    def __init__(self, far: RayFar, start: Start, window_bytes: int, when_lost: Callable[[BaseException], None]) -> None:
        super().__init__(when_lost, "relay", self._pump, self._stay)
        self._far, self._start, self._window_bytes = far, start, window_bytes
        self._name, self.nodes, self._cache = uuid.uuid4().hex, 0, CacheState()
        self.has_begun = self._is_closed = False  # begun: there is a window
        self._has_entered = threading.Event()
        self.start()

    @property
    def cache_state(self) -> CacheState:
        """The contents of the cache on the other node, a second ago."""
        return self._cache

    def close(self) -> None:
        """Ends the threads, and leaves the other node. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._over.set()
        if self.has_begun:
            self.window.close_for_writers()
        self._far.leave(self._name)
        for thread in self._threads:
            thread.join(timeout=MOST_END_SECONDS)
        if self.has_begun:
            self.window.close()

    # ------------------------------------------------------------------ in the threads

    def _stay(self) -> None:
        self._has_entered.wait()
        while not self._over.is_set():
            need = self.window.slowest_need_nanoseconds if self.has_begun else 0
            self.nodes, self._cache = self._far.stay(self._name, need)
            self._over.wait(_STAY_SECONDS)

    def _pump(self) -> None:
        try:
            self._far.enter(self._name, self._start)
        finally:
            self._has_entered.set()
        chunk = self._next(self._far.ask(self._name, 0), 0)
        self.nodes, self._cache = self._far.stay(self._name, 0)  # trainings that enter now get the number of others
        self.window = Window.create(self._window_bytes, 1, chunk.first)
        self.window.cache = self._cache
        lane, self.has_begun = Lane(self.window, 0), True
        while True:
            count = len(chunk.pieces)
            asked, end = self._far.ask(self._name, chunk.first), chunk.first + count
            for item, (kind, data) in enumerate(chunk.pieces, chunk.first):
                try:
                    lane.put(item, kind, [data], len(data))
                except TooLargeError as error:  # the window of the other node is larger than this one
                    packed = pack_error(error)
                    lane.put(item, packed.kind, packed.parts, packed.size)
            lane.note_prepared(count, count * chunk.nanoseconds, count * chunk.cpu_nanoseconds)
            chunk = self._next(asked, end)
            if chunk.first != end:
                raise FarLost(f"examples are missing: after {end - 1} came {chunk.first}")

    def _next(self, asked: Any, needed: int) -> Chunk:
        """Returns the next chunk that has examples."""
        while not self._over.is_set():
            chunk = self._far.chunk(asked)
            if chunk.pieces:
                return chunk
            asked = self._far.ask(self._name, needed)
        raise Closed
