"""A rank is killed, torchrun starts all of them anew, and the job goes on as if nothing had happened (elastic_runs.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import elastic_runs
import node_launch
import pytest
import torch
from elastic_runs import DIES_AT, EVERY

pytestmark = pytest.mark.program


@pytest.mark.parametrize(("nodes", "devices", "dies"), [(2, 2, 0)], ids=["two nodes, the rank that saves"])
def test_after_a_rank_is_killed_the_job_goes_on_from_its_last_checkpoint_bit_by_bit(
    tmp_path: Path, nodes: int, devices: int, dies: int
) -> None:
    node_launch.torchrun(nodes, devices, elastic_runs.__file__, tmp_path, nodes, devices, dies, restarts=1)
    assert (tmp_path / "died").exists()
    for rank in range(nodes * devices):
        whole, restarted = (_of(tmp_path, name, rank) for name in ("whole", "restarted"))
        saved = DIES_AT // EVERY * EVERY  # steps
        assert len(whole["batches"]) > saved + 10
        assert restarted["batches"] == whole["batches"][saved:]
        assert restarted["weights"] == whole["weights"]
        assert restarted["fresh"] == whole["fresh"]
        for before, after in zip(whole["reports"], restarted["reports"], strict=True):
            for name in ("epoch", "factor", "fresh_examples", "echoed_examples", "passes", "next_factor", "message"):
                assert before[name] == after[name], name


def _of(folder: Path, name: str, rank: int) -> Any:
    return torch.load(folder / f"{name}-rank-{rank}.pt", weights_only=True)
