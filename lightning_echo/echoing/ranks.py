"""What the ranks of a distributed job must agree on before the first batch: who they are, and the seed."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch

__all__ = ["default_seed", "world"]


def world() -> tuple[int, int]:
    """Number of ranks and this rank, as ``torch.distributed`` has them; (1, 0) without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def default_seed(loader: Any) -> int:
    """``seed_everything``'s seed, else that of the loader's generator, else a drawn one; equal on all ranks.

    All ranks must call it together.
    """
    if seed := os.environ.get("PL_GLOBAL_SEED"):
        return int(seed)
    generator = getattr(loader, "generator", None)
    drawn = [secrets.randbits(32) if generator is None else generator.initial_seed()]
    if world()[0] > 1:
        torch.distributed.broadcast_object_list(drawn, src=0)
    return int(drawn[0])
