"""The options of a cache, and the cache of a node: made as they say, found by other processes, shared by the ranks that may."""

import math
import os
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lightning_echo.cache import arena, node_cache
from lightning_echo.cache.exchange import Part, reason_against
from lightning_echo.cache.kept import CacheConfig, read_cache_config
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.node_cache import Identity, NodeCache, Place, nodes_of, place_of_process
from lightning_echo.data.elsewhere import NotRead

MIB = 2**20


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


def test_data_sets_are_alike_in_class_number_and_samples_and_if_samples_could_be_read():
    mine = Identity("Images", 10, b"same")
    assert mine.is_like(Identity("Images", 10, b"same"))
    others = (Identity("Texts", 10, b"same"), Identity("Images", 11, b"same"), Identity("Images", 10, b"other"))
    for other in (*others, Identity("Images", 10, b"same", "other")):
        assert not mine.is_like(other)
    assert not Identity("Images", 10, None).is_like(Identity("Images", 10, None))


GIB = 2**30


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *[("8GiB", 8 * GIB), ("8 gib", 8 * GIB), ("1.5 GiB", 3 * 2**29), (".5GiB", 2**29), ("500MB", 500_000_000)],
        *[("2 TB", 2 * 10**12), (" 1048576 B ", 2**20), (2**20, 2**20), (10**10, 10**10)],
        *[(0.5, 2 * GIB), (0.999, int(4 * GIB * 0.999))],
    ],
)
def test_a_size_in_bytes(size, expected):
    assert CacheConfig(size).bytes_of(free_bytes=4 * GIB) == expected


UNIT = r'cache\.size must be a string with a unit such as "8GiB".*, got '
BETWEEN = r"cache\.size as a share of the free memory must be between 0 and 1, got .*bytes"
BAD_SIZES = [
    *((size, ValueError, UNIT) for size in ("8 apples", "8", "GiB", "", "-1GiB", "1e3MB", "1,5GiB", "8GiB of it", "nanGiB")),
    *((size, ValueError, BETWEEN) for size in (0.0, 1.0, 1.5, -0.5, math.nan, math.inf)),
    *((size, TypeError, UNIT) for size in (None, True, [1], b"8GiB", 1j)),
    *((size, ValueError, "is less than one MiB: a cache holds examples$") for size in ("1000 B", "0GiB", "0.5MiB")),
    *((size, ValueError, r"is less than one MiB \(an integer is a number of bytes\)$") for size in (0, -5)),
    (8, ValueError, r'cache\.size=8 is less than one MiB .*did you mean "8GiB"\?'),
]


@pytest.mark.parametrize(("size", "error", "said"), BAD_SIZES, ids=[repr(row[0]) for row in BAD_SIZES])
def test_an_impossible_size(size, error, said):
    with pytest.raises(error, match=said):
        CacheConfig(size)


def test_a_share_of_memory_that_nobody_knows(monkeypatch):
    monkeypatch.setattr("lightning_echo.cache.kept.free_memory_bytes", lambda: None)
    assert CacheConfig("1GiB").bytes_of() == GIB
    with pytest.raises(ValueError, match=r"cache\.size=0\.5 is a share .* give bytes"):
        CacheConfig(0.5).bytes_of()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"hold": "decoded"}, ValueError, r"cache\.hold must be one of 'auto', 'raw', 'loaded', 'whole', got 'decoded'"),
        ({"path": 7}, TypeError, r"cache\.path must be a string or None, got 7"),
        ({"path": ""}, TypeError, r"cache\.path must be a string or None, got ''"),
        ({"name": "train"}, ValueError, r"cache\.name='train' needs a folder on a local disk: give cache\.path"),
        ({"name": "../train", "path": "/d"}, ValueError, r"cache\.name must be 1 to 64 letters.*got '\.\./train'"),
        ({"name": ".train", "path": "/d"}, ValueError, r"cache\.name must be .*not beginning with '\.'"),
        ({"name": "a" * 65, "path": "/d"}, ValueError, r"cache\.name must be 1 to 64"),
        ({"ignore": "log_dir"}, TypeError, r"cache\.ignore must be names of attributes, such as \[\"log_dir\"\], got 'log_dir'"),
        ({"ignore": [3]}, TypeError, r"cache\.ignore must be names"),
        ({"partitioned": 1}, TypeError, r"cache\.partitioned must be True or False, got 1"),
        ({"partitioned": True, "name": "a", "path": "/d"}, ValueError, r"cache\.partitioned=True and cache\.name='a' exclude"),
    ],
)
def test_an_impossible_option(options, error, said):
    with pytest.raises(error, match=said):
        CacheConfig("1GiB", **options)


CONFIG = CacheConfig("2GiB", hold="raw")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2GiB", CacheConfig("2GiB")),
        (0.25, CacheConfig(0.25)),
        ({"size": "2GiB", "hold": "raw"}, CONFIG),
        (OmegaConf.create({"size": "2GiB", "hold": "raw", "name": None}), CONFIG),
        (CONFIG, CONFIG),
        (None, None),
    ],
)
def test_the_forms_in_which_it_may_be_given(given, expected):
    assert read_cache_config(given) == expected != CacheConfig("1GiB")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hold": "raw"}, "cache needs a size"),
        ({"sise": "2GiB", "hild": "raw"}, "cache has unknown options sise, hild: known are size, hold, path, name, partitioned"),
    ],
)
def test_unknown_options_and_no_size(given, said):
    with pytest.raises(ValueError, match=said):
        read_cache_config(given)


def test_nodes_whose_examples_could_not_be_read_are_not_joined_and_it_says_why():
    parts = [Part(2, share, 1, 4, 2) for share in (0, 1)]
    read, unread = (
        Identity("Images", 10, b"same"),
        Identity("Images", 10, None, why_no_samples="its examples could not be read"),
    )
    assert reason_against(parts, [read, read], ["", ""]) == ""
    expected = "the data sets of the ranks cannot be compared, since on rank 1 its examples could not be read"
    assert reason_against(parts, [read, unread], ["", ""]) == expected


def test_what_kept_examples_from_being_read_is_known_of_a_data_set():
    made_from = SimpleNamespace(fingerprint=lambda: SimpleNamespace(digest=lambda: "made"))
    cache = SimpleNamespace(
        _holds={"loaded": None},
        _made_from=lambda hold: made_from,
        _differs_in_workers=False,
        _indices=range(4),
        _read=lambda hold, indices: NotRead("its process has died"),
        _dataset=[],
    )
    identity, _ = LoaderCache._identity(cache, 4)
    assert (identity.samples, identity.why_no_samples) == (None, "its examples could not be read: its process has died")
    cache._differs_in_workers = True
    assert "a worker_init_fn may change them" in LoaderCache._identity(cache, 4)[0].why_no_samples
