"""Facts on which the ranks of a job must agree before the first batch: their number, in the job and on a node, and the seed."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from typing import Any

import torch

from lightning_echo.cache.node_cache import gathered, nodes_of, place_of_process

_DATA_PARALLEL = "data_parallel"  # the dimension of Lightning's ModelParallelStrategy


def world() -> tuple[int, int]:
    """Returns the number of ranks and the number of this rank in ``torch.distributed``; (1, 0) without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), torch.distributed.get_rank()
    return 1, 0


def ranks_of_launcher() -> int:
    """Returns how many ranks this node has, if the launcher reports it (torchrun does); otherwise 1."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) else 1


def ranks_on_node() -> int:
    """Returns how many ranks this node has. All ranks must call this function together."""
    nodes = nodes_of(gathered(place_of_process()))
    return nodes.count(nodes[world()[1]]) if len(nodes) > 1 else ranks_of_launcher()


def data_parallel() -> tuple[int, int]:
    """Returns how many ranks (or groups of ranks) need data of their own, and the number of this one.

    These are the ranks of `world`, unless a device mesh with a dimension ``"data_parallel"`` covers the job. Along the other
    dimensions of such a mesh, ranks share the work on the same data.

    The mesh belongs to a strategy, and torch keeps no list of meshes. So if the job has more than one group of processes, this
    function searches all objects. That takes 0.2 s: call it once in a run. If earlier trainings of this process have left other
    meshes, the mesh with the fewest groups is taken, to be on the safe side.
    """
    size, rank = world()
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    if size == 1 or meshes is None or torch.distributed.get_pg_count() == 1:
        return size, rank
    groups = []
    for mesh in [each for each in gc.get_objects() if type(each) is meshes.DeviceMesh]:
        if _DATA_PARALLEL in (mesh.mesh_dim_names or ()) and mesh.size() == size:
            dimension = mesh.mesh_dim_names.index(_DATA_PARALLEL)
            groups.append((mesh.size(dimension), mesh.get_local_rank(dimension)))
    return min(groups, default=(size, rank))


def default_seed(loader: Any) -> int:
    """Returns the seed of ``seed_everything``, or that of the loader's generator, or a random one. It is equal on all ranks.

    All ranks must call this function together.
    """
    if seed := os.environ.get("PL_GLOBAL_SEED"):
        return int(seed)
    generator = getattr(loader, "generator", None)
    drawn = [secrets.randbits(32) if generator is None else generator.initial_seed()]
    if world()[0] > 1:
        torch.distributed.broadcast_object_list(drawn, src=0)
    return int(drawn[0])
