"""The loader's phases on data sets whose stages take a known time of a clock that nothing else moves; files are real ones."""

from pickle import PicklingError

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_echo import StagedDataset
from lightning_echo.analysis import phases as phases_module
from lightning_echo.analysis.measured import Spread
from lightning_echo.analysis.parts import BatchSeconds, Cuts, PartRun, Spent
from lightning_echo.analysis.phases import READ_AHEAD, _reads_in_flight, _Runner, measure_loader
from lightning_echo.split.reading import Part, ReadPart

READ, DECODE, AUGMENT, COLLATE = 0.006, 0.004, 0.003, 0.008
BATCHES = [[4 * batch + i for i in range(4)] for batch in range(10)]
ALL = [[4 * batch + i for i in range(4)] for batch in range(40)]
NAMES = ("read", "read_cached", "decode", "augment", "collate")


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)
    monkeypatch.setattr("lightning_echo.data.elsewhere._here_is_elsewhere", True)  # cuts are looked for in this process


def take(seconds):
    Clock.now += seconds


class Staged(StagedDataset):
    def __len__(self):
        return 160

    def read(self, index):
        take(READ)
        return index

    def decode(self, raw):
        take(DECODE)
        return torch.tensor([raw])

    def augment(self, example):
        take(AUGMENT)
        return example


class Halved(StagedDataset):
    """Reading and decoding are one."""

    __len__, augment = Staged.__len__, Staged.augment

    def load(self, index):
        take(READ + DECODE)
        return torch.tensor([index])


class Files(Dataset):
    """Not to be cut; its first reads of a file are slow, as from a storage."""

    def __init__(self, folder, cold=()):
        self.folder, self.cold = folder, cold

    def __len__(self):
        return 160

    def __getitem__(self, index):
        path = self.folder / str(index)
        assert path.read_text() == str(index)
        if index in self.cold:
            self.cold.remove(index)  # in memory from now on
            take(READ)
        take(DECODE)
        return torch.tensor([index])


@pytest.fixture
def folder(tmp_path):
    for index in range(160):
        (tmp_path / str(index)).write_text(str(index))
    return tmp_path


@pytest.fixture
def cold(monkeypatch):
    """The examples that are out of memory: the first forty, from the time when their pages are dropped."""
    found = set()
    monkeypatch.setattr(phases_module, "drop_pages", lambda paths: found.update(range(40)) or len(paths))
    return found


def collate(examples):
    take(COLLATE)
    return torch.cat(examples)


def measured(dataset, most_seconds=60.0, batches=BATCHES, **options):
    said = []
    loader = DataLoader(dataset, collate_fn=collate, **{"batch_size": 4, **options})
    return measure_loader(loader, batches, 10, most_seconds, said.append), said


def of_own_batches(dataset, batches):
    return measured(dataset, batches=batches, batch_size=1, batch_sampler=batches)[0]


def times(found):
    return tuple(pytest.approx(getattr(found, name).median) for name in NAMES)


def test_reading_decoding_and_augmentation_are_told_apart(monkeypatch):
    found, said = measured(Staged())
    assert times(found) == (READ, 0, DECODE, AUGMENT, COLLATE)
    assert found.points == ("after_read", "before_augmentation", "after_augmentation", "after_batching", "after_transfer")
    assert (found.files, found.can_have_workers, found.takes_ahead, found.examples) == ((), True, True, 160)
    assert said == [
        "the loader: files and transforms",
        "fetch rate: reading alone",
        "preparation rate: from memory",
        "augmentation alone",
        "what a cache holds of an example",
    ]
    monkeypatch.setattr(Staged, "read", lambda self, index: pytest.fail("what is in memory is read"))
    prepare, _ = found.in_memory.part(Staged())
    assert [example.item() for example in prepare([0, 17, 39])] == [0, 17, 39]


def test_what_opens_no_files_but_labels_is_read_at_examples_that_were_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_echo.data.elsewhere._here_is_elsewhere", False)
    seen = []
    (tmp_path / "labels").write_text("7")

    class Seen(Staged):
        def read(self, index):
            (tmp_path / "labels").read_text()
            seen.append(index)
            return super().read(index)

    found, _ = measured(Seen(), batches=ALL)
    reading = [index for index in seen if index not in (0, 159)]  # by which the cut is proved
    # The first pass, in a worker, is not seen here; the third augments, the last puts each of its examples into two caches.
    assert reading == [*range(40, 80), *range(40, 80), *(index for batch in ALL[10:20] for index in (*batch, *batch))]
    assert found.real.indices == ALL[20:30]
    assert (found.in_memory.indices, sorted(found.raw_items)) == (ALL[10:20], list(range(40, 80)))
    assert found.files == ()
    assert [note.split(":")[1][:31] for note in found.notes] == [" no file was seen to be opened "]
    found, _ = measured(Seen())
    assert found.real.indices == found.in_memory.indices == BATCHES
    assert "too short for examples that were not read before" in found.notes[1]
    assert "it needs 40 batches" in found.notes[1]


RARE = (21, 50, 71)
SHORT, LONG = 4 * (READ + DECODE + AUGMENT) + COLLATE, 4 * (READ + DECODE + AUGMENT) + COLLATE + 0.5


class Rare(Staged):
    """Some examples take long to prepare."""

    def decode(self, raw):
        take(0.5 if raw in RARE else 0.0)
        return super().decode(raw)


def test_the_times_of_single_batches_are_kept_and_rare_long_ones_count_as_often_as_they_are():
    """Of 40 batches the first four do not count: the others have three long ones, of 36."""
    loader = DataLoader(Rare(), 4, collate_fn=collate)
    found = measure_loader(loader, ALL, 40, 60.0, str)
    expected = [LONG if batch in [index // 4 for index in RARE] else SHORT for batch in range(4, 40)]
    assert found.batch_seconds == pytest.approx(tuple(expected))
    assert times(found) == (READ, 0, DECODE + 3 * 0.5 / 36 / 4, AUGMENT, COLLATE)
    assert measured(Staged())[0].batch_seconds == (), "ten are too few"


@pytest.mark.usefixtures("cold")
def test_the_times_of_single_batches_are_those_out_of_memory(folder):
    """Each example is read from a file, that of every seventh batch from a slow place."""

    class Reads(Staged):
        def read(self, index):
            if index in cold_ones:
                cold_ones.discard(index)
                take(0.5)
            return int((folder / str(index)).read_text())

    cold_ones = set()
    loader = DataLoader(Reads(), 4, collate_fn=collate)
    runs = []

    def say(what):
        runs.append(what)
        if what.startswith("fetch rate: out of memory"):
            cold_ones.update(range(0, 160, 28))

    found = measure_loader(loader, ALL, 40, 60.0, say)
    short = 4 * (DECODE + AUGMENT) + COLLATE
    assert found.batch_seconds == pytest.approx(tuple(short + (0.5 if batch % 7 == 0 else 0) for batch in range(4, 40)))


class Storage:
    """A read takes ``latency`` seconds; examples come at most every ``transfer`` seconds. In the place of a run in workers."""

    def __init__(self, latency, transfer=0.0, cpu=0.0, workers=1):
        self.latency, self.transfer, self.cpu, self.workers = latency, transfer, cpu, workers
        self.runs = []  # threads, and the indices that they were given

    def __call__(self, loader, part, batches, **options):
        threads = part.args[2]
        self.runs.append((threads, [index for batch in batches for index in batch]))
        each = max(self.latency / threads, self.transfer * self.workers, self.cpu)
        return PartRun([BatchSeconds(Spent(len(batch) * each, len(batch) * self.cpu), Spent(), Spent()) for batch in batches])


def in_flight(monkeypatch, storage, indices=range(10_000), files=(), expected=None):
    loader = DataLoader(range(8), num_workers=storage.workers if storage.workers > 1 else 0)
    monkeypatch.setattr(phases_module, "run_part", storage)
    cut = Cuts(None, None, (), ReadPart(Part.raw, True, 1))
    run = _Runner(loader, 60.0, lambda what: None)
    found = _reads_in_flight(run, cut, indices, files, storage.latency if expected is None else expected)
    return {each.reads: 1e3 * each.seconds.median for each in found}


@pytest.mark.parametrize(
    ("storage", "milliseconds"),
    [
        (Storage(0.02), {1: 20, 4: 5, 16: 1.25, 64: 0.3125}),
        (Storage(0.02, workers=2), {2: 10, 4: 5, 16: 1.25, 64: 0.3125}),
        (Storage(0.02, workers=8), {8: 2.5, 16: 1.25, 64: 0.3125}),
        (Storage(0.02, transfer=0.002), {1: 20, 4: 5, 16: 2, 64: 2}),  # 2 ms each, however many are under way
        (Storage(0.02, transfer=0.02), {1: 20, 4: 20}),
        (Storage(0.0004), {1: 0.4}),  # as from memory: nobody waits
        (Storage(0.02, cpu=0.02), {1: 20}),  # it works
        (Storage(0.001, cpu=0.0002), {1: 1, 4: 0.25}),  # of which 0.2 ms are work: what is left to wait is less than a change
    ],
)
def test_reads_are_measured_with_more_under_way_as_long_as_that_helps(monkeypatch, storage, milliseconds):
    assert in_flight(monkeypatch, storage) == pytest.approx(milliseconds)


def test_each_number_of_reads_is_measured_on_examples_that_were_not_read_and_threads_read_several_each(monkeypatch):
    storage = Storage(0.02)
    in_flight(monkeypatch, storage)
    read = [index for _, indices in storage.runs for index in indices]
    assert read == list(range(len(read))), "each once, in the order of the training"
    assert len(read) <= READ_AHEAD
    assert all(len(indices) >= 2 * 4 * threads for threads, indices in storage.runs)
    slow = Storage(2.0)
    in_flight(monkeypatch, slow)
    assert len(slow.runs[0][1]) == 2 * 4, "no more than needed: it takes long"


def test_files_are_dropped_each_time_and_read_again_and_without_files_too_few_examples_end_it(monkeypatch):
    dropped = []
    monkeypatch.setattr(phases_module, "drop_pages", lambda paths: dropped.append(tuple(paths)))
    assert list(in_flight(monkeypatch, Storage(0.02), range(800), ("a", "b"))) == [1, 4, 16, 64]
    assert dropped == [("a", "b")] * 4
    assert list(in_flight(monkeypatch, Storage(0.02), range(800))) == [1, 4, 16]
    assert in_flight(monkeypatch, Storage(0.02), range(7)) == {}


def test_reading_ahead_is_measured_if_threads_may_read_and_otherwise_says_why_not():
    class SaysSo(Staged):
        reads_concurrently = True

    loader = DataLoader(SaysSo(), 4, collate_fn=collate)
    said = []
    found = measure_loader(loader, ALL, 10, 60.0, said.append, "auto")
    assert said[-2] == "fetch rate: with 1, 4, 16, 64 reads under way"
    assert (found.read_ahead, found.no_reads_ahead, len(found.in_flight) > 0) == ("reading", "", True)
    found = measure_loader(DataLoader(Staged(), 4, collate_fn=collate), ALL, 10, 60.0, str, "auto")
    assert (found.read_ahead, found.in_flight) == ("", ())
    assert found.no_reads_ahead.startswith("read of Staged is code of the user's")


class Sized(Staged):
    """Raw items of 1,000 and 3,000 bytes in turn, loaded examples of ten times as many."""

    def read(self, index):
        return bytes(1000 if index % 2 else 3000)

    def decode(self, raw):
        return torch.zeros(10 * len(raw), dtype=torch.uint8)


def test_what_an_example_costs_in_a_cache_is_the_mean_of_some():
    """An arena rounds up to 64 bytes; a record says in less than 200 bytes what it is made of."""
    found, _ = measured(Sized(), num_workers=1)
    assert 2000 <= found.in_cache["raw"].bytes < 2300
    assert 20_000 <= found.in_cache["loaded"].bytes < 20_300
    assert found.in_cache["loaded"].hit == Spread.exactly(0.0)  # by the clock of this test


def test_a_batch_sampler_of_the_users_leaves_only_points_of_batches():
    found = of_own_batches(Staged(), BATCHES)
    assert found.points == ("after_batching", "after_transfer")
    assert list(found.in_cache) == ["raw", "loaded"], "each example is read by its index, whatever batch it is in"
    assert times(found) == (READ, 0, DECODE, AUGMENT, COLLATE)


def test_files_read_again_are_read_from_memory(folder, cold):
    class Raw(Staged):
        def read(self, index):
            take(READ if index in cold else 0.001)
            cold.discard(index)
            return int((folder / str(index)).read_text())

    found, said = measured(Raw())
    assert times(found) == (READ, 0.001, DECODE, AUGMENT, COLLATE)
    assert said[1:4] == ["fetch rate: out of memory", "preparation rate: in memory", "fetch rate: in memory"]
    assert found.raw_items == {}
    assert found.real.indices == found.in_memory.indices == BATCHES


def test_without_a_cut_after_reading_the_first_touch_takes_longer_by_what_is_read():
    found, _ = measured(Halved())
    assert times(found)[1:] == (0, READ + DECODE, AUGMENT, COLLATE)
    assert found.points[0] == "before_augmentation"
    assert found.in_memory.indices == BATCHES
    assert list(found.in_cache) == ["loaded"]
    assert found.notes[0].startswith("fetch rate: no file was seen to be opened")


@pytest.mark.parametrize(("most_seconds", "batches"), [(60.0, 10), (0.1, 3)])
def test_what_a_pass_takes_longer_whose_pages_were_dropped_is_reading(most_seconds, batches, folder, monkeypatch):
    """A batch takes 4 * (6 + 4) + 8 = 48 ms out of memory: the third one is the last within 0.1 s; in memory six would be."""
    cold = set()

    def drop(paths):
        assert sorted(paths) == sorted(str(folder / str(index)) for index in range(40))
        cold.update(range(40))
        return len(paths)

    monkeypatch.setattr(phases_module, "drop_pages", drop)
    found, said = measured(Files(folder, cold), most_seconds)
    assert times(found) == (READ, 0, DECODE, 0, COLLATE)
    assert found.points == ("after_augmentation", "after_batching", "after_transfer")
    assert (len(found.files), found.notes, found.in_cache) == (40, (), {})
    assert found.real.indices == found.in_memory.indices == BATCHES[:batches]
    assert "what a cache holds of an example" not in said


def readers():
    """How many workers there are, in a worker."""
    info = get_worker_info()
    return 1 if info is None else info.num_workers


class SharedReads(Staged):
    def read(self, index):
        take(READ * readers())
        return index


def test_how_reading_slows_down_is_measured_with_another_number_of_workers(folder, monkeypatch):
    """They share the storage and nothing else; their clocks are their own."""
    dropped, run_part = folder / "dropped", phases_module.run_part

    def run_and_keep_in_memory(*args, **options):
        made = run_part(*args, **options)
        dropped.unlink(missing_ok=True)
        return made

    monkeypatch.setattr(phases_module, "drop_pages", lambda paths: dropped.touch() or len(paths))
    monkeypatch.setattr(phases_module, "run_part", run_and_keep_in_memory)
    found, said = measured(SharedReads(), batches=ALL, num_workers=2)
    assert times(found)[0] == READ * 2
    assert (found.read_sharing, found.prepare_sharing) == (pytest.approx(1.0), pytest.approx(0.0))
    assert any(each.endswith(", num_workers=1") for each in said)


class Here(Staged):
    """Reads in the process that made it, as what holds a device or a handle."""

    def __init__(self, message):
        self.message = message

    def decode(self, raw):
        if get_worker_info() is not None:
            raise RuntimeError(self.message)
        return super().decode(raw)


@pytest.mark.slow
def test_a_data_set_that_fails_in_a_worker_is_measured_without_one_and_that_is_said():
    found, said = measured(Here("one\ntwo"))
    assert times(found) == (READ, 0, DECODE, AUGMENT, COLLATE)
    assert said[:2] == ["the loader: files and transforms", "the loader, in this process"]
    assert "fails in a worker process" in found.notes[0]
    assert "(two)" in found.notes[0]
    assert [note.split(":")[0] for note in found.notes[1:]] == ["fetch rate", "fetch rate"]
    assert (found.transforms, found.can_have_workers) == ({}, False)
    with pytest.raises(RuntimeError, match="in DataLoader worker process"):  # with a worker of its own it is not tried without
        measured(Here("one"), num_workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RuntimeError, PicklingError])
def test_what_fails_everywhere_is_raised_from_the_users_process(kind):
    class Fails(Staged):
        def read(self, index):
            if index == BATCHES[-1][-1]:  # the last of the first pass
                raise kind("worker" if get_worker_info() is not None else "here")
            return index

    with pytest.raises(kind, match=r"^here$"):
        measured(Fails())
