"""How many items may be live: sixteen batches, less of a short pass or of scarce memory, and never too few for a batch."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.caching.free_memory import free_memory_bytes
from lightning_echo.loading import sizing
from lightning_echo.loading.loader import EchoLoader

MIB = 2**20


class TestMemory:
    """Examples of 1 MiB, batches of 8, two workers that are never started: 32 live examples are usual."""

    @pytest.fixture
    def free(self, monkeypatch):
        def set_free(mebibytes):
            number = None if mebibytes is None else mebibytes * MIB
            monkeypatch.setattr(sizing, "free_memory_bytes", lambda: number)

        return set_free

    def make(self, factor=2, **options):
        loader = DataLoader(torch.zeros(16, 2**18), batch_size=8, num_workers=2)
        return EchoLoader(loader, factor, insertion_point="after_augmentation", **options)

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

    def test_an_explicit_size_that_cannot_fit_is_refused_with_the_way_out(self, free):
        free(200)
        with pytest.raises(ValueError, match=r"buffer_size=201 cannot fit: .* Use a smaller one, or a later insertion point"):
            self.make(buffer_size=201)

    def test_an_explicit_size_that_fits_is_taken_as_it_is(self, free):
        free(200)
        assert self.make(buffer_size=199).buffer_size == 199

    def test_whole_batches_are_counted_by_their_examples(self, free):
        free(200)
        loader = DataLoader(torch.zeros(16, 2**18), batch_size=8)
        with pytest.warns(UserWarning, match=r"buffer_size is 2 instead of 4: 4 live batches of 8 MiB"):
            assert EchoLoader(loader, 2, insertion_point="after_batching").buffer_size == 2

    def test_what_is_free_is_what_the_container_leaves(self):
        assert sizing.free_memory_bytes is free_memory_bytes


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(16, 2))


class TestDefault:
    def default(self, point, examples, workers=0):
        return EchoLoader(DataLoader(torch.zeros(examples, 2), 8, num_workers=workers), 2, insertion_point=point).buffer_size

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

        assert EchoLoader(DataLoader(Sized(), 8), 2).buffer_size == 50

    def test_where_the_length_of_a_pass_is_not_known(self):
        assert EchoLoader(DataLoader(Stream(), 8), 2).buffer_size == 128
        assert EchoLoader(Stream(), 2, insertion_point="after_batching").buffer_size == 16

    def test_a_quarter_of_the_pass_of_this_rank(self):
        loader = DataLoader(torch.zeros(800, 2), 8)
        assert EchoLoader(loader, 2, insertion_point="after_augmentation", num_replicas=2, rank=0).buffer_size == 100
