"""Sharing for one `EchoLoader` with ``share=``, and `serve`, which runs a reader in the foreground."""

from __future__ import annotations

import os
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader

from lightning_echo.cache.kept import HOLDS, CacheConfig, read_cache_config
from lightning_echo.cache.node_cache import CacheCounts, gathered, nodes_of, place_of_process
from lightning_echo.cache.reads import Lookups
from lightning_echo.data.copies import bytes_in_words
from lightning_echo.data.elsewhere import NotRead, read_elsewhere
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.pipeline.kinds import Indexed, IndexedBatches, Kind, Opaque, OwnBatches, Stream, StreamBatches, kind_of
from lightning_echo.pipeline.pipelines import Opening, Pipeline
from lightning_echo.pipeline.prefetch import DEPTH
from lightning_echo.plan.order import Order
from lightning_echo.share.attachment import Attachment, Waited
from lightning_echo.share.config import (
    Gone,
    ShareConfig,
    StarterLock,
    names,
    new_socket,
    read_share_config,
    receive,
    send,
    shared_folder,
    socket_of,
)
from lightning_echo.share.connecting import Group
from lightning_echo.share.parts import Items, items_of, part_of
from lightning_echo.share.pipeline import PacedPipeline, SharedPipeline
from lightning_echo.share.process import Payload, ReaderError, fitting_window, name_of_process, payload_of, run_reader, seed_of
from lightning_echo.share.ray import check_ray, place_of_training
from lightning_echo.share.reader_cache import ReaderCache, options_in_words
from lightning_echo.share.reading import order_of
from lightning_echo.share.same_data import Unit, changed_since, fingerprint_of, loader_of, parts_of, trained_parts, unit_of
from lightning_echo.share.stream import SharedBatches, SharedStream, SizedSharedStream
from lightning_echo.share.stream_reading import first_item
from lightning_echo.share.window import CacheState, Window
from lightning_echo.split.prove import whole_batch, why_not_apart
from lightning_echo.split.reading import AUTO_IN_FLIGHT
from lightning_echo.split.staged import batched

# ---------------------------------------------------------------------- idle runs
# Loaders of one process may share under one name. The reader waits for each training. But a loop that has ended may leave its
# loader in scope, and no other process reports to the reader that nobody takes from it any more. So when the next loader of that
# name must start, the idle ones are closed. If one of them is iterated again, it starts again where it stopped.


class _Use(NamedTuple):
    """The epoch of a run that was begun last, and where."""

    name: str
    process: int
    thread: threading.Thread
    epoch: weakref.ref[Any]


_uses: weakref.WeakKeyDictionary[Any, _Use] = weakref.WeakKeyDictionary()  # by `EchoRun`


def begins(run: Any, name: str, epoch: Any) -> None:
    """Notes that an `EchoRun` begins an epoch in this thread. If it must start, idle runs of the same name are closed first."""
    here = threading.current_thread()
    use = _Use(name, os.getpid(), here, weakref.ref(epoch))
    if not run.is_running:
        for other, last in list(_uses.items()):
            if other is run or last[:2] != use[:2]:
                continue
            epoch_of = last.epoch()
            is_over = epoch_of is None or epoch_of.finished or other.delivery.progress.over
            # and the thread that took its batches does something else now
            if is_over and (last.thread is here or not last.thread.is_alive()):
                other.close()
    _uses[run] = use


# ---------------------------------------------------------------------- loader sharing


def point_of_shared(point: InsertionPoint, unit: Unit) -> InsertionPoint:
    """Returns the insertion point of a loader that shares. Raises a ValueError if it comes before what is shared."""
    if point is InsertionPoint.auto:
        return earliest(Needs.examples) if unit in (Unit.indexed, Unit.streamed) else point
    if point not in points_from(Needs.examples):
        raise ValueError(
            f"{point.option} is impossible with share: examples are shared as the reader has augmented them. Use "
            f"'{earliest(Needs.examples)}', or, to share what comes before the augmentation, a cache under a name: "
            'cache=CacheConfig("8GiB", path=folder, name="train")'
        )
    return point


def read_by(kind: Kind, name: str) -> Kind:
    """Returns the kind of what a reader reads for a training: that of the base, if the training takes a part of it."""
    return kind if part_of(kind) is None else kind_of(loader_of(parts_of(kind), seed_of(name)))


class LoaderSharing:
    """Sharing of one loader. Raises a ValueError if the loader cannot share."""

    def __init__(self, config: ShareConfig, kind: Kind, cache: CacheConfig | None = None, *, in_flight: int | str = 1) -> None:
        self.config, self._users, self._unit, self._in_flight = config, kind, unit_of(kind), in_flight
        self.is_replayed = self._unit is Unit.indexed  # so that the order of a run follows from the name
        self._attachment: Attachment | None = None
        self._waited_before, self._saved_before, self._missed_before = Waited(), 0.0, 0
        self._again_before = 0
        check_shareable(config, kind)
        self._cache_config, self._cache = cache, None if cache is None else ReaderCache.of(cache, read_by(kind, config.name))
        self._lookups = Lookups()  # of the examples that were delivered
        self._stream = SharedStream(config)
        self._batches: SharedBatches | None = None
        if self._unit is Unit.streamed and hasattr(kind.loader.dataset, "__len__"):
            self._stream = SizedSharedStream(config, len(kind.loader.dataset))
        elif self._unit is Unit.examples_of_batch:
            self._batches = SharedBatches(self._stream, kind.length, None, kind.loader.collate_fn)
        elif self._unit is Unit.batch:
            size = getattr(kind.loader, "batch_size", None)
            self._batches = SharedBatches(self._stream, kind.length, size if isinstance(size, int) else None, None)

    def kind(self) -> Kind:
        """Returns the kind that this training echoes: the user's loader, or one that takes the reader's items in its place."""
        if self._batches is not None:
            return SharedOpaque(self._batches, self)
        loader = self._users.loader
        if self._unit is not Unit.streamed:
            return SharedIndexed(loader, self)
        over_items = DataLoader(
            self._stream,
            batch_size=loader.batch_size,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
            pin_memory=loader.pin_memory,
        )
        return SharedOfStream(over_items, self)

    @property
    def trainings(self) -> int:
        """How many trainings the reader has now; 0 without a reader."""
        return 0 if self._attachment is None else self._attachment.trainings

    @property
    def has_other_part(self) -> bool:
        """Whether the user has chosen another part of the data since this training has attached to its reader."""
        if self._attachment is None:
            return False
        before, now = self._attachment.items.part, part_of(self._users)
        if before is None or now is None:
            return before is not now
        return not np.array_equal(before.indices, now.indices)

    @property
    def missed_examples(self) -> int:
        """Examples that other trainings had and this rank missed, since the reader does not wait with ``behind="skip"``."""
        now = 0 if self._attachment is None else self._attachment.missed
        return self._missed_before + now + self._stream.missed * self._examples_of_item()

    @property
    def read_again_examples(self) -> int:
        """Examples that the reader has read again for this rank, since it came late. Those that a cache held do not count."""
        return self._again_before + (0 if self._attachment is None else self._attachment.read_again)

    def _examples_of_item(self) -> int:
        return 1 if self._batches is None else self._batches.rows

    @property
    def saved_cpu_seconds(self) -> float:
        """Processor seconds that this rank has saved: those for its own reading, less its share of the reader's."""
        return self._saved_before + (0.0 if self._attachment is None else self._attachment.saved_cpu_seconds)

    @property
    def most_factor(self) -> float | None:
        """The largest factor with which this training takes fresh examples as fast as they come; None if no other one shares."""
        return None if self._attachment is None else self._attachment.most_factor

    @property
    def waited(self) -> Waited:
        """Seconds that this training has waited so far."""
        now = Waited() if self._attachment is None else self._attachment.waited
        return now.after(self._waited_before)

    @property
    def cache_counts(self) -> CacheCounts | None:
        """The contents of the reader's cache, and the hits and misses of this rank's fresh examples; None without a cache."""
        if (config := self._cache_config) is None:
            return None
        hits, misses = self._lookups
        state = CacheState() if self._attachment is None else self._attachment.cache
        size, hold = state.size or config.bytes_of(), HOLDS[state.hold] if state.hold else config.hold
        return CacheCounts(state.examples, state.bytes, hits, misses, bool(state.is_full), hold, size)

    def add_lookups(self, hits: int, misses: int, received: int = 0, waited_seconds: float = 0.0) -> None:
        """Counts fresh examples that were delivered. See `LoaderCache.add_lookups`."""
        del received, waited_seconds  # there are no other nodes
        self._lookups = Lookups(self._lookups.hits + hits, self._lookups.misses + misses)

    def start(self, opening: Opening) -> SharedPipeline:
        """Attaches to the reader, and starts the pipeline. All ranks must call this function together."""
        layout, names = opening.layout, gathered(uuid.uuid4().hex)
        if len(names) != layout.replicas:
            raise ValueError(
                f"share={self.config.name!r} is impossible here: the loader divides its data among {layout.replicas} ranks, and "
                f"torch.distributed knows of {len(names)}. Leave num_replicas and rank out"
            )
        places, folders = zip(*gathered((place_of_process(), str(shared_folder()))), strict=True)
        nodes = list(zip(nodes_of(places), folders, strict=True))  # several nodes on one machine have a folder each
        if len(set(nodes)) > 1 and self.config.cluster is None:
            raise ValueError(
                f"share={self.config.name!r} is impossible here: the ranks are on several nodes, and a reader serves one. On a "
                "Ray cluster, set share.cluster='ray': then one node reads for all. Else leave share out"
            )
        node = nodes[opening.rank]
        elsewhere = sum(other != node for other in nodes)
        group, part = Group(f"{names[0]}-{nodes.index(node)}", layout.replicas, layout.length, elsewhere), part_of(self._users)
        items = items_of(part, self._order_of_base)
        attachment = self._attach(layout.batch_size * layout.replicas, group, items=items)
        try:
            return SharedPipeline(self.config, self._users, opening, attachment)
        except BaseException:
            attachment.close()
            raise

    def start_over_stream(self, start: Callable[[], Pipeline]) -> PacedPipeline:
        """Attaches to the reader, and starts the pipeline over the loader that takes the reader's items."""
        if (ranks := len(gathered(0))) > 1:
            raise ValueError(
                f"share={self.config.name!r} is impossible here: {self._unit.value} cannot be divided among {ranks} ranks. "
                "Use a DataLoader over a map-style data set, which can; or leave share out"
            )
        size = 1 if self._batches is not None else self._users.loader.batch_size
        attachment = self._attach(size, Group.of_one(), self._stream.follow)
        self._stream.attach(attachment)
        try:
            return PacedPipeline(start(), attachment, self._examples_of_item)
        except BaseException:
            attachment.close()
            raise

    def _order_of_base(self) -> Order:
        seed = seed_of(self.config.name)
        return order_of(kind_of(loader_of(parts_of(self._users), seed)), seed)

    def _attach(
        self, tell_every: int, group: Group, follow: Callable[[Window, int], int] | None = None, items: Items | None = None
    ) -> Attachment:
        self._waited_before, self._saved_before = self.waited, self.saved_cpu_seconds
        self._missed_before += 0 if self._attachment is None else self._attachment.missed
        self._again_before = self.read_again_examples
        place = place_of_training(self.config.name) if self.config.cluster else None
        data_fingerprint = fingerprint_of(self._users, self.config.ignore, options_in_words(self._cache_config))
        if trained := trained_parts(data_fingerprint):
            warnings.warn(
                f"lightning_echo: share={self.config.name!r}: the reader has a copy of {', '.join(trained[:3])}, as it is "
                "now: it does not see what the training makes of it",
                UserWarning,
                stacklevel=2,
            )

        def payload(follows: bool) -> Payload:
            if follows and (changed := changed_since(self._users, self.config.ignore, data_fingerprint)):
                raise ReaderError(
                    f"the reader of share={self.config.name!r} has died, and another one would read other data: {changed} (when "
                    "this training began, and now). Resume it from its last checkpoint, with the data as they were. If the "
                    'difference decides nothing about examples, name it in all trainings: ShareConfig(ignore=("log_dir",))'
                )
            return payload_of(self.config, self._users, data_fingerprint, place, self._in_flight, self._cache)

        self._attachment = Attachment(
            self.config,
            payload,
            data_fingerprint,
            tell_every=tell_every,
            group=group,
            follow=follow,
            items=items,
            workers=max(getattr(self._users.loader, "num_workers", 0), 1),
        )
        return self._attachment


# ---------------------------------------------------------------------- kinds


class _Shared(Kind):
    """A kind whose examples a reader reads for this training."""

    state_workers = 0  # the workers are the reader's
    order_by = None  # the name decides

    def __init__(self, loader: Any, sharing: LoaderSharing) -> None:
        super().__init__(loader)
        self._sharing = sharing

    def hearers(self) -> tuple[Any, ...]:
        return ()


class SharedIndexed(_Shared, Indexed):
    reads = "examples"  # the calls are the reader's

    def lookahead(self, largest_factor: float) -> int:
        return DEPTH + 1  # batches that the thread may have planned

    def open(self, opening: Opening) -> Pipeline:
        return self._sharing.start(opening)


class SharedIndexedBatches(_Shared, IndexedBatches):
    open = SharedIndexed.open


class _SharedItems(_Shared):
    """A loader over the reader's items, which takes the place of the user's."""

    def open(self, opening: Opening) -> Pipeline:
        return self._sharing.start_over_stream(lambda: super(_SharedItems, self).open(opening))  # type: ignore[safe-super]


class SharedOfStream(_SharedItems, Stream):
    pass


class SharedStreamBatches(_SharedItems, StreamBatches):
    pass


class SharedOpaque(_SharedItems, Opaque):
    pass


SharedIndexed.whole_batches = SharedIndexedBatches
SharedOfStream.whole_batches = SharedStreamBatches


def check_shareable(config: ShareConfig, kind: Kind) -> None:
    """Raises a ValueError if a loader cannot share, or a ModuleNotFoundError if it needs Ray and that is not installed."""
    if not hasattr(os, "memfd_create"):
        raise ValueError(f"share={config.name!r} is impossible on this system: it needs Linux. Leave share out")
    if why := _why_not(kind):
        raise ValueError(f"share={config.name!r} is impossible here: {why}")
    if config.cluster is None:
        return
    check_ray(config.name)
    if unit_of(kind) is not Unit.indexed:
        raise ValueError(
            f"share={config.name!r} with share.cluster={config.cluster!r} is impossible here: no other node could continue "
            f"within a pass, since what is shared is {unit_of(kind).value}. Use a DataLoader over a map-style data set; or leave "
            "cluster out, so that each node has a reader of its own"
        )


def _why_not(kind: Kind) -> str:
    """Returns why a loader cannot share, and what to do instead; empty if it can."""
    if kind.shards_itself:
        return (
            "its sampler divides the data among ranks itself. Give it a plain sampler: a loader that shares divides its data. If "
            "Lightning has put that sampler there, return the loader from train_dataloader, and do not pass it to fit"
        )
    if not isinstance(kind, Indexed) or batched(kind.loader.dataset) is None:
        return ""
    if isinstance(kind, OwnBatches):  # whose examples are shared together, and were read in one call
        found = read_elsewhere(kind.loader, whole_batch, None)
        return "" if isinstance(found, NotRead) else found[0]
    found = read_elsewhere(kind.loader, why_not_apart, kind.readable_indices, kind.loader.collate_fn)
    return "" if isinstance(found, NotRead) else str(found)


# ---------------------------------------------------------------------- serving

_ANSWER_SECONDS = 5.0
_BETWEEN_LOOKS_SECONDS = 0.5
_BETWEEN_SHOWS_SECONDS = 2.0


def serve(
    loader: Any,
    share: ShareConfig | str,
    *,
    cache: CacheConfig | Mapping[str, Any] | str | float | int | None = None,
    show: Callable[[str], None] | None = None,
) -> None:
    """Runs the reader of a name in the foreground, until you interrupt it (Ctrl-C).

    You do not need it: the first training starts a reader in a process of its own. Use this function to watch the reader, or to
    start it yourself: for data that is too large to be sent to a process, or with more workers than a training would have.

    Args:
        loader: A ``DataLoader`` with the data set, sampler and workers of the trainings. Its batch size does not matter.
        share: The name, or a `ShareConfig`, of which only ``name``, ``window``, ``workers`` and ``ignore`` are used. With
            ``workers="sum"`` the reader has at least the workers of ``loader``.
        cache: The cache of the reader, as the trainings give it: a `CacheConfig`, a mapping of its fields, or its size alone.
        show: Called every few seconds with a text about the trainings and their places.

    Raises:
        TypeError: ``loader`` is not a loader, or ``share`` is neither a name nor a `ShareConfig`.
        ValueError: The loader cannot be shared, the cache is impossible, or there is a reader of this name already.
        RuntimeError: The workers cannot continue.

    Example:
        >>> serve([[0, 1], [2, 3]], None)
        Traceback (most recent call last):
        TypeError: share must be a name or a ShareConfig, got None
    """
    config = read_share_config(share)
    if config is None:
        raise TypeError("share must be a name or a ShareConfig, got None")
    kind = kind_of(loader)
    check_shareable(config, kind)
    cache_config = read_cache_config(cache)
    reader_cache = None if cache_config is None else ReaderCache.of(cache_config, read_by(kind, config.name))
    data_fingerprint = fingerprint_of(kind, config.ignore, options_in_words(cache_config))
    lock = StarterLock(config.name)
    if not lock.try_to_hold() or status_of(config.name) is not None:
        lock.release()
        raise ValueError(f"there is a reader of share={config.name!r} already: end it first, or give another name")
    with lock, suppress(KeyboardInterrupt), _shown(config.name, show):
        run_reader(
            config.name,
            kind_of(loader_of(parts_of(kind), seed_of(config.name))),
            data_fingerprint=data_fingerprint,
            window_bytes=fitting_window(config),
            workers=config.workers,
            least_workers=getattr(loader, "num_workers", 0),
            in_flight=AUTO_IN_FLIGHT,
            cache=reader_cache,
            linger_seconds=float("inf"),
            starter=f"serve in {name_of_process()}",
            when_ready=lock.release,
        )


@contextmanager
def _shown(name: str, show: Callable[[str], None] | None) -> Iterator[None]:
    """Shows the status of the reader, in a thread, until the ``with`` block ends."""
    over = threading.Event()

    def run() -> None:
        written, text = 0, ""
        while not over.wait(_BETWEEN_SHOWS_SECONDS):
            if (status := status_of(name)) is not None and show is not None:
                rate = max(status["written"] - written, 0) / _BETWEEN_SHOWS_SECONDS
                written, before, text = status["written"], text, "\n".join(lines_about(name, status, rate))
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
    """Returns the status that the reader of a name reports; None if there is no such reader, or it does not answer."""
    with new_socket() as connection:
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(socket_of(name))
            send(connection, {"status": 1})
            status: dict[str, Any] = receive(connection)[0]["status"]
        except (Gone, OSError):
            return None
    return status


def shared_readers() -> str:
    """Returns the text of ``lightning-echo shared``: the status of all readers of this user."""
    before = {name: status for name in names() if (status := status_of(name)) is not None}
    if not before:
        return "No shared readers are running."
    time.sleep(_BETWEEN_LOOKS_SECONDS)
    now = {name: status for name in before if (status := status_of(name)) is not None}
    return "\n".join(
        line
        for name, status in now.items()
        for line in lines_about(name, status, (status["written"] - before[name]["written"]) / _BETWEEN_LOOKS_SECONDS)
    )


def _in_percent(share: float) -> str:
    return f"{100 * share:.2g}% of " if share < 1 else ""


def lines_about(name: str, status: dict[str, Any], items_per_second: float) -> list[str]:
    """Returns lines of text, for people, about a reader with the status ``status``, which passes so many items of its data.

    >>> status = {"pid": 7, "data": "Images of 1,000", "count": 1, "length": 1000, "workers": 2, "window_bytes": 2**30}
    >>> status |= {"is_full": True, "read": 800, "slowest": "a.py"}
    >>> training = {"label": "a.py", "behind": "wait", "at": 1500, "share": 0.8}
    >>> status["cluster"] = [{"node": "10.0.0.5", "rate": 48.25, "cpu_seconds": 0.0201, "examples": 900, "is_ready": True}]
    >>> for line in lines_about("sweep", {**status, "trainings": [training]}, 100.0):
    ...     print(line)
    sweep: process 7 reads 80% of Images of 1,000 for 1 training with 2 workers, 80 examples/s, window 1 GiB; waits for a.py
      a.py: pass 1, 50%, behind="wait", takes 80% of the data
      worker on 10.0.0.5: 48.2 examples/s, 900 so far, 20.1 ms of processor time each
    """
    count, share = status["count"], status["read"] / status["length"] if status["length"] and status["read"] else 1.0
    waits = f"; waits for {status['slowest']}" if status["is_full"] and status["slowest"] else ""
    workers = status["workers"]
    head = (
        f"{name}: process {status['pid']} reads {_in_percent(share)}{status['data']} for {count} training"
        f"{'' if count == 1 else 's'} with {workers} worker{'' if workers == 1 else 's'}, "
        f"{share * items_per_second:.3g} examples/s, "
        f"window {bytes_in_words(status['window_bytes'])}{waits}"
    )
    lines, length = [head], status["length"]
    for training in status["trainings"]:
        at, behind = training["at"], f'behind="{training["behind"]}"'
        if at is None:
            place = "waits for other trainings"
        elif not length:
            place = f"item {at % first_item(1)}, {behind}"
        else:
            number, taken = divmod(at, length)
            takes = f", takes {_in_percent(training['share'])}the data" if training["share"] < 1 else ""
            place = f"pass {number}, {100 * taken // length}%, {behind}{takes}"
        lines.append(f"  {training['label']}: {place}")
    for worker in status["cluster"]:
        each = f"{1e3 * worker['cpu_seconds']:.3g} ms of processor time each"
        made = f"{worker['rate']:.3g} examples/s, {worker['examples']:,} so far, {each}"
        lines.append(f"  worker on {worker['node']}: {made if worker['is_ready'] else 'begins'}")
    return lines
