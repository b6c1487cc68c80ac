"""Ranks that share the work on the same data get the same batches. The runs are those of tensor_parallel_runs.py."""

from __future__ import annotations

from typing import Any

import node_launch
import pytest
import tensor_parallel_runs
from trainer_runs import fresh_stream


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks saw."""
    return node_launch.with_ranks(2, tmp_path_factory.mktemp("tensor_parallel"), tensor_parallel_runs.__file__)[1]


def indices(run: Any) -> list[tuple[int, ...]]:
    return [batch[0] for batch in run["batches"]]


def test_lightning_gives_both_ranks_the_same_examples(ranks: Any) -> None:
    plain = [rank["scenario_plain"] for rank in ranks]
    assert [run["share"] for run in plain] == [{"num_replicas": 1, "rank": 0}] * 2
    assert indices(plain[0]) == indices(plain[1])
    assert len(plain[0]["batches"]) == 2 * 6


@pytest.mark.parametrize("name", ["module", "callback", "bare_with_ranks"])
def test_echoed_too_both_ranks_get_the_same_batches_the_noise_included(ranks: Any, name: str) -> None:
    first, second = (rank[f"scenario_{name}"]["batches"] for rank in ranks)
    assert first == second
    assert len(first) == 2 * 6
    assert len({index for batch in first for index in batch[0]}) == 22


def test_a_bare_loader_does_not_deal_its_data_out_to_them(ranks: Any) -> None:
    for rank in ranks:
        assert (
            "would divide its data among 2 ranks, but the data-parallel dimension of the job's device mesh has 1"
            in rank["scenario_bare"]
        )
        assert "EchoLoader(..., num_replicas=1, rank=0) on this rank" in rank["scenario_bare"]


def test_with_as_many_data_parallel_ranks_as_there_are_a_bare_loader_deals_out_as_ever(ranks: Any) -> None:
    first, second = (rank["scenario_bare_without_tensor_parallelism"] for rank in ranks)
    assert (first["share"], second["share"]) == ({"num_replicas": 2, "rank": 0}, {"num_replicas": 2, "rank": 1})
    assert [len(batch) for batch in indices(first)] == [4, 4, 3] * 2
    # In the first pass: from the next one on, a rank may get what the other one had.
    mine, others = (set(fresh_stream(run["batches"])[:11]) for run in (first, second))
    assert (len(mine), len(others), mine & others) == (11, 11, set())
    assert {number for run in (first,) for batch in run["batches"] for noise in batch[1] for number in noise}.isdisjoint(
        {number for batch in second["batches"] for noise in batch[1] for number in noise}
    )
