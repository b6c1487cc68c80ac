"""Who needs data of its own: the ranks of the job, or groups of them where a device mesh says so."""

import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_echo.cache.node_cache import Place
from lightning_echo.loader import setting as ranks


class Mesh:
    """Like torch's ``DeviceMesh``, seen from rank 3: coordinates are row and column."""

    def __init__(self, names, shape, place):
        self.mesh_dim_names, self.shape, self.place = names, shape, place

    def size(self, dimension=None):
        return self.shape[0] * self.shape[1] if dimension is None else self.shape[dimension]

    def get_local_rank(self, dimension):
        return self.place[dimension]


@pytest.fixture(autouse=True)
def job(monkeypatch):
    """Rank 3 of 4, where the classes of meshes are those above; several groups of processes."""
    monkeypatch.setattr(ranks, "world", lambda: (4, 3))
    monkeypatch.setitem(sys.modules, "torch.distributed.device_mesh", SimpleNamespace(DeviceMesh=Mesh))
    monkeypatch.setattr(torch.distributed, "get_pg_count", lambda: 5)


@pytest.mark.parametrize(
    ("names", "shape", "place", "expected"),
    [
        (("data_parallel", "tensor_parallel"), (2, 2), (1, 1), (2, 1)),
        (("data_parallel", "tensor_parallel"), (1, 4), (0, 3), (1, 0)),
        (("data_parallel", "tensor_parallel"), (4, 1), (3, 0), (4, 3)),
        (("tensor_parallel", "data_parallel"), (4, 1), (3, 0), (1, 0)),
    ],
)
def test_a_mesh_says_which_of_them_do(names, shape, place, expected):
    assert ranks.data_parallel() == (4, 3), "without a mesh every rank"
    mesh = Mesh(names, shape, place)
    assert ranks.data_parallel() == expected
    del mesh


def test_of_several_meshes_the_one_with_the_fewest_groups_counts():
    names = "data_parallel", "tensor_parallel"
    meshes = [Mesh(names, (4, 1), (3, 0)), Mesh(names, (1, 4), (0, 3)), Mesh(names, (2, 2), (1, 1))]
    assert ranks.data_parallel() == (1, 0)
    del meshes[1]
    assert ranks.data_parallel() == (2, 1)


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("data_parallel", "tensor_parallel"), (2, 1)),  # of a part of the job, or of an earlier one
        (("replicate", "shard"), (2, 2)),  # both of them are data parallel
        (None, (2, 2)),
    ],
)
def test_other_meshes_say_nothing(names, shape):
    mesh = Mesh(names, shape, (1, 0))
    assert ranks.data_parallel() == (4, 3)
    del mesh


def test_nothing_is_looked_for_where_there_are_no_groups_or_no_other_process(monkeypatch):
    mesh = Mesh(("data_parallel", "tensor_parallel"), (1, 4), (0, 3))
    monkeypatch.setattr(ranks.gc, "get_objects", lambda: pytest.fail("looked"))
    monkeypatch.setattr(torch.distributed, "get_pg_count", lambda: 1)
    assert ranks.data_parallel() == (4, 3)
    monkeypatch.setattr(torch.distributed, "get_pg_count", lambda: pytest.fail("asked without a job"))
    monkeypatch.setattr(ranks, "world", lambda: (1, 0))
    assert ranks.data_parallel() == (1, 0)
    del mesh


def test_the_ranks_of_a_node_are_those_with_a_place_on_it(monkeypatch):
    here, there = Place(("host", "boot", "0"), "0"), Place(("other", "boot", "1"), "0")
    places = [here, here._replace(local_rank="1"), there, here._replace(local_rank="2")]
    monkeypatch.setattr(ranks, "gathered", lambda place: places)
    assert ranks.ranks_on_node() == 3, "rank 3 is on the first node"
    monkeypatch.setattr(ranks, "world", lambda: (4, 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks.ranks_on_node() == 1, "what is there counts for more than what a launcher says"
