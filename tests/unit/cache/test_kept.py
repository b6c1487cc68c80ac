"""The cache of a loader is opened once and given on; under a name the next job finds it again, if it is of the same data."""

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from word_data import WORDS, OtherWords, Words, cache_of

from lightning_echo.cache import kept
from lightning_echo.cache.arena import Arena, ArenaError
from lightning_echo.cache.kept import CacheConfig, Contents, file_of, open_kept
from lightning_echo.cache.reads import StaleCacheError
from lightning_echo.data.fingerprint import Fingerprint

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
    def test_are_written_and_read_and_other_ones_are_refused(self):
        contents = Contents.of([("Images", 1000), ("ÄÖ", 2)], "raw", "read")
        assert contents == ("Images of 1,000, ÄÖ of 2", "raw", "read")
        assert Contents.from_bytes(contents.to_bytes()) == contents
        for data in (b"", b"{", b"[]", b'{"hold": "raw"}', b"\xff"):
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


class TestTheFile:
    def test_is_made_with_a_few_examples_and_found_again(self, config, tmp_path):
        arena, contents = open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {3: "three", 19: "nineteen"}))
        assert (contents, arena.keys, arena.budget_bytes, arena.counts.records) == (CONTENTS, 21, MIB, 2)
        del arena
        assert os.listdir(tmp_path) == [f"train-loaded-{MADE_FROM.digest()}.cache"]
        arena, contents = open_kept(config, path_of(config), 21, 0, lambda: pytest.fail("it is there"))
        assert (contents, arena.counts.records) == (CONTENTS, 2)

    def test_of_another_job_that_was_quicker_is_taken(self, config):
        theirs = CONTENTS._replace(data_sets="theirs")
        made = []

        def begin():
            made.append(Arena.create_file(path_of(config), 21, MIB, theirs.to_bytes()))
            return CONTENTS, {}

        arena, contents = open_kept(config, path_of(config), 21, 0, begin)
        assert contents == theirs
        assert arena._file is made[0]._file

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (FileExistsError(), "is repeatedly created and deleted by another process"),
            (OSError(28, "No space left on device"), "cannot be used: .*No space left"),
        ],
    )
    def test_that_cannot_be_made_is_refused(self, config, monkeypatch, error, said):
        monkeypatch.setattr(kept.Arena, "create_file", lambda *args: (_ for _ in ()).throw(error))
        with pytest.raises(ValueError, match=rf"cache\.name='train' .*{said}"):
            open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {}))

    def test_of_examples_that_only_pickle_can_write_is_refused_and_nothing_is_left(self, config, tmp_path):
        with pytest.raises(TypeError, match=r"of type object cannot be kept under the name 'train'.*Leave cache\.name out"):
            open_kept(config, path_of(config), 21, 0, lambda: (CONTENTS, {3: object()}))
        assert os.listdir(tmp_path) == []


class InFile(Words):
    def __init__(self, path):
        super().__init__(WORDS)
        self.path = path

    def load(self, index):
        return self.path.read_text()


def job(dataset, config, *, warns=None, split=False):
    """The cache of a job, which has found or made its file."""
    cache = cache_of(dataset, config, whole=not split)
    said = cache.open()
    assert warns in said if warns else said == ""
    return cache


@pytest.fixture
def filled(config):
    """A job has held twelve words in the file."""
    cache = job(Words(WORDS), config)
    for key in range(12):
        cache.caching().store.put(key, WORDS[key])
    cache.add_lookups(3, 4)
    return config


class TestTheNextJob:
    def test_finds_what_was_held_and_counts_for_itself_also_of_other_subsets_and_splits(self, filled, monkeypatch):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))  # the file has its space already
        cache = job(Words(WORDS), filled)
        assert (cache.counts.hits, cache.counts.misses, cache.counts.hold) == (0, 0, "loaded")
        assert set(range(12)) <= {key for key in range(20) if key in cache.caching().store.arena}
        assert f"{the_file(filled)}, where 1" in cache.describe()
        subset = job(torch.utils.data.Subset(Words(WORDS), [19, 4, 5]), filled)
        assert subset.caching().store.get(4) == "word 4"
        assert job(Words(WORDS), filled, split=True).counts.examples >= 12, "of an echo before the augmentation"

    @pytest.mark.parametrize(
        ("dataset", "why"),
        [
            (OtherWords(WORDS), "dataset: word_data.Words and word_data.OtherWords"),
            (Words([*WORDS[:14], "other", *WORDS[15:]]), r"dataset\.words: list of 20 \(\w+\) and list of 20 \(\w+\)"),
        ],
        ids=["class", "one label"],
    )
    def test_has_another_data_set_and_so_another_file_and_the_log_says_why(self, filled, dataset, why):
        first = the_file(filled)
        cache = job(dataset, filled)
        assert len(os.listdir(filled.path)) == 2
        assert 14 not in cache.caching().store.arena
        assert re.search(
            rf"second pass on; {re.escape(first)} is of other data \({why}; cache\.ignore leaves out .*\)$", cache.describe()
        )
        assert "of other data" not in job(Words(WORDS), filled).describe(), "it has found its file again"

    def test_finds_its_file_if_what_differs_decides_no_example(self, config):
        for run in ("first", "second"):
            words = Words(WORDS)
            words.run = run
            cache = job(words, replace(config, ignore=("run",)))
        assert len(os.listdir(config.path)) == 1
        assert "where 8 are already" in cache.describe()

    def test_has_other_files_which_no_attribute_shows(self, config, tmp_path):
        (tmp_path / "word").write_text("one")
        job(InFile(tmp_path / "word"), config).caching().store.put(0, "one")
        (tmp_path / "word").write_text("other")
        with pytest.raises(ValueError, match="is kept for something else: example 0 was another one when it was put there"):
            cache_of(InFile(tmp_path / "word"), config, whole=True).open()

    @pytest.mark.parametrize(("size", "warns"), [("2MiB", True), (2**22, True), (0.0001, False)])
    def test_is_told_that_another_size_is_not_used_unless_it_is_a_share_which_is_never_the_same(self, filled, size, warns):
        said = "is not used: the cache 'train' was made with 1 MiB" if warns else None
        assert job(Words(WORDS), replace(filled, size=size), warns=said).counts.size == MIB

    @pytest.mark.parametrize("damage", ["a changed byte", "an index that leads to another record"])
    def test_finds_a_damaged_record(self, filled, damage):
        with open(the_file(filled), "r+b") as file:
            data = file.read()
            at, new = (data.index(b"word 0"), b"W") if damage == "a changed byte" else (4096, data[4096 + 8 : 4096 + 16])
            file.seek(at)
            file.write(new)
        with pytest.raises(StaleCacheError, match="the cache 'train' is damaged: the record of example 0"):
            cache_of(Words(WORDS), filled, whole=True).open()


CONFIG = CacheConfig("1MiB")


def cache_with(dataset, keys=range(20)):
    cache = cache_of(dataset, CONFIG)
    assert cache.open() == ""
    for key in keys:
        assert cache.caching().store.put(key, dataset.load(key))
    return cache


def followed_by(before, dataset):
    after = cache_of(dataset, CONFIG)
    after.follow(before)
    return after, after.open()


def test_opened_again_it_is_what_it_was_and_a_copy_in_another_process_opens_its_own():
    cache = cache_with(Words(WORDS))
    assert cache.open() == ""
    assert cache.counts.examples == 20
    assert 0 < cache.memory_to_come == MIB - cache.counts.bytes
    state = cache.__getstate__()
    assert (state["_opened"], state["_readers"]) == (None, ())


class TestAReload:
    def test_of_the_same_data_goes_on(self):
        after, said = followed_by(cache_with(Words(WORDS)), Words(list(WORDS)))
        assert (said, after.counts.examples) == ("", 20)

    @pytest.mark.parametrize(
        ("held", "data", "why"),
        [
            (range(20), Words(WORDS[::-1]), "(dataset.words: list of 20 "),
            ([7], Words([*WORDS[:7], "another word", *WORDS[8:]]), "(dataset.words: list of 20 "),
            (range(20), Words(WORDS[:-1]), "(20 examples, and now 19)"),
            (range(20), OtherWords(WORDS), "(dataset: word_data.Words and word_data.OtherWords"),
        ],
        ids=["another order", "one other example", "filtered", "another class"],
    )
    def test_of_other_data_begins_again(self, held, data, why):
        after, said = followed_by(cache_with(Words(WORDS), held), data)
        assert f"the data set has changed {why}" in said
        assert said.endswith(": the cache is emptied")
        assert after.counts.examples == 0

    def test_of_other_files_begins_again_which_no_attribute_shows(self, tmp_path):
        class InFile(Words):
            def load(self, index):
                return (tmp_path / "word").read_text()

        (tmp_path / "word").write_text("one")
        before = cache_with(InFile(WORDS))
        (tmp_path / "word").write_text("other")
        after, said = followed_by(before, InFile(WORDS))
        assert "example 0 was another one when it was put there" in said
        assert after.counts.examples == 0


def test_a_cache_smaller_than_an_example_says_so_once():
    cache = cache_of(Words(["x" * 2 * MIB] * 2), CONFIG)
    assert "the cache of 1 MiB holds nothing: an example takes 2 MiB. Give it a larger size" in cache.open()
    assert cache.open() == ""
    assert followed_by(cache, Words(["x" * 2 * MIB] * 2))[1] == "", "it was said before the reload"


@pytest.mark.parametrize(("differs", "check_at", "kept"), [(False, [], 8), (True, [0, 2, 5, 8, 10, 13, 16, 19], 0)])
def test_where_only_workers_have_the_data_set_they_compare_it_and_a_kept_file_begins_empty(differs, check_at, kept, tmp_path):
    cache = cache_of(Words(WORDS), CacheConfig("1MiB", path=str(tmp_path), name="train"), differs=differs)
    cache.open()
    assert list(cache.caching().check_at) == check_at
    assert cache.counts.examples == kept


def test_the_line_says_what_is_held_where_and_what_share_and_comes_once(tmp_path):
    cache = cache_with(Words([f"{number:100000}" for number in range(20)]), [])
    line = cache.describe()
    assert line.startswith("cache: holds [load] (loaded), 97.8 KiB per example; 1 MiB hold 50% of 20 examples: ")
    assert line.endswith("from the second pass on 50% are read, which makes reading 2 times faster")
    assert cache.describe() == ""
    cache = cache_of(Words(WORDS), CacheConfig("1MiB", path=str(tmp_path)), [*range(20)] * 3)  # indices that lead to them thrice
    cache.open()
    line = cache.describe()
    assert f"1 MiB on the disk of {tmp_path} hold 100% of 20 examples: nothing is read from the second pass on" in line
