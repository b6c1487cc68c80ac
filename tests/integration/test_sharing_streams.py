"""Sharing what is not read by index: streams, loaders of whole batches, and samplers with a memory of their own."""

import os
import signal
import time

import pytest
import torch
from sharing_runs import (
    Numbers,
    closing,
    epochs_of,
    examples,
    indices,
    kill_reader,
    resumed,
    rows,
    sleeps,
    status,
    together,
    wait_until,
)
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

from lightning_echo import EchoLoader
from lightning_echo.share import sharing as loader_sharing
from lightning_echo.share.connecting import SharedDataDiffers
from lightning_echo.share.packing import SharedReadError
from lightning_echo.share.process import ReaderError

LENGTH = 97


pytestmark = pytest.mark.usefixtures("own_folder")


class Stream(IterableDataset):
    """Yields what `Numbers` has, each worker a part of it."""

    def __init__(self, length=LENGTH, seconds=0.0, fails_at=None):
        self.numbers = Numbers(length, seconds, fails_at)
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.numbers[index] for index in range(first, self.length, step))


class Batches:
    """An iterable of batches, and no ``DataLoader``."""

    def __init__(self, batch_size, length=LENGTH, seconds=0.0):
        self.batch_size, self.length, self.seconds = batch_size, length, seconds

    def __len__(self):
        return -(-self.length // self.batch_size)

    def __iter__(self):
        for first in range(0, self.length, self.batch_size):
            time.sleep(self.seconds)
            index = torch.arange(first, min(first + self.batch_size, self.length))
            data = (index % 251).to(torch.uint8)[:, None].expand(-1, 64).clone()
            yield {"index": index, "noise": torch.rand(len(index)), "data": data}


class UnsizedBatches(Batches):
    __len__ = None


class BatchesInOne(IterableDataset):
    """A stream that makes its batches by itself."""

    def __iter__(self):
        return iter(Batches(10))


class Counting(Sampler):
    """Its order depends on how often it was iterated, which it tells nobody."""

    def __init__(self, length):
        self.length, self.times = length, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        self.times += 1
        return iter([(7 * number + self.times) % self.length for number in range(self.length)])


def of_stream(batch_size, workers=2, dataset=None, **options):
    return DataLoader(Stream() if dataset is None else dataset, batch_size=batch_size, num_workers=workers, **options)


def of_own_batches(batch_size):
    dataset = Numbers(LENGTH)
    return DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 7, False), num_workers=1)


LOADERS = {
    "stream": of_stream,
    "stream without workers": lambda size: of_stream(size, workers=0),
    "batches": Batches,
    "batches without a length": UnsizedBatches,
    "batch_size=None": lambda size: DataLoader(BatchesInOne(), batch_size=None),
    "a batch sampler": of_own_batches,
    "a sampler that counts": lambda size: DataLoader(Numbers(LENGTH), batch_size=size, sampler=Counting(LENGTH), num_workers=1),
}


def shared(loader, factor=1, options=None, **share):
    share = {"name": "data", "linger_seconds": 0.5, "window": "1MiB", **share}
    return EchoLoader(loader, factor, share=share, **{"seed": 0, **(options or {})})


@pytest.mark.parametrize("kind", LOADERS)
def test_each_training_gets_every_example_once_in_one_order(kind):
    trainings = [shared(LOADERS[kind](size), wait_for=2, window=2**13) for size in (8, 20)]
    found = together(*(closing(each, 2, sleeps(0.001 * number)) for number, each in enumerate(trainings)))
    for epochs, size in zip(found, (8, 20), strict=True):
        assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(LENGTH))] * 2
        if kind in ("stream", "batches"):
            whole, rest = divmod(LENGTH, size)
            assert [[len(batch) for batch in epoch] for epoch in epochs] == [[size] * whole + [rest]] * 2
    first, other = [[examples(epoch) for epoch in epochs] for epochs in found]
    assert other == first
    assert first[0] != first[1], "each pass has noise of its own"
    assert [each.sharing.missed_examples for each in trainings] == [0, 0]


def test_drop_last_drops_only_the_last_part_batch_of_the_training_that_wants_it():
    trainings = [shared(of_stream(8, drop_last=drops), wait_for=2) for drops in (False, True)]
    all_of_it, less = together(*(closing(each, 2) for each in trainings))
    for whole, dropped in zip(all_of_it, less, strict=True):
        assert [len(batch) for batch in dropped] == [8] * 12
        assert examples(dropped) == examples(whole)[:96]


def test_the_length_of_a_training_is_that_of_its_own_batch_size_and_other_batches_are_refused():
    first = shared(Batches(4, length=10))
    epoch = iter(first)
    next(epoch)
    second = shared(Batches(10))
    assert len(second) == 10
    with pytest.raises(SharedDataDiffers, match=r"loader\.length: 97 and 10"):
        next(iter(second))
    first.close()


class Odd(Batches):
    def __iter__(self):
        for batch in super().__iter__():
            yield {**batch, "more": torch.zeros(3)}


def test_a_batch_that_cannot_be_cut_is_refused_with_a_hint():
    def run(loader):
        try:
            return str(len(list(loader)))
        except ValueError as error:
            return str(error)
        finally:
            loader.close()

    trainings = [shared(Odd(size), wait_for=2) for size in (8, 5)]
    counted, refused = sorted(together(*(lambda each=each: run(each) for each in trainings)), key=len)
    assert counted.isdecimal()
    assert "cannot be cut for another batch size: its leaves must have one number of rows" in refused


def test_a_training_that_comes_late_gets_the_rest_of_the_pass_and_then_whole_ones():
    first, second = (shared(of_stream(8, dataset=Stream(seconds=0.002)), window=2**13) for _ in range(2))
    epoch = iter(first)
    had = [rows(next(epoch)) for _ in range(5)]

    def goes_on():
        wait_until(lambda: status()["count"] == 2, "the late one is there")
        return [rows(batch) for batch in epoch], *closing(first, 3)()

    (rest, *later), late = together(goes_on, closing(second, 3))
    assert sorted(indices([*had, *rest])) == list(range(LENGTH))
    assert 0 < len(examples(late[0])) < LENGTH
    assert sorted(indices(late[1])) == sorted(indices(late[2])) == list(range(LENGTH))
    assert set(examples(late[1])) <= {example for each in later for example in examples(each)}


def test_each_training_echoes_as_much_as_it_wants():
    plain, echoing = shared(of_stream(8), wait_for=2), shared(of_stream(8), 2, wait_for=2)
    epochs, twice = together(closing(plain, 4), closing(echoing, 4))
    fresh = [example for epoch in epochs for example in examples(epoch)]
    echoed = [example for epoch in twice for example in examples(epoch)]
    assert set(echoed) <= set(fresh)
    assert max(map(echoed.count, echoed)) > 1
    assert echoing.counts.fresh < len(echoed) == echoing.counts.fresh + echoing.counts.echoed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batches without a length", "a sampler that counts"])
def test_alone_with_its_reader_a_training_resumes_exactly(kind):
    found, rest = resumed(lambda: shared(LOADERS[kind](8), 2), 13, 3)
    assert rest == found[13 : 13 + len(rest)]


def killing(loader, *, after, epochs):
    """A training during which the reader is killed, after so many batches."""
    try:
        found = [[]]
        epoch = iter(loader)
        for _ in range(after):
            found[0].append(rows(next(epoch)))
        pid = kill_reader()
        found[0] += [rows(batch) for batch in epoch]
        for _ in range(epochs):
            found.append([rows(batch) for batch in loader])
        return pid, found
    finally:
        loader.close()


def test_where_no_other_reader_finds_its_place_a_dead_one_is_an_error_with_a_hint():
    with pytest.raises(ReaderError, match=r"no other one finds its place in this data again.*share\.restart='pass'"):
        killing(shared(of_stream(2), window=2**13), after=3, epochs=3)


def test_what_is_in_the_window_is_taken_before_the_error():
    loader = shared(of_stream(2, workers=1, dataset=Stream(10_000, seconds=0.001)))
    epoch, found = iter(loader), []
    for _ in range(5):
        found += next(epoch)["index"].tolist()
    wait_until(lambda: status()["written"] > 60, "the window has more")
    kill_reader()
    with pytest.raises(ReaderError):
        found.extend(index for batch in epoch for index in batch["index"].tolist())
    assert found == list(range(len(found)))
    assert len(found) > 50
    loader.close()


@pytest.mark.slow
def test_with_restart_pass_the_trainings_go_on_with_the_next_pass(caplog):
    share = {"restart": "pass", "window": 2**13, "wait_for": 2}
    first, second = shared(of_stream(2), **share), shared(of_stream(2), **share)
    (_, found), other = together(lambda: killing(first, after=3, epochs=2), closing(second, 3))
    for epochs in (found, other):
        assert [sorted(indices(epoch)) for epoch in epochs[1:]] == [list(range(LENGTH))] * 2
        assert len(set(indices(epochs[0]))) == len(indices(epochs[0])) <= LENGTH
    assert [examples(epoch) for epoch in found[1:]] == [examples(epoch) for epoch in other[1:]]
    assert "the rest of pass 0 was lost with the reader" in caplog.text


@pytest.mark.slow
def test_where_the_length_of_an_epoch_is_known_it_is_kept_when_the_rest_of_a_pass_is_lost():
    loader = shared(LOADERS["a batch sampler"](7), restart="pass", window=2**12)
    _, (first, second) = killing(loader, after=3, epochs=1)
    assert len(first) == len(second) == 14
    batches = [*first, *second]
    assert any(sorted(indices(batches[at : at + 14])) == list(range(LENGTH)) for at in range(1, 14)), "a whole pass, later"


@pytest.mark.slow
def test_a_sampler_with_a_memory_is_found_again_by_the_next_reader():
    loader = shared(DataLoader(Numbers(LENGTH, seconds=0.001), batch_size=4, sampler=Counting(LENGTH)), window=2**14)
    found = epochs_of(loader, 2)
    pid, rest = killing(loader, after=5, epochs=1)
    assert pid
    expected = [[(7 * number + times) % LENGTH for number in range(LENGTH)] for times in (1, 2, 3, 4)]
    assert [indices(epoch) for epoch in (*found, *rest)] == expected


class Objects(Stream):
    """Yields what cannot be shared."""

    def __iter__(self):
        yield {"image": [object()]}


@pytest.mark.parametrize(
    ("dataset", "error", "said"),
    [
        (Stream(0), RuntimeError, "yielded nothing in pass 0"),
        (Objects(), TypeError, r"example\['image'\]\[0\] is a builtins.object, which cannot be shared"),
    ],
)
def test_what_a_stream_has_instead_of_examples_is_an_error_that_names_it(dataset, error, said):
    loader = shared(of_stream(8, dataset=dataset))
    with pytest.raises(error, match=said):
        next(iter(loader))
    loader.close()


@pytest.mark.slow
def test_a_worker_of_a_stream_that_is_killed_is_a_dead_reader(tmp_path):
    class Deadly(Stream):
        def __iter__(self):
            for example in super().__iter__():
                if example["index"] == 50 and not (tmp_path / "died").exists():
                    # Batches that are still in this process die with it, and a reader without any is not replaced.
                    wait_until((tmp_path / "taken").exists, "the training has taken a batch")
                    (tmp_path / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield example

    loader = shared(of_stream(8, workers=1, dataset=Deadly()), restart="pass")
    try:
        first, second = epochs_of(loader, 2, (tmp_path / "taken").touch)
    finally:
        loader.close()
    assert (tmp_path / "died").exists()
    assert len(indices(first)) < LENGTH
    assert indices(second) == list(range(LENGTH))


def test_several_ranks_are_refused_with_a_hint(monkeypatch):
    monkeypatch.setattr(loader_sharing, "gathered", lambda value: [value, value])
    loader = shared(of_stream(8))
    with pytest.raises(ValueError, match=r"an example of a stream cannot be divided among 2 ranks.*map-style"):
        next(iter(loader))
    wait_until(lambda: loader.sharing.trainings == 0, "nobody is there")


class FailsToRead(Dataset):
    def __init__(self, fails, length=40):
        self.fails, self.length = fails, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.fails() if index == 16 else torch.tensor(index)


@pytest.mark.parametrize("kind", ["by index", "a batch sampler"])
def test_an_exception_of_a_class_of_the_script_reaches_the_training_after_all_batches_before_it(kind):
    class OfTheScript(ValueError):  # a name finds it nowhere in the process of the reader
        pass

    def fails():
        raise OfTheScript("no such file")

    data = FailsToRead(fails)
    batches = {"batch_size": 4} if kind == "by index" else {"batch_sampler": BatchSampler(range(40), 4, False)}
    found, message = until_it_fails(shared(DataLoader(data, num_workers=1, **batches), restart=False), SharedReadError)
    assert "OfTheScript: no such file" in message
    assert found == list(range(16))


def until_it_fails(loader, kind):
    """A training that ends with an exception of this kind: the numbers that it got, and the message."""
    found = []
    try:
        for batch in loader:
            found.extend(batch.reshape(-1).tolist())
    except kind as error:
        return found, str(error)
    finally:
        loader.close()
    return found, "ended without an exception"
