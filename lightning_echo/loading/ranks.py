"""What the ranks of a distributed job must agree on before the first batch: who they are, and the seed."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from typing import Any

import torch

__all__ = ["data_parallel", "default_seed", "world"]

_DATA_PARALLEL = "data_parallel"  # the dimension of Lightning's ModelParallelStrategy


def world() -> tuple[int, int]:
    """Number of ranks and this rank, as ``torch.distributed`` has them; (1, 0) without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def data_parallel() -> tuple[int, int]:
    """Number of ranks, or groups of ranks, that need data of their own, and which one this is.

    They are those of `world`, unless a device mesh with a dimension ``"data_parallel"`` covers the job: along its other
    dimensions ranks share the work on the same data. Such a mesh belongs to a strategy, and torch has no list of them; so it is
    looked for among all objects, where the job has more groups of processes than one. That takes 0.2 s: ask once in a run. Where
    earlier trainings of this process have left others, the one counts that makes the fewest groups, which is the cautious answer.
    """
    size, rank = world()
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if size == 1 or meshes is None or torch.distributed.get_pg_count() == 1:
        return size, rank
    found = [each for each in gc.get_objects() if type(each) is meshes.DeviceMesh and _covers(each, size)]
    dimensions = [mesh.mesh_dim_names.index(_DATA_PARALLEL) for mesh in found]
    groups = [(mesh.size(dim), mesh.get_local_rank(dim)) for mesh, dim in zip(found, dimensions, strict=True)]
    return min(groups, default=(size, rank))


def _covers(mesh: Any, size: int) -> bool:
    """Whether a mesh is one of the whole job that says what is data parallel."""
    return _DATA_PARALLEL in (mesh.mesh_dim_names or ()) and mesh.size() == size


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
