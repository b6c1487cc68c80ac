"""Which ranks share a cache: by machine, node and local rank, and by the data set."""

import pytest
import torch

from lightning_echo.cache.node_cache import Identity, Place, nodes_of, place_of_process
from lightning_echo.cache.record import digest_of
from lightning_echo.split.staged import sample_places

HERE, THERE = ("host", "boot", "0"), ("host", "boot", "1")


class TestNodes:
    def test_are_told_apart_by_machine_and_number(self):
        assert nodes_of([Place(HERE, "0"), Place(THERE, "0"), Place(HERE, "1"), Place(THERE, "1")]) == [0, 1, 0, 1]

    def test_are_told_apart_by_a_local_rank_that_comes_again(self):
        assert nodes_of([Place(HERE, "0"), Place(HERE, "0"), Place(HERE, "0")]) == [0, 1, 2]

    def test_are_one_where_no_launcher_says_a_local_rank(self):
        assert nodes_of([Place(HERE, None)] * 3) == [0, 0, 0]

    def test_count_a_first_process_without_a_local_rank_as_number_0(self):
        assert nodes_of([Place(HERE, None), Place(HERE, "1"), Place(HERE, "0"), Place(HERE, "1")]) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("environment", "number", "local_rank"),
    [
        ({}, "0", None),
        ({"LOCAL_RANK": "1", "GROUP_RANK": "3"}, "3", "1"),
        ({"LOCAL_RANK": "0", "NODE_RANK": "2"}, "2", "0"),
        ({"SLURM_NODEID": "4"}, "4", None),
        ({"GROUP_RANK": "1", "NODE_RANK": "2"}, "1", None),
    ],
)
def test_a_process_says_where_it_runs_by_what_its_launcher_has_set(environment, number, local_rank):
    place = place_of_process(environment)
    assert place.machine[2] == number
    assert place.local_rank == local_rank
    assert place.machine[:2] == place_of_process({}).machine[:2]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100, 10**7])
def test_samples_are_at_most_eight_in_order_from_the_first_to_the_last(count):
    places = sample_places(count)
    assert len(places) == min(count, 8)
    assert sorted(set(places)) == places
    if count:
        assert (places[0], places[-1]) == (0, count - 1)


def test_a_digest_changes_with_any_byte_and_with_the_order():
    one, other = {"image": torch.zeros(5), "id": 1}, {"image": torch.zeros(5), "id": 2}
    assert digest_of([one, other]) == digest_of([{"image": torch.zeros(5), "id": 1}, other])
    assert len({digest_of([one]), digest_of([other]), digest_of([one, other]), digest_of([other, one])}) == 4


def test_data_sets_are_alike_in_class_number_and_samples_and_if_samples_could_be_read():
    mine = Identity("Images", 10, b"same")
    assert mine.is_like(Identity("Images", 10, b"same"))
    others = (Identity("Texts", 10, b"same"), Identity("Images", 11, b"same"), Identity("Images", 10, b"other"))
    for other in (*others, Identity("Images", 10, b"same", "other")):
        assert not mine.is_like(other)
    assert not Identity("Images", 10, None).is_like(Identity("Images", 10, None))
