"""Random numbers that an analysis draws and puts back: those of this process, and those of a loader's own generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_echo.echoing.loader import EchoLoader

__all__ = ["random_numbers_kept"]


@contextmanager
def random_numbers_kept() -> Iterator[Callable[[Any], None]]:
    """Those of torch, numpy and Python are afterwards what they were; so are the generators of loaders that are shown to it.

    Yields:
        What each loader is to be shown to before it is iterated.
    """
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    own: dict[torch.Generator, torch.Tensor] = {}

    def show(loader: Any) -> None:
        for generator in _generators(loader):
            own.setdefault(generator, generator.get_state())

    try:
        yield show
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        for generator, state in own.items():
            generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """Of the loader, and of what gives it its order."""
    loader = loader.loader if isinstance(loader, EchoLoader) else loader
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = loader, sampler, batches, getattr(batches, "sampler", None)
    generators = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]
