"""A worker of a reader on another machine, as it runs there: a Ray actor that prepares examples and sends them as an array."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as worker_of_torch

from lightning_echo.data.randomness import seed_all
from lightning_echo.pipeline.reads import Pools
from lightning_echo.plan.plan import mix
from lightning_echo.share.packing import ChunkWriter
from lightning_echo.share.parts import Chunk
from lightning_echo.share.process import Payload
from lightning_echo.share.reading import Preparation, Recipe
from lightning_echo.share.same_data import another_example, difference_of_code, loader_of

# The class of the actor is sent by value, and imports nothing when it begins. So it says within a second that it has a CPU, while
# importing torch takes several.

RECORD, NOTE = 0x20, 0x21  # kinds of pieces behind the examples: a record for the reader's cache, a message for its log
KEY_BYTES = 8
_SEED_OF_WORKER = 23


class DiffersThere(RuntimeError):
    """Another machine has another Python, other packages, other code or other data."""


class Sent(NamedTuple):
    """What an actor gets once."""

    versions: dict[str, str]
    seed: int
    number: int
    workers: int
    where: str  # its node, for people


def versions() -> dict[str, str]:
    """Returns the versions of what decides about an example, in this process."""
    found = {"Python": ".".join(map(str, sys.version_info[:2]))}
    for name in ("lightning-echo", "torch", "torchvision", "numpy", "pillow"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def actor_class() -> type:
    """Returns the class of an actor, which is pickled by value."""

    class EchoWorker:
        def here(self) -> str:
            import ray

            return str(ray.util.get_node_ip_address())

        def begin(self, payload: bytes, sent: Any) -> None:
            from importlib import import_module

            self._maker = import_module("lightning_echo.share.ray_actor").maker_of(payload, sent)

        def compare(self) -> None:
            self._maker.compare()

        def attend(self, run: int, recipe: bytes) -> None:
            self._maker.attend(run, recipe)

        def make(self, run: int, pieces: Any, records: Any, takes_records: bool) -> Any:
            return self._maker.make(run, pieces, records, takes_records)

    return EchoWorker


class Maker:
    """Prepares examples in an actor, as a worker of the reader does.

    Raises `DiffersThere` if this machine would make other examples, and whatever the data set raises.
    """

    def __init__(self, payload: bytes, sent: Sent) -> None:
        here = versions()
        for name, version in sent.versions.items():
            if here.get(name) != version:
                raise DiffersThere(f"{name} is {here.get(name, 'not installed')} there, and {version} in the reader")
        found = Payload.from_bytes(payload)
        sys.path += [path for path in found.paths if path not in sys.path]
        parts, _ = cloudpickle.loads(found.loader)
        self._fingerprint: dict[str, str] = found.options["fingerprint"]
        if differs := difference_of_code(self._fingerprint, parts):
            raise DiffersThere(f"{differs} (the training's, and there)")
        loader = loader_of(parts, 0)
        self._dataset, self._where = loader.dataset, f", on {sent.where}"
        self._become_worker(sent, loader.worker_init_fn)
        self._run, self._records = -1, SentRecords(0)
        self._preparation: Preparation | None = None
        self._lane, self._notes, self._workers = Collected(), list[str](), sent.number + 1
        self._close: Callable[[], None] = lambda: None

    def compare(self) -> None:
        """Reads the examples that the training has looked at. Raises `DiffersThere` if one is another one here."""
        if differs := another_example(self._dataset, self._fingerprint):
            raise DiffersThere(
                f"{differs}: there are other files, or another kind of processor. All machines need the same files under the "
                "same paths"
            )

    def _become_worker(self, sent: Sent, users: Callable[[int], None] | None) -> None:
        torch.set_num_threads(1)
        seed = mix(sent.seed, _SEED_OF_WORKER, sent.number)
        seed_all(seed)
        info = worker_of_torch.WorkerInfo(id=sent.number, num_workers=sent.workers, seed=seed, dataset=self._dataset)
        worker_of_torch._worker_info = info
        if get_worker_info() is not info:
            raise RuntimeError(f"torch {torch.__version__} keeps get_worker_info() elsewhere: please report this")
        if users is not None:
            users(sent.number)

    def attend(self, run: int, recipe: bytes) -> None:
        """Prepares for a reading, which is a number, from now on."""
        self._close()
        found: Recipe = cloudpickle.loads(recipe)
        ahead, caching, pools = found.ahead, found.caching, Pools(workers=self._workers)
        self._close = pools.close
        if ahead is not None:
            ahead = replace(ahead, pools=pools)
        if caching is not None:
            arena: Any = caching.store.arena
            self._records = arena
        self._preparation = Preparation(
            self._dataset, lambda: self._lane, Recipe(found.seed, ahead, caching), self._where, self._notes.append
        )
        self._run = run

    def make(self, run: int, pieces: list[Chunk], records: dict[int, bytes], takes_records: bool) -> Any:
        """Returns the wanted examples of some pieces, in their order, as an array (see `packing.py`)."""
        assert self._preparation is not None, "attend comes first"
        assert run == self._run, "the reading is over"
        self._lane.begin()
        self._records.begin(records, takes_records)
        for piece in pieces:
            self._preparation.fetch(piece)
        count, nanoseconds, cpu_nanoseconds = self._lane.spent
        for key, record in self._records.added:
            self._lane.add(RECORD, [key.to_bytes(KEY_BYTES, "little"), record], KEY_BYTES + len(record))
        for note in self._notes:
            self._lane.add(NOTE, [note.encode()], len(note.encode()))
        self._notes.clear()
        return self._lane.array(pieces[0].first, nanoseconds // max(count, 1), cpu_nanoseconds // max(count, 1))


def maker_of(payload: bytes, sent: Any) -> Maker:
    return Maker(payload, Sent(*sent))


class Collected(ChunkWriter):
    """Has the place of a `Lane` in an actor: it keeps what is put, until the next `begin`."""

    waited_nanoseconds = 0

    def begin(self) -> None:
        super().begin()
        self.spent = (0, 0, 0)  # examples, nanoseconds, processor nanoseconds

    def wait_until_open(self) -> None: ...

    def go_to(self, item: int) -> None: ...

    def put(self, item: int, kind: int, parts: Sequence[Any], size: int) -> None:
        del item
        self.add(kind, parts, size)  # copies: the data set may use the memory of an example again

    def note_prepared(self, examples: int, nanoseconds: int, cpu_nanoseconds: int) -> None:
        before = self.spent
        self.spent = (before[0] + examples, before[1] + nanoseconds, before[2] + cpu_nanoseconds)


class SentRecords:
    """Has the place of the cache's arena in an actor: records that came with a call. ``added`` are those that are to be held."""

    shortage, is_in_memory = "", False

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.begin({}, False)

    def begin(self, records: dict[int, bytes], takes_records: bool) -> None:
        self._records, self.added = dict(records), list[tuple[int, bytes]]()
        self.counts = SimpleNamespace(is_frozen=not takes_records, records=0)

    def __contains__(self, key: int) -> bool:
        return key in self._records

    def get(self, key: int) -> bytes | None:
        return self._records.get(key)

    def put(self, key: int, parts: Sequence[Any]) -> bool:
        if key in self._records:
            return False
        record = self._records[key] = b"".join(parts)
        self.added.append((key, record))
        return True
