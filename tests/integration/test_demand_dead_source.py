"""A source that delivers nothing is said: on each rank, and whichever thread of the training fetches."""

import re
import time
import warnings
from itertools import islice

import pytest
from demand_cases import ReadAndDecode, Serials, Sleepy, batches_of, on_demand
from loader_cases import nothing_left_behind
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_echo import EchoLoader
from lightning_echo.pipeline import demand
from lightning_echo.pipeline.prefetch import WorkerProcesses

DEAD_AT = 20
READS = {"max_factor": 2, "insertion_point": "before_augmentation", "seed": 0}

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:lightning_echo. Own has neither state_dict"),  # the same order in each pass
]


class Own(Sampler):
    """A sampler class of the user's: no thread may run it, so none fetches."""

    def __iter__(self):
        return iter(range(1000))

    def __len__(self):
        return 1000


class Stream(IterableDataset):
    def __init__(self, *sleepy):
        self.data = Sleepy(*sleepy)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


def own_order(data):
    return EchoLoader(DataLoader(data, 4, sampler=Own(), num_workers=1), "demand", **READS)


def without_workers(data):
    return on_demand(data, workers=0, reads_in_flight=4, **READS)


def streamed(data):
    plain = DataLoader(Stream(data.length, data.blocks_at, data.until), 4)
    return EchoLoader(plain, "demand", max_factor=2, insertion_point="after_augmentation")


def second_rank(data):
    return on_demand(data, workers=1, num_replicas=2, rank=1, reads_in_flight=4, **READS)


@pytest.mark.parametrize("make", [own_order, without_workers, streamed, second_rank])
def test_a_training_that_waits_in_vain_is_told_once_for_what(tmp_path, monkeypatch, make):
    monkeypatch.setattr("lightning_echo.pipeline.demand._DEAD_SECONDS", 0.5)
    go, said = tmp_path / "go", []
    loader = make(Sleepy(1000, DEAD_AT + (make is second_rank), go))

    def warn(message, *args, **kwargs):
        if "has waited" in str(message):
            said.append(str(message))
            go.touch()

    monkeypatch.setattr(warnings, "warn", warn)
    with nothing_left_behind():
        run = batches_of(loader)
        while not said:  # or for ever
            next(run)
        assert len(list(islice(run, 40))) == 40
        loader.close()
    named = "the next example of the stream" if make is streamed else r"example 2\d of the data set"
    assert re.fullmatch(rf"lightning_echo: the training has waited \d s for fresh examples: {named} is not .*", said[0])
    assert len(said) == 1


class Clock:
    """Stands for the time, which a test sets."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(demand, "perf_counter", found)
    return found


def waited(seconds, clock, waiting):
    """Lets a training wait, and look as often as it does."""
    waiting.since = clock.now
    for _ in range(seconds):
        clock.now += 1
        assert waiting.lost(0.0) is None
    waiting.since = None


class Waits(demand.Waiting):
    def _why(self):
        return "why"


@pytest.fixture
def waiting():
    found = Waits(None, WorkerProcesses(), None, 0.0, [].append)
    found.has_begun = True
    return found


def told(waiting):
    return waiting.say.__self__


def test_each_stall_is_told_but_at_most_once_a_minute(clock, waiting):
    for seconds, others in ((9, 100), (15, 20), (12, 100), (30, 0)):
        waited(seconds, clock, waiting)
        clock.now += others
    said = "the training has waited 11 s for fresh examples"
    assert told(waiting) == [f"{said}: why", f"{said} (stall 3): why"]


def test_a_stall_that_lasts_is_told_again_when_it_is_ten_times_as_long(clock, waiting):
    waited(2000, clock, waiting)
    assert [re.search(r"waited (\d+) s", each).group(1) for each in told(waiting)] == ["11", "111", "1111"]


@pytest.mark.slow
def test_a_training_whose_steps_are_long_is_told_nothing_and_a_dropped_loader_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr("lightning_echo.pipeline.demand._DEAD_SECONDS", 0.2)
    with nothing_left_behind():
        loader = own_order(ReadAndDecode(1000))
        for _ in islice(loader, 2):
            time.sleep(2.5)  # a warning would be an error
        del loader


def test_a_journal_that_cannot_be_written_is_said_on_its_rank(tmp_path):
    (tmp_path / "file").touch()
    loader = on_demand(Serials(100), workers=1, num_replicas=2, rank=1, journal=tmp_path / "file" / "folder")
    with pytest.warns(UserWarning, match=r"the journal .*echo_journal_rank1.bin cannot be written"):
        next(iter(loader))
    loader.close()
