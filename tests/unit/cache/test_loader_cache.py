"""The cache of one loader: opened once, kept over restarts, given on to the loader after a reload if the data is the same."""

import pytest
from word_data import WORDS, OtherWords, Words, cache_of

from lightning_echo.cache.kept import CacheConfig
from lightning_echo.cache.reads import NoKeysError

MIB = 2**20
CONFIG = CacheConfig("1MiB")


def filled(dataset, keys=range(20)):
    cache = cache_of(dataset, CONFIG)
    assert cache.open() == ""
    for key in keys:
        assert cache.caching().store.put(key, dataset.load(key))
    return cache


def followed_by(before, dataset):
    after = cache_of(dataset, CONFIG)
    after.follow(before)
    return after, after.open()


def test_before_it_is_open_it_holds_nothing_and_all_its_memory_is_to_come(tmp_path):
    cache = cache_of(Words(WORDS), CONFIG)
    counts = cache.counts
    assert (counts.examples, counts.bytes, counts.hits, counts.hold, counts.size) == (0, 0, 0, "auto", MIB)
    assert (cache.memory_to_come, cache.not_held) == (MIB, None)
    assert cache_of(Words(WORDS), CacheConfig("1MiB", path=str(tmp_path))).memory_to_come == 0


def test_opened_again_it_is_what_it_was_and_a_copy_in_another_process_opens_its_own():
    cache = filled(Words(WORDS))
    assert cache.open() == ""
    assert cache.counts.examples == 20
    assert 0 < cache.memory_to_come == MIB - cache.counts.bytes
    state = cache.__getstate__()
    assert (state["_opened"], state["_readers"]) == (None, ())


def test_a_cache_that_has_stopped_to_grow_takes_no_more(monkeypatch):
    monkeypatch.setattr("lightning_echo.cache.arena.free_memory_bytes", lambda: 0)
    cache = cache_of(Words(WORDS), CONFIG)
    cache.open()
    assert not cache.caching().store.put(0, "word")
    assert cache.counts.is_full
    assert cache.memory_to_come == 0


def test_what_it_will_not_hold_as_it_is_while_it_is_live(tmp_path):
    cache = filled(Words(WORDS), range(5))
    assert cache.not_held == 0
    cache.of_node.store().arena.freeze()
    assert cache.not_held == len(WORDS) - 5
    for mebibytes in (1, 2):  # before it is full, that follows from its size
        cache = cache_of(Words(WORDS * 1000), CacheConfig(f"{mebibytes}MiB"))
        cache.open()
        assert cache.not_held == len(WORDS) * 1000 - mebibytes * MIB // cache._hold.example_bytes > 0
    on_disk = cache_of(Words(WORDS), CacheConfig("1MiB", path=str(tmp_path)))
    of_others = cache_of(Words(WORDS), CacheConfig("1MiB", "loaded"), whole=True)
    for cache in (on_disk, of_others):
        cache.open()
        assert cache.not_held is None, "nothing that is live is held in memory"


class TestAReload:
    def test_of_the_same_data_goes_on(self):
        after, said = followed_by(filled(Words(WORDS)), Words(list(WORDS)))
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
    def test_of_other_data_begins_anew(self, held, data, why):
        after, said = followed_by(filled(Words(WORDS), held), data)
        assert f"the data set has changed {why}" in said
        assert said.endswith(": the cache is emptied")
        assert after.counts.examples == 0

    def test_that_cannot_hold_what_was_held_begins_anew(self):
        before = cache_of(Words(WORDS), CacheConfig("1MiB", "whole"), whole=True)
        before.open()
        after, said = followed_by(before, Words(WORDS))
        assert "has changed" in said
        assert after.counts.hold == "loaded"

    def test_of_other_files_begins_anew_which_no_attribute_shows(self, tmp_path):
        class InFile(Words):
            def load(self, index):
                return (tmp_path / "word").read_text()

        (tmp_path / "word").write_text("one")
        before = filled(InFile(WORDS))
        (tmp_path / "word").write_text("other")
        after, said = followed_by(before, InFile(WORDS))
        assert "example 0 was another one when it was put there" in said
        assert after.counts.examples == 0

    def test_of_a_data_set_that_has_grown_begins_anew(self):
        dataset = Words(list(WORDS))
        cache = filled(dataset)
        dataset.words.append("one more")
        assert "has changed" in cache.open()
        assert cache.counts.examples == 0


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
    cache = filled(Words([f"{number:100000}" for number in range(20)]), [])
    line = cache.describe()
    assert line.startswith("cache: holds [load] (loaded), 97.8 KiB per example; 1 MiB hold 50% of 20 examples: ")
    assert line.endswith("from the second pass on 50% are read, which makes reading 2 times faster")
    assert cache.describe() == ""
    cache = cache_of(Words(WORDS), CacheConfig("1MiB", path=str(tmp_path)), [*range(20)] * 3)  # indices that lead to them thrice
    cache.open()
    line = cache.describe()
    assert f"1 MiB on the disk of {tmp_path} hold 100% of 20 examples: nothing is read from the second pass on" in line


def test_a_data_set_without_a_length_has_no_keys():
    class Endless:
        def __getitem__(self, index):
            return index

    with pytest.raises(NoKeysError, match="has no length"):
        cache_of(Endless(), CONFIG, whole=True)
