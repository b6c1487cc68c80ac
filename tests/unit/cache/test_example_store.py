"""Examples are looked up and added, counted, audited, and checked where they come from a file."""

import dataclasses
import multiprocessing

import pytest
import torch

from lightning_echo.cache.arena import Arena
from lightning_echo.cache.reads import MISSING, ExampleStore, Lookups, StaleCacheError
from lightning_echo.cache.record import encode, owner_of

MIB = 2**20


@dataclasses.dataclass
class Example:
    image: torch.Tensor


def make_store(name=None):
    return ExampleStore(Arena.create(20, MIB), name)


class TestLookingUp:
    def test_what_was_put_is_found_in_memory_of_its_own(self):
        store, example = make_store(), {"x": torch.arange(4), "label": 3}
        assert store.put(5, example)
        assert store.put(4, None)
        assert store.get(4) is None, "None is an example"
        found = store.get(5)
        assert torch.equal(found["x"], example["x"])
        found["x"] += 1
        example["x"] += 10
        assert store.get(5)["x"].tolist() == [0, 1, 2, 3]

    def test_hits_and_misses_are_counted_and_what_is_read_again_is_not(self):
        store = make_store()
        store.put(1, "a")
        assert store.get(0) is MISSING
        assert [store.get(1) for _ in range(3)] == ["a"] * 3
        assert store.get(None) is MISSING, "an example without a key"
        assert store.look_up([1, 2], are_fresh=False) == (["a", MISSING], [1], [])
        assert store.lookups == Lookups(hits=3, misses=2)

    def test_a_full_store_takes_nothing_and_does_not_even_make_a_record(self):
        store = make_store()
        store.arena.freeze()
        assert not store.put(0, lambda: "which pickle could not write")

    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
    def test_another_process_has_the_same_examples_and_counts_of_its_own(self, method):
        store = make_store()
        store.put(0, "a")
        store.get(0)
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            assert pool.apply(_looked_up, (store,)) == ("a", (1, 0))
        assert store.lookups == (1, 0)
        assert store.get(7) == "from there"


def _looked_up(store):
    found = store.get(0)
    store.put(7, "from there")
    return found, tuple(store.lookups)


class TestWhoseRecordItIs:
    def test_so_is_one_of_other_data_and_one_that_another_node_sends_for_another_example(self):
        arena = Arena.create(20, MIB)
        one, other = (ExampleStore(arena, data=data) for data in (7, 8))
        one.put(1, "one")
        assert one.decoded(1, arena.get(1)) == "one"
        for store, key in ((other, 1), (one, 2)):
            with pytest.raises(StaleCacheError, match=f"the record of example {key} is"):
                store.decoded(key, arena.get(1))

    def test_workers_know_of_which_data_it_is(self):
        store = ExampleStore(Arena.create(20, MIB), data=7)
        store.put(1, "one")
        assert multiprocessing.reduction.ForkingPickler.loads(multiprocessing.reduction.ForkingPickler.dumps(store)).data == 7


class TestAudit:
    def test_is_due_for_that_hit_among_several_and_for_no_miss(self):
        store = make_store()
        store.put(0, "a")
        assert store.look_up([0], are_fresh=False).to_audit == [], "what is not counted"
        assert store.look_up([5, 0, 0]) == ([MISSING, "a", "a"], [0], [1])
        assert store.look_up([0, 0, 5, 0, 0]).to_audit == []  # hits 3 to 6
        assert store.look_up([5, 0, 0, 5, 0, 0, 0]).to_audit == [5]  # hits 7 to 11
        assert store.look_up([0] * 1000).to_audit == [100 - 12, 1000 - 12]

    def test_finds_a_data_set_that_returns_something_else(self):
        store = make_store()
        store.audit({"x": torch.ones(2)}, {"x": torch.ones(2)}, 7)
        with pytest.raises(StaleCacheError, match=r"example 7 has changed since it was cached: .*x"):
            store.audit({"x": torch.ones(2)}, {"x": torch.tensor([1.0, 2.0])}, 7)


class Opaque:
    """Holds nothing that could be compared."""

    __slots__ = ()

    def __reduce__(self):
        return Opaque, ()


def test_examples_that_cannot_be_compared_are_audited_by_their_records():
    make_store().audit([Opaque(), 1], [Opaque(), 1], 7)
    with pytest.raises(StaleCacheError, match="example 7 has changed since it was cached"):
        make_store().audit([Opaque(), 1], [Opaque(), 2], 7)


class TestUnderAName:
    def make(self, tmp_path, make_new=True):
        path = str(tmp_path / "arena")
        return ExampleStore(Arena.create_file(path, 20, MIB) if make_new else Arena.open_file(path), "train")

    def test_a_pickled_one_in_the_file_is_not_read(self, tmp_path):
        store = self.make(tmp_path)
        store.arena.put(
            3, encode(Example(torch.ones(1)), checksum=True, owner=owner_of(0, 3)).parts
        )  # as somebody might have written it there
        with pytest.raises(ValueError, match="may only be read by the job that has written it"):
            store.get(3)

    @pytest.mark.parametrize("place", [0, 20, 60, -1])
    def test_a_changed_byte_is_noticed_at_the_first_hit(self, tmp_path, place):
        store = self.make(tmp_path)
        store.put(3, b"x" * 100)
        assert self.make(tmp_path, make_new=False).get(3) == b"x" * 100
        data = (tmp_path / "arena").read_bytes()
        start = data.index(b"x" * 100)
        with open(tmp_path / "arena", "r+b") as file:
            file.seek(start + place % 100)
            file.write(b"y")
        again = self.make(tmp_path, make_new=False)
        with pytest.raises(StaleCacheError, match=r"the cache 'train' is damaged: the record of example 3.*Remove its file"):
            again.get(3)

    def test_a_whole_one_is_checked_once_in_a_process(self, tmp_path, monkeypatch):
        store, checked = self.make(tmp_path), []
        store.put(3, "a")
        monkeypatch.setattr("lightning_echo.cache.reads.is_whole", lambda data, owner: checked.append(owner) or True)
        assert [store.get(3) for _ in range(4)] == ["a"] * 4
        assert checked == [owner_of(0, 3)]
