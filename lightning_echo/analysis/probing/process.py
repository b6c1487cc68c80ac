"""Restores what the trainings of an analysis change in this process: random states, and switches of torch that a Trainer sets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["process_state_restored"]


@contextmanager
def process_state_restored() -> Iterator[None]:
    """Restores, at its end, the random states of torch, numpy and Python, and the switches of torch that a Trainer sets."""
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)
        for device, state in enumerate(of_devices):
            torch.cuda.set_rng_state(state, device)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.backends.cudnn.benchmark = benchmark
