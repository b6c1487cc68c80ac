"""The cache in a reader: what is proved of it, how it is opened, and what the window and the training say of it."""

import logging
import pickle

import pytest
from torch.utils.data import DataLoader

from lightning_echo import CacheConfig, StagedDataset
from lightning_echo.cache.node_cache import NodeCache
from lightning_echo.cache.reads import Lookups
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.attachment import Attachment
from lightning_echo.share.config import ShareConfig
from lightning_echo.share.connecting import Link, Place
from lightning_echo.share.packing import HELD, pack, pack_error
from lightning_echo.share.pipeline import SharedExamples
from lightning_echo.share.reader_cache import ReaderCache, options_in_words
from lightning_echo.share.same_data import difference, fingerprint_of, in_short
from lightning_echo.share.window import CacheState, Lane, Window

SQUARES = StagedDataset.of([number * number for number in range(40)], augment=float)


def kind():
    return kind_of(DataLoader(SQUARES, 4, shuffle=True, num_workers=1))


def full(config, *, is_there=False):
    raise ValueError("cache.size is more than the memory that is free")


def test_it_is_opened_once_and_its_state_is_what_it_holds():
    cache = pickle.loads(pickle.dumps(ReaderCache.of(CacheConfig("1MiB", hold="loaded"), kind())))
    assert cache.state == CacheState()
    reader = kind()
    opened = cache.open(reader, follows=False)
    assert cache.open(reader, follows=False) is opened
    assert opened.caching().store.put(3, 9)
    assert (cache.state.examples, cache.state.size, cache.state.is_full, cache.state.hold) == (1, 2**20, 0, 2)
    assert cache.state.bytes == opened.counts.bytes > 0
    assert cache.about.startswith("cache: holds [load] (loaded), ")
    assert pickle.loads(pickle.dumps(cache)).state == CacheState(), "another process opens its own"


def test_without_room_a_first_reader_does_not_begin_and_one_that_follows_has_none(monkeypatch, caplog):
    cache = ReaderCache.of(CacheConfig("1MiB"), kind())
    monkeypatch.setattr(NodeCache, "check", full)
    with pytest.raises(ValueError, match="more than the memory that is free"):
        cache.open(kind(), follows=False)
    caplog.set_level(logging.INFO, "lightning_echo")
    assert cache.open(kind(), follows=True) is None
    assert cache.state == CacheState()
    assert cache.about == "cache: there is none, cache.size is more than the memory that is free"
    assert cache.about in caplog.text


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [("8GiB", 2**33, True), ("8GiB", "8GB", False), (0.5, 0.5, True), (0.5, 0.25, False), ("8GiB", None, False)],
)
def test_the_options_as_a_text_tell_two_caches_apart(one, other, is_same):
    first, second = (None if size is None else CacheConfig(size) for size in (one, other))
    assert (options_in_words(first) == options_in_words(second)) == is_same
    assert options_in_words(CacheConfig(0.5, hold="raw")) != options_in_words(CacheConfig(0.5))


def test_another_cache_is_a_difference_that_other_differences_come_before():
    def compared(dataset, cache):
        return in_short(fingerprint_of(kind_of(DataLoader(dataset, 4)), cache=cache))

    assert difference(compared(SQUARES, "1 byte"), compared(SQUARES, "2 bytes")) == "cache: 1 byte and 2 bytes"
    assert difference(compared(SQUARES, "1 byte"), compared(SQUARES, "1 byte")) == ""
    assert not difference(compared(range(8), "1 byte"), compared(range(9), "2 bytes")).startswith("cache: ")


def test_the_window_hands_the_state_on():
    window = Window.create(2**14, 2, 0)
    assert window.cache == CacheState()
    window.cache = CacheState(3, 2**40, 2**41, 1, 2)
    copied = Window(window.read_only_descriptor(), can_write=False)
    assert copied.cache == CacheState(3, 2**40, 2**41, 1, 2)
    assert (copied.lanes, copied.seconds_per_example) == (2, 0.0), "the words beside it are as they were"


def test_a_training_counts_what_was_held_of_the_items_that_it_takes():
    window = Window.create(2**16, 1, 0)
    lane, held = Lane(window, 0), {0, 2, 3}
    for item in range(4):
        kind, parts, size = pack({"item": item})
        lane.put(item, kind | HELD * (item in held), parts, size)
    lane.put(4, *pack_error(ValueError("broken")))

    attachment = Attachment(ShareConfig("a"), lambda _: pytest.fail("a reader is started"), {}, tell_every=100)

    attachment._link = Link(None, -1, window, Place(0, 0, False), [])
    attachment._told = 1000
    examples = SharedExamples(attachment, 8)
    attachment.keep([0, 1])  # of a resumed run: they were counted before
    assert [examples[item] for item in (0, 1)] == [{"item": 0}, {"item": 1}]
    assert examples.lookups == Lookups(0, 0)
    assert [examples[item] for item in (2, 3)] == [{"item": 2}, {"item": 3}]
    assert examples.lookups == Lookups(2, 0)
    with pytest.raises(ValueError, match="broken"):
        examples[4]
