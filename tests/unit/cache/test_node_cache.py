"""The cache of a node: made as its options say, found by other processes, counted."""

import os
import subprocess
import sys

import pytest

from lightning_echo.cache import arena, node_cache
from lightning_echo.cache.arena import ArenaAddress
from lightning_echo.cache.kept import CacheConfig, Contents
from lightning_echo.cache.node_cache import CacheCounts, NodeCache

MIB = 2**20


def test_counts_are_those_of_the_arena_and_of_all_that_add_lookups():
    cache = NodeCache.make(CacheConfig("1MiB"), "raw", 10)
    assert cache.store().put(3, b"some bytes")
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


def test_keys_are_those_of_the_data_set():
    assert NodeCache.make(CacheConfig("1MiB"), "raw", 10).keys == 10


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


class TestOnADisk:
    def test_no_file_has_a_name_and_what_is_put_is_found(self, tmp_path):
        cache = NodeCache.make(CacheConfig("1MiB", path=str(tmp_path)), "raw", 10)
        assert cache.store().put(1, [1, 2.5, "three"])
        assert NodeCache.attach(cache.address).store().get(1) == [1, 2.5, "three"]
        assert not list(tmp_path.iterdir())

    def test_a_path_that_is_a_file_or_is_not_there_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(ValueError, match=r"cache\.path must be a folder on a local disk, but '.*file' is a file"):
            NodeCache.check(CacheConfig("1MiB", path=str(tmp_path / "file")))
        with pytest.raises(ValueError, match="nowhere' does not exist"):
            NodeCache.check(CacheConfig("1MiB", path=str(tmp_path / "nowhere")))

    def test_more_than_is_free_on_the_disk_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"cache\.size is 1,000,000 GiB, but only .* GiB are free in cache\.path="):
            NodeCache.check(CacheConfig(10**6 * 2**30, path=str(tmp_path)))

    def test_a_folder_that_cannot_be_written_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may write everywhere
        with pytest.raises(ValueError, match=r"cache\.path='.*' cannot be written by this user"):
            NodeCache.check(CacheConfig("1MiB", path=str(tmp_path)))


def test_what_the_workers_have_agreed_on_is_no_example():
    cache = NodeCache.make(CacheConfig("1MiB"), "raw", 10)
    store = cache.store()
    store.arena.put(10, [b"a digest"])
    assert cache.counts.examples == 0
    store.put(3, "an example")
    assert cache.counts.examples == 1


def test_the_other_ranks_know_the_name(tmp_path):
    contents = Contents("Words of 10", "raw", "read")
    config = CacheConfig("1MiB", path=str(tmp_path), name="train")
    cache, found = NodeCache.make_kept(config, str(tmp_path / "train.cache"), 10, 7, lambda: (contents, {2: "two"}))
    cache.add_lookups(3, 4)
    other = NodeCache.attach(cache.address)
    assert found == contents
    assert (other.store().name, other.hold, other.counts) == ("train", "raw", cache.counts)
    assert (other.counts.examples, other.counts.hits, other.counts.misses) == (1, 3, 4)


def test_a_process_that_is_gone_cannot_be_attached_to():
    program = (
        "from lightning_echo.cache.kept import CacheConfig\n"
        "from lightning_echo.cache.node_cache import NodeCache\n"
        "address = NodeCache.make(CacheConfig('1MiB'), 'raw', 10).address\n"
        "print(address.arena.pid, address.arena.fd)"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
    arena = ArenaAddress(*map(int, told.split()[-2:]), b"")
    with pytest.raises(FileNotFoundError):
        NodeCache.attach(node_cache.Address("raw", arena, arena))
