"""Reads in flight: batches, counts and states are the same to the bit as with one read after the other, whatever the timing."""

import hashlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sqlite3
import struct
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
import torchvision
from loader_cases import nothing_left_behind, pairwise, same, take, through_a_file, workers
from PIL import Image, UnidentifiedImageError
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torchvision.transforms import v2

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.pipeline import reads as pool
from lightning_echo.split import make as make_stages
from lightning_echo.split import reading

LENGTH = 90


class ReadLog:
    """A file with a line for each read: process and index."""

    def __init__(self, path):
        self.path = path

    def add(self, index):
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, struct.pack("qq", os.getpid(), index))
        os.close(file)

    def entries(self):
        with open(self.path, "rb") as file:
            return list(struct.iter_unpack("qq", file.read()))


class Slow(StagedDataset):
    """Each read takes a time of its own, other in each thread: what is ready first has nothing to do with the order."""

    def __init__(self, length=LENGTH, log=None, most_seconds=0.002, bad=None):
        self.length, self.log, self.most_seconds, self.bad = length, log, most_seconds, bad

    def read(self, index):
        if self.log is not None:
            self.log.add(index)
        time.sleep(random.Random((index * 31) ^ threading.get_ident() ^ os.getpid()).random() * self.most_seconds)
        if index == self.bad:
            raise OSError(5, f"no answer for {index}")
        return str(index).encode()

    def decode(self, raw):
        return torch.full((3,), float(raw))

    def augment(self, example):
        return example + torch.rand(3)

    def __len__(self):
        return self.length


class SlowItems(Dataset):
    """No stages: whole examples are read."""

    def __init__(self, length=LENGTH, log=None):
        self.length, self.log = length, log

    def __getitem__(self, index):
        time.sleep(random.Random(index ^ threading.get_ident()).random() * 0.002)
        if self.log is not None:
            self.log.add(index)
        return torch.full((3,), float(index))

    def __len__(self):
        return self.length


class UsersSampler(Sampler):
    """Says how far it was asked, at each batch: a sampler may decide by what the training has learnt."""

    def __init__(self, length):
        self.length, self.asked = length, 0

    def __iter__(self):
        for index in range(self.length):
            self.asked += 1
            yield index * 7 % self.length

    def __len__(self):
        return self.length


ORDERS = {
    "shuffled": lambda dataset: {"shuffle": True},
    "sequential": lambda dataset: {},
    "generator": lambda dataset: {"sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(4))},
    "weighted": lambda dataset: {"sampler": WeightedRandomSampler([1.0, 2.0, 3.0] * (len(dataset) // 3), len(dataset))},
    "users": lambda dataset: {"sampler": UsersSampler(len(dataset))},
}


def loader_of(reads, *, order="shuffled", workers=2, batch_size=4, dataset=None, **options):
    dataset = Slow() if dataset is None else dataset
    if order == "batches":
        ordered = {"batch_sampler": BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False)}
    else:
        ordered = {"batch_size": batch_size, **ORDERS[order](dataset)}
    factor = options.pop("factor", 1)
    plain = DataLoader(dataset, num_workers=workers, timeout=options.pop("timeout", 0), **ordered)
    return EchoLoader(plain, factor, seed=3, reads_in_flight=reads, **options)


def delivered(loader, count):
    """So many batches, each with its fresh examples, and the state after the last one."""
    batches = []
    while len(batches) < count:
        for batch in itertools.islice(loader, count - len(batches)):
            batches.append((batch.clone(), loader.last_batch_counts.fresh))
    state = loader.state_dict()
    loader.close()
    return batches, state


def take_and_close(loader, count):
    batches = [batch.clone() for batch in take(loader, count)]
    loader.close()
    return batches


def digest(loader, count):
    """The hash of so many batches."""
    found = hashlib.sha256()
    for batch in take(loader, count):
        found.update(batch.numpy().tobytes())
    loader.close()
    return found.hexdigest()


# ---------------------------------------------------------------------- the same batches


SETTINGS = pairwise(
    order=[*ORDERS, "batches"],
    workers=[0, 1, 2],
    factor=[1, 2.37, 6],
    reuse=["memory", "each"],
    point=["auto", "after_read", "before_augmentation", "after_augmentation", "after_batching"],
    reads=[2, 32],
)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_batches_counts_and_states_are_the_same(setting):
    setting = dict(setting)
    reads, point = setting.pop("reads"), setting.pop("point")
    if setting["order"] == "batches":
        point = "auto"
    if setting["order"] == "weighted" and point in ("auto", "after_read", "before_augmentation"):
        setting["factor"] = 1  # with replacement
    one, many = (delivered(loader_of(each, insertion_point=point, **setting), 60) for each in (1, reads))
    assert same(one, many)


@pytest.mark.slow
def test_the_hash_of_a_thousand_batches_is_the_same():
    options = {"factor": 1.7, "dataset": Slow(4001, most_seconds=0.001), "batch_size": 8}
    assert len({digest(loader_of(reads, **options), 1000) for reads in (1, 2, 32)}) == 1


@pytest.mark.parametrize("reads", [2, 32])
def test_after_changes_of_the_factor_batches_are_the_same(reads):
    def batches(reads):
        loader, found = loader_of(reads, factor=1), []
        for factor in (3, 1, 6.5, 2, 1):
            found += [batch.clone() for batch in itertools.islice(loader, 23)]
            loader.factor = factor
        loader.close()
        return found, loader.counts

    assert same(*(batches(each)[0] for each in (1, reads)))


@pytest.mark.parametrize("point", ["before_augmentation", "after_augmentation"])
def test_a_run_that_is_resumed_at_any_batch_goes_on_the_same(point):
    whole = [batch for batch, _ in delivered(loader_of(1, factor=2.5, insertion_point=point), 40)[0]]
    for stop in range(1, 30, 4):
        first = loader_of(16, factor=2.5, insertion_point=point)
        seen, state = delivered(first, stop)
        second = loader_of(8, factor=2.5, insertion_point=point)
        second.load_state_dict(through_a_file(state))
        rest, _ = delivered(second, 40 - stop)
        assert same([batch for batch, _ in (*seen, *rest)], whole)


CACHES = [("raw", "before_augmentation"), ("loaded", "before_augmentation"), ("raw", "after_augmentation"), ("raw", "after_read")]


@pytest.mark.parametrize(("hold", "point"), CACHES)
@pytest.mark.parametrize("workers", [0, 2])
def test_through_a_cache_batches_hits_and_misses_are_the_same_and_a_held_example_is_not_read(hold, point, workers, tmp_path):
    found = []
    for reads in (1, 16):
        log = ReadLog(str(tmp_path / f"{reads}"))
        loader = loader_of(
            reads, workers=workers, factor=1.5, insertion_point=point, dataset=Slow(log=log), cache={"size": "4MiB", "hold": hold}
        )
        before = len(log.entries())
        batches = [batch.clone() for batch in take(loader, 23 * 4)]
        counts = loader.cache_counts
        read = Counter(index for _, index in log.entries()[before:])
        loader.close()
        found.append((batches, counts.hits, counts.misses))
        assert max(read.values()) <= 1 + 2 * max(workers, 1)  # a worker may read what another one has just put, and audits hits
    assert same(*found)


class Misfit(Slow):
    """Some examples draw random numbers while they are loaded."""

    def decode(self, raw):
        example = super().decode(raw)
        return example + torch.rand(1) if int(raw) in (13, 57) else example


@pytest.mark.filterwarnings("ignore:.*does not fit the split:UserWarning")
def test_examples_that_do_not_fit_the_split_are_the_same():
    one, many = (delivered(loader_of(reads, factor=2, dataset=Misfit()), 60)[0] for reads in (1, 8))
    assert same(one, many)


NESTED = {
    "subset": lambda log: Subset(Slow(log=log), range(80, 20, -2)),
    "concat": lambda log: ConcatDataset([Slow(30, log), Slow(40, log)]),
    "named cut": lambda log: StagedDataset.of(SlowItems(log=log), augment=lambda example: example + torch.rand(3)),
    "items": lambda log: SlowItems(log=log),
}


@pytest.mark.parametrize("name", NESTED)
def test_data_sets_of_any_kind_give_the_same(name):
    one, many = (take_and_close(loader_of(reads, dataset=NESTED[name](None), factor=2), 60) for reads in (1, 16))
    assert same(one, many)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factor", [1, 2])
def test_no_example_is_read_twice(factor, workers, tmp_path):
    log = ReadLog(tmp_path / "reads")
    loader = loader_of(16, dataset=Slow(2000, log), workers=workers, factor=factor, buffer_size=64)
    before = len(log.entries())
    take(loader, 60)
    fresh = loader.counts.fresh
    loader.close()
    read = Counter(index for _, index in log.entries()[before:])
    twice = [index for index, times in read.items() if times > 1]
    assert len(read) >= fresh
    assert max(read.values()) <= 2
    assert len(twice) <= 3 * max(workers, 1)  # the 1st, 10th and 100th read of each worker is compared with one without threads


def test_a_users_sampler_is_not_asked_earlier():
    asked = []
    for reads in (1, 32):
        loader, found = loader_of(reads, order="users", workers=2), []
        for _ in itertools.islice(loader, 12):
            time.sleep(0.05)  # the thread that fetches has asked for all that it may
            found.append(loader.loader.sampler.asked)
        loader.close()
        asked.append(found)
    assert asked[0] == asked[1]


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [17, 44, 88])
def test_an_error_is_raised_when_the_turn_of_its_example_comes(bad, workers):
    def until_error(reads):
        loader, seen = loader_of(reads, dataset=Slow(bad=bad), workers=workers, order="sequential"), []
        with pytest.raises(OSError, match=f"no answer for {bad}") as raised:
            seen.extend(batch.clone() for batch in loader)
        loader.close()
        return seen, str(raised.value).splitlines()[-1], getattr(raised.value, "__notes__", [])[:1]

    with nothing_left_behind():
        assert same(until_error(1), until_error(16))


@pytest.mark.parametrize("reads", [2, 32])
def test_after_a_killed_worker_the_run_continues_with_the_same_batches(reads):
    whole = [batch for batch, _ in delivered(loader_of(1, factor=2), 40)[0]]
    with nothing_left_behind():
        loader, seen, before = loader_of(reads, factor=2), [], workers()
        iterator = iter(loader)
        for _ in range(9):
            seen.append(next(iterator).clone())
        for process in workers() - before:
            os.kill(process, signal.SIGKILL)
        with pytest.raises((RuntimeError, OSError, EOFError)):
            seen.extend(batch.clone() for batch in iterator)
        state = loader.state_dict()
        loader.close()
        again = loader_of(reads, factor=2)
        again.load_state_dict(state)
        seen += [batch for batch, _ in delivered(again, 40 - len(seen))[0]]
    assert same(seen, whole)


class Hanging(Slow):
    def __init__(self, log=None, at=60):
        super().__init__(log=log)
        self.at = at

    def read(self, index):
        if index == self.at:
            time.sleep(1000)
        return super().read(index)


def test_a_read_that_hangs_is_named_before_torch_gives_up():
    loader = loader_of(8, dataset=Hanging(), order="sequential", timeout=3)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"example 60 of the data set is not read after 2\.7 s, and the loader has timeout=3"):
        take(loader, 23)
    assert time.monotonic() - started < 10
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_close_returns_within_a_second_while_reads_hang(workers):
    loader = loader_of(8, dataset=Hanging(), order="sequential", workers=workers)
    batches = itertools.islice(loader, 12)
    assert len(list(batches)) == 12
    time.sleep(0.3)  # the read hangs, and a worker waits for it
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 1


def test_nothing_is_left_behind():
    with nothing_left_behind():
        for workers in (0, 2):
            loader = loader_of(16, workers=workers)
            take(loader, 5)
            loader.close()
            dropped = loader_of(16, workers=workers)
            take(dropped, 5)
            del dropped


def hang(path):
    """A training whose worker waits for a read that does not end."""
    loader = loader_of(8, dataset=Hanging(), order="sequential")
    Path(path).write_text(" ".join(map(str, workers() or {0})))
    for number, _ in enumerate(loader):
        if number == 12:
            Path(path).write_text(" ".join(map(str, workers())))


def test_workers_end_with_a_killed_training_while_a_read_hangs(tmp_path):
    training = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path / "workers",))
    training.start()
    until(lambda: len((tmp_path / "workers").read_text().split()) == 2 if (tmp_path / "workers").exists() else False)
    of_training = [int(process) for process in (tmp_path / "workers").read_text().split()]
    time.sleep(0.5)  # a worker waits for the read
    training.kill()
    training.join()
    until(lambda: not any(psutil.pid_exists(process) and psutil.Process(process).status() != "zombie" for process in of_training))


def until(holds):
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_workers_that_are_spawned_read_ahead_and_close_at_once(context):
    found = []
    for reads_in_flight in (1, 8):
        plain = DataLoader(Slow(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context=context)
        loader = EchoLoader(plain, 2, seed=3, reads_in_flight=reads_in_flight)
        found.append(take_and_close(loader, 20))
    assert same(*found)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("reads", "error", "got"),
    [
        *((0, ValueError, "0"), (-1, ValueError, "-1"), (1.5, ValueError, "1.5"), ("many", ValueError, "'many'")),
        *((4097, ValueError, "4097"), (True, TypeError, "True"), ([2], TypeError, "[2]")),
    ],
)
def test_a_bad_number_is_refused(reads, error, got):
    said = f"reads_in_flight must be an integer from 1 (one read after the other) to 4,096, or 'auto', got .*{re.escape(got)}"
    with pytest.raises(error, match=said.replace("(one", r"\(one").replace("other)", r"other\)")):
        EchoLoader(DataLoader(Slow()), 1, reads_in_flight=reads)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Batched(Slow):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Random(SlowItems):
    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(3)


class SharedFile(Slow):
    """One place in one file: threads that seek and read at the same time read from another place."""

    def __init__(self, path):
        super().__init__()
        path.write_bytes(b"".join(str(index).encode().rjust(8) for index in range(LENGTH)))
        self.file = open(path, "rb")  # noqa: SIM115

    def read(self, index):
        self.file.seek(8 * index)
        return self.file.read(8)


class Rows(Slow):
    def __init__(self, path):
        super().__init__()
        self.rows = sqlite3.connect(path)

    def read(self, index):
        return str(self.rows.execute("select ?", (index,)).fetchone()[0]).encode()


def refused(dataset, workers=2, **options):
    with pytest.raises(ValueError, match=r"^reads_in_flight=32 is impossible here: ") as raised:
        EchoLoader(DataLoader(dataset, batch_size=4, num_workers=workers), 1, reads_in_flight=32, **options)
    return str(raised.value)


def test_what_threads_cannot_read_is_refused_with_a_way_out(tmp_path):
    assert "the data set is a stream" in refused(Stream())
    assert "has a __getitems__ of its own" in refused(Batched())
    assert "draw its random numbers in another order" in refused(Random())
    assert "Split the data set with read, decode and augment" in refused(Random())
    assert "set num_workers" in refused(SlowItems(), workers=0)


def test_data_sets_whose_threads_disturb_each_other_are_refused(tmp_path):
    said = refused(SharedFile(tmp_path / "rows"))
    assert "is another example when threads read at the same time" in said
    assert "threading.local" in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_belongs_to_one_thread_is_refused():
    said = refused(Rows(":memory:"))
    assert "in a thread raised" in said
    assert "threading.local" in said


def test_a_partitioned_cache_and_a_number_are_refused_together():
    with pytest.raises(ValueError, match=r"reads_in_flight=8 and cache\.partitioned=True are impossible together"):
        loader_of(8, cache={"size": "4MiB", "partitioned": True})


def test_the_line_at_the_start_names_the_reads_and_their_memory(caplog):
    with caplog.at_level("INFO"):
        loader = loader_of(8)
        take_and_close(loader, 1)
    assert re.search(r"2 workers; reads in flight: up to 8 \(reading, at most .+ ahead\)", caplog.text)


def test_a_limit_of_open_files_is_an_error_before_training():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with pytest.raises(ValueError, match=r"reads_in_flight=1000 needs 500 open files in each of 2 processes.*at most 272"):
            loader_of(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------------- "auto"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of 96 PNG files in two classes."""
    root = tmp_path_factory.mktemp("images")
    for number in range(96):
        path = root / ("even" if number % 2 == 0 else "odd") / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (20, 16), (number, 255 - number, 7)).save(path)
    return root


def slow_open(log, seconds):
    """An ``open`` that takes its time, and writes down which thread has called it."""

    def opened(file, *args, **kwargs):
        log.add(int(threading.current_thread().name.startswith("lightning_echo-read")))
        time.sleep(seconds)
        return open(file, *args, **kwargs)

    return opened


def of_folder(folder, transform=None, **options):
    dataset = torchvision.datasets.ImageFolder(str(folder), transform or v2.Compose([v2.RandomCrop(12), v2.PILToTensor()]))
    plain = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=options.pop("workers", 1))
    return EchoLoader(plain, options.pop("factor", 1), seed=3, **options)


@pytest.mark.parametrize("point", ["auto", "after_read", "after_augmentation", "after_batching"])
@pytest.mark.parametrize("workers", [0, 1])
def test_auto_reads_a_folder_in_threads_while_reads_wait(point, workers, folder, tmp_path, monkeypatch):
    log = ReadLog(tmp_path / "opened")
    for module in (make_stages, torchvision.datasets.folder):
        monkeypatch.setattr(module, "open", slow_open(log, 0.003), raising=False)
    expected = take_and_close_pairs(of_folder(folder, insertion_point=point, workers=workers, factor=2, reads_in_flight=1), 60)
    assert Counter(by_thread for _, by_thread in log.entries())[1] == 0
    before = len(log.entries())
    loader = of_folder(folder, insertion_point=point, workers=workers, factor=2)
    assert same(take_and_close_pairs(loader, 60), expected)
    by_threads = Counter(by_thread for _, by_thread in log.entries()[before:])
    assert by_threads[0] < 60  # at first the worker reads by itself, and the proof does
    assert by_threads[1] > 100


def take_and_close_pairs(loader, count):
    batches = [[part.clone() for part in batch] for batch in take(loader, count)]
    loader.close()
    return batches


def test_auto_stays_out_where_reads_do_not_wait(folder, tmp_path, monkeypatch):
    log = ReadLog(tmp_path / "opened")
    for module in (make_stages, torchvision.datasets.folder):
        monkeypatch.setattr(module, "open", slow_open(log, 0), raising=False)
    take_and_close_pairs(of_folder(folder, factor=2), 60)
    assert {by_thread for _, by_thread in log.entries()} == {0}


def test_threads_stop_when_reads_do_not_wait_any_more(folder, tmp_path, monkeypatch):
    log, calm = ReadLog(tmp_path / "opened"), tmp_path / "calm"

    def opened(file, *args, **kwargs):
        log.add(int(threading.current_thread().name.startswith("lightning_echo-read")))
        if not calm.exists():
            time.sleep(0.003)
        return open(file, *args, **kwargs)

    monkeypatch.setattr(pool, "_PROBE_EVERY", 16)
    for module in (make_stages, torchvision.datasets.folder):
        monkeypatch.setattr(module, "open", opened, raising=False)
    loader = of_folder(folder)
    take(loader, 30)
    assert Counter(by_thread for _, by_thread in log.entries())[1] > 50
    calm.touch()
    take(loader, 60)
    before = len(log.entries())
    take(loader, 30)
    loader.close()
    assert {by_thread for _, by_thread in log.entries()[before:]} == {0}


def own_loader(path):
    return torchvision.datasets.folder.pil_loader(path).convert("L")


def test_files_whose_read_cannot_be_cut_off_are_read_into_the_page_cache(folder, tmp_path, monkeypatch):
    log, cached = ReadLog(tmp_path / "opened"), tmp_path / "cached"
    cached.mkdir()

    def opened(file, *args, **kwargs):
        """The first open of a file takes its time."""
        log.add(int(threading.current_thread().name.startswith("lightning_echo-read")))
        mark = cached / Path(file).name
        if not mark.exists():
            time.sleep(0.003)
            mark.touch()
        return open(file, *args, **kwargs)

    for module in (reading, torchvision.datasets.folder):
        monkeypatch.setattr(module, "open", opened, raising=False)
    dataset = torchvision.datasets.ImageFolder(str(folder), v2.PILToTensor(), loader=own_loader)
    found = []
    for number in (1, None):
        for mark in cached.iterdir():
            mark.unlink()
        loader = EchoLoader(DataLoader(dataset, batch_size=8, num_workers=1), 1, seed=3, reads_in_flight=number)
        found.append(take_and_close_pairs(loader, 12))
    assert same(*found)
    assert Counter(by_thread for _, by_thread in log.entries())[1] > 40


def test_a_damaged_file_is_the_error_of_the_data_set(folder, tmp_path):
    root = shutil.copytree(folder, tmp_path / "images")
    (root / "odd" / "033.png").write_bytes(b"no image")
    said = []
    for number in (1, 16):
        loader = of_folder(root, reads_in_flight=number)
        with pytest.raises(UnidentifiedImageError, match=r"033\.png") as raised:
            take(loader, 12)
        said.append(str(raised.value).splitlines()[-1].partition(" at 0x")[0])
        loader.close()
    assert said[0] == said[1]


class SaysSo(SlowItems):
    reads_concurrently = True


def test_a_data_set_that_says_so_is_read_in_threads_by_auto():
    with_hint = loader_of(None, dataset=SaysSo(), factor=2)
    assert with_hint._setting.choice.reading.part is reading.Part.whole
    assert loader_of(None, dataset=SlowItems())._setting.choice.reading is None
    assert same(take_and_close(with_hint, 40), take_and_close(loader_of(1, dataset=SaysSo(), factor=2), 40))


class Sometimes(Slow):
    """Threads disturb each other, but not on the examples that the proof tries."""

    def read(self, index):
        raw = super().read(index)
        in_thread = threading.current_thread().name.startswith("lightning_echo-read")
        return b"7" if in_thread and index == self.length - 2 else raw


class DrawsLater(Slow):
    """Most reads draw random numbers, but not those that the proof tries."""

    def read(self, index):
        if index % 7 == 1:
            torch.rand(1)
        return super().read(index)


@pytest.mark.parametrize("factor", [1, 2])
def test_reads_that_draw_random_numbers_are_noticed_while_the_worker_waits_for_them(factor):
    dataset = DrawsLater(7 * 8, most_seconds=0.01)
    said = "random numbers were drawn|draws random numbers"
    with pytest.raises((pool.ReadChangedError, ValueError), match=said):
        take_and_close(loader_of(8, dataset=dataset, factor=factor, insertion_point="before_augmentation"), 60)


def test_an_item_that_is_another_one_in_a_thread_is_noticed_where_it_is_compared():
    tenth = Subset(Sometimes(200), [*range(9), 198, *range(10, 40)])
    loader = EchoLoader(DataLoader(tenth, batch_size=40), 1, reads_in_flight=8)
    said = "example 9 of the data set cannot be read by threads: in a thread it is another one"
    with pytest.raises(pool.ReadChangedError, match=said):
        take(loader, 1)
    loader.close()
