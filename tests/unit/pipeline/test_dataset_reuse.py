"""Examples that a worker hands out again: drawn as the first time, safe from edits, and without memory beyond their own."""

from itertools import count

import numpy as np
import pytest
import torch
from cache_cases import Plain, Staged, Tensors, make_cache, make_requests, noise, request
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from lightning_echo.data import randomness as seeding


class TestRandomNumbers:
    @pytest.mark.parametrize(("factor", "seeds"), [(1, 1), (4, None)])
    def test_where_nothing_is_used_again_there_is_one_seed_for_a_batch(self, monkeypatch, factor, seeds):
        calls = count()
        monkeypatch.setattr(seeding, "seed_all", lambda seed: next(calls))
        cache, requests = make_cache(Plain()), make_requests(factor)
        for _ in range(20):
            before, asked = next(calls), next(requests)
            cache.fetch(asked)
            made = next(calls) - before - 1
            assert made == (seeds or asked.fresh + 1)  # else one for each fresh example and one for the batch


class TestProtection:
    """The code that gets an example may edit it: no other use sees that. (test_protect.py knows all the types.)"""

    @pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
    def test_edits_do_not_reach_another_use(self, point):
        cache, requests = make_cache(Tensors(), point), make_requests(4)
        for _ in range(60):
            asked = next(requests)
            examples, _ = cache.fetch(asked)
            assert [example.tolist() for example in examples] == [[index + 0.5] * 3 for index in asked.indices]
            for example in examples:
                example.zero_()

    def test_augmentation_gets_copies_although_torchs_own_collate_makes_some_later(self):
        cache = make_cache(Tensors(), "before_augmentation", collate_fn=default_collate)
        uses = [cache.fetch(request([7], fresh=int(not i), stays_live="110"[i]))[0][0].tolist() for i in range(3)]
        assert uses == [[7.5] * 3] * 3

    def test_echoes_are_not_copied_where_torchs_own_collate_does_it(self):
        original = torch.zeros(3)
        cache = make_cache([original], collate_fn=default_collate)
        (first,), _ = cache.fetch(request([0], fresh=1, stays_live="1"))
        (again,), _ = cache.fetch(request([0], fresh=0, stays_live="1"))
        (last,), _ = cache.fetch(request([0], fresh=0))
        assert first is original
        assert again is last is not original
        assert default_collate([again, last]).data_ptr() != again.data_ptr()

    def test_the_first_use_is_what_was_read_and_the_last_one_what_was_kept(self):
        copies = []

        class Example:
            def __deepcopy__(self, memo):
                copies.append(Example())
                return copies[-1]

        original = Example()
        cache = make_cache([original])
        uses = [cache.fetch(request([5], fresh=int(not i), indices=[0], stays_live="110"[i]))[0][0] for i in range(3)]
        assert uses == [original, copies[1], copies[0]]
        assert len(copies) == 2

    def test_a_small_part_of_something_large_does_not_keep_all_of_it(self):
        class Frames(Dataset):
            def __getitem__(self, index):
                return torch.zeros(100_000)[:10], np.zeros(100_000)[:10]

        cache = make_cache(Frames(), collate_fn=default_collate)
        cache.fetch(request([0, 1], fresh=2, stays_live="11"))
        held, _ = cache.fetch(request([0, 1], fresh=0, stays_live="11"))
        for tensor, array in held:
            assert tensor.untyped_storage().nbytes() == 40
            assert array.base is None


def test_torchs_collate_function_copies_no_types_that_were_registered_with_it(monkeypatch):
    class Registered:
        """A type that a user has registered with torch's collate function, which then hands it on uncopied."""

        def __init__(self):
            self.value = torch.zeros(3)

    class Data(Plain):
        def __getitem__(self, index):
            return Registered()

    monkeypatch.setitem(default_collate_fn_map, Registered, lambda batch, *, collate_fn_map=None: batch)
    cache, requests = make_cache(Data(), collate_fn=default_collate), make_requests(4)
    for _ in range(40):
        for example in default_collate(cache.fetch(next(requests))[0]):
            assert example.value.tolist() == [0, 0, 0]
            example.value += 1


def test_what_is_redone_never_shares_random_numbers_with_what_is_reused():
    """Batch 5 and the example at position 5 are different things."""

    class Both(Staged):
        def load(self, index):
            return noise()

        def augment(self, example):
            return example, noise()

    cache, requests = make_cache(Both(), "before_augmentation"), make_requests(2)
    loaded, drawn = set(), set()
    for _ in range(60):
        for example, augmented in cache.fetch(next(requests))[0]:
            loaded.add(example)
            drawn.add(augmented)
    assert not loaded & drawn
