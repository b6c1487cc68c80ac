"""How many items may be live: what the user or the rule of reuse asks for, what memory holds, and never too few for a batch."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.loader import sizing
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.sizing import BufferSize, BufferSizing, Room
from lightning_echo.plan.plan import Reuse

MIB = 2**20


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def free(monkeypatch):
    def set_free(mebibytes):
        number = None if mebibytes is None else mebibytes * MIB
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda: number)

    return set_free


class TestMemory:
    """Examples of 1 MiB, batches of 8, two workers that are never started: 32 live examples are usual with ``reuse="each"``."""

    def make(self, factor=2, reuse="each", **options):
        loader = DataLoader(torch.zeros(16, 2**18), batch_size=8, num_workers=2)
        return EchoLoader(loader, factor, insertion_point="after_augmentation", reuse=reuse, **options)

    @pytest.mark.parametrize("mebibytes", [None, 321, 10**6])
    def test_enough_or_unknown_memory_leaves_the_default_as_it_is(self, free, mebibytes):
        free(mebibytes)
        assert self.make().buffer_size == 32

    def test_a_default_takes_at_most_a_tenth_of_the_free_memory_and_says_so(self, free):
        free(200)
        with pytest.warns(UserWarning, match=r"buffer_size is 20 instead of 32: 32 live examples of 1 MiB .* Set buffer_size"):
            assert self.make().buffer_size == 20

    @pytest.mark.parametrize(("factor", "least"), [(1, 8), (1.5, 8), (2, 8), (4, 12), (8, 14)])
    def test_a_default_never_shrinks_below_what_a_batch_needs(self, free, factor, least):
        free(1)
        with pytest.warns(UserWarning, match=f"buffer_size is {least} instead of 32"):
            assert self.make(factor).buffer_size == least

    @pytest.mark.parametrize("reuse", ["each", "memory"])
    def test_an_explicit_size_that_cannot_fit_is_refused_with_the_way_out(self, free, reuse):
        free(200)
        with pytest.raises(ValueError, match=r"buffer_size=201 cannot fit: .* Use a smaller one, or a later insertion point"):
            self.make(reuse=reuse, buffer_size=201)

    @pytest.mark.parametrize("reuse", ["each", "memory"])
    def test_an_explicit_size_that_fits_is_taken_as_it_is(self, free, reuse):
        free(200)
        assert self.make(reuse=reuse, buffer_size=199).buffer_size == 199

    def test_whole_batches_are_counted_by_their_examples(self, free):
        free(200)
        loader = DataLoader(torch.zeros(16, 2**18), batch_size=8)
        with pytest.warns(UserWarning, match=r"buffer_size is 2 instead of 4: 4 live batches of 8 MiB"):
            assert EchoLoader(loader, 2, insertion_point="after_batching", reuse="each").buffer_size == 2

    def test_what_is_free_is_what_the_container_leaves(self):
        assert sizing.free_memory_bytes is free_memory_bytes


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(16, 2))


class TestDefaultOfReuseOfEach:
    def default(self, point, examples, workers=0):
        loader = DataLoader(torch.zeros(examples, 2), 8, num_workers=workers)
        return EchoLoader(loader, 2, insertion_point=point, reuse="each").buffer_size

    @pytest.mark.parametrize(
        ("workers", "examples", "size"),
        [
            (0, 512, 128),  # sixteen batches of eight
            (2, 10_000, 128),  # whatever the number of workers ...
            (10, 10_000, 160),  # ... but for two batches each
            (2, 511, 127),  # of a short pass a quarter ...
            (0, 16, 16),  # ... but for two batches for each worker
            (3, 16, 48),
        ],
    )
    def test_of_examples(self, workers, examples, size):
        assert self.default("after_augmentation", examples, workers) == size

    @pytest.mark.parametrize(("examples", "size"), [(10_000, 16), (512, 16), (400, 12), (16, 4)])
    def test_of_batches_whatever_the_number_of_workers(self, examples, size):
        assert [self.default("after_batching", examples, workers) for workers in (0, 2)] == [size, size]

    def test_in_device_memory(self):
        assert self.default("after_transfer", 10_000) == 4

    def test_of_a_stream_whose_length_is_known(self):
        class Sized(Stream):
            def __len__(self):
                return 200

        assert EchoLoader(DataLoader(Sized(), 8), 2, reuse="each").buffer_size == 50

    def test_where_the_length_of_a_pass_is_not_known(self):
        assert EchoLoader(DataLoader(Stream(), 8), 2, reuse="each").buffer_size == 128
        assert EchoLoader(Stream(), 2, insertion_point="after_batching", reuse="each").buffer_size == 16

    def test_a_quarter_of_the_pass_of_this_rank(self):
        loader, options = DataLoader(torch.zeros(800, 2), 8), {"insertion_point": "after_augmentation", "reuse": "each"}
        assert EchoLoader(loader, 2, **options, num_replicas=2, rank=0).buffer_size == 100


class Mebibytes(Dataset):
    """Examples that say that they have 1 MiB, and are a view of one number."""

    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        return torch.full((1,), float(index)).expand(2**18)

    def __len__(self):
        return self.length


def over_mebibytes(length=10_000, factor=2, workers=2, **options):
    """Batches of 8 examples of 1 MiB. Nothing is read but one example."""
    loader = DataLoader(Mebibytes(length), batch_size=8, num_workers=workers)
    return EchoLoader(loader, factor, **{"insertion_point": "after_augmentation", **options})


class TestAskedForInMemory:
    @pytest.mark.parametrize(("asked", "size"), [("20MiB", 20), ("0.5 GiB", 512), ("21MB", 20)])
    def test_bytes_are_as_many_items_as_they_hold(self, free, asked, size):
        free(1000)
        assert over_mebibytes(buffer_size=asked).buffer_size == size

    @pytest.mark.parametrize(("ranks", "size"), [(None, 300), (1, 300), (4, 75), (7, 42)])
    def test_a_share_is_one_of_the_free_memory_which_the_ranks_of_the_node_divide(self, free, monkeypatch, ranks, size):
        free(1000)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert over_mebibytes(buffer_size=0.3).buffer_size == size

    def test_bytes_are_those_of_each_rank(self, free, monkeypatch):
        free(1000)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert over_mebibytes(buffer_size="300MiB").buffer_size == 300

    def test_batches_are_counted_by_their_examples(self, free):
        free(1000)
        assert over_mebibytes(buffer_size="100MiB", insertion_point="after_batching").buffer_size == 12

    def test_a_pass_bounds_it_so_that_no_index_is_held_twice(self, free):
        free(10**6)
        for asked in ("1TB", 0.9):
            for reuse in ("each", "memory"):
                assert over_mebibytes(100, buffer_size=asked, reuse=reuse).buffer_size == 92
                batches = over_mebibytes(100, buffer_size=asked, reuse=reuse, insertion_point="after_batching")
                assert batches.buffer_size == 13, "a pass"

    def test_a_pass_that_hardly_fills_a_batch_is_no_reason_to_refuse(self, free):
        free(1000)
        assert over_mebibytes(10, buffer_size="500MiB", workers=1).buffer_size == 4, "what a batch of 8 needs at factor 2"

    def test_too_little_for_a_batch_is_refused_with_the_bytes_that_it_needs(self, free):
        free(1000)
        needs = r"a batch of 8 needs 6 live examples in each of 2 workers\. Use at least 12 \(12 MiB\), or leave it out"
        with pytest.raises(ValueError, match=rf"buffer_size='11MiB' \(11 live examples\) is too small for factor=4: {needs}"):
            over_mebibytes(factor=4, buffer_size="11MiB")
        with pytest.raises(ValueError, match=rf"buffer_size=0\.011 \(11 live examples\) is too small for factor=4: {needs}"):
            over_mebibytes(factor=4, buffer_size=0.011)
        assert over_mebibytes(factor=4, buffer_size="12MiB").buffer_size == 12

    def test_a_factor_that_needs_more_is_refused_with_the_bytes_too(self, free):
        free(1000)
        loader = over_mebibytes(buffer_size="12MiB")
        with pytest.raises(ValueError, match=r"buffer_size='12MiB' .* factor=8: .* Use at least 14 \(14 MiB\)"):
            loader.factor = 8

    def test_more_than_is_free_is_refused(self, free):
        free(200)
        with pytest.raises(ValueError, match=r"buffer_size='201MiB' cannot fit: 201 live examples of 1 MiB need more than"):
            over_mebibytes(buffer_size="201MiB")
        assert over_mebibytes(buffer_size="200MiB").buffer_size == 200

    @pytest.mark.parametrize("asked", ["1GiB", 0.1])
    @pytest.mark.parametrize(("point", "items"), [("after_augmentation", "examples"), ("after_batching", "batches")])
    def test_where_the_size_of_an_item_is_not_known_a_number_is_asked_for(self, asked, point, items):
        with pytest.raises(ValueError, match=rf"buffer_size={asked!r} is memory, .* is not known: give a number of {items}"):
            EchoLoader(DataLoader(Stream(), 8), 2, insertion_point=point, buffer_size=asked)

    def test_a_share_of_what_is_not_known_is_refused_and_bytes_are_not(self, free):
        free(None)
        with pytest.raises(ValueError, match=r"buffer_size=0\.1 is a share of the free memory, which this system does not tell"):
            over_mebibytes(buffer_size=0.1)
        assert over_mebibytes(buffer_size="40MiB").buffer_size == 40


class TestDefaultOfReuseFromMemory:
    """A tenth of the free memory, as a power of two of batches; at most half of what a pass allows, and a batch per worker."""

    def size(self, length=10_000, **options):
        return over_mebibytes(length, reuse="memory", **options).buffer_size

    @pytest.mark.parametrize(
        ("mebibytes", "size"), [(5120, 64 * 8), (10_239, 64 * 8), (5119, 32 * 8), (20, 2 * 8), (10**6, (10_000 - 8) // 2)]
    )
    def test_of_examples(self, free, mebibytes, size):
        free(mebibytes)
        assert self.size() == size

    def test_it_is_the_rule_by_default(self, free):
        free(5120)
        assert (over_mebibytes().reuse, over_mebibytes().buffer_size) == ("memory", 64 * 8)

    def test_half_of_the_pass_of_this_rank(self, free):
        free(10**6)
        assert self.size(800, num_replicas=2, rank=0) == (400 - 8) // 2

    def test_the_ranks_of_a_node_divide_the_tenth(self, free, monkeypatch):
        free(4000)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
        assert self.size() == 4 * 8

    @pytest.mark.parametrize("factor", [1, 4, 8])
    def test_never_less_than_a_batch_needs_at_any_factor(self, free, factor):
        """Two workers, batches of 8: with a large factor a batch is nearly all echoes."""
        free(1)
        assert self.size(factor=factor) == 2 * 8

    @pytest.mark.parametrize(("length", "batch_size", "workers"), [(64, 16, 2), (20, 16, 0), (500, 64, 4)])
    def test_of_a_short_pass_it_allows_any_factor_later_on(self, length, batch_size, workers):
        echoed = EchoLoader(DataLoader(range(length), batch_size, num_workers=workers), 1, reuse="memory")
        assert echoed.check_factor(1000) == 1000

    def test_of_batches_it_is_at_most_a_pass(self, free):
        free(800)
        assert self.size(insertion_point="after_batching") == 8
        free(10**6)
        assert self.size(length=800, insertion_point="after_batching") == 100

    def test_of_a_short_pass_it_leaves_something_to_shuffle(self, free):
        """If all but a batch were held, the next pass would have to keep the order of this one."""
        free(10**6)
        echoed = over_mebibytes(200, reuse="memory", workers=0)
        assert echoed.buffer_size == (200 - 8) // 2

    def test_nothing_is_warned_of_and_nothing_noted(self, free, recwarn):
        free(100)
        assert self.size() == 2 * 8  # what a batch of each of two workers needs at any factor
        assert not recwarn.list

    @pytest.mark.parametrize("memory", [None, 10**6])
    def test_of_examples_of_unknown_size_it_is_64_batches(self, free, memory):
        free(memory)
        loader = EchoLoader(DataLoader(Stream(), 8), 2, reuse="memory")
        assert loader.buffer_size == 64 * 8
        assert EchoLoader(Stream(), 2, reuse="memory", insertion_point="after_batching").buffer_size == 64

    def test_and_of_at_most_a_pass(self):
        class Sized(Stream):
            def __len__(self):
                return 200

        assert EchoLoader(DataLoader(Sized(), 8), 2, reuse="memory").buffer_size == 200

    def test_where_free_memory_is_not_known_it_is_64_batches_too(self, free):
        free(None)
        assert self.size() == 512

    def test_the_line_about_a_loader_says_that_it_does_not_follow_the_memory(self, caplog):
        said = "buffer_size is a default that does not follow the memory: how much memory live examples take is not known"
        for loader, number in (
            (EchoLoader(DataLoader(Stream(), 8), 2, reuse="memory", seed=0), 1),
            (over_mebibytes(reuse="memory", workers=0, seed=0), 0),
            (EchoLoader(DataLoader(Stream(), 8), 2, reuse="each", seed=0), 0),
        ):
            caplog.clear()
            with caplog.at_level("INFO", "lightning_echo"):
                next(iter(loader))
            assert caplog.messages
            assert [said in line for line in caplog.messages].count(True) == number


class TestEachRank:
    def test_the_ranks_of_a_node_divide_the_tenth_that_the_usual_default_may_take(self, free, monkeypatch):
        free(800)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with pytest.warns(
            UserWarning, match=r"more than a tenth of the 0\.195 GiB of free memory that each of the node's 4 ranks has"
        ):
            assert over_mebibytes(reuse="each").buffer_size == 20

    @pytest.mark.parametrize("said", ["", "0", "many", "-2"])
    def test_what_a_launcher_says_wrongly_is_not_taken(self, free, monkeypatch, said):
        free(1000)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
        assert over_mebibytes(buffer_size=0.3).buffer_size == 300


class TestDevice:
    """Live batches on a device take its memory, and as much of the host's."""

    def size(self, **options):
        return over_mebibytes(insertion_point="after_transfer", reuse="memory", **options).buffer_size

    @pytest.mark.parametrize(("host", "device", "size"), [(8000, 1600, 16), (1600, 8000, 16), (1600, None, 16), (None, 1600, 16)])
    def test_the_scarcer_memory_counts(self, free, monkeypatch, host, device, size):
        free(host)
        monkeypatch.setattr(sizing, "free_device_bytes", lambda: None if device is None else device * MIB)
        assert self.size() == size

    def test_a_device_is_that_of_one_rank(self, free, monkeypatch):
        free(80_000)
        monkeypatch.setattr(sizing, "free_device_bytes", lambda: 1600 * MIB)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert self.size() == 16

    def test_it_is_not_asked_for_items_elsewhere(self, free, monkeypatch):
        free(800)
        monkeypatch.setattr(sizing, "free_device_bytes", lambda: pytest.fail("asked"))
        assert over_mebibytes(reuse="memory").buffer_size == 64

    def test_a_process_that_does_not_use_cuda_is_left_so(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("began to use CUDA"))
        assert sizing.free_device_bytes() is None

    def test_what_torch_has_reserved_and_does_not_use_is_free(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 5000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 700)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 400)
        assert sizing.free_device_bytes() == 1300


class TestSettling:
    """One size on all ranks: examples of 1 byte, batches of 8 in one worker, a long pass."""

    def size(self, asked=None, reuse=Reuse.memory, free=1000, item_bytes=1):
        made = BufferSizing(
            batch_size=8,
            workers=1,
            item_bytes=item_bytes,
            by_batches=False,
            usual=128,
            unknown=512,
            most=None,
            most_by_default=None,
            reuse=reuse,
        )
        return BufferSize(asked, made, 2.0, Room(free))

    def others(self, *told):
        return lambda mine: [mine, *told]

    def test_is_on_the_smallest_that_a_rank_has_worked_out(self):
        for told, value in [(60, 60), (110, 64)]:
            size = self.size()
            assert (size.value, size.is_settled) == (64, False)
            assert size.settle(2.0, Room(1000), self.others((told, False))) == ""
            assert (size.value, size.is_settled) == (value, True)

    def test_counts_what_is_free_by_then(self):
        size = self.size(0.5)
        size.settle(2.0, Room(600), self.others())
        assert size.value == 300

    def test_stays_with_the_estimate_where_free_memory_is_not_told_any_more(self):
        size = self.size(0.5)
        size.settle(2.0, None, self.others())
        assert size.value == 500

    def test_a_number_is_settled_from_the_start(self):
        size = self.size(40)
        size.keep(30)
        assert (size.value, size.is_settled) == (40, True)

    def test_keeps_the_size_of_a_saved_run_where_all_ranks_have_room_for_it(self):
        for asked in (None, 0.5, "50B"):
            size = self.size(asked)
            size.keep(777)
            assert (size.value, size.is_settled) == (777, False)
            assert size.settle(2.0, Room(777), self.others((3, True))) == ""
            assert size.value == 777

    @pytest.mark.parametrize(("room", "others"), [(776, True), (777, False)])
    def test_and_not_where_one_has_not(self, room, others):
        size = self.size()
        size.keep(777)
        assert size.settle(2.0, Room(room), self.others((50, others))) == ""
        assert size.value == 50

    def test_a_saved_run_that_is_left_again_is_forgotten(self):
        size = self.size()
        size.keep(777)
        size.keep(None)
        size.settle(2.0, Room(2000), self.others())
        assert size.value == 128

    def test_what_is_settled_stays_settled_if_the_saved_size_is_the_same(self):
        size = self.size()
        size.settle(2.0, Room(1000), self.others())
        size.keep(64)
        assert size.is_settled
        size.keep(60)
        assert not size.is_settled

    def test_where_another_rank_has_too_little_for_a_batch_all_of_them_refuse(self):
        with pytest.raises(ValueError, match=r"buffer_size=0\.5 \(3 live examples\) is too small for factor=2"):
            self.size(0.5).settle(2.0, Room(1000), self.others((3, False)))

    def test_the_usual_default_says_if_it_gets_smaller_than_it_said(self):
        each = self.size(reuse=Reuse.each, free=5000)
        assert (each.value, each.warning) == (128, "")
        assert each.settle(2.0, Room(5000), self.others((50, False))) == (
            "buffer_size is 50 instead of 128: another rank has less free memory"
        )
        each = self.size(reuse=Reuse.each, free=5000)
        assert each.settle(2.0, Room(400), self.others()).startswith("buffer_size is 40 instead of 128: 128 live examples of")
        each = self.size(reuse=Reuse.each, free=5000)
        assert each.settle(2.0, Room(400), self.others((30, False))).startswith("buffer_size is 30 instead of 128: another rank")

    def test_and_says_nothing_twice(self):
        each = self.size(reuse=Reuse.each, free=400)
        assert each.value == 40
        assert each.warning.startswith("buffer_size is 40 instead of 128")
        assert each.settle(2.0, Room(400), self.others()) == ""
        assert each.value == 40


class TestBesideACache:
    def sizing(self, reuse=Reuse.memory):
        return BufferSizing(
            batch_size=8,
            workers=1,
            item_bytes=1,
            by_batches=False,
            usual=128,
            unknown=512,
            most=992,
            most_by_default=496,
            reuse=reuse,
        )

    @pytest.mark.parametrize(("not_cached", "live"), [(0, 992), (100, 992), (101, 100), (None, 100)])
    def test_as_much_as_the_pass_allows_is_live_where_there_is_room_for_what_the_cache_has_not(self, not_cached, live):
        room = Room(10**6, not_cached=not_cached)
        assert self.sizing().size("100B", 2.0, room) == (live, "")
        assert self.sizing().size(0.0001, 2.0, room) == (live, "")
        assert self.sizing(Reuse.each).size("100B", 2.0, room) == (100, "")

    @pytest.mark.parametrize(("not_cached", "live"), [(100, 496), (101, 64), (None, 64)])
    def test_by_default_half_of_that(self, not_cached, live):
        assert self.sizing().size(None, 2.0, Room(1000, not_cached=not_cached)) == (live, "")

    @pytest.mark.parametrize(
        ("size", "not_cached", "fits"),
        [(900, 500, True), (900, 501, False), (900, None, False), (500, 900, True), (501, 900, False), (500, None, True)],
    )
    def test_a_saved_size_fits_where_there_is_room_for_what_the_cache_has_not(self, size, not_cached, fits):
        assert self.sizing().fits(size, Room(500, not_cached=not_cached)) is fits
