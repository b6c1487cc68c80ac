"""The options of a cache: sizes in the forms that people write, and a clear error for every other one."""

import math

import numpy as np
import pytest

from lightning_echo.cache.kept import CacheConfig, read_cache_config

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500_000_000),
        ("2 TB", 2 * 10**12),
        (" 1048576 B ", 2**20),
        (".5GiB", 2**29),
        (2**20, 2**20),
        (10**10, 10**10),
        (0.5, 2 * GIB),
        (0.999, int(4 * GIB * 0.999)),
    ],
)
def test_a_size_in_bytes(size, expected):
    assert CacheConfig(size).bytes_of(free_bytes=4 * GIB) == expected


@pytest.mark.parametrize("size", ["8 apples", "8", "GiB", "", "-1GiB", "1e3MB", "1,5GiB", "8GiB of it", "nanGiB"])
def test_a_string_that_is_no_size(size):
    with pytest.raises(ValueError, match=r'cache\.size must be a string with a unit such as "8GiB".*, got '):
        CacheConfig(size)


@pytest.mark.parametrize("size", [0.0, 1.0, 1.5, -0.5, math.nan, math.inf])
def test_a_number_that_is_no_share(size):
    with pytest.raises(ValueError, match=r"cache\.size as a share of the free memory must be between 0 and 1, got .*bytes"):
        CacheConfig(size)


@pytest.mark.parametrize("size", [None, True, [1], b"8GiB", 1j])
def test_something_that_is_no_size(size):
    with pytest.raises(TypeError, match=r"cache\.size must be a string with a unit"):
        CacheConfig(size)


def test_a_few_bytes_were_meant_as_gibibytes():
    with pytest.raises(ValueError, match=r'cache\.size=8 is less than one MiB .*did you mean "8GiB"\?'):
        CacheConfig(8)


@pytest.mark.parametrize("size", [0, -5])
def test_no_bytes_or_fewer(size):
    with pytest.raises(ValueError, match="less than one MiB") as refused:
        CacheConfig(size)
    assert "did you mean" not in str(refused.value)


@pytest.mark.parametrize("size", ["1000 B", "0GiB", "0.5MiB"])
def test_a_size_with_a_unit_that_holds_nothing(size):
    with pytest.raises(ValueError, match="is less than one MiB: a cache holds examples"):
        CacheConfig(size)


def test_a_share_of_memory_that_nobody_knows(monkeypatch):
    monkeypatch.setattr("lightning_echo.cache.kept.free_memory_bytes", lambda: None)
    assert CacheConfig("1GiB").bytes_of() == GIB
    with pytest.raises(ValueError, match=r"cache\.size=0\.5 is a share .* give bytes"):
        CacheConfig(0.5).bytes_of()


@pytest.mark.parametrize(
    ("options", "error", "message"),
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
def test_an_impossible_option(options, error, message):
    with pytest.raises(error, match=message):
        CacheConfig("1GiB", **options)


def test_it_is_a_value():
    assert CacheConfig("1GiB", hold="raw") == CacheConfig("1GiB", hold="raw") != CacheConfig("1GiB")
    with pytest.raises(AttributeError):
        CacheConfig("1GiB").size = "2GiB"


class TestForms:
    def test_a_size_alone(self):
        assert read_cache_config("2GiB") == CacheConfig("2GiB")
        assert read_cache_config(0.25) == CacheConfig(0.25)

    def test_options_by_name(self):
        assert read_cache_config({"size": "2GiB", "hold": "raw"}) == CacheConfig("2GiB", hold="raw")

    def test_what_is_one_already_and_none(self):
        config = CacheConfig("2GiB")
        assert read_cache_config(config) is config
        assert read_cache_config(None) is None

    def test_those_of_omegaconf(self):
        omegaconf = pytest.importorskip("omegaconf")
        given = omegaconf.OmegaConf.create({"size": "2GiB", "hold": "loaded", "name": None})
        assert read_cache_config(given) == CacheConfig("2GiB", hold="loaded")

    def test_an_unknown_option_is_named(self):
        with pytest.raises(
            ValueError, match="cache has unknown options sise, hild: known are size, hold, path, name, partitioned"
        ):
            read_cache_config({"sise": "2GiB", "hild": "raw"})

    def test_a_size_is_needed(self):
        with pytest.raises(ValueError, match="cache needs a size"):
            read_cache_config({"hold": "raw"})


@pytest.mark.parametrize(("size", "plain"), [(np.int64(2**30), 2**30), (np.float64(0.5), 0.5)])
def test_numbers_of_numpy_become_plain_ones(size, plain):
    config = CacheConfig(size)
    assert config == CacheConfig(plain)
    assert type(config.size) is type(plain)
