"""One cache per node: two ranks and their workers hold each example once, and two nodes hold their own (cache_ranks_runs.py)."""

import cache_ranks_runs
import node_launch
import pytest
from cache_ranks_runs import EPOCHS, LENGTH, RANKS

pytestmark = pytest.mark.program

NODES = ((0, 1), (2, 3))
EACH = LENGTH // RANKS  # examples of a pass on a rank
# What the workers of a node had prepared when the last batch was taken, and nobody took, is held as well or is not: it depends on
# the clock. Two batches of a rank at most, and one under way.
READ_AHEAD = len(NODES[0]) * 3 * 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return node_launch.once(
        tmp_path_factory, "cache_ranks", lambda folder: node_launch.side_by_side(RANKS, folder, cache_ranks_runs.__file__)
    )


def of(ranks, scenario, name):
    return [rank[f"scenario_{scenario}"][name] for rank in ranks]


@pytest.mark.parametrize("scenario", ["same_data", "echoed_and_short_of_memory"])
def test_every_rank_sees_what_it_sees_without_a_cache(ranks, scenario):
    for seen, plain in zip(of(ranks, scenario, "seen"), of(ranks, scenario, "plain"), strict=True):
        assert len(seen) == EPOCHS * EACH
        assert seen == plain


def test_the_ranks_of_a_node_hold_each_example_once_and_the_other_node_holds_its_own(ranks):
    seen, counts = of(ranks, "same_data", "seen"), of(ranks, "same_data", "counts")
    for node in NODES:
        distinct = {int(example[0]) for rank in node for example in seen[rank]}
        examples, held_bytes, _, _ = counts[node[0]]
        assert counts[node[1]] == counts[node[0]], "both ranks look at the same cache"
        assert len(distinct) < LENGTH, "so that the two nodes hold different examples"
        assert len(distinct) <= examples <= min(LENGTH, len(distinct) + READ_AHEAD)
        assert examples * 4000 < held_bytes < examples * 4400 or examples * 1000 < held_bytes < examples * 1300


@pytest.mark.parametrize("scenario", ["same_data", "echoed_and_short_of_memory"])
def test_hits_and_misses_are_the_fresh_examples_of_the_node(ranks, scenario):
    counts, fresh = of(ranks, scenario, "counts"), of(ranks, scenario, "fresh")
    for node in NODES:
        _, _, hits, misses = counts[node[0]]
        assert hits + misses == sum(fresh[rank] for rank in node)
        assert hits > 0


def test_ranks_with_data_of_their_own_never_get_each_others_examples(ranks):
    seen, counts = of(ranks, "data_of_each_rank", "seen"), of(ranks, "data_of_each_rank", "counts")
    said, fresh = of(ranks, "data_of_each_rank", "said"), of(ranks, "data_of_each_rank", "fresh")
    for rank in range(RANKS):
        assert {int(example[0]) - 10 * rank for example in seen[rank]} <= set(range(LENGTH))
        plain = of(ranks, "same_data", "plain")[rank]
        assert [[number - 10 * rank for number in example[:1]] for example in seen[rank]] == [example[:1] for example in plain]
        assert sum(counts[rank][2:]) == fresh[rank], "each counts for itself"
        own = [
            f"lightning_echo: rank {rank} has a cache of its own: its data set is another one than that of the ranks before it "
            f"(dataset.offset: 0 and {10 * rank}; cache.ignore leaves out what decides no example)"
        ]
        assert said[rank] == (own if rank % 2 else [])


def test_ranks_that_have_read_different_examples_of_the_same_data_share_its_cache(ranks):
    assert of(ranks, "each_rank_has_read_others", "said") == [[]] * RANKS
    seen, counts = of(ranks, "same_data", "seen"), of(ranks, "each_rank_has_read_others", "counts")
    for node in NODES:
        distinct = {int(example[0]) for rank in node for example in seen[rank]}
        assert counts[node[0]] == counts[node[1]], "both ranks look at the same cache"
        assert len(distinct) <= counts[node[0]][0] <= min(LENGTH, len(distinct) + READ_AHEAD)


def test_a_reload_keeps_what_is_held_of_the_same_data_and_nothing_of_other_data(ranks):
    for rank in range(RANKS):
        reload = ranks[rank]["scenario_reload"]
        assert reload["same"] >= reload["held"] > 0
        assert {int(example[0]) - 1 for example in reload["seen"]} <= set(range(LENGTH))
        assert sorted(example[0] for example in reload["seen"]) != sorted(
            example[0] for example in of(ranks, "same_data", "plain")[rank][: len(reload["seen"])]
        )
        assert any("the data set has changed (dataset.offset: 0 and 1; cache.ignore leaves" in each for each in reload["said"])


def test_a_rank_that_cannot_make_the_cache_leaves_no_other_rank_waiting(ranks):
    errors = [rank["scenario_first_rank_fails"] for rank in ranks]
    assert errors[2] == "ValueError: no memory here"
    assert {errors[rank] for rank in (0, 1, 3)} == {"RuntimeError: rank 2 could not make its cache: no memory here"}


def test_the_ranks_of_a_node_have_a_kept_file_together_and_the_next_job_has_no_miss(ranks):
    for node in NODES:
        (first, second), (other, other_of_second) = (ranks[rank]["scenario_kept"] for rank in node)
        assert first == other, "both ranks look at the same cache"
        assert second == other_of_second
        assert first[2] + first[3] == second[2] == 2 * EACH
        assert second[3] == 0
        # The file holds what the second job finds, and what the workers of either have read ahead of the next pass by then.
        assert 2 * EACH <= first[0] <= second[0] <= 2 * EACH + 8 + READ_AHEAD, "eight of the proof"
        assert all(examples * 4000 < held_bytes < examples * 4400 for examples, held_bytes, _, _ in (first, second))
