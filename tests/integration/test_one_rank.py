"""Code of the user's that runs on rank 0 alone meets no collective of ours. The runs are those of one_rank_runs.py."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import one_rank_runs
import pytest
import torch
from one_rank_runs import EPOCHS, STEPS

pytestmark = pytest.mark.timeout(200)
# On two ranks: the mean of their numbers, and of the numbers of an epoch's steps.
RIGHT: dict[str, float] = {"rank": 0.5, "rank_step": 0.5, "rank_epoch": 0.5, "mean": sum(range(STEPS)) / STEPS, "val_rank": 0.5}
READS = [f"{name}, {where}" for name in one_rank_runs.echoes() for where in ("ends", "everywhere")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one_rank")
    environment = {name: value for name, value in os.environ.items() if name not in ("PL_GLOBAL_SEED", "LOCAL_RANK")}
    command = [sys.executable, one_rank_runs.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=190, env=environment, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_ran(found: list[dict[str, Any]]) -> None:
    """Both ranks took all steps, and what was logged is right."""
    for rank in found:
        assert rank["steps"] == [STEPS] * EPOCHS
        assert rank["metrics"] == RIGHT


def test_plain_lightning_lets_rank_zero_read_in_every_hook(ranks: list[dict[str, Any]]) -> None:
    assert_ran([rank["plain"] for rank in ranks])
    assert ranks[0]["plain"]["reads"][0] > 2 * STEPS * EPOCHS > ranks[1]["plain"]["reads"][0] == 0


@pytest.mark.parametrize("run", READS)
def test_rank_zero_may_read_metrics_before_between_and_after_ours(ranks: list[dict[str, Any]], run: str) -> None:
    found = [rank["reads"][run] for rank in ranks]
    assert_ran(found)
    often = ranks[0]["plain"]["reads"][0] if run.endswith("everywhere") else EPOCHS
    assert found[0]["reads"] == [often] * 3
    assert found[1]["reads"] == [0] * 3


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_progress_bar_may_stand_before_and_after_ours(ranks: list[dict[str, Any]], place: str) -> None:
    assert_ran([rank["bars"][place] for rank in ranks])


@pytest.mark.parametrize("run", ["puts_itself_first", "model_parallel"])
def test_rank_zero_may_read_metrics(ranks: list[dict[str, Any]], run: str) -> None:
    """A callback that puts itself in front of all others; a strategy with a device mesh."""
    found = [rank[run] for rank in ranks]
    assert_ran(found)
    assert found[0]["reads"][0] >= EPOCHS
