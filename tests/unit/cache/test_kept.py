"""A cache under a name is found again by the next job, refused where it is that of something else, and shared by jobs."""

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from word_data import WORDS, OtherWords, Words

from lightning_echo import StagedDataset
from lightning_echo.cache import kept
from lightning_echo.cache.arena import Arena, ArenaError
from lightning_echo.cache.kept import CacheConfig, Contents, file_of, open_kept
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.reads import StaleCacheError
from lightning_echo.data.fingerprint import Fingerprint
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import uncut_stages

MIB = 2**20
MADE_FROM = Fingerprint({"dataset": "Words"}, {})
CONTENTS = Contents("Words of 20", "loaded", "load, Resize")


@pytest.fixture
def config(tmp_path):
    return CacheConfig("1MiB", path=str(tmp_path), name="train")


def path_of(config):
    return file_of(config, "loaded", MADE_FROM)


def the_file(config):
    (name,) = os.listdir(config.path)
    return os.path.join(config.path, name)


class TestContents:
    def test_are_written_and_read(self):
        contents = Contents.of([("Images", 1000), ("ÄÖ", 2)], "raw", "read")
        assert contents == ("Images of 1,000, ÄÖ of 2", "raw", "read")
        assert Contents.from_bytes(contents.to_bytes()) == contents

    @pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"hold": "raw"}', b"\xff"])
    def test_of_something_else_are_refused(self, data):
        with pytest.raises(ArenaError, match="another version: remove it"):
            Contents.from_bytes(data)

    def test_of_very_many_data_sets_fit_into_a_file_and_tell_them_apart(self):
        many = [(f"Größe{number}", number) for number in range(10_000)]
        one = Contents.of(many, "raw", "ü" * 10**6)
        other = Contents.of([*many[:-1], ("Größe9999", 1)], "raw", "ü" * 10**6)
        assert len(one.to_bytes()) < 2500
        assert one.what == other.what
        assert one.data_sets != other.data_sets
        assert Contents.from_bytes(one.to_bytes()) == one

    def test_say_in_which_way_they_differ(self):
        assert CONTENTS.difference(CONTENTS) == ""
        assert CONTENTS.difference(CONTENTS._replace(data_sets="Words of 19")) == (
            "it was made of [Words of 20], and the data set here is [Words of 19]"
        )
        assert CONTENTS.difference(CONTENTS._replace(what="load, CenterCrop")) == (
            "it holds [load, Resize] (loaded), and here [load, CenterCrop] (loaded) would be held"
        )
        assert CONTENTS.difference(CONTENTS._replace(hold="raw"))


class TestTheFile:
    def test_is_made_with_a_few_examples_and_found_again(self, config, tmp_path):
        arena, contents = open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {3: "three", 19: "nineteen"}))
        assert (contents, arena.keys, arena.budget_bytes, arena.counts.records) == (CONTENTS, 21, MIB, 2)
        del arena
        assert os.listdir(tmp_path) == [f"train-loaded-{MADE_FROM.digest()}.cache"]
        arena, contents = open_kept(config, path_of(config), 21, 0, lambda: pytest.fail("it is there"))
        assert (contents, arena.counts.records) == (CONTENTS, 2)

    def test_examples_of_other_types_are_refused_and_nothing_is_left(self, config, tmp_path):
        with pytest.raises(TypeError, match=r"of type object cannot be kept under the name 'train'.*Leave cache\.name out"):
            open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {3: object()}))
        assert os.listdir(tmp_path) == []

    def test_of_another_job_that_was_quicker_is_taken(self, config):
        theirs = CONTENTS._replace(data_sets="theirs")

        def begin():
            self.arena = Arena.create_file(path_of(config), 21, MIB, theirs.to_bytes())
            return CONTENTS, {}

        arena, contents = open_kept(config, path_of(config), 21, 0, begin)
        assert contents == theirs
        assert arena._file is self.arena._file

    def test_that_comes_and_goes_is_given_up(self, config, monkeypatch):
        def exists(*args):
            raise FileExistsError

        monkeypatch.setattr(kept.Arena, "create_file", exists)
        with pytest.raises(ValueError, match="is repeatedly created and deleted by another process"):
            open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {}))

    def test_that_is_damaged_is_refused_with_its_path(self, config):
        with open(path_of(config), "wb") as file:
            file.write(b"something else")
        with pytest.raises(
            ValueError, match=r"cache\.name='train' cannot be used: .* not a cache of lightning_echo.*train-loaded-\w+\.cache"
        ):
            open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {}))

    def test_that_cannot_be_made_is_refused(self, config, monkeypatch):
        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kept.Arena, "create_file", full)
        with pytest.raises(ValueError, match=r"cache\.name='train' cannot be used: .*No space left"):
            open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {}))


class SometimesNoise(Words):
    """Every third example draws where it should not."""

    def load(self, index):
        return f"{self.words[index]}{torch.rand(()).item() if index % 3 == 2 else ''}"


def cache_of(dataset, config, indices=None):
    return LoaderCache(config, dataset, indices, None, uncut_stages, differs_in_workers=False)


def describe_of(dataset, config):
    cache = cache_of(dataset, config)
    cache.open()
    return cache.describe()


class InFile(Words):
    def __init__(self, path):
        super().__init__(WORDS)
        self.path = path

    def load(self, index):
        return self.path.read_text()


def fill(config, dataset, keys):
    cache = cache_of(dataset, config)
    assert cache.open() == ""
    for key in keys:
        cache.caching().store.put(key, dataset.load(key))
    cache.add_lookups(3, 4)


class TestTheNextJob:
    def test_finds_what_was_held_and_counts_for_itself(self, config):
        fill(config, Words(WORDS), range(12))
        cache = cache_of(Words(WORDS), config)
        assert cache.open() == ""
        counts = cache.counts
        assert (counts.hits, counts.misses, counts.hold) == (0, 0, "loaded")
        assert set(range(12)) <= {key for key in range(20) if key in cache.caching().store.arena}
        assert f"{the_file(config)}, where 1" in cache.describe()

    def test_may_have_the_same_data_in_other_subsets(self, config):
        fill(config, Words(WORDS), range(12))
        subset = torch.utils.data.Subset(Words(WORDS), [19, 4, 5])
        cache = cache_of(subset, config)
        assert cache.open() == ""
        assert cache.caching().store.get(4) == "word 4"

    @pytest.mark.parametrize(
        ("dataset", "why"),
        [
            (Words(WORDS[:-1]), r"dataset\.words: list of 20 \(\w+\) and list of 19 \(\w+\)"),
            (OtherWords(WORDS), "dataset: word_data.Words and word_data.OtherWords"),
            (Words([*WORDS[:14], "other", *WORDS[15:]]), r"dataset\.words: list of 20 \(\w+\) and list of 20 \(\w+\)"),
        ],
        ids=["length", "class", "one label"],
    )
    def test_has_another_data_set_and_so_another_file_and_the_log_says_why(self, config, dataset, why):
        fill(config, Words(WORDS), range(12))
        first = the_file(config)
        cache = cache_of(dataset, config)
        assert cache.open() == ""
        assert len(os.listdir(config.path)) == 2
        assert 14 not in cache.caching().store.arena
        assert re.search(
            rf"second pass on; {re.escape(first)} is of other data \({why}; cache\.ignore leaves out .*\)$", cache.describe()
        )
        assert "of other data" not in describe_of(Words(WORDS), config), "it has found its file again"

    def test_finds_its_file_if_what_differs_decides_no_example(self, config):
        for run in ("first", "second"):
            words = Words(WORDS)
            words.run = run
            cache = cache_of(words, replace(config, ignore=("run",)))
            assert cache.open() == ""
        assert len(os.listdir(config.path)) == 1
        assert "where 8 are already" in cache.describe()

    def test_has_other_files_which_no_attribute_shows(self, config, tmp_path):
        (tmp_path / "word").write_text("one")
        fill(config, InFile(tmp_path / "word"), range(12))
        (tmp_path / "word").write_text("other")
        with pytest.raises(ValueError, match="is kept for something else: example 0 was another one when it was put there"):
            cache_of(InFile(tmp_path / "word"), config).open()

    def test_is_told_nothing_by_a_file_that_cannot_be_read(self, config, tmp_path):
        (tmp_path / f"train-loaded-{'0' * 16}.cache").write_text("something else")
        assert describe_of(Words(WORDS), config).endswith("second pass on")

    def test_does_not_find_what_may_not_be_held(self, config):
        fill(config, SometimesNoise(WORDS), [])
        cache = cache_of(SometimesNoise(WORDS), config)
        assert cache.open() == ""
        held = [key for key in range(20) if key in cache.caching().store.arena]
        assert held
        assert all(key % 3 != 2 for key in held)

    def test_holds_something_else_in_another_file(self, config, tmp_path):
        fill(config, Words(WORDS), range(12))
        whole = cache_of(Words(WORDS), CacheConfig("1MiB", "whole", path=str(tmp_path), name="train"))
        assert whole.open() == ""
        assert (whole.counts.hold, len(os.listdir(tmp_path))) == ("whole", 2)

    def test_takes_the_hold_of_the_file_where_it_may_choose(self, tmp_path):
        class Raw(StagedDataset):
            def read(self, index):
                return b"%d" % index

            def decode(self, raw):
                return int(raw)

            def augment(self, example):
                return example

            def __len__(self):
                return 20

        def config(hold):
            return CacheConfig("1MiB", hold, path=str(tmp_path), name="train")

        first = cache_of(Raw(), config("raw"))
        assert first.open() == ""
        auto = cache_of(Raw(), config("auto"))
        assert auto.open() == ""
        assert auto.counts.hold == "raw", "although loaded is what a cache for all of them would hold"

    @pytest.mark.parametrize("size", ["2MiB", 2**22])
    def test_gives_another_size_and_is_told(self, config, tmp_path, size):
        fill(config, Words(WORDS), range(12))
        cache = cache_of(Words(WORDS), CacheConfig(size, path=str(tmp_path), name="train"))
        assert "is not used: the cache 'train' was made with 1 MiB" in cache.open()
        assert cache.counts.size == MIB

    def test_gives_a_share_of_the_memory_and_is_not_told_since_that_is_never_the_same(self, config, tmp_path):
        fill(config, Words(WORDS), range(12))
        assert cache_of(Words(WORDS), CacheConfig(0.0001, path=str(tmp_path), name="train")).open() == ""

    def test_does_not_need_the_space_again_that_the_file_has(self, config, monkeypatch):
        fill(config, Words(WORDS), range(12))
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        assert cache_of(Words(WORDS), config).open() == ""

    def test_finds_a_damaged_record(self, config):
        fill(config, Words(WORDS), range(12))
        with open(the_file(config), "r+b") as file:
            data = file.read()
            file.seek(data.index(b"word 0"))
            file.write(b"WORD 0")
        with pytest.raises(StaleCacheError, match="the cache 'train' is damaged: the record of example 0"):
            cache_of(Words(WORDS), config).open()

    def test_finds_an_index_that_leads_to_the_record_of_another_example(self, config):
        fill(config, Words(WORDS), range(12))
        with open(the_file(config), "r+b") as file:
            file.seek(4096 + 8)
            of_another = file.read(8)
            file.seek(4096)
            file.write(of_another)
        with pytest.raises(StaleCacheError, match="the cache 'train' is damaged: the record of example 0"):
            cache_of(Words(WORDS), config).open()


def test_a_split_for_the_insertion_point_does_not_change_what_is_kept(config):
    """A job that echoes before the augmentation and one that echoes whole examples hold the same, and share it."""
    dataset = Words(WORDS)
    fill(config, dataset, range(12))
    split = find_split(dataset)

    def watched(data):
        return WatchedStages(make_stages(data, split.conventions), data, refusal=None)

    cache = LoaderCache(config, dataset, None, split, watched, differs_in_workers=False)
    assert cache.open() == ""
    assert cache.counts.examples >= 12
