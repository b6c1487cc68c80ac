"""A setting that is tried: over which loader the training runs, for how many steps, and what is refused."""

import math
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler, get_worker_info

from lightning_echo import StagedDataset
from lightning_echo.analysis.measured import CachedExample, Spread
from lightning_echo.analysis.parts import Batches, FirstBatches, whole
from lightning_echo.analysis.predict import TrainingSetting
from lightning_echo.analysis.trials import try_setting
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.split.prove import make_stages

INDICES = [[0, 1], [2, 3], [4, 5], [6, 7]]


class Numbers(StagedDataset):
    """Reading gives the index; preparing it adds a half."""

    def __init__(self):
        self.read_indices = []

    def __len__(self):
        return 8

    def read(self, index):
        self.read_indices.append(index)
        return index

    def decode(self, raw):
        return torch.tensor([raw + 0.5])

    def augment(self, example):
        return example


class Training:
    """In the place of a `ShortTraining`: notes what it is asked to run, and each step takes as many seconds as it has batches."""

    def __init__(self, loader, real, **phases):
        none = {"files": (), "raw_items": {}, "cut_after_reading": None, "in_memory": None, "takes_ahead": False, "in_cache": {}}
        none["batch_seconds"] = ()
        self.loader, self.phases = loader, SimpleNamespace(real=real, **{**none, **phases})
        self.ran, self.no_pinning = [], "batches are copied to the device 'cpu'"

    def clock(self, loader, steps):
        self.ran.append((loader, steps))
        return SimpleNamespace(seconds=[float(len(loader))] * steps)

    def clock_echoed(self, loader, steps, skipped=0, **options):
        self.ran.append((loader, steps, skipped, options))
        return SimpleNamespace(seconds=[3.0] * steps)


def batches_of(training):
    return [batch.flatten().tolist() for batch in training.ran[0][0]]


def in_parts(dataset=None, **phases):
    loader = DataLoader(Numbers() if dataset is None else dataset, batch_size=2, num_workers=0)
    return Training(loader, Batches(loader, whole, INDICES), **phases)


@pytest.mark.parametrize("share", [0, 0.25, 1.0])
def test_a_share_of_raw_items_comes_from_memory_and_the_rest_is_read(share):
    dataset = Numbers()
    training = in_parts(
        dataset,
        raw_items={index: index for index in range(8)},
        cut_after_reading=partial(make_stages, conventions=None, raw=True),
        in_memory=SimpleNamespace(indices=INDICES),
    )
    assert try_setting(training, TrainingSetting(cached_fraction=share), 4) == Spread.exactly(4.0)
    assert batches_of(training) == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5], [6.5, 7.5]]
    assert len(dataset.read_indices) == 8 - 8 * share


def test_a_share_of_files_is_read_into_the_page_cache_evenly_spread(tmp_path, monkeypatch):
    files = tuple(str(tmp_path / str(number)) for number in range(10))
    for file in files:
        Path(file).write_bytes(b"x")
    training, read = in_parts(files=files), []
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: read.append(path.name))
    try_setting(training, TrainingSetting(cached_fraction=0.2), 4)
    assert read == ["4", "9"]


@pytest.mark.parametrize("takes_ahead", [True, False])
def test_what_is_echoed_runs_over_the_same_indices_again_and_again(takes_ahead):
    training = in_parts(takes_ahead=takes_ahead)
    setting = TrainingSetting(factor=2.5, insertion_point="after_augmentation")
    assert try_setting(training, setting, 4) == Spread.exactly(3.0)
    loader, *how = training.ran[0]
    assert how == [4, 0, {"factor": 2.5, "insertion_point": "after_augmentation", "reads_in_flight": 1}]
    first = [batch.flatten().tolist() for batch in islice(loader, 5)]
    assert first == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5], [6.5, 7.5], [0.5, 1.5]]
    assert len(loader) == 10_000
    assert kind_of(loader).may_run_in_thread is takes_ahead, "as in the training: a step does not pay for the hand-over"


def cached(**setting):
    """Four batches of two, of which examples take a MiB in a cache."""
    training = in_parts(in_cache={"loaded": CachedExample(2**20, Spread.exactly(0.0))})
    try_setting(training, TrainingSetting(hold="loaded", **setting), 100)
    return training.ran[0]


def test_with_a_cache_the_share_comes_first_and_the_steps_that_count_read_the_rest_for_the_first_time():
    loader, steps, skipped, options = cached(cached_fraction=0.5)
    indices = list(loader.sampler)
    assert indices[:4] == [1, 3, 5, 7], "two batches fill the cache"
    assert indices[4:20] == [*range(8), *range(8)]
    assert skipped == 2
    assert steps == 2  # at least; of the four batches, fewer than the first steps of a training
    cache = {"size": math.ceil(1.05 * 4 * 2**20), "hold": "loaded"}
    assert options == {"factor": 1.0, "reads_in_flight": 1, "cache": cache}


def test_reads_in_flight_are_tried_over_the_same_indices_in_an_order_that_can_be_looked_at():
    """If the training's order cannot be looked at, that of the trial cannot be either."""
    for takes_ahead in (True, False):
        training = in_parts(takes_ahead=takes_ahead)
        try_setting(training, TrainingSetting(reads_in_flight=16), 4)
        loader, *how = training.ran[0]
        assert how == [4, 0, {"factor": 1.0, "reads_in_flight": 16}]
        assert (type(loader.sampler) is SequentialSampler) is takes_ahead
        first = [batch.flatten().tolist() for batch in islice(loader, 5)]
        assert first == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5], [6.5, 7.5], [0.5, 1.5]]
    training = in_parts(takes_ahead=True, in_cache={"loaded": CachedExample(2**20, Spread.exactly(0.0))})
    setting = TrainingSetting(hold="loaded", cached_fraction=0.5, factor=2, insertion_point="after_batching", reads_in_flight=4)
    try_setting(training, setting, 4)
    loader, _, skipped, options = training.ran[0]
    assert skipped == 2 * 2
    assert (options["reads_in_flight"], options["factor"], options["insertion_point"]) == (4, 2, "after_batching")
    assert [batch.flatten().tolist() for batch in islice(loader, 3)] == [[1.5, 3.5], [5.5, 7.5], [0.5, 1.5]]


def test_prefetching_and_pinning_are_options_of_the_loader_that_is_tried(monkeypatch):
    made = []
    monkeypatch.setattr("lightning_echo.analysis.parts.DataLoader", lambda dataset, **options: made.append(options) or [])
    cost = {"loaded": CachedExample(2**20, Spread.exactly(0.0))}
    training = in_parts(takes_ahead=True, batch_seconds=(0.005,) * 16, in_cache=cost)
    training.no_pinning = ""
    for workers in (1, 2):
        setting = TrainingSetting(workers, prefetch_factor=8, pin_memory=True)
        try_setting(training, setting, 4)
        assert list(training.ran[-1][0]) == []
        assert [made[-1][name] for name in ("num_workers", "prefetch_factor", "pin_memory")] == [workers, 8, True]
    for beside in ({"factor": 2}, {"reads_in_flight": 4}, {"cached_fraction": 0.5, "hold": "loaded"}):
        try_setting(training, TrainingSetting(1, prefetch_factor=8, **beside), 4)
        echoed = training.ran[-1][0]
        assert (echoed.num_workers, echoed.prefetch_factor, echoed.pin_memory) == (1, 8, False)
    try_setting(training, TrainingSetting(1, pin_memory=True, factor=2), 4)
    assert training.ran[-1][0].pin_memory
    try_setting(training, TrainingSetting(1), 4)
    assert list(training.ran[-1][0]) == []
    assert (made[-1]["prefetch_factor"], made[-1]["pin_memory"]) == (2, False), "as measured"


def test_of_rare_long_batches_the_step_is_the_mean_of_all():
    """Eight steps of 10 ms and two of 110, in one half: three of four blocks are without."""
    training = in_parts(batch_seconds=(0.005,) * 16 + (0.08,) * 3)
    training.clock = lambda loader, steps: SimpleNamespace(seconds=[0.01] * 8 + [0.11] * 2)
    assert try_setting(training, TrainingSetting(), 10).median == pytest.approx(0.03)
    training.phases.batch_seconds = ()
    assert try_setting(training, TrainingSetting(), 10).median == pytest.approx(0.01)
    assert try_setting(training, TrainingSetting(), 10, as_mean=True).median == pytest.approx(0.03), "for a proof"


def as_a_whole():
    loader = DataLoader(range(8), batch_size=2, num_workers=0)
    return Training(loader, FirstBatches(loader, 3))


def test_a_stream_is_run_as_it_is():
    training = as_a_whole()
    assert try_setting(training, TrainingSetting(), 3) == Spread.exactly(3.0)
    assert training.ran == [(training.phases.real, 3)]
    assert try_setting(training, TrainingSetting(workers=0, factor=2), 3) == Spread.exactly(3.0)
    assert training.ran[1][0] is training.loader


class SeenByInit:
    """A ``worker_init_fn`` that notes in the data set which one it sees."""

    def __call__(self, worker):
        dataset = get_worker_info().dataset
        dataset.seen = torch.tensor(float(type(dataset).__name__ == "Marked"))


class Marked(Dataset):
    seen = torch.tensor(-1.0)

    def __getitem__(self, index):
        return self.seen

    def __len__(self):
        return 8


def test_with_reads_in_flight_a_worker_init_fn_sees_the_users_data_set():
    training = in_parts(takes_ahead=True)
    training.loader = DataLoader(Marked(), 2, num_workers=1, worker_init_fn=SeenByInit())
    try_setting(training, TrainingSetting(reads_in_flight=16, workers=1), 4)
    loader, *_ = training.ran[0]
    assert next(iter(loader)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "setting", "message"),
    [
        (in_parts, {"storage_speedup": 2}, "storage_speedup=2 cannot be tried on this machine"),
        (in_parts, {"shared_by": 2}, "shared_by=2 cannot be tried with one training"),
        (in_parts, {"cluster_workers": 2}, "cluster_workers=2 cannot be tried on this machine, only predicted"),
        (in_parts, {"factor": 2, "cached_fraction": 0.5}, "cached_fraction without hold and factor > 1 cannot be tried together"),
        (
            in_parts,
            {"reads_in_flight": 2, "cached_fraction": 0.5},
            "without hold and reads_in_flight > 1 cannot be tried together",
        ),
        (in_parts, {"cached_fraction": 0.5, "hold": "raw"}, "hold='raw' cannot be tried here: the examples cannot be held"),
        (as_a_whole, {"cached_fraction": 0.5, "hold": "loaded"}, "hold='loaded' cannot be tried here"),
        (in_parts, {"cached_fraction": 0.5}, "opens fewer than two files, and no raw item of it is held in memory"),
        (as_a_whole, {"workers": 2}, "workers, pin_memory and cached_fraction of a stream cannot be tried"),
        (as_a_whole, {"workers": 2, "factor": 2}, "workers and pin_memory of a stream cannot be tried"),
        (in_parts, {"pin_memory": True}, "pin_memory=True cannot be tried here: batches are copied to the device 'cpu'"),
        (in_parts, {"prefetch_factor": 4}, "prefetch_factor=4 cannot be tried without workers: give workers, too"),
        (in_parts, {"prefetch_factor": 4, "workers": 1}, "were not measured .that takes 16 of them, and no stream"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_anything_runs(make, setting, message):
    training = make()
    with pytest.raises(ValueError, match=message):
        try_setting(training, TrainingSetting(**setting), 4)
    assert training.ran == []
