"""Code of the user's that runs on rank 0 alone meets no collective of ours. The runs are those of one_rank_runs.py."""

from __future__ import annotations

from typing import Any

import node_launch
import one_rank_runs
import pytest
from one_rank_runs import EPOCHS, STEPS

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
# On two ranks: the mean of their numbers, and of the numbers of an epoch's steps.
RIGHT: dict[str, float] = {"rank": 0.5, "rank_step": 0.5, "rank_epoch": 0.5, "mean": sum(range(STEPS)) / STEPS, "val_rank": 0.5}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return node_launch.once(
        tmp_path_factory, "one_rank", lambda folder: node_launch.with_ranks(2, folder, one_rank_runs.__file__)[1]
    )


def assert_ran(found: list[dict[str, Any]]) -> None:
    """Both ranks took all steps, and what was logged is right."""
    for rank in found:
        assert rank["steps"] == [STEPS] * EPOCHS
        assert rank["metrics"] == RIGHT


def test_plain_lightning_lets_rank_zero_read_in_every_hook(ranks: list[dict[str, Any]]) -> None:
    assert_ran([rank["plain"] for rank in ranks])
    assert ranks[0]["plain"]["reads"][0] > 2 * STEPS * EPOCHS > ranks[1]["plain"]["reads"][0] == 0


@pytest.mark.parametrize("run", one_rank_runs.echoes())
def test_rank_zero_may_read_metrics_before_between_and_after_ours(ranks: list[dict[str, Any]], run: str) -> None:
    found = [rank["reads"][run] for rank in ranks]
    assert_ran(found)
    assert found[0]["reads"] == [ranks[0]["plain"]["reads"][0]] * 3
    assert found[1]["reads"] == [0] * 3


def test_a_progress_bar_may_stand_after_ours(ranks: list[dict[str, Any]]) -> None:
    assert_ran([rank["bars"] for rank in ranks])


@pytest.mark.parametrize("run", ["puts_itself_first", "model_parallel"])
def test_rank_zero_may_read_metrics(ranks: list[dict[str, Any]], run: str) -> None:
    """A callback that puts itself in front of all others; a strategy with a device mesh."""
    found = [rank[run] for rank in ranks]
    assert_ran(found)
    assert found[0]["reads"][0] >= EPOCHS
