"""What threads of a worker read: only what is safe, or what the user says; and what is refused, with the reason."""

import re
import shutil
import sqlite3
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from loader_cases import same, take
from PIL import Image, UnidentifiedImageError
from reads_cases import LENGTH, ReadLog, Slow, SlowItems, loader_of, take_and_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchvision.transforms import v2

from lightning_echo import EchoLoader
from lightning_echo.pipeline import reads as pool
from lightning_echo.split import make as make_stages
from lightning_echo.split import reading

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
    dataset = SharedFile(tmp_path / "rows")
    said = refused(dataset)
    dataset.file.close()
    assert "is another example when threads read at the same time" in said
    assert "threading.local" in said


class OneBuffer(SlowItems):
    """All examples are read into the same memory."""

    def __init__(self):
        super().__init__()
        self.buffer = np.zeros(8, dtype=np.uint8)

    def __getitem__(self, index):
        self.buffer[:] = index
        return torch.from_numpy(self.buffer)


def test_items_that_are_read_into_the_same_memory_are_refused():
    assert "is read into the same memory. Return a copy" in refused(OneBuffer())


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


@pytest.mark.grid
@pytest.mark.parametrize("point", ["auto", "after_read", "after_augmentation", "after_batching"])
@pytest.mark.parametrize("workers", [0, 1])
def test_auto_reads_a_folder_in_threads_while_reads_wait(point, workers, folder, tmp_path, monkeypatch):
    log = ReadLog(tmp_path / "opened")
    for module in (make_stages, torchvision.datasets.folder):
        monkeypatch.setattr(module, "open", slow_open(log, 0.003), raising=False)
    expected = take_and_close_pairs(of_folder(folder, insertion_point=point, workers=workers, factor=2, reads_in_flight=1), 60)
    assert Counter(by_thread for _, by_thread in log.entries())[1] == 0
    before = len(log.entries())
    number = None if workers else 16  # without workers, only a number lets threads read
    loader = of_folder(folder, insertion_point=point, workers=workers, factor=2, reads_in_flight=number)
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
    by_threads, end = {0, 1}, time.monotonic() + 60
    while by_threads != {0}:  # three probes in a row must not wait: on a busy machine, some do
        assert time.monotonic() < end, "threads read, although reads do not wait"
        before = len(log.entries())
        take(loader, 30)
        by_threads = {by_thread for _, by_thread in log.entries()[before:]}
    loader.close()


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


class FailsByChance(torch.nn.Module):
    def forward(self, image):
        if torch.rand(1) < 0.02:
            raise ValueError("by chance")
        return image


@pytest.mark.parametrize("point", ["after_augmentation", "before_augmentation"])
def test_an_error_of_a_random_transform_is_raised_where_it_is_without_threads(point, folder):
    found = []
    for number in (1, 16):
        loader = of_folder(folder, v2.Compose([FailsByChance(), v2.PILToTensor()]), insertion_point=point, reads_in_flight=number)
        seen = []
        with pytest.raises(ValueError, match="by chance"):
            seen.extend(take_and_close_pairs(loader, 200))
        found.append((loader.counts.fresh, seen))
        loader.close()
    assert found[0] == found[1]


class Clips(Dataset):
    """Reads a small piece of each of its large files."""

    def __init__(self, paths):
        self.paths = paths

    def __getitem__(self, index):
        with open(self.paths[index], "rb", buffering=0) as file:
            return torch.tensor(list(file.read(64)))

    def __len__(self):
        return len(self.paths)


class Far(Clips):
    """Its storage takes its time, also for a file in the page cache."""

    def __getitem__(self, index):
        time.sleep(0.002)
        with open(self.paths[index], "rb") as file:
            return torch.tensor(list(file.read())[:64])


def files_of(folder, size):
    paths = [str(folder / str(number)) for number in range(120)]
    for path in paths:
        Path(path).write_bytes(bytes(size))
    return paths


def test_files_of_which_only_pieces_are_read_are_not_read_whole_by_threads(tmp_path):
    clips = EchoLoader(DataLoader(Clips(files_of(tmp_path, 100_000)), num_workers=1), 1)
    assert clips._setting.choice.reading is None
    whole = EchoLoader(DataLoader(Clips(files_of(tmp_path, 100)), num_workers=1), 1)
    assert whole._setting.choice.reading.part is reading.Part.files


def test_of_a_file_that_is_far_larger_than_those_tried_a_piece_is_read(tmp_path):
    paths = files_of(tmp_path, 1000)
    Path(paths[1]).write_bytes(bytes(10 * 2**20))
    part = reading.ReadPart(reading.Part.files, is_ours=True, item_bytes=1000)
    before = reading._bytes_read()
    part.make(Clips(paths), None).read()(1)
    assert 0 < reading._bytes_read() - before < 2**20


def test_files_whose_second_read_is_no_faster_are_read_by_the_data_set_alone(tmp_path, monkeypatch):
    log = ReadLog(tmp_path / "opened")
    monkeypatch.setattr(reading, "open", slow_open(log, 0), raising=False)
    (tmp_path / "files").mkdir()
    loader = EchoLoader(DataLoader(Far(files_of(tmp_path / "files", 100)), batch_size=4, num_workers=1, shuffle=True), 1)
    take(loader, 60)
    by_threads = Counter(by_thread for _, by_thread in log.entries())[1]
    assert 8 < by_threads < 240
    take(loader, 60)
    assert Counter(by_thread for _, by_thread in log.entries())[1] == by_threads
    loader.close()


@pytest.mark.parametrize(
    ("dataset", "workers", "why"),
    [
        (Slow(), 1, "read of Slow is code of the user's: set reads_concurrently = True in its class"),
        (SlowItems(), 1, "SlowItems has no read"),
        (Slow(), 0, "there are no workers; a number lets threads of this process read"),
    ],
)
def test_auto_that_is_asked_for_says_why_nothing_is_read_ahead(dataset, workers, why, caplog):
    for asked, says in (("auto", True), (None, False)):
        caplog.clear()
        with caplog.at_level("INFO"):
            take_and_close(loader_of(asked, dataset=dataset, workers=workers, factor=2), 1)
        assert (f"reads_in_flight='auto' reads one example after the other: {why}" in caplog.text) is says


class Clock(Slow):
    def decode(self, raw):
        return torch.tensor([float(time.monotonic_ns())])


def test_a_point_and_reads_that_are_both_impossible_are_refused_with_the_reason_of_the_point():
    loader = DataLoader(Clock(40), batch_size=4, num_workers=2)
    with pytest.raises(ValueError, match=r"insertion_point='before_augmentation' is impossible here: .*came out differently"):
        EchoLoader(loader, 2, insertion_point="before_augmentation", reads_in_flight=2)


class OpensOnly(Slow):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def read(self, index):
        return open(self.path, "rb")

    def decode(self, raw):
        with raw:
            return torch.tensor(list(raw.read()))


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_items_that_are_open_files_are_refused(tmp_path):
    (tmp_path / "item").write_bytes(b"abc")
    assert "an example holds" in refused(OpensOnly(str(tmp_path / "item")))


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
    """Some reads draw random numbers, by default none of those that are tried."""

    def __init__(self, length, most_seconds=0.001, at=2):
        super().__init__(length, most_seconds=most_seconds)
        self.at = at

    def read(self, index):
        if index % 11 == self.at:
            torch.rand(1)
        return super().read(index)


@pytest.mark.slow
def test_reads_that_draw_random_numbers_are_not_left_to_threads_once_that_is_seen(monkeypatch):
    monkeypatch.setattr(pool, "_WATCHED_EVERY", 1)
    loader = loader_of(8, dataset=DrawsLater(56, most_seconds=0.04), workers=1)  # the worker waits most of the time
    with pytest.warns(UserWarning, match="random numbers were drawn while threads read example .* reads_in_flight is 1"):
        batches = take_and_close(loader, 14 * 6)
    assert len(batches) == 14 * 6
    assert "reading draws random numbers" in refused(DrawsLater(56, at=4))


def test_an_item_that_is_another_one_in_a_thread_is_noticed_where_it_is_compared():
    tenth = Subset(Sometimes(200), [*range(9), 198, *range(10, 40)])
    loader = EchoLoader(DataLoader(tenth, batch_size=40), 1, reads_in_flight=8)
    said = "example 9 of the data set cannot be read by threads: in a thread it is another one"
    with pytest.raises(pool.ReadChangedError, match=said):
        take(loader, 1)
    loader.close()


class Ring(Slow):
    """Each item is a view of one of eight buffers, which the ninth read after it uses again."""

    def __init__(self):
        super().__init__(200)
        self.own = threading.local()

    def read(self, index):
        super().read(index)
        ring = self.own.__dict__.setdefault("ring", [np.zeros(8, dtype=np.int64) for _ in range(8)])
        place = self.own.__dict__["place"] = (self.own.__dict__.get("place", -1) + 1) % 8
        ring[place][:] = index
        return ring[place]

    def decode(self, raw):
        return torch.tensor(raw[:3]).float()

    def __getstate__(self):
        return {}

    def __setstate__(self, state):
        self.__init__()


def test_items_whose_memory_is_used_again_later_are_the_same():
    one, many = (take_and_close(loader_of(number, dataset=Ring(), order="sequential", batch_size=8), 50) for number in (1, 4))
    assert same(one, many)
