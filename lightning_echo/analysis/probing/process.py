"""What trainings change in this process and an analysis puts back: random numbers, and switches of torch that a Trainer turns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["process_kept"]


@contextmanager
def process_kept() -> Iterator[None]:
    """The random numbers of torch, numpy and Python are afterwards what they were, and whether torch is to be deterministic."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.benchmark = benchmark
