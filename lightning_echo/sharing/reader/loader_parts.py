"""The parts of a loader that a reader needs, taken from the training's loader and put together again in the reader.

Not among them: batch size, collate function, ``drop_last``, pinning, since a reader makes no batches; and ``timeout``, since its
workers wait for trainings.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader

from lightning_echo.fetching.source import Source
from lightning_echo.sharing.window import CHUNK

__all__ = ["loader_of", "parts_of"]


def parts_of(source: Source) -> dict[str, Any]:
    """Returns the parts of a training's loader."""
    loader = source.loader
    context = loader.multiprocessing_context
    return {
        "dataset": loader.dataset,
        "sampler": copy.copy(source.sampler),
        "generator": loader.generator,
        "num_workers": max(loader.num_workers, 1),
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": None if context is None else context.get_start_method(),
    }


def loader_of(parts: dict[str, Any]) -> DataLoader[Any]:
    """Returns a loader of these parts."""
    return DataLoader(batch_size=CHUNK, **parts)
