"""How many items may be live: what the user or the rule of reuse asks for, what memory holds, and never too few for a batch."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo.data.machine import free_memory_bytes
from lightning_echo.loader import buffer as sizing
from lightning_echo.loader.buffer import BufferSize, BufferSizing, Room
from lightning_echo.loader.loader import EchoLoader
from lightning_echo.plan.plan import Reuse

MIB = 2**20
EACH, BATCHES, TRANSFER = {"reuse": "each"}, {"insertion_point": "after_batching"}, {"insertion_point": "after_transfer"}


@pytest.fixture
def free(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def set_free(mebibytes, ranks=None, device=None):
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda: None if mebibytes is None else mebibytes * MIB)
        if device is not None:
            monkeypatch.setattr(sizing, "free_device_bytes", lambda: device * MIB)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return set_free


class Mebibytes(Dataset):
    """Examples that say that they have 1 MiB, and are a view of one number."""

    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        return torch.full((1,), float(index)).expand(2**18)

    def __len__(self):
        return self.length


class Stream(IterableDataset):
    """The size of its examples is not known, as nothing is read of it."""

    def __iter__(self):
        return iter(torch.zeros(16, 2))


class Sized(Stream):
    def __len__(self):
        return 200


def over_mebibytes(length=10_000, factor=2, workers=2, **options):
    """Batches of 8 examples of 1 MiB. Nothing is read but one example, and workers are never started."""
    loader = DataLoader(Mebibytes(length), batch_size=8, num_workers=workers)
    return EchoLoader(loader, factor, **{"insertion_point": "after_augmentation", **options})


@pytest.mark.parametrize(
    ("length", "options", "size"),
    [
        (512, {"workers": 0}, 128),  # sixteen batches of eight
        (10_000, {}, 128),  # whatever the number of workers ...
        (10_000, {"workers": 10}, 160),  # ... but for two batches each
        (511, {}, 127),  # of a short pass a quarter ...
        (16, {"workers": 0}, 16),  # ... but for two batches for each worker
        (16, {"workers": 3}, 48),
        (800, {"num_replicas": 2, "rank": 0}, 100),  # of the pass of this rank
        *[(length, BATCHES, size) for length, size in ((10_000, 16), (512, 16), (400, 12), (16, 4))],
        (10_000, {**BATCHES, "workers": 0}, 16),
        (10_000, TRANSFER, 4),
    ],
)
def test_the_default_of_each_is_so_many_batches_and_a_part_of_a_pass(free, length, options, size):
    for mebibytes in (None, 10**6):
        free(mebibytes)
        assert over_mebibytes(length, **EACH, **options).buffer_size == size


@pytest.mark.parametrize(("factor", "least"), [(1, 8), (2, 8), (4, 12), (8, 14)])
def test_the_default_of_each_takes_at_most_a_tenth_of_the_memory_and_never_less_than_a_batch_needs(free, factor, least):
    free(1)
    with pytest.warns(UserWarning, match=f"buffer_size is {least} instead of 32: 32 live examples of 1 MiB .* Set buffer_size"):
        assert over_mebibytes(16, factor, **EACH).buffer_size == least
    free(200)
    with pytest.warns(UserWarning, match="buffer_size is 20 instead of 32"):
        assert over_mebibytes(16, factor, **EACH).buffer_size == 20
    with pytest.warns(UserWarning, match="buffer_size is 2 instead of 4: 4 live batches of 8 MiB"):
        assert over_mebibytes(16, factor, **EACH, **BATCHES).buffer_size == 2
    free(321)
    assert over_mebibytes(16, factor, **EACH).buffer_size == 32
    free(800, ranks=4)
    with pytest.warns(UserWarning, match=r"a tenth of the 0\.195 GiB of free memory that each of the node's 4 ranks has"):
        assert over_mebibytes(**EACH).buffer_size == 20


@pytest.mark.parametrize(
    ("mebibytes", "options", "size"),
    [
        # A tenth of the free memory, as a power of two of batches; at most half of what a pass allows, and a batch per worker.
        *[(memory, {}, size) for memory, size in ((5120, 64 * 8), (10_239, 64 * 8), (5119, 32 * 8), (20, 2 * 8))],
        (10**6, {}, (10_000 - 8) // 2),
        (10**6, {"length": 800, "num_replicas": 2, "rank": 0}, (400 - 8) // 2),
        (10**6, {"length": 200, "workers": 0}, (200 - 8) // 2),  # else the next pass would have to keep the order of this one
        *[(1, {"factor": factor}, 2 * 8) for factor in (1, 4, 8)],
        (800, BATCHES, 8),
        (10**6, {"length": 800, **BATCHES}, 100),
        (None, {}, 64 * 8),
    ],
)
def test_the_default_of_memory_follows_the_memory(free, recwarn, mebibytes, options, size):
    free(mebibytes)
    loader = over_mebibytes(**options)
    assert (loader.reuse, loader.buffer_size, recwarn.list) == ("memory", size, [])


@pytest.mark.parametrize("reuse", ["each", "memory"])
def test_where_sizes_or_a_length_are_not_known_a_default_is_so_many_batches(reuse):
    batches = 16 if reuse == "each" else 64
    assert EchoLoader(DataLoader(Stream(), 8), 2, reuse=reuse).buffer_size == 8 * batches
    assert EchoLoader(Stream(), 2, **BATCHES, reuse=reuse).buffer_size == batches
    assert EchoLoader(DataLoader(Sized(), 8), 2, reuse=reuse).buffer_size == (50 if reuse == "each" else 200)


@pytest.mark.parametrize(
    ("asked", "options", "size"),
    [
        (199, {}, 199),
        ("20MiB", {}, 20),
        ("0.5 GiB", {}, 512),
        ("21MB", {}, 20),
        ("100MiB", BATCHES, 12),
        (0.3, {}, 300),
        ("500MiB", {"length": 10, "workers": 1}, 4),  # what a batch of 8 needs at factor 2, though a pass hardly fills one
    ],
)
@pytest.mark.parametrize("reuse", ["each", "memory"])
def test_what_is_asked_for_is_taken_as_it_is(free, asked, options, size, reuse):
    free(1000)
    assert over_mebibytes(buffer_size=asked, reuse=reuse, **options).buffer_size == size


@pytest.mark.parametrize(("ranks", "size"), [("1", 300), ("4", 75), ("7", 42), ("", 300), ("0", 300), ("many", 300), ("-2", 300)])
def test_the_ranks_that_a_launcher_tells_divide_a_share_but_not_bytes(free, ranks, size):
    free(1000, ranks)
    assert over_mebibytes(buffer_size=0.3).buffer_size == size
    assert over_mebibytes(buffer_size="300MiB").buffer_size == 300
    assert size != 75 or over_mebibytes().buffer_size == 2 * 8, "a tenth of 250 MiB"


@pytest.mark.parametrize("asked", ["1TB", 0.9])
@pytest.mark.parametrize("reuse", ["each", "memory"])
def test_a_pass_bounds_memory_so_that_no_index_is_held_twice(free, asked, reuse):
    free(10**6)
    assert over_mebibytes(100, buffer_size=asked, reuse=reuse).buffer_size == 92
    assert over_mebibytes(100, buffer_size=asked, reuse=reuse, **BATCHES).buffer_size == 13, "a pass"


@pytest.mark.parametrize(
    ("mebibytes", "options", "said"),
    [
        (200, {"buffer_size": 201}, r"=201 cannot fit: .* Use a smaller one, or a later insertion point"),
        (200, {"buffer_size": 201, **EACH}, r"=201 cannot fit: "),
        (200, {"buffer_size": "201MiB"}, r"='201MiB' cannot fit: 201 live examples of 1 MiB need more than"),
        (1000, {"buffer_size": "11MiB", "factor": 4}, r"='11MiB' \(11 live examples\) is too small for factor=4: {needs}"),
        (1000, {"buffer_size": 0.011, "factor": 4}, r"=0\.011 \(11 live examples\) is too small for factor=4: {needs}"),
        (1000, {"buffer_size": 11, "factor": 4}, r"=11 is too small for factor=4: a batch of 8 .*\. Use at least 12, or leave"),
        (None, {"buffer_size": 0.1}, r"=0\.1 is a share of the free memory, which this system does not tell"),
    ],
)
def test_a_size_that_cannot_be_is_refused_with_the_one_that_can(free, mebibytes, options, said):
    free(mebibytes)
    needs = r"a batch of 8 needs 6 live examples in each of 2 workers\. Use at least 12 \(12 MiB\), or leave it out"
    with pytest.raises(ValueError, match="buffer_size" + said.replace("{needs}", needs)):
        over_mebibytes(**options)


@pytest.mark.parametrize("asked", ["1GiB", 0.1])
@pytest.mark.parametrize(("point", "items"), [("after_augmentation", "examples"), ("after_batching", "batches")])
def test_where_the_size_of_an_item_is_not_known_a_number_is_asked_for(asked, point, items):
    with pytest.raises(ValueError, match=rf"buffer_size={asked!r} is memory, .* is not known: give a number of {items}"):
        EchoLoader(DataLoader(Stream(), 8), 2, insertion_point=point, buffer_size=asked)


@pytest.mark.parametrize(
    ("host", "device", "ranks"), [(8000, 1600, 1), (1600, 8000, 1), (1600, None, 1), (None, 1600, 1), (80_000, 1600, 4)]
)
def test_live_batches_on_a_device_take_the_scarcer_memory_of_device_and_host(free, host, device, ranks):
    free(host, ranks, device)
    assert over_mebibytes(**TRANSFER).buffer_size == 16
    assert device is None or host is None or over_mebibytes().buffer_size > 16, "the device is not asked for items elsewhere"


def test_free_memory_is_what_the_container_leaves_and_on_a_device_what_torch_does_not_use(monkeypatch):
    assert sizing.free_memory_bytes is free_memory_bytes
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("began to use CUDA"))
    assert sizing.free_device_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 400)
    assert sizing.free_device_bytes() == 1300


def sizing_of_bytes(reuse=Reuse.memory, most=None):
    """Examples of 1 byte, batches of 8 in one worker."""
    half = None if most is None else most // 2
    counted = {"batch_size": 8, "workers": 1, "item_bytes": 1, "by_batches": False, "usual": 128, "unknown": 512}
    return BufferSizing(**counted, most=most, most_by_default=half, reuse=reuse)


class TestSettling:
    """One size on all ranks, over a long pass."""

    def size(self, asked=None, reuse=Reuse.memory, free=1000):
        return BufferSize(asked, sizing_of_bytes(reuse), 2.0, Room(free))

    def others(self, *told):
        return lambda mine: [mine, *told]

    @pytest.mark.parametrize(
        ("asked", "room", "told", "value"),
        [
            (None, Room(1000), [(60, False)], 60),
            (None, Room(1000), [(110, False)], 64),
            (0.5, Room(600), [], 300),  # what is free by then
            (0.5, None, [], 500),  # not told any more
        ],
    )
    def test_is_on_the_smallest_that_a_rank_works_out_by_then(self, asked, room, told, value):
        size = self.size(asked)
        assert not size.is_settled
        assert size.settle(2.0, room, self.others(*told)) == ""
        assert (size.value, size.is_settled) == (value, True)

    @pytest.mark.parametrize("asked", [None, 0.5, "50B"])
    def test_keeps_the_size_of_a_saved_run_where_all_ranks_have_room_for_it(self, asked):
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

    def test_where_another_rank_has_too_little_for_a_batch_all_of_them_refuse(self):
        with pytest.raises(ValueError, match=r"buffer_size=0\.5 \(3 live examples\) is too small for factor=2"):
            self.size(0.5).settle(2.0, Room(1000), self.others((3, False)))

    @pytest.mark.parametrize(
        ("free", "by_then", "told", "said"),
        [
            (5000, 5000, [(50, False)], "buffer_size is 50 instead of 128: another rank has less free memory"),
            (5000, 400, [], "buffer_size is 40 instead of 128: 128 live examples of"),
            (5000, 400, [(30, False)], "buffer_size is 30 instead of 128: another rank"),
            (400, 400, [], ""),  # it was said before
        ],
    )
    def test_the_default_of_each_says_once_that_it_is_smaller(self, free, by_then, told, said):
        each = self.size(reuse=Reuse.each, free=free)
        assert each.warning.startswith("buffer_size is 40 instead of 128") == (free == 400)
        found = each.settle(2.0, Room(by_then), self.others(*told))
        assert found.startswith(said)
        assert bool(found) == bool(said)


@pytest.mark.parametrize(("not_cached", "live"), [(0, 992), (100, 992), (101, 100), (None, 100)])
def test_beside_a_cache_as_much_as_the_pass_allows_is_live_where_there_is_room_for_what_it_has_not(not_cached, live):
    room = Room(10**6, not_cached=not_cached)
    assert sizing_of_bytes(most=992).size("100B", 2.0, room) == (live, "")
    assert sizing_of_bytes(most=992).size(0.0001, 2.0, room) == (live, "")
    assert sizing_of_bytes(Reuse.each, most=992).size("100B", 2.0, room) == (100, "")
    by_default = sizing_of_bytes(most=992).size(None, 2.0, room._replace(bytes=1000))
    assert by_default == (496 if live == 992 else 64, "")
