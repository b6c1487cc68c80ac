"""Sharing for one `EchoLoader` with ``share=``: whether its loader can share, and its pipeline when a run starts."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.caching.node_cache import gathered, nodes_of, place_of_process
from lightning_echo.fetching.choice import Choice
from lightning_echo.fetching.layout import Launch, Layout
from lightning_echo.fetching.prefetch import DEPTH
from lightning_echo.fetching.restartable_pipeline import Pipeline
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.planning.shape import PlanShape
from lightning_echo.protecting.elsewhere import NotRead, read_elsewhere
from lightning_echo.sharing.cluster.ray_cluster import check_ray, place_of_training
from lightning_echo.sharing.reader.loader_parts import Unit, unit_of
from lightning_echo.sharing.same_data import print_of, trained_parts
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.starting import payload_of
from lightning_echo.sharing.taking.attachment import Attachment, Waited
from lightning_echo.sharing.taking.connecting import Group
from lightning_echo.sharing.taking.pace import Pace, PacedPipeline
from lightning_echo.sharing.taking.shared_pipeline import SharedCounts, SharedPipeline
from lightning_echo.sharing.taking.shared_stream import SharedBatches, SharedStream, SizedSharedStream
from lightning_echo.sharing.window import Window
from lightning_echo.splitting.calls import whole_batch, why_not_apart
from lightning_echo.splitting.staged import batched

__all__ = ["LoaderSharing", "check_shareable", "point_of_shared"]


def point_of_shared(point: InsertionPoint, unit: Unit) -> InsertionPoint:
    """Returns the insertion point of a loader that shares.

    Args:
        point: What the user asks for.
        unit: What is shared.

    Raises:
        ValueError: The insertion point comes before what is shared.
    """
    if point is InsertionPoint.auto:
        return point if unit.is_of_batch else earliest(Needs.examples)
    if point not in points_from(Needs.examples):
        raise ValueError(
            f"{point.option} is impossible with share: examples are shared as the reader has augmented them. Use "
            f"'{earliest(Needs.examples)}', or, to share what comes before the augmentation, a cache under a name: "
            'cache=CacheConfig("8GiB", path=folder, name="train")'
        )
    return point


class LoaderSharing:
    """How one loader shares.

    Args:
        config: The options.
        source: The user's loader.
        has_cache: Whether the loader is cached, too.

    Attributes:
        config: The options.
        source: The loader from which this training takes its examples. It is the user's loader if that is read by index, else a
            loader that takes the reader's items in its place.

    Raises:
        ValueError: The loader cannot share.
        ModuleNotFoundError: ``cluster="ray"`` is given, and Ray is not installed.
    """

    def __init__(self, config: ShareConfig, source: Source, *, has_cache: bool) -> None:
        self.config, self._counts = config, SharedCounts()
        self._users, self._unit = source, unit_of(source)
        self._attachment: Attachment | None = None
        self._waited_before, self._saved_before = Waited(), 0.0
        if has_cache:
            raise ValueError(
                "share and cache are impossible together: the reader reads for all trainings. Give the data set of the loader a "
                'cache instead: DataLoader(CachedDataset(dataset, "8GiB"), ...)'
            )
        check_shareable(config, source)
        self._stream = _stream_of(config, source) if self._unit is Unit.streamed else SharedStream(config)
        self._batches: SharedBatches | None = None
        self.source = source
        if self._unit is Unit.streamed:
            self.source = Source(_loader_over(self._stream, source.loader))
        elif self._unit.is_of_batch:
            self._batches = _batches_of(self._stream, source, self._unit)
            self.source = Source(self._batches)

    @property
    def is_replayed(self) -> bool:
        """Whether each reader gives the same item at the same place, so that the order of a run follows from the name."""
        return self._unit.is_replayed

    @property
    def lookahead(self) -> int:
        """How many batches the thread may have planned after the one that was delivered last."""
        return DEPTH + 1

    @property
    def trainings(self) -> int:
        """How many trainings the reader has now; 0 without a reader."""
        return 0 if self._attachment is None else self._attachment.trainings

    @property
    def missed_examples(self) -> int:
        """Examples that other trainings had and this rank missed, since the reader does not wait with ``behind="skip"``."""
        late = 0 if self._attachment is None else self._attachment.missed_late
        return self._counts.missed + late + self._stream.missed * self._examples_of_item()

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

    def start(self, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch, *, rank: int, key: int) -> SharedPipeline:
        """Attaches to the reader, and starts the pipeline. All ranks must call this function together.

        Args:
            choice: The insertion point.
            layout: How the training cuts a pass into batches and divides it among ranks.
            shape: Sizes of the plan, as without sharing.
            launch: How the run begins.
            rank: The number of this rank's share of a pass.
            key: Seed for the random numbers of the collate function.

        Raises:
            ValueError: The ranks cannot share, or another training shares other data under this name.
            TypeError: The loader cannot be sent to the reader.
            ReaderError: No reader could begin.
        """
        attachment = self._attach(layout.batch_size * layout.replicas, self._group(layout.replicas, layout.length))
        try:
            return SharedPipeline(
                self._users,
                choice,
                layout,
                shape,
                launch,
                rank=rank,
                key=key,
                name=self.config.name,
                attachment=attachment,
                counts=self._counts,
            )
        except BaseException:
            attachment.close()
            raise

    def start_over_stream(self, start: Callable[[], Pipeline]) -> PacedPipeline:
        """Attaches to the reader, and starts the pipeline over the loader that takes the reader's items.

        Args:
            start: Starts the pipeline.

        Raises:
            ValueError: There are several ranks, or another training shares other data under this name.
            TypeError: The loader cannot be sent to the reader.
            ReaderError: No reader could begin.
        """
        if (ranks := len(gathered(0))) > 1:
            raise ValueError(
                f"share={self.config.name!r} is impossible here: {self._unit.value} cannot be divided among {ranks} ranks. "
                "Use a DataLoader over a map-style data set, which can; or leave share out"
            )
        size = 1 if self._unit.is_of_batch else self._users.loader.batch_size
        attachment = self._attach(size, Group.of_one(), self._stream.follow)
        self._stream.attach(attachment)
        try:
            return PacedPipeline(start(), attachment, Pace(attachment, self._examples_of_item))
        except BaseException:
            attachment.close()
            raise

    def _attach(self, tell_every: int, group: Group, follow: Callable[[Window, int], int] | None = None) -> Attachment:
        self._waited_before, self._saved_before = self.waited, self.saved_cpu_seconds
        self._counts.missed += 0 if self._attachment is None else self._attachment.missed_late
        place = place_of_training(self.config.name) if self.config.cluster else None
        data_print = print_of(self._users, self.config.ignore)
        if trained := trained_parts(data_print):
            warnings.warn(
                f"lightning_echo: share={self.config.name!r}: the reader has a copy of {', '.join(trained[:3])}, as it is "
                "now: it does not see what the training makes of it",
                UserWarning,
                stacklevel=2,
            )
        self._attachment = Attachment(
            self.config,
            lambda: payload_of(self.config, self._users, data_print, place),
            data_print,
            tell_every=tell_every,
            group=group,
            follow=follow,
        )
        return self._attachment

    def _group(self, replicas: int, length: int) -> Group:
        names = gathered(uuid.uuid4().hex)
        if len(names) != replicas:
            raise ValueError(
                f"share={self.config.name!r} is impossible here: the loader divides its data among {replicas} ranks, and "
                f"torch.distributed knows of {len(names)}. Leave num_replicas and rank out"
            )
        if len(set(nodes_of(gathered(place_of_process())))) > 1:
            raise ValueError(
                f"share={self.config.name!r} is impossible here: the ranks are on several nodes, and a reader serves one. Leave "
                "share out"
            )
        return Group(names[0], replicas, length)


def check_shareable(config: ShareConfig, source: Source) -> None:
    """Refuses a loader that cannot share.

    Raises:
        ValueError: The loader cannot share. The message says why, and what to do.
        ModuleNotFoundError: ``cluster="ray"`` is given, and Ray is not installed.
    """
    if not hasattr(os, "memfd_create"):
        raise ValueError(f"share={config.name!r} is impossible on this system: it needs Linux. Leave share out")
    if why := _why_not(source):
        raise ValueError(f"share={config.name!r} is impossible here: {why}")
    if config.cluster is None:
        return
    check_ray(config.name)
    if not unit_of(source).is_replayed:
        raise ValueError(
            f"share={config.name!r} with share.cluster={config.cluster!r} is impossible here: no other node could go on within "
            f"a pass, since what is shared is {unit_of(source).value}. Use a DataLoader over a map-style data set; or leave "
            "cluster out, so that each node has a reader of its own"
        )


def _why_not(source: Source) -> str:
    """Returns why a loader cannot share, and what to do instead; empty if it can."""
    if source.shards_itself:
        return "its sampler divides the data among ranks itself. Give it a plain sampler: a loader that shares divides its data"
    if not source.rebuilds or batched(source.loader.dataset) is None:
        return ""
    if source.own_batches:  # whose examples are shared together, and were read in one call
        found = read_elsewhere(source.loader, whole_batch, None)
        return "" if isinstance(found, NotRead) else found[0]
    found = read_elsewhere(source.loader, why_not_apart, source.readable_indices, source.loader.collate_fn)
    return "" if isinstance(found, NotRead) else str(found)


def _stream_of(config: ShareConfig, source: Source) -> SharedStream:
    """Returns a stream of the reader's items, in place of the training's own stream."""
    dataset = source.loader.dataset
    return SizedSharedStream(config, len(dataset)) if hasattr(dataset, "__len__") else SharedStream(config)


def _loader_over(stream: SharedStream, loader: Any) -> DataLoader[Any]:
    """Returns the training's own loader, over the reader's stream."""
    return DataLoader(
        stream,
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
        pin_memory=loader.pin_memory,
    )


def _batches_of(stream: SharedStream, source: Source, unit: Unit) -> SharedBatches:
    """Returns a loader of the reader's batches, in place of a loader that makes its batches itself."""
    if unit is Unit.examples_of_batch:
        return SharedBatches(stream, source.length, None, source.loader.collate_fn)
    size = getattr(source.loader, "batch_size", None)
    return SharedBatches(stream, source.length, size if isinstance(size, int) else None, None)
