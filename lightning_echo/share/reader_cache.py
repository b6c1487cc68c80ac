"""`ReaderCache`: the cache in a reader. A training proves what it can hold, the reader opens it, the workers read through it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning_echo.cache.holding import Hold, find_holds, holds_found
from lightning_echo.cache.kept import HOLDS, CacheConfig, is_any_there
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.node_cache import NodeCache
from lightning_echo.data.elsewhere import read_elsewhere
from lightning_echo.log import LOGGER
from lightning_echo.pipeline.kinds import Indexed, Kind
from lightning_echo.share.same_data import Unit, unit_of
from lightning_echo.share.window import CacheState
from lightning_echo.split.prove import Split
from lightning_echo.split.staged import uncut_stages

# What the reader has read stays in its memory, or on a disk, as long as the reader lives: over all passes, and over all trainings
# that come and leave. It is a `LoaderCache` without insertion point, so that it may hold raw, loaded or whole examples. The
# workers look an example up, seed the random states as they do without a cache, and finish it. So the window has the same bytes.
#
# Each training looks at a few examples, to find out what can be held. Only the reader asks for memory: where it has its cache
# already, a training that comes later finds less free memory than the cache takes.


class ReaderCache:
    """The cache of a reader. A training makes it with `of`, and sends it with the parts of its loader. The reader opens it."""

    def __init__(self, config: CacheConfig, holds: list[Hold]) -> None:
        self._config, self._holds = config, holds
        self._opened: LoaderCache | None = None
        self.about = ""  # one line for people, once it is open

    @property
    def cuts(self) -> list[Split | None]:
        """Where an example may be cut whose first part is held; None: whole examples are held."""
        return [hold.split for hold in self._holds]

    @classmethod
    def of(cls, config: CacheConfig, kind: Kind) -> ReaderCache:
        """Makes one for this loader. Raises a ValueError if it can hold nothing, or the data set's own error."""
        kind.check_cache()
        if unit_of(kind) is not Unit.indexed:
            raise ValueError(
                f"share and cache are impossible together here: what is shared is {unit_of(kind).value}, and the reader does not "
                'read it by index. Give the data set of the loader a cache instead: CachedDataset(dataset, "8GiB")'
            )
        if config.partitioned:
            raise ValueError(
                "share and cache.partitioned=True are impossible together: one reader reads for all nodes, and has a cache of "
                "its own. Leave cache.partitioned out"
            )
        indices, size = kind.readable_indices, config.bytes_of()
        found = read_elsewhere(kind.loader, find_holds, indices, None, config.hold, uncut_stages, size)
        return cls(config, holds_found(found))

    def open(self, kind: Indexed, *, follows: bool) -> LoaderCache | None:
        """Opens it in the reader, whose copy of the loader is given. A later call returns the same cache.

        ``follows``: whether this reader follows one that has died. Its trainings need no cache, and so there is none (None) if
        the system has not freed the memory of the dead reader yet. Otherwise raises a ValueError if there is no room.
        """
        if self._opened is not None:
            return self._opened
        try:
            NodeCache.check(self._config, is_there=is_any_there(self._config))
        except ValueError as error:
            if not follows:
                raise
            self.about = f"cache: there is none, {error}"
            LOGGER.warning("%s", self.about)
            return None
        opened = LoaderCache(
            self._config,
            kind.loader.dataset,
            kind.readable_indices,
            None,
            uncut_stages,
            differs_in_workers=kind.prepared_in_workers,
            loader=kind.loader,
            holds=self._holds,
        )
        if message := opened.open(together=False):
            LOGGER.warning("cache: %s", message)
        self._opened, self.about = opened, opened.describe()
        LOGGER.info("%s", self.about)
        return opened

    @property
    def state(self) -> CacheState:
        """The contents of the cache now, for the trainings."""
        if self._opened is None:
            return CacheState()
        counts = self._opened.counts
        return CacheState(counts.examples, counts.bytes, counts.size, counts.is_full, HOLDS.index(counts.hold))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}


def options_in_words(config: CacheConfig | None) -> str:
    """Returns the options of a cache as a text. Trainings that share must have the same one.

    >>> options_in_words(CacheConfig("1MiB", hold="raw")), options_in_words(CacheConfig(0.5)), options_in_words(None)
    ("1,048,576 bytes, hold='raw'", '0.5 of the free memory', 'none')
    """
    if config is None:
        return "none"
    size = f"{config.size} of the free memory" if isinstance(config.size, float) else f"{config.bytes_of():,} bytes"
    others = [field for field in fields(CacheConfig) if field.name != "size" and getattr(config, field.name) != field.default]
    return ", ".join([size, *(f"{field.name}={getattr(config, field.name)!r}" for field in others)])
