"""Sharing on a Ray cluster of several nodes: a reader for each, or one in all; nodes and readers that are lost; Ray Tune."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from lightning.pytorch import Trainer  # noqa: E402
from ray import tune  # noqa: E402
from ray_runs import Noted, Recording, cluster_of, reads, training  # noqa: E402
from sharing_runs import Numbers, examples, indices, wait_until  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lightning_echo import EchoCallback  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

LENGTH, EPOCHS = 240, 3
SECONDS = 120  # nothing takes so long, unless it hangs
ONE = {"cluster": "ray", "join": "pass", "linger_seconds": 1}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster_of(tmp_path_factory.mktemp("n"), {"a": 2, "b": 2, "c": 1}) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_readers_left_behind(nodes):
    yield
    nodes.end_readers()


def check_exact(found: list[Any], epochs: int = EPOCHS) -> None:
    """Each training has each example once per epoch; all of them in the same order, with the same noise."""
    for training_epochs in found:
        assert len(training_epochs) == epochs
        for epoch in training_epochs:
            assert sorted(indices(epoch)) == list(range(LENGTH))
    first, *others = [[examples(epoch) for epoch in training_epochs] for training_epochs in found]
    assert all(other == first for other in others)


def test_one_node_reads_for_all(nodes, tmp_path):
    data = Noted(LENGTH, tmp_path / "reads")
    started = [
        training(node, data, size, name="one", wait_for=2, **ONE) for node, size in (("a", 8), ("a", 5), ("b", 16), ("b", 7))
    ]
    check_exact(ray.get(started, timeout=SECONDS))
    assert len({node for _, node in reads(tmp_path / "reads")}) == 1
