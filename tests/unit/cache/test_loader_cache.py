"""The cache of one loader: opened once, kept over restarts, given on to the loader after a reload if the data is the same."""

import pytest
from word_data import WORDS, OtherWords, Words

from lightning_echo.cache.kept import CacheConfig
from lightning_echo.cache.loader_cache import LoaderCache
from lightning_echo.cache.reads import NoKeysError
from lightning_echo.split.check import WatchedStages
from lightning_echo.split.prove import find_split, make_stages
from lightning_echo.split.staged import uncut_stages


def cache_of(dataset, size="1MiB", *, whole=False, differs=False, **options):
    split = None if whole else find_split(dataset)

    def watched(data):
        return WatchedStages(make_stages(data, split.conventions), data, refusal=None)

    make = uncut_stages if whole else watched
    return LoaderCache(CacheConfig(size, **options), dataset, None, split, make, differs_in_workers=differs)


def filled(dataset, keys=range(20)):
    cache = cache_of(dataset)
    assert cache.open() == ""
    for key in keys:
        assert cache.caching().store.put(key, dataset.load(key))
    return cache


def followed_by(before, dataset):
    after = cache_of(dataset)
    after.follow(before)
    return after, after.open()


def test_before_it_is_open_it_holds_nothing_and_says_what_it_may_hold():
    counts = cache_of(Words(WORDS)).counts
    assert (counts.examples, counts.bytes, counts.hits, counts.hold, counts.size) == (0, 0, 0, "auto", 2**20)


def test_memory_that_it_has_not_taken_yet_is_to_come(tmp_path):
    assert cache_of(Words(WORDS)).memory_to_come == 2**20
    cache = filled(Words(WORDS))
    assert 0 < cache.memory_to_come == 2**20 - cache.counts.bytes
    assert cache_of(Words(WORDS), path=str(tmp_path)).memory_to_come == 0


def test_a_cache_that_has_stopped_to_grow_takes_no_more(monkeypatch):
    monkeypatch.setattr("lightning_echo.cache.arena.free_memory_bytes", lambda: 0)
    cache = cache_of(Words(WORDS))
    cache.open()
    assert not cache.caching().store.put(0, "word")
    assert cache.counts.is_full
    assert cache.memory_to_come == 0


def test_what_it_will_not_hold_as_it_is_while_it_is_live(tmp_path):
    cache = cache_of(Words(WORDS))
    assert cache.not_held is None  # not open yet
    cache.open()
    assert cache.not_held == 0
    cache = filled(Words(WORDS), range(5))
    assert cache.not_held == 0
    cache.of_node.store().arena.freeze()
    assert cache.not_held == len(WORDS) - 5 > 0


@pytest.mark.parametrize("size", ["1MiB", "2MiB"])
def test_before_it_is_full_that_follows_from_its_size(size, monkeypatch):
    cache = cache_of(Words(WORDS * 1000), size)
    cache.open()
    room = int(size[0]) * 2**20 // cache._hold.example_bytes
    assert cache.not_held == len(WORDS) * 1000 - room > 0


def test_where_it_holds_something_else_or_on_a_disk_nothing_live_is_held(tmp_path):
    for cache in (cache_of(Words(WORDS), path=str(tmp_path)), cache_of(Words(WORDS), whole=True, hold="loaded")):
        cache.open()
        assert cache.not_held is None


def test_opened_again_it_is_what_it_was():
    cache = filled(Words(WORDS))
    assert cache.open() == ""
    assert cache.counts.examples == 20


class TestAReload:
    def test_of_the_same_data_goes_on(self):
        after, said = followed_by(filled(Words(WORDS)), Words(list(WORDS)))
        assert (said, after.counts.examples) == ("", 20)

    @pytest.mark.parametrize("held", [range(20), [7]], ids=["all", "one example"])
    def test_of_other_data_begins_anew_if_a_held_example_is_another_one(self, held):
        changed = [*WORDS[:7], "another word", *WORDS[8:]] if len(held) == 1 else WORDS[::-1]
        after, said = followed_by(filled(Words(WORDS), held), Words(changed))
        assert "the data set has changed (dataset.words: list of 20 " in said
        assert said.endswith(": the cache is emptied")
        assert after.counts.examples == 0

    def test_of_a_filtered_list_begins_anew(self):
        after, said = followed_by(filled(Words(WORDS)), Words(WORDS[:-1]))
        assert "has changed" in said
        assert after.counts.examples == 0

    def test_of_another_class_begins_anew(self):
        after, said = followed_by(filled(Words(WORDS)), OtherWords(WORDS))
        assert "has changed" in said
        assert after.counts.examples == 0

    def test_that_cannot_hold_what_was_held_begins_anew(self):
        before = cache_of(Words(WORDS), whole=True, hold="whole")
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


def test_a_data_set_that_has_grown_begins_anew():
    dataset = Words(list(WORDS))
    cache = filled(dataset)
    dataset.words.append("one more")
    assert "has changed" in cache.open()
    assert cache.counts.examples == 0


def test_a_cache_smaller_than_an_example_says_so_once():
    cache = cache_of(Words(["x" * 2**21] * 2))
    assert "the cache of 1 MiB holds nothing: an example takes 2 MiB. Give it a larger size" in cache.open()
    assert cache.open() == ""
    assert followed_by(cache, Words(["x" * 2**21] * 2))[1] == "", "it was said before the reload"


def test_a_kept_file_begins_empty_where_only_workers_have_the_data_set(tmp_path):
    for differs, examples in ((False, 8), (True, 0)):
        cache = cache_of(Words(WORDS), differs=differs, path=str(tmp_path), name=f"differs_{differs}")
        cache.open()
        assert cache.counts.examples == examples


class TestTheLine:
    def test_says_what_is_held_and_what_share_and_comes_once(self):
        cache = filled(Words([f"{number:100000}" for number in range(20)]), [])
        line = cache.describe()
        assert line.startswith("cache: holds [load] (loaded), 97.8 KiB per example; 1 MiB hold 50% of 20 examples: ")
        assert line.endswith("from the second pass on 50% are read, which makes reading 2 times faster")
        assert cache.describe() == ""

    def test_of_a_cache_for_everything_says_that_nothing_is_read_any_more(self):
        assert "hold 100% of 20 examples: nothing is read from the second pass on" in filled(Words(WORDS)).describe()

    def test_counts_examples_and_not_indices_that_lead_to_them(self):
        split, words = find_split(Words(WORDS)), Words(WORDS)

        def watched(data):
            return WatchedStages(make_stages(data, split.conventions), data, refusal=None)

        cache = LoaderCache(CacheConfig("1MiB"), words, [*range(20)] * 3, split, watched, differs_in_workers=False)
        cache.open()
        assert "hold 100% of 20 examples" in cache.describe()

    def test_names_the_disk(self, tmp_path):
        cache = cache_of(Words(WORDS), path=str(tmp_path))
        cache.open()
        assert f"1 MiB on the disk of {tmp_path} hold" in cache.describe()


def test_workers_compare_their_data_sets_only_where_a_function_of_the_users_may_change_them():
    for differs, expected in ((False, []), (True, [0, 2, 5, 8, 10, 13, 16, 19])):
        cache = cache_of(Words(WORDS), differs=differs)
        cache.open()
        assert list(cache.caching().check_at) == expected


def test_a_data_set_without_a_length_has_no_keys():
    class Endless:
        def __getitem__(self, index):
            return index

    with pytest.raises(NoKeysError, match="has no length"):
        cache_of(Endless(), whole=True)


def test_a_copy_in_another_process_opens_its_own():
    state = filled(Words(WORDS)).__getstate__()
    assert (state["_opened"], state["_readers"]) == (None, ())
