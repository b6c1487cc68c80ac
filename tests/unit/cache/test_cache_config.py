"""The options of a cache: sizes in the forms that people write, and a clear error for every other one."""

import math

import numpy as np
import pytest
from omegaconf import OmegaConf

from lightning_echo.cache.kept import CacheConfig, read_cache_config

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


@pytest.mark.parametrize(("size", "plain"), [(np.int64(2**30), 2**30), (np.float64(0.5), 0.5)])
def test_numbers_of_numpy_become_plain_ones_and_nothing_can_be_set_later(size, plain):
    config = CacheConfig(size)
    assert config == CacheConfig(plain)
    assert type(config.size) is type(plain)
    with pytest.raises(AttributeError):
        config.size = "2GiB"
