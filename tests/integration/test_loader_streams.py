"""Streams, with real workers: exact counts in every pass, at factor 1 the plain loader, exact resuming or a clear refusal."""

import contextlib
import threading
from contextlib import closing
from itertools import chain, islice

import numpy as np
import pytest
import torch
import torch.multiprocessing
from loader_cases import epochs, nothing_left_behind, take
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_echo import EchoLoader

LENGTH, BATCH = 50, 4


def share(length):
    """What this worker reads, as PyTorch's documentation shows it."""
    info = get_worker_info()
    return range(length) if info is None else range(info.id, length, info.num_workers)


class Stream(IterableDataset):
    """Dealt out by ``get_worker_info``. An example is [number, noise]: the noise tells one reading of it from every other."""

    def __init__(self, length=LENGTH):
        self.length = length

    def __iter__(self):
        for number in share(self.length):
            yield self.example(number)

    def example(self, number):
        return torch.tensor([number, float(torch.rand((), dtype=torch.float64)), np.random.rand()], dtype=torch.float64)


class Sized(Stream):
    def __len__(self):
        return self.length


def echo(factor, dataset=None, workers=2, seed=0, epoch_length="full_pass", buffer_size=None, reuse="memory", **options):
    """By default two batches are live in each worker: these streams are short."""
    buffer_size = buffer_size or 2 * BATCH * max(workers, 1)
    plain = DataLoader(Stream() if dataset is None else dataset, BATCH, num_workers=workers, **options)
    return EchoLoader(plain, factor, seed=seed, epoch_length=epoch_length, buffer_size=buffer_size, reuse=reuse)


def numbers(batches):
    return [[int(number) for number in batch[:, 0].tolist()] for batch in batches]


@pytest.mark.parametrize(("workers", "persistent", "reuse"), [(0, False, "each"), (2, True, "memory")])
def test_a_new_factor_reaches_the_workers_and_counts_from_the_same_batch_in_every_run(workers, persistent, reuse):
    def shares():
        loader = echo(1, Stream(400), workers, reuse=reuse, persistent_workers=persistent and workers > 0)
        found = []
        for _ in islice(loader, 60):
            found.append(loader.last_batch_counts.fresh)
            if len(found) == 20:
                loader.factor = 4
                since = loader.factor_since
        loader.close()
        return found, since

    found, since = shares()
    assert found[:since] == [BATCH] * since
    assert since == 20 + (6 if workers else 0)
    assert set(found[since + 2 * BATCH :]) == {1}
    assert shares() == (found, since)


def test_without_a_length_it_has_none_and_its_epochs_end_with_the_stream(caplog):
    loader = EchoLoader(DataLoader(Stream(), BATCH), 2, seed=0)
    assert loader.epoch_length == "full_pass"
    with pytest.raises(TypeError, match="has no length, since its loader has none"):
        len(loader)
    with caplog.at_level("INFO", logger="lightning_echo"):
        epochs(loader, 2)
    _, reason, remarks = (record.getMessage() for record in caplog.records)
    assert reason == "insertion_point='auto' chose after_augmentation: the data set is a stream, which has no index"
    assert "; an epoch ends when the stream ends, after about 2 times as many steps as without echoing" in remarks
    assert remarks.startswith("a checkpoint from within a pass cannot be resumed, unless the data set has state_dict()")


def test_closed_within_a_pass_it_begins_the_next_one_and_says_so():
    loader = echo(1, workers=1)
    take(loader, 3)
    loader.close()
    with pytest.warns(UserWarning, match="cannot be continued, because its workers were ended: the next pass begins"):
        epoch = list(loader)
    assert sorted(number for batch in numbers(epoch) for number in batch) == list(range(LENGTH))
    loader.close()


def test_a_batch_that_the_collate_function_made_none_is_a_batch():
    """For examples that are all broken, for one: Lightning leaves such a batch out by itself."""
    loader = echo(2, workers=1, collate_fn=lambda examples: None)
    batches = list(loader)
    loader.close()
    assert set(batches) == {None}
    assert loader.delivered_batches == len(batches) >= LENGTH / BATCH
    assert loader.counts.fresh == LENGTH


def test_data_pipes_are_divided_among_the_workers_as_torch_divides_them():
    pipe = IterableWrapper([torch.tensor([number]) for number in range(48)]).shuffle().sharding_filter()
    loader = EchoLoader(DataLoader(pipe, BATCH, num_workers=2), 1, seed=0)
    passes = [[int(number) for batch in loader for number in batch] for _ in range(3)]
    loader.close()
    assert [sorted(each) for each in passes] == [list(range(48))] * 3


def test_where_each_worker_drops_its_own_rest_a_pass_ends_before_torchs_length():
    """22 examples make five batches of four, and three workers make four of them: 2 + 1 + 1."""
    plain = DataLoader(Sized(22), 4, num_workers=3, drop_last=True)
    kept = sorted(chain.from_iterable(numbers(plain)))
    with closing(EchoLoader(plain, 1, insertion_point="after_augmentation", seed=0)) as loader:
        delivered = [number for _ in range(4) for batch in numbers(loader) for number in batch]
    assert (len(plain), len(kept)) == (5, 16)
    assert len(delivered) == 4 * 5 * 4
    assert [sorted(delivered[first : first + 16]) for first in range(0, 80, 16)] == [kept] * 5


class Failing(IterableDataset):
    def __iter__(self):
        yield from torch.zeros(9, 1)
        raise LookupError("shard 3 is unreadable")


def test_an_error_of_the_stream_arrives_where_its_batch_would():
    loader = echo(1, Failing())
    found = []
    with nothing_left_behind(), pytest.raises(LookupError, match="shard 3 is unreadable"):
        found.extend(loader)
    assert len(found) == 2 * 2


class ToldInTwoSteps(Stream):
    """Its pass is told in memory of all workers, as Hugging Face's; whoever meets another one on the way says so."""

    def __init__(self):
        super().__init__()
        context = torch.multiprocessing.get_context()
        self.inside, self.met, self.told = context.Barrier(2), context.Event(), context.Value("i", -1)

    def set_epoch(self, epoch):
        before = self.told.value
        with contextlib.suppress(threading.BrokenBarrierError):
            self.inside.wait(0.3)
            self.met.set()
        self.told.value += epoch - before


def test_real_workers_tell_their_stream_the_pass_one_after_another():
    stream = ToldInTwoSteps()
    with closing(EchoLoader(DataLoader(stream, BATCH, num_workers=2), 2, seed=0)) as loader:
        for number in range(2):
            assert list(loader)
            assert stream.told.value == number
            stream.inside.reset()
    assert not stream.met.is_set()
