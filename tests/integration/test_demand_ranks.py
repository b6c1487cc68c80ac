"""Two ranks that read at different speeds echo on demand, and resume, as two, three and one (demand_ranks_runs.py).

What a rank must have delivered follows from its place in a state, by the order in which ranks share a pass. What it has delivered
is seen by the training: an example that no batch had before.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import demand_ranks_runs
import node_launch
import pytest
import torch
from demand_ranks_runs import AFTER, BEFORE, LENGTH, Shuffles

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def run(folder: Path) -> Path:
        for ranks in (2, 3):
            node_launch.torchrun(1, ranks, demand_ranks_runs.__file__, folder)
        return folder

    return node_launch.once(tmp_path_factory, "demand_ranks", run)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"ranks-2-rank-{rank}.pt", weights_only=True) for rank in range(2)]


def fresh(*runs: list[Any]) -> list[int]:
    """The indices of the fresh examples of runs, each of which began with an empty memory."""
    found = []
    for batches in runs:
        seen: set[int] = set()
        for batch in batches:
            assert len({index for index, _ in batch}) == len(batch), "an index is twice in a batch"
            found += [index for index, token in batch if token not in seen]
            seen |= {token for _, token in batch}
    return found


def users_order(passes: int) -> list[list[int]]:
    sampler = Shuffles()
    return [list(sampler) for _ in range(passes)]


def booked(place: list[Any]) -> list[int]:
    """The positions that a place says were delivered."""
    _, frontier, ahead, _, _ = place
    return [*range(frontier), *(position for first, size in ahead for position in range(first, first + size))]


def users_indices(place: list[Any], rank: int, ranks: int = 2) -> Counter[int]:
    """What a rank has delivered at a place, if `Shuffles` is dealt out slot by slot."""
    each, positions = LENGTH // ranks, booked(place)
    order = users_order(max(positions) // each + 1)
    return Counter(order[position // each][position % each * ranks + rank] for position in positions)


def test_a_state_has_the_places_of_all_ranks_and_is_the_same_whichever_saves_it(two: Any) -> None:
    one, other = (rank["whole"]["state"]["demand"]["ranks"] for rank in two)
    assert one == other
    for rank, place in enumerate(one):
        number, *_, fresh_count, echoed = place
        assert (number, fresh_count + echoed) == (BEFORE, sum(map(len, two[rank]["whole"]["batches"])))
        assert [fresh_count, echoed] == two[rank]["whole"]["counts"]
        assert Counter(fresh(two[rank]["whole"]["batches"])) == users_indices(place, rank)


def test_the_slow_rank_echoes_and_the_steps_stay_equal(two: Any) -> None:
    quick, slow = (rank["whole"]["counts"] for rank in two)
    assert sum(quick) == sum(slow)
    assert slow[0] < 0.8 * quick[0]
    assert slow[1] > 0.2 * sum(slow)


def test_nothing_is_lost_and_nothing_comes_twice_in_a_pass_when_a_run_resumes(two: Any) -> None:
    for rank, found in enumerate(two):
        place = found["resumed"]["state"]["demand"]["ranks"][rank]
        delivered = fresh(found["whole"]["batches"], found["resumed"]["batches"])
        assert place[0] == BEFORE + AFTER
        assert Counter(delivered) == users_indices(place, rank)
        assert found["resumed"]["counts"] == place[3:]
        assert place[3] == len(delivered)
        assert found["resumed"]["said"] == []


def test_a_training_that_is_killed_resumes_from_the_checkpoint_of_rank_0(two: Any) -> None:
    """Without a shuffle, so that a rank has the same examples in each pass."""
    each = LENGTH // 2
    for rank, found in enumerate(two):
        killed, again = found["killed"], found["resumed by the Trainer"]
        assert killed["died"]
        assert [len(killed["batches"]), len(again["batches"])] == [BEFORE, AFTER]
        place = again["state"]["demand"]["ranks"][rank]
        delivered = Counter(fresh(killed["batches"], again["batches"]))
        assert delivered == Counter(position % each * 2 + rank for position in booked(place))
        assert max(delivered.values()) - min(delivered.values()) <= 1
        assert place[3:] == again["state"]["counts"][:2]
        assert [each for each in again["said"] if "place" in each] == []
        assert again["report"] == [sum(place[at] for place in again["state"]["demand"]["ranks"]) for at in (3, 4)]


def test_a_rank_that_saves_alone_knows_the_places_of_all_at_once(two: Any) -> None:
    for found in two:
        assert found["alone"]["state"]["demand"]["ranks"] == found["whole"]["state"]["demand"]["ranks"]
        assert found["alone"]["seconds"] < 1
        assert found["alone"]["said"] == []


def test_a_rank_that_has_not_come_so_far_is_said_to_be_unknown_and_reads_again(two: Any) -> None:
    ahead, other = two[0]["ahead"], two[1]
    places = ahead["state"]["demand"]["ranks"]
    assert ahead["seconds"] < 8
    assert len(ahead["said"]) == 1
    assert f"rank 1 (known after batch {BEFORE}) is not known after batch {BEFORE + 5}" in ahead["said"][0]
    assert [places[0][0], places[1]] == [BEFORE + 5, other["whole"]["state"]["demand"]["ranks"][1]]
    batches = [[*two[0]["whole"]["batches"], *ahead["batches"]], other["whole"]["batches"]]
    for rank, before in enumerate(batches):
        found = two[rank]["resumed from ahead"]
        place = found["state"]["demand"]["ranks"][rank]
        assert Counter(fresh(before, found["batches"])) == users_indices(place, rank)
    said = [message for message in two[0]["resumed from ahead"]["said"] if "read again" in message]
    assert len(said) == 1
    assert f"rank 1 (known after batch {BEFORE})" in said[0]


def test_three_ranks_and_then_one_continue_with_what_no_rank_had_delivered(two: Any, folder: Path) -> None:
    three = [torch.load(folder / f"ranks-3-rank-{rank}.pt", weights_only=True)["resumed"] for rank in range(3)]
    assert all(len(found["batches"]) == AFTER for found in three)
    assert "leaves nothing out" in "".join(three[0]["said"])
    one = demand_ranks_runs.loader(0.0)
    one.load_state_dict(torch.load(folder / "of-three.pt", weights_only=True))
    with pytest.warns(UserWarning, match="leaves nothing out"):
        last = demand_ranks_runs.train(one, 1)
    earlier = one.state_dict()["demand"]["earlier"]
    ends = [sum(place[2][-1]) if place[2] else place[1] for _, _, places in earlier for place in places]
    passes = max(ends) // (LENGTH // 3) + 1
    while (place := one.state_dict()["demand"])["frontier"] < passes * LENGTH:
        last += demand_ranks_runs.train(one, 1)
    one.close()
    runs = [
        *(found[name]["batches"] for found in two for name in ("whole", "resumed")),
        *(found["batches"] for found in three),
        last,
    ]
    delivered = [0, place["frontier"], place["ahead"], 0, 0]
    assert Counter(fresh(*runs)) == users_indices(delivered, 0, ranks=1)
