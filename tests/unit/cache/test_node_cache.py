"""The cache of a node: made as its options say, found by other processes, counted, shared by the ranks that may."""

import os

import pytest

from lightning_echo.cache import arena, node_cache
from lightning_echo.cache.kept import CacheConfig, Contents
from lightning_echo.cache.node_cache import CacheCounts, Identity, NodeCache, Place, nodes_of, place_of_process
from lightning_echo.split.staged import sample_places

MIB = 2**20


def test_counts_are_those_of_the_arena_and_of_all_that_add_lookups():
    cache = NodeCache.make(CacheConfig("1MiB"), "raw", 10)
    assert cache.keys == 10
    assert cache.store().put(3, b"some bytes")
    assert cache.store().arena.put(10, [b"a digest, as workers agree on one: no example"])
    other = NodeCache.attach(cache.address)
    other.add_lookups(2, 5)
    cache.add_lookups(1, 0)
    counts = cache.counts
    assert (counts.examples, counts.hits, counts.misses, counts.is_full) == (1, 3, 5, False)
    assert (counts.hold, counts.size) == ("raw", MIB)
    assert 10 <= counts.bytes < 400
    assert other.counts == counts
    assert other.store().get(3) == b"some bytes"


def test_the_hit_fraction_is_0_before_the_first_lookup():
    assert CacheCounts(0, 0, 0, 0, is_full=False, hold="raw", size=MIB).hit_fraction == 0
    assert CacheCounts(0, 0, 3, 1, is_full=False, hold="raw", size=MIB).hit_fraction == 0.75


def test_a_size_beyond_the_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(node_cache, "free_memory_bytes", lambda: 3 * MIB)
    monkeypatch.setattr(node_cache, "held_in_memory", lambda: 0)  # by caches of other tests
    with pytest.raises(ValueError, match=r"cache\.size='4MiB' is more than the 3 MiB of memory that are free: give less"):
        NodeCache.check(CacheConfig("4MiB"))
    NodeCache.check(CacheConfig("3MiB"))
    monkeypatch.setattr(node_cache, "held_in_memory", lambda: MIB)
    NodeCache.check(CacheConfig("4MiB"))


@pytest.mark.parametrize("free", [100 * MIB, 2**40])
def test_a_fifth_of_the_free_memory_and_at_most_2_gib_stays_free_whoever_adds(monkeypatch, free):
    monkeypatch.setattr(node_cache, "free_memory_bytes", lambda: free)
    step, reserve = 64 * MIB, min(free // 5, 2**31)  # an arena asks for 64 MiB at once
    for fits in (True, False):
        monkeypatch.setattr(arena, "free_memory_bytes", lambda fits=fits: step + reserve - (not fits))
        makers = [NodeCache.make(CacheConfig("1MiB"), "raw", 10) for _ in range(2)]
        for cache in (makers[0], NodeCache.attach(makers[1].address)):
            assert cache.store().put(3, b"some bytes") is fits


def test_on_a_disk_no_file_has_a_name_and_what_is_put_is_found(tmp_path):
    cache = NodeCache.make(CacheConfig("1MiB", path=str(tmp_path)), "raw", 10)
    assert cache.store().put(1, [1, 2.5, "three"])
    assert NodeCache.attach(cache.address).store().get(1) == [1, 2.5, "three"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("path", "size", "writable", "said"),
    [
        ("file", "1MiB", True, r"cache\.path must be a folder on a local disk, but '.*file' is a file"),
        ("nowhere", "1MiB", True, "nowhere' does not exist"),
        ("", 10**6 * 2**30, True, r"cache\.size is 1,000,000 GiB, but only .* GiB are free in cache\.path="),
        ("", "1MiB", False, r"cache\.path='.*' cannot be written by this user"),
    ],
)
def test_a_place_where_no_cache_can_be_is_refused(path, size, writable, said, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda *_: writable)  # a superuser may write everywhere
    with pytest.raises(ValueError, match=said):
        NodeCache.check(CacheConfig(size, path=str(tmp_path / path)))


def test_the_other_ranks_know_the_name(tmp_path):
    contents = Contents("Words of 10", "raw", "read")
    config = CacheConfig("1MiB", path=str(tmp_path), name="train")
    cache, found = NodeCache.make_kept(config, str(tmp_path / "train.cache"), 10, 7, lambda: (contents, {2: "two"}))
    cache.add_lookups(3, 4)
    other = NodeCache.attach(cache.address)
    assert found == contents
    assert (other.store().name, other.hold, other.counts) == ("train", "raw", cache.counts)
    assert (other.counts.examples, other.counts.hits, other.counts.misses) == (1, 3, 4)


HERE, THERE = ("host", "boot", "0"), ("host", "boot", "1")


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        ([(HERE, "0"), (THERE, "0"), (HERE, "1"), (THERE, "1")], [0, 1, 0, 1]),
        ([(HERE, "0"), (HERE, "0"), (HERE, "0")], [0, 1, 2]),
        ([(HERE, None)] * 3, [0, 0, 0]),
        ([(HERE, None), (HERE, "1"), (HERE, "0"), (HERE, "1")], [0, 0, 1, 1]),
    ],
    ids=["by machine", "by a local rank that comes again", "no launcher", "a first process without a local rank"],
)
def test_nodes_are_told_apart_by_machine_number_and_local_rank(places, nodes):
    assert nodes_of([Place(*place) for place in places]) == nodes


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
    assert (place.machine[2], place.local_rank) == (number, local_rank)
    assert place.machine[:2] == place_of_process({}).machine[:2]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100, 10**7])
def test_samples_are_at_most_eight_in_order_from_the_first_to_the_last(count):
    places = sample_places(count)
    assert len(places) == min(count, 8)
    assert sorted(set(places)) == places
    assert not count or (places[0], places[-1]) == (0, count - 1)


def test_data_sets_are_alike_in_class_number_and_samples_and_if_samples_could_be_read():
    mine = Identity("Images", 10, b"same")
    assert mine.is_like(Identity("Images", 10, b"same"))
    others = (Identity("Texts", 10, b"same"), Identity("Images", 11, b"same"), Identity("Images", 10, b"other"))
    for other in (*others, Identity("Images", 10, b"same", "other")):
        assert not mine.is_like(other)
    assert not Identity("Images", 10, None).is_like(Identity("Images", 10, None))
