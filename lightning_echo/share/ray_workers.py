"""Workers on other machines: Ray actors prepare examples for a reader, and threads of the reader write these into its window.

::

    reader                                                        an actor, with one CPU of another node
    order -> chunks --+--> workers here ----------write----+
                      +--> thread of a lane --piece--> Preparation --> array of packed examples
                              window <----write---- thread <----Ray's object store----+

* An actor is a lane (``window.py``). It gets chunks when it has room for them, as a worker here does, and a slow one gets fewer.
* What it makes does not depend on who makes it: random numbers follow from the item. So nothing is lost with an actor: what it
  had is asked of another actor, and if that one is lost, too, of a new worker here, in the same lane.
* The data set travels once, as the bytes that the training has sent to the reader.
* Nothing here is a condition for a training to go on. Where the cluster has no CPU, the workers here read alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import cloudpickle

from lightning_echo.cache.reads import Caching, ExampleStore, Keys
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.reads import Pools
from lightning_echo.share.packing import Chunk as Packed
from lightning_echo.share.packing import pack_error
from lightning_echo.share.parts import Chunk
from lightning_echo.share.process import Payload, left_parent, seed_of, serve_payload, telling_of_failure
from lightning_echo.share.ray import NAMESPACE, Relay, environment_of_actor, joined
from lightning_echo.share.ray_actor import KEY_BYTES, RECORD, DiffersThere, Sent, SentRecords, actor_class, versions
from lightning_echo.share.reading import Reading, Recipe
from lightning_echo.share.server import CannotBegin
from lightning_echo.share.window import CHUNK, MOST_LANES, Closed, Lane, TooLargeError
from lightning_echo.split.staged import batched

# ---------------------------------------------------------------------- in the reader: a lane

_CALLS_AHEAD = 2  # an actor has one call in work, and one to come
# A call costs some ms of all processes together, whatever it brings. So it brings many examples, but takes no longer than this,
# its array is not larger, and two calls of each lane fit into the window.
_MOST_CALL_SECONDS, _MOST_CALL_BYTES, _MOST_CALL_CHUNKS = 1.0, 16 * 2**20, 4
_FIRST_ITEMS = 2  # of a call, as long as neither is known
_SHARE_OF_STORE = 4  # all calls ahead together take at most a fourth of the node's object store
_LOOK_SECONDS, _MOST_LOOK_SECONDS = 1.0, 8.0  # a longer look each time: one that ends breaks off what is on its way
_MOST_ROOM_LOOK_SECONDS = 0.016  # threads of one process must not ask too often for room in the window
_MOST_GET_SECONDS = 30.0


class Lost(Exception):
    """An actor is gone, or does not answer."""


@dataclass(eq=False)
class Actor:
    """An actor, as the reader sees it."""

    handle: Any
    node: str
    number: int
    asked_at: float
    where: str  # its node, for people
    answer: Any = None  # to the call that is under way before it makes examples
    is_placed: bool = False
    has_begun: bool = False
    is_leaving: bool = False  # it gets no more
    is_ready: bool = False
    lane: int | None = None  # of the reading; None: it has none
    run: int = -1  # the reading that it attends
    calls: int = 0  # under way
    examples: int = 0
    seconds: float = 0.0  # that it took for them
    cpu_seconds: float = 0.0
    rates: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))  # when so many were there


class _Call(NamedTuple):
    pieces: list[Chunk]
    answer: Any  # None: nothing is wanted of them


class FarLane:
    """A thread's work in one lane of a reading: it asks an actor for pieces of chunks, and writes them into the window."""

    def __init__(self, workers: RayWorkers, actor: Actor, reading: Reading, run: int) -> None:
        self._workers, self._actor, self._reading, self._run = workers, actor, reading, run
        self._number, self._own = -1, actor
        self._chunks: Iterator[Chunk] = iter(())
        self._pieces: deque[Chunk] = deque()  # of a chunk, to be asked for
        self._calls: deque[_Call] = deque()  # under way, the oldest first

    def run(self) -> None:
        try:
            if (opened := self._reading.open_lane()) is not None:
                self._own.lane = self._number = opened[0]
                self._chunks = opened[1]
                self._serve()
        finally:
            self._own.lane = None

    def _serve(self) -> None:
        while True:
            try:
                self._take_all()
            except Lost as lost:
                if not self._go_elsewhere(str(lost)):
                    return  # a worker of the reader continues in this lane
            else:
                self._reading.close_lane(self._number)
                return

    def _take_all(self) -> None:
        lane = Lane(self._reading.window, self._number, most_look_seconds=_MOST_ROOM_LOOK_SECONDS)
        if (attends := self._actor.answer) is not None:
            self._answer(attends)
            self._actor.answer = None
        while self._ask():
            call = self._calls[0]
            packed = None if call.answer is None else Packed.from_array(self._answer(call.answer))
            self._calls.popleft()
            if packed is None:
                lane.go_to(call.pieces[-1].end)
            else:
                self._actor.calls -= 1
                self._write(lane, call.pieces, packed)

    def _ask(self) -> bool:
        """Asks for more pieces. Returns whether any call is under way."""
        window, workers = self._reading.window, self._workers
        items = self._items_of_call()
        size = items * (window.bytes_per_example or _MOST_CALL_BYTES / _FIRST_ITEMS)
        most = _CALLS_AHEAD if workers.calls_ahead * size <= workers.most_ahead_bytes else 1
        while len(self._calls) < most and (pieces := self._next_pieces(items)):
            if window.is_closed:
                raise Closed
            answer = None
            if any(piece.wanted or piece.ahead or piece.dropped for piece in pieces):
                pieces, records, takes = workers.with_records(pieces)
                answer = self._actor.handle.make.remote(self._run, pieces, records, takes)
                self._actor.calls += 1
            self._calls.append(_Call(pieces, answer))
        return bool(self._calls)

    def _next_pieces(self, items: int) -> list[Chunk]:
        """Returns pieces of so many items in all, or one that is longer; fewer if the lane gets no more."""
        found, count = list[Chunk](), 0
        while count < items:
            if not self._pieces:
                if self._own.is_leaving and self._own is self._actor:
                    self._reading.deal_no_more(self._number)
                if (chunk := next(self._chunks, None)) is None:
                    break
                self._pieces += chunk.cut(CHUNK if self._workers.reads_chunks else items)
            if found and count + len(self._pieces[0].indices) > items:
                break
            found.append(self._pieces.popleft())
            count += len(found[-1].indices)
        return found

    def _items_of_call(self) -> int:
        actor, window = self._actor, self._reading.window
        if not actor.examples or not window.bytes_per_example:
            return _FIRST_ITEMS
        by_time = _MOST_CALL_SECONDS * actor.examples / max(actor.seconds, 1e-9)
        by_size = _MOST_CALL_BYTES / window.bytes_per_example
        by_window = window.ring_bytes / (_CALLS_AHEAD * max(window.lanes, 1) * window.bytes_per_example)
        return max(int(min(by_time, by_size, by_window, _MOST_CALL_CHUNKS * CHUNK)), 1)

    def _answer(self, answer: Any) -> Any:
        """Waits for an answer. Raises `Lost` if the actor is gone or hangs, or the error that ends a worker here, too."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        began, look = time.monotonic(), _LOOK_SECONDS  # since this thread waits: it may have waited for room in the window before
        try:
            while not ray.wait([answer], timeout=look)[0]:
                look = min(2 * look, _MOST_LOOK_SECONDS)
                if self._reading.window.is_closed:
                    raise Closed
                most = self._workers.most_silent_seconds
                if (silent := time.monotonic() - began) > most:
                    self._workers.be_patient(most)
                    raise Lost(f"has not answered for {silent:.0f} s")
            return ray.get(answer, timeout=_MOST_GET_SECONDS)
        except RayTaskError as error:
            raise RuntimeError(f"{self._actor.where}: {error.cause}") from error
        except GetTimeoutError as error:
            raise Lost(f"has sent nothing for {_MOST_GET_SECONDS:.0f} s") from error
        except RayError as error:
            raise Lost(f"is lost ({type(error).__name__})") from error

    def _write(self, lane: Lane, pieces: list[Chunk], packed: Packed) -> None:
        items = [item for piece in pieces for item in piece.wanted]
        if packed.first != pieces[0].first or len(packed.pieces) < len(items):
            raise RuntimeError(f"{self._actor.where} has sent other examples than it was asked for: please report this")
        for item, (kind, data) in zip(items, packed.pieces, strict=False):
            lane.go_to(item)
            try:
                lane.put(item, kind, [data], len(data))
            except TooLargeError as error:
                error_packed = pack_error(error)
                lane.put(item, error_packed.kind, error_packed.parts, error_packed.size)
        for kind, data in packed.pieces[len(items) :]:
            if kind == RECORD:
                self._workers.keep_record(int.from_bytes(data[:KEY_BYTES], "little"), data[KEY_BYTES:])
            else:
                LOGGER.warning("%s: %s", self._actor.where, bytes(data).decode())
        count, actor = len(items), self._actor
        lane.note_prepared(count, count * packed.nanoseconds, count * packed.cpu_nanoseconds)
        lane.go_to(pieces[-1].end)
        actor.examples += count
        actor.seconds += count * packed.nanoseconds / 1e9
        actor.cpu_seconds += count * packed.cpu_nanoseconds / 1e9
        actor.rates.append((time.monotonic(), actor.examples))

    def _go_elsewhere(self, why: str) -> bool:
        """Asks another actor for what is left, or else a worker of the reader. Returns whether this thread keeps the lane."""
        lost, is_first = self._actor, self._actor is self._own
        self._workers.lose(lost, why)
        self._reading.deal_no_more(self._number)
        left = [*(piece for call in self._calls for piece in call.pieces), *self._pieces, *self._chunks]
        self._calls.clear()
        self._pieces = deque(piece._replace(ahead=[], dropped=[]) for piece in left)  # nobody else was told anything
        other = self._workers.other_than(lost, self._run) if is_first else None
        if other is not None:
            self._actor = other
            return True
        self._reading.hand_over(self._number, self._pieces)
        self._own.lane = None
        return False


# ---------------------------------------------------------------------- in the reader: which actors there are
# A thread looks twice a second. It asks for actors on nodes that have CPUs, the reader's own node last. One that Ray does not
# place within seconds is withdrawn: as long as it waits, it is a demand for which an autoscaler buys machines. A node that makes
# other examples, or cannot begin, is left out. Before the first step that is an error; later, a warning.

_BETWEEN_LOOKS_SECONDS = 0.5
_BETWEEN_NODES_SECONDS = 2.0
_MOST_PENDING_SECONDS = 10.0  # and one more for each actor that is asked for at once
_MOST_BEGINNING_SECONDS = 120.0
_MOST_FIRST_SECONDS = 45.0  # a training is let in when each node has an actor that has begun, or after this time
_AGAIN_SECONDS = (5.0, 10.0, 30.0, 60.0)  # after which a node is asked again on which nothing could be placed
_LEAST_SILENT_SECONDS = 20.0  # then an actor counts as lost that has not answered a call
_JUDGED_SECONDS = 2.0  # of waiting, or of a full window: then there are more actors, or fewer
_NO_CPU = "the cluster has no free CPU"
_LEAST_SHARE_WAITING, _LEAST_SHARE_FULL = 0.2, 0.8
_MORE = 0.25  # so much of them at once


@dataclass
class _Node:
    """A node that has CPUs."""

    where: str
    failures: int = 0
    again_at: float = 0.0
    left_out: str = ""  # why nothing is asked of it any more
    has_answered: bool = False  # an actor there has begun, or could not
    is_same: bool = False  # it makes the same examples


class RayWorkers:
    """The workers of a reader on other nodes of its cluster. ``seed`` is that of the reader, ``resources`` are those of an actor.

    The process must have joined the cluster. See `Cluster` for the methods that a `Server` calls.
    """

    def __init__(self, name: str, place: dict[str, Any], payload: Payload, seed: int) -> None:
        self._name, self._place, self._seed = name, place, seed
        self._resources: dict[str, float] = dict(payload.options["cluster_resources"])
        self._payload: Any = payload.to_bytes()
        self._has_put = False  # the payload is in Ray's object store
        self._low = self._high = self._target = 0
        self._actors: list[Actor] = []
        self._nodes: dict[str, _Node] = {}
        self._nodes_at = -math.inf
        self._reading: Reading | None = None
        self._run, self._numbers = 0, 0
        self._keys: Keys | None = None
        self._recipe = b""
        self._store: ExampleStore | None = None
        self.reads_chunks = False
        self.most_ahead_bytes = 2**28
        self.most_silent_seconds = _LEAST_SILENT_SECONDS
        self._lock = threading.Lock()
        self._over, self._news = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._began_at = math.inf
        self._has_settled = self._has_said_none = False
        self._refusal = ""
        self._looks = Counter[str]()

    # ------------------------------------------------------------------ the server's thread

    def want(self, low: int, high: int) -> None:
        """Lets there be so many actors: ``low`` at first, then up to ``high`` while the trainings wait for reading."""
        if (low, high) != (self._low, self._high):
            self._low, self._high = low, high
            self._target = min(max(self._target, self._low), self._high)
            self._news.set()
        if high and self._thread is None:
            self._began_at = time.monotonic()
            self._thread = threading.Thread(target=self._work, name="lightning_echo-cluster", daemon=True)
            self._thread.start()

    @property
    def has_settled(self) -> bool:
        """Whether it is known what the nodes can do. Raises `CannotBegin` if the first of them cannot make these examples."""
        if self._refusal:
            raise CannotBegin(self._refusal)
        self._has_settled |= time.monotonic() - self._began_at > _MOST_FIRST_SECONDS
        return self._has_settled or not self._high

    def attend(self, reading: Reading | None) -> None:
        """Lets the actors work for this reading from now on; None: for none."""
        with self._lock:
            self._reading, self._run = reading, self._run + 1
            self._looks.clear()
            if reading is None:
                return
            recipe = reading.recipe
            ahead = None if recipe.ahead is None else replace(recipe.ahead, pools=Pools())
            self._keys = self._store = None
            caching = recipe.caching
            if caching is not None and not caching.check_at:  # else each worker may have another data set
                self._store, self._keys = caching.store, Keys(reading.dataset)
                records: Any = SentRecords(caching.store.arena.keys)
                caching = Caching(ExampleStore(records, caching.store.name, caching.store.data), caching.make_held)
            else:
                caching = None
            self._recipe = cloudpickle.dumps(Recipe(recipe.seed, ahead, caching))
            self.reads_chunks = batched(reading.dataset) is not None
        self._news.set()

    @property
    def about(self) -> str:
        return (
            "" if self._actors or not self._has_said_none else f"{_NO_CPU}: the workers of this machine read alone until it has"
        )

    def status(self) -> list[dict[str, Any]]:
        """Returns, for people, what each actor does."""
        return [
            {
                "node": actor.where,
                "rate": _rate_of(actor),
                "examples": actor.examples,
                "cpu_seconds": actor.cpu_seconds / max(actor.examples, 1),
                "is_ready": actor.is_ready,
            }
            for actor in list(self._actors)
        ]

    def close(self) -> None:
        """Ends all actors."""
        self._over.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(_MOST_GET_SECONDS)
        for actor in list(self._actors):
            self._end(actor)

    # ------------------------------------------------------------------ the threads of the lanes

    @property
    def calls_ahead(self) -> int:
        return _CALLS_AHEAD * max(len(self._actors), 1)

    def with_records(self, pieces: list[Chunk]) -> tuple[list[Chunk], dict[int, bytes], bool]:
        """Returns pieces, what the reader's cache holds of them, and whether it takes more. What it holds is not read ahead."""
        store = self._store
        if store is None:
            return pieces, {}, False
        arena, found, asked = store.arena, dict[int, bytes](), list[Chunk]()
        for piece in pieces:
            for key in self._keys_of([piece.index_of(item) for item in piece.wanted]):
                if key >= 0 and (record := arena.get(key)) is not None:
                    found[key] = bytes(record)
            keys = self._keys_of(piece.ahead)
            ahead = [index for index, key in zip(piece.ahead, keys, strict=True) if key < 0 or key not in arena]
            asked.append(piece._replace(ahead=ahead))
        return asked, found, not arena.counts.is_frozen

    def _keys_of(self, indices: list[Any]) -> list[int]:
        assert self._keys is not None, "there is a cache"
        return list(map(int, self._keys.of_many(indices)))

    def keep_record(self, key: int, record: Any) -> None:
        """Adds what an actor has read to the reader's cache."""
        if self._store is not None:
            self._store.arena.put(key, [record])

    def lose(self, actor: Actor, why: str) -> None:
        """Drops an actor. What it had is asked elsewhere."""
        with self._lock:
            if actor not in self._actors:
                return
        LOGGER.warning("a worker on %s %s: what it had is read elsewhere", actor.where, why)
        self._end(actor)
        self._news.set()

    def be_patient(self, seconds: float) -> None:
        """Waits longer for the next call than for one that was not answered for so long: examples may take so long.

        Several lanes may say that at once, since all began at once: it is twice as long then, and not more.
        """
        self.most_silent_seconds = max(self.most_silent_seconds, 2 * seconds)

    def other_than(self, lost: Actor, run: int) -> Actor | None:
        """Returns the actor that has least to do, best on another node, and attends this reading; None if there is none."""
        with self._lock:
            at_work = [one for one in self._actors if one.is_ready and one.run == run and one.lane is not None]
        others = (one for one in at_work if one is not lost and not one.is_leaving)
        return min(others, key=lambda one: (one.node == lost.node, one.calls), default=None)

    # ------------------------------------------------------------------ its own thread

    def _work(self) -> None:
        from ray.exceptions import RayError

        while not self._over.is_set():
            try:
                self._look()
            except (RayError, OSError, RuntimeError) as error:  # of the cluster, whose nodes come and go
                LOGGER.warning("the cluster does not answer: %s", error)
            self._news.wait(_BETWEEN_LOOKS_SECONDS)
            self._news.clear()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._nodes_at > _BETWEEN_NODES_SECONDS:
            self._nodes_at = now
            self._look_at_nodes()
        self._judge()
        for actor in list(self._actors):
            self._hear(actor, now)
        self._give_back()
        self._ask_for_more(now)
        for actor in list(self._actors):
            self._let_work(actor)
        if not self._has_settled and self._nodes_at > -math.inf:
            asked = {actor.node for actor in self._actors}
            self._has_settled = all(self._nodes[node].has_answered for node in asked if node in self._nodes)

    def _look_at_nodes(self) -> None:
        import ray

        found = dict[str, _Node]()
        for node in ray.nodes():
            resources, name = node["Resources"], node["NodeID"]
            if name == self._place["node"]:
                self.most_ahead_bytes = int(resources.get("object_store_memory", 2**30)) // _SHARE_OF_STORE
            if node["Alive"] and all(resources.get(each, 0.0) >= of for each, of in self._needed()):
                found[name] = self._nodes.get(name) or _Node(f"{node['NodeManagerAddress']} (node {name[:8]})")
        self._nodes = found

    def _needed(self) -> list[tuple[str, float]]:
        """Returns what an actor needs."""
        return [("CPU", 1.0), *self._resources.items()]

    def _judge(self) -> None:
        """Wants more actors while the trainings wait for reading, and fewer while the window is full."""
        reading = self._reading
        if self._low == self._high:
            self._target = self._high
            return
        if reading is None or not reading.window.is_open:
            return
        window = reading.window
        self._looks["all"] += 1
        self._looks["full"] += window.is_full
        self._looks["waits"] += not window.has(window.low)
        if self._looks["all"] * _BETWEEN_LOOKS_SECONDS < _JUDGED_SECONDS:
            return
        full, waits = (self._looks[each] / self._looks["all"] for each in ("full", "waits"))
        self._looks.clear()
        step, before = max(math.ceil(_MORE * self._target), 1), self._target
        ready = sum(actor.is_ready for actor in self._actors)
        if waits >= _LEAST_SHARE_WAITING and ready >= self._target:  # those that begin are waited for first
            self._target = min(self._target + step, self._high)
        elif full >= _LEAST_SHARE_FULL:
            self._target = max(self._target - 1, self._low)
        if self._target != before:
            LOGGER.info("number of workers on other machines: %d in place of %d", self._target, before)

    def _hear(self, actor: Actor, now: float) -> None:
        """Takes the answer of an actor that begins."""
        import ray
        from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError

        if actor.is_ready:
            return
        if not ray.wait([actor.answer], timeout=0)[0]:
            pending = sum(not each.is_placed for each in self._actors)
            if not actor.is_placed and now - actor.asked_at > _MOST_PENDING_SECONDS + pending:
                LOGGER.info("a worker on %s is withdrawn: no CPU is free", actor.where)
                self._fail(actor, now)
            elif now - actor.asked_at > _MOST_BEGINNING_SECONDS:
                self._leave_out(actor, f"a worker does not begin within {_MOST_BEGINNING_SECONDS:.0f} s")
            return
        try:
            ray.get(actor.answer, timeout=_MOST_GET_SECONDS)
        except RayTaskError as error:
            self._leave_out(actor, _why(error.cause))
        except RuntimeEnvSetupError as error:
            self._leave_out(actor, f"its runtime_env cannot be set up: {error}")
        except RayError as error:
            LOGGER.warning("a worker on %s could not begin: %s", actor.where, error)
            self._fail(actor, now)
        else:
            self._go_on(actor)

    def _go_on(self, actor: Actor) -> None:
        """Lets an actor that has answered do what comes next: begin, then compare if no other one of its node has, then work."""
        import ray

        node = self._nodes.get(actor.node)
        if node is None:  # it has left the cluster: nobody compares its examples any more
            self._end(actor)
        elif not actor.is_placed:
            actor.is_placed = True
            if not self._has_put:
                self._payload, self._has_put = ray.put(self._payload), True
            number = MOST_LANES + actor.number  # no worker here has that number
            sent = Sent(versions(), self._seed, number, number + 1, actor.where)
            actor.answer = actor.handle.begin.remote(self._payload, tuple(sent))
        elif not actor.has_begun and not node.is_same:
            actor.has_begun, actor.answer = True, actor.handle.compare.remote()
        else:
            actor.has_begun = actor.is_ready = True
            actor.answer = None
            node.has_answered = node.is_same = True
            LOGGER.info("a worker on %s has begun", actor.where)

    def _ask_for_more(self, now: float) -> None:
        missing = self._target - sum(not actor.is_leaving for actor in self._actors)
        if missing <= 0 or (self._reading is None and self._has_settled):
            return
        room = self._room(now)
        if not room and not self._has_said_none and not self._actors:
            self._has_said_none = True
            LOGGER.warning("%s: the workers of this node read alone until it has", _NO_CPU)
        for _ in range(min(missing, room.total())):
            chosen = max(+room, key=lambda name: (name != self._place["node"], room[name]))
            room[chosen] -= 1
            self._ask(chosen, now)

    def _room(self, now: float) -> Counter[str]:
        """Returns how many actors each node has room for now. One beyond that would wait, and trainings would wait for it."""
        from ray._private.state import available_resources_per_node  # ray.available_resources() tells only the sum

        free, needed = available_resources_per_node(), self._needed()
        waiting, room = Counter(actor.node for actor in self._actors if not actor.is_placed), Counter[str]()
        for name, node in self._nodes.items():
            if not node.left_out and node.again_at <= now:
                room[name] = int(min(free.get(name, {}).get(each, 0.0) // of for each, of in needed)) - waiting[name]
        return +room

    def _ask(self, node: str, now: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind = ray.remote(actor_class()).options(
            namespace=NAMESPACE,
            num_cpus=1,
            resources=self._resources,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            runtime_env=environment_of_actor(self._place.get("runtime_env")),
        )
        handle = kind.remote()
        actor = Actor(handle, node, self._numbers, now, self._nodes[node].where, handle.here.remote())
        self._numbers += 1
        with self._lock:
            self._actors.append(actor)

    def _let_work(self, actor: Actor) -> None:
        """Lets an actor that has begun, and has no lane, work for the present reading."""
        with self._lock:
            reading, run = self._reading, self._run
            if reading is None or not actor.is_ready or actor.is_leaving or actor.lane is not None or not reading.window.is_open:
                return
            if actor.run != run:
                actor.run, actor.calls = run, 0
                actor.answer = actor.handle.attend.remote(run, self._recipe)
            actor.lane = -1  # about to be
        try:
            reading.begin_thread(FarLane(self, actor, reading, run).run)
        except OSError as error:  # the system has no thread left
            LOGGER.warning("a worker on %s cannot be served: %s", actor.where, error)
            actor.lane = None

    def _give_back(self) -> None:
        """Ends the actors that are too many, when they have done what they were asked for; of those on this node first."""
        staying = [actor for actor in self._actors if not actor.is_leaving]
        order = sorted(staying, key=lambda actor: (actor.is_ready, actor.node != self._place["node"], -actor.number))
        for actor in order[: max(len(staying) - self._target, 0)]:
            actor.is_leaving = True
        for actor in list(self._actors):
            if actor.is_leaving and actor.lane is None:
                self._end(actor)

    def _fail(self, actor: Actor, now: float) -> None:
        """Withdraws an actor, and asks its node for another one later."""
        if (node := self._nodes.get(actor.node)) is not None:
            node.again_at = now + _AGAIN_SECONDS[min(node.failures, len(_AGAIN_SECONDS) - 1)]
            node.failures, node.has_answered = node.failures + 1, True
        self._end(actor)

    def _leave_out(self, actor: Actor, why: str) -> None:
        """Asks nothing of a node any more."""
        message = f"{actor.where} cannot make examples for share={self._name!r}: {why}"
        node = self._nodes.get(actor.node)
        if node is None or not node.left_out:
            if self._has_settled or self._reading is not None:  # there are trainings, which go on
                LOGGER.warning("%s. It is left out", message)
            else:
                self._refusal = self._refusal or message
        if node is not None:
            node.left_out, node.has_answered = why, True
        self._end(actor)

    def _end(self, actor: Actor) -> None:
        import ray

        with self._lock:
            if actor in self._actors:
                self._actors.remove(actor)
        ray.kill(actor.handle)


def _why(error: Exception) -> str:
    """Returns why an actor could not begin, and what helps."""
    if isinstance(error, DiffersThere):
        return str(error)
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        return f"{said}. Install it on that machine, or let Ray bring it: ray.init(runtime_env={{'py_modules': [...]}})"
    return f"{said}. All machines need the same files under the same paths" if isinstance(error, OSError) else said


def _rate_of(actor: Actor) -> float:
    """Returns the examples a second that an actor has made of late."""
    if len(actor.rates) < 2:
        return 0.0
    (began, first), (ended, last) = actor.rates[0], actor.rates[-1]
    return (last - first) / max(ended - began, 1e-9)


# ---------------------------------------------------------------------- process

_GATHER_SECONDS = 20.0  # relays need about ten seconds to start and to join the cluster


def main(name: str, status: int) -> None:
    """Reads the payload, leaves the parent, joins the cluster, and reads or relays. See ``main`` of ``process.py``."""
    with telling_of_failure(status):
        payload = left_parent()
        options = payload.options
        with joined(name, options["cluster"], options["fingerprint"]) as far:
            if far is None:
                LOGGER.info("this node reads for all nodes")
                cluster = RayWorkers(name, options["cluster"], payload, seed_of(name))
                cluster.want(*options["cluster_workers"])  # now: they begin while this process does
                try:
                    serve_payload(name, status, payload, gather_seconds=_GATHER_SECONDS, cluster=cluster)
                finally:
                    cluster.close()
            else:
                LOGGER.info("the reader on %s reads for this node", far.where)
                serve_payload(name, status, payload, Relay(far, options["window_bytes"], LOGGER.warning))
