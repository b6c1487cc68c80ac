"""Random states: seeded from the plan for what runs in the workers, put back where it runs in the training process.

Only torch's CPU generator is seeded: ``torch.manual_seed`` would also reseed every GPU, which nothing puts back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["preserved_random_states", "seed_all"]


def seed_all(seed: int) -> None:
    """Seeds torch's default generator, numpy's and ``random``'s global ones with a 64-bit number."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Puts the three global random states back as they were."""
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
