"""What an `EchoLoader` with ``share=`` has of it: whether its loader can share, and its pipeline when a run starts."""

from __future__ import annotations

import os
import uuid
from typing import Any

from lightning_echo.caching.node_cache import gathered, nodes_of, place_of_process
from lightning_echo.fetching.choice import Choice
from lightning_echo.fetching.layout import Launch, Layout
from lightning_echo.fetching.prefetch import DEPTH
from lightning_echo.fetching.source import Source
from lightning_echo.insertion import InsertionPoint, Needs, earliest, points_from
from lightning_echo.planning.shape import PlanShape
from lightning_echo.sharing.attachment import Attachment, Group, Waited
from lightning_echo.sharing.same_data import print_of
from lightning_echo.sharing.share_config import ShareConfig
from lightning_echo.sharing.shared_pipeline import SharedCounts, SharedPipeline
from lightning_echo.sharing.starting import payload_of

__all__ = ["LoaderSharing", "check_shareable", "point_of_shared"]


def point_of_shared(point: InsertionPoint) -> InsertionPoint:
    """Returns the insertion point of a loader that shares.

    Args:
        point: What the user asks for.

    Raises:
        ValueError: It lies before what is shared.
    """
    if point is InsertionPoint.auto:
        return earliest(Needs.examples)
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

    Raises:
        ValueError: The loader cannot share.
    """

    def __init__(self, config: ShareConfig, source: Source, *, has_cache: bool) -> None:
        self.config, self._counts = config, SharedCounts()
        self._source = source
        self._attachment: Attachment | None = None
        self._waited_before = Waited()
        if has_cache:
            raise ValueError(
                "share and cache are impossible together: the reader reads for all trainings. Give the data set of the loader a "
                'cache instead: DataLoader(CachedDataset(dataset, "8GiB"), ...)'
            )
        check_shareable(config, source)

    @property
    def lookahead(self) -> int:
        """How many batches after the delivered one the thread may have planned."""
        return DEPTH + 1

    @property
    def trainings(self) -> int:
        """How many trainings the reader has now; 0 without a reader."""
        return 0 if self._attachment is None else self._attachment.trainings

    @property
    def missed_examples(self) -> int:
        """Examples that other trainings had and this rank missed, since the reader does not wait with ``behind="skip"``."""
        return self._counts.missed

    @property
    def most_factor(self) -> float | None:
        """The largest factor with which this training takes fresh examples as fast as they can come; None without others."""
        return None if self._attachment is None else self._attachment.most_factor

    @property
    def waited(self) -> Waited:
        """Seconds that this training has waited so far."""
        now = Waited() if self._attachment is None else self._attachment.waited
        before = self._waited_before
        return Waited(before.for_reading + now.for_reading, before.for_peers + now.for_peers)

    def start(self, choice: Choice, layout: Layout, shape: PlanShape, launch: Launch, *, rank: int, key: int) -> SharedPipeline:
        """Attaches to the reader, and starts the pipeline. All ranks must call this function together.

        Args:
            choice: The insertion point.
            layout: How the training cuts and deals out a pass.
            shape: Sizes of the plan, as without sharing.
            launch: What the run says.
            rank: Which share of a pass is that of this rank.
            key: Seed of what the collate function draws.

        Raises:
            ValueError: The ranks cannot share; or other data has this name.
            TypeError: The loader cannot be sent to the reader.
            ReaderError: No reader could begin.
        """
        self._waited_before = self.waited
        data_print = print_of(self._source)
        self._attachment = Attachment(
            self.config,
            lambda: payload_of(self.config, self._source, data_print),
            data_print,
            tell_every=layout.batch_size * layout.replicas,
            group=self._group(layout.replicas),
        )
        try:
            return SharedPipeline(
                self._source,
                choice,
                layout,
                shape,
                launch,
                rank=rank,
                key=key,
                name=self.config.name,
                attachment=self._attachment,
                counts=self._counts,
            )
        except BaseException:
            self._attachment.close()
            raise

    def _group(self, replicas: int) -> Group:
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
        if replicas > 1 and self.config.behind == "skip":
            raise ValueError(
                f"share.behind='skip' is impossible with {replicas} ranks: they would miss different examples, and part. "
                "Use behind='wait'"
            )
        return Group(names[0], replicas)


def check_shareable(config: ShareConfig, source: Source) -> None:
    """Refuses a loader that cannot share.

    Raises:
        ValueError: The message says why, and what to do.
    """
    if not hasattr(os, "memfd_create"):
        raise ValueError(f"share={config.name!r} is impossible on this system: it needs Linux. Leave share out")
    if why := _why_not(source):
        raise ValueError(f"share={config.name!r} is impossible here: {why}")


def _why_not(source: Source) -> str:
    """Says why a loader cannot share, and the way out; empty if it can."""
    kind = type(source.loader).__name__
    if source.streams or source.reads_stream:
        return "the data set is a stream, whose order a reader that has died leaves unknown. Copy it to a local disk, or cache it"
    if not source.rebuilds:
        return f"{kind} does not tell which examples are in its batches. Use a DataLoader over a map-style data set"
    if source.own_batches:
        return "the loader has a batch_sampler of its own. Give it batch_size and a sampler"
    if source.shards_itself:
        return "its sampler divides the data among ranks itself. Give it a plain sampler: a loader that shares divides its data"
    if not (source.is_sequential or source.is_shuffled) and _has_state(source.sampler):
        return (
            f"its sampler ({type(source.sampler).__name__}) has a generator or a state of its own, which a second reader would "
            "not find again if the first one died. Leave its generator out: it gets one that follows from the name"
        )
    return ""


def _has_state(sampler: Any) -> bool:
    return getattr(sampler, "generator", None) is not None or callable(getattr(sampler, "state_dict", None))
