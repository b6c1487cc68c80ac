"""`ShareMeter`: what sharing the reading did to a training in an epoch. Only a single loader can share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_echo.loading.loader import EchoLoader
from lightning_echo.sharing.loader_sharing import LoaderSharing

__all__ = ["ShareMeter", "ShareUse"]

_NANOSECONDS = 1_000_000_000


class ShareUse(NamedTuple):
    """What sharing did in an epoch.

    Attributes:
        trainings: Number of trainings that the reader has at the end of the epoch, this one among them.
        waited_seconds: Seconds that a batch waited for another training, on the rank where this was longest.
        missed: Examples that other trainings had and this one did not, in the run so far, all ranks.
        saved_cpu_seconds: Processor seconds that sharing has saved this training in the run so far, all ranks.
        slowest_training: The training that this rank waited for longest in the run so far; empty if it waited for none.
    """

    trainings: int
    waited_seconds: float
    missed: int
    saved_cpu_seconds: float
    slowest_training: str = ""


class ShareMeter:
    """Follows the loader of a training, if it shares."""

    def __init__(self) -> None:
        self._waited_at_start = 0.0

    def begin_epoch(self, loader: Any) -> None:
        """Notes the counts when an epoch begins, or continues after a resume."""
        sharing = _sharing_of(loader)
        self._waited_at_start = 0.0 if sharing is None else sharing.waited.for_peers

    def end_epoch(self, loader: Any, gather: Callable[[list[int]], Tensor]) -> ShareUse | None:
        """Returns what was measured in the epoch; None if the loader does not share. All ranks must call this together.

        Args:
            loader: What is trained on.
            gather: Returns the values of every rank, shape (ranks, values). It is called only if the loader shares.
        """
        if (sharing := _sharing_of(loader)) is None:
            return None
        waited = sharing.waited.for_peers - self._waited_at_start
        saved = int(sharing.saved_cpu_seconds * _NANOSECONDS)
        of_ranks = gather([sharing.trainings, int(waited * _NANOSECONDS), sharing.missed_examples, saved]).tolist()
        trainings, waits, missed, saves = zip(*of_ranks, strict=True)
        by_peer = sharing.waited.by_peer
        slowest = max(by_peer, key=by_peer.__getitem__, default="")
        return ShareUse(max(trainings), max(waits) / _NANOSECONDS, sum(missed), sum(saves) / _NANOSECONDS, slowest)


def _sharing_of(loader: Any) -> LoaderSharing | None:
    return loader.sharing if isinstance(loader, EchoLoader) else None
