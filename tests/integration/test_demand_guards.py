"""What guards a run on demand: a state of an earlier batch, reads into one memory, a slow read, a program that is killed."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from demand_cases import Sleepy, batches_of, booked, on_demand
from torch.utils.data import DataLoader, RandomSampler

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.pipeline.reads import ReadChangedError

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[2]


def with_generator(seed):
    sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(range(12), batch_size=4, sampler=sampler, num_workers=2)
    return EchoLoader(loader, "demand", max_factor=1, insertion_point="after_augmentation", seed=0)


@pytest.mark.slow
def test_a_state_of_two_batches_before_has_the_order_of_its_pass_though_a_later_one_was_asked_for():
    loader = with_generator(seed=1)
    whole = [batch.tolist() for batch in islice(batches_of(loader), 24)]
    loader.close()
    loader = with_generator(seed=1)
    run = batches_of(loader)
    states = []
    for number in range(1, 13):
        next(run)
        pipeline = loader._run._pipeline
        states.append((number, loader.state_dict(), [pipeline.state(number - back) for back in range(min(number, 3))]))
    loader.close()
    for number, state, earlier in states:
        for back, at in enumerate(earlier):
            other = with_generator(seed=2)  # its own generator is elsewhere: the state decides
            other.load_state_dict({**state, "delivered": number - back, "order": at["order"], "demand": at["demand"]})
            found = [batch.tolist() for batch in islice(batches_of(other), 7)]
            assert found == whole[number - back : number - back + 7], (number, back)
            other.close()


class OneMemory(StagedDataset):
    """After 40 examples, which is after any proof, each one is loaded into the same tensor."""

    def __init__(self, length):
        self.length, self.memory, self.loads = length, torch.zeros(2, dtype=torch.int64), 0

    def __len__(self):
        return self.length

    def load(self, index):
        self.loads += 1
        memory = torch.zeros(2, dtype=torch.int64) if self.loads <= 40 else self.memory
        memory[0], memory[1] = index, 3 * index
        return memory

    def augment(self, example):
        return example.clone()


def test_examples_that_are_loaded_into_one_memory_are_noticed_and_read_again():
    options = {
        "insertion_point": "before_augmentation",
        "batch_size": 8,
        "workers": 1,
        "max_factor": 1,
    }  # each is read, so many are
    loader = on_demand(OneMemory(64), **options)
    with pytest.warns(UserWarning, match=r"example \d+ is overwritten when a later one of its batch is loaded"):
        batches = list(islice(batches_of(loader), 24))
    for batch in batches:
        assert len(set(batch[:, 0].tolist())) == 8
        assert (batch[:, 1] == 3 * batch[:, 0]).all()
    loader.close()


def test_so_many_examples_overtake_a_slow_read_and_not_more(tmp_path):
    reads = 2
    loader = on_demand(
        Sleepy(1000, 20, tmp_path / "go"),
        **{"workers": 1, "max_factor": 1, "reads_in_flight": reads, "batch_size": 8, "timeout": 1},
        insertion_point="before_augmentation",
    )
    with pytest.raises(RuntimeError, match="example 20 of the data set is not read"):
        deque(islice(batches_of(loader), 120), maxlen=0)
    positions = booked(loader.state_dict())
    loader.close()
    assert 20 not in positions
    overtook = sum(position > 20 for position in positions)
    assert 8 <= overtook <= 32 * reads


class SleepyInWorkers(Sleepy):
    """An example is its index and the process that made it."""

    def decode(self, raw):
        return torch.tensor([raw, os.getpid()])

    def augment(self, example):
        return example


def test_a_slow_read_is_overtaken_by_a_quarter_of_its_workers_pass_and_not_more(tmp_path):
    length, workers, size, slow = 100, 4, 4, 40
    loader = on_demand(
        SleepyInWorkers(length, slow, tmp_path / "go"),
        **{"workers": workers, "max_factor": 1, "reads_in_flight": 2 * workers, "batch_size": size, "timeout": 1},
        insertion_point="before_augmentation",
    )
    rows = []
    with pytest.raises(RuntimeError, match=f"example {slow} of the data set is not read"):
        rows.extend(row for batch in islice(batches_of(loader), 120) for row in batch.tolist())
    loader.close()
    first = slow // size % workers * size  # batches go to the workers in turn
    before = {index for index in range(slow) if index // size % workers == slow // size % workers}
    pid = next(pid for index, pid in rows if index == first)
    of_worker = [index for index, each in rows if each == pid]
    assert before == set(of_worker[: len(before)])
    assert 1 <= len(of_worker) - len(before) <= length // workers // 4


class SecondReads(StagedDataset):
    """From example 60 on, a worker's second read of the same one waits for a file, then fails or gives something else."""

    def __init__(self, length, until, what):
        self.length, self.until, self.what, self.reads, self.is_used = length, until, what, {}, False

    def __len__(self):
        return self.length

    def read(self, index):
        count = self.reads[index] = self.reads.get(index, 0) + 1
        if index < 60 or count == 1 or not self.is_used:
            return index
        while not os.path.exists(self.until):
            time.sleep(0.002)
        if self.what == "fails":
            raise OSError("network")
        return index + (self.what == "differs")

    def decode(self, raw):
        return torch.tensor([raw, 2 * raw])

    def augment(self, example):
        return example


@pytest.mark.parametrize("what", ["same", "differs", "fails"])
def test_a_read_is_compared_with_another_one_for_which_the_training_does_not_wait(what, tmp_path):
    options = {"workers": 1, "max_factor": 1, "reads_in_flight": 4, "batch_size": 8, "insertion_point": "before_augmentation"}
    data = SecondReads(2000, tmp_path / "go", what)
    loader = on_demand(data, timeout=20, **options)
    data.is_used = True  # after the proof
    run = batches_of(loader)
    found = [int(index) for batch in islice(run, 40) for index in batch[:, 0]]  # the 100th read of the worker is among them
    assert sorted(found) == sorted(set(found))
    (tmp_path / "go").touch()
    if what == "differs":
        with pytest.raises(
            ReadChangedError, match=r"example \d+ of the data set cannot be read by threads: read twice, it is another"
        ):
            deque(islice(run, 100), maxlen=0)
    else:
        found += [int(index) for batch in islice(run, 60) for index in batch[:, 0]]
        assert sorted(found) == sorted(set(found))
    loader.close()


PROGRAM = """
import sys, time
import psutil
from demand_cases import Sleepy, batches_of, on_demand

if __name__ == "__main__":
    options = {"workers": 1, "max_factor": 1, "reads_in_flight": 2, "batch_size": 8, "insertion_point": "before_augmentation"}
    loader = on_demand(Sleepy(100, 30, sys.argv[1]), **options)
    next(batches_of(loader))
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    time.sleep(100)
"""


@pytest.mark.program
def test_a_worker_that_holds_a_request_ends_when_its_program_is_killed(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    command = [sys.executable, str(script), str(tmp_path / "go")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert pids
        time.sleep(0.5)  # so long the worker holds requests that it cannot fill
        assert all(psutil.pid_exists(pid) for pid in pids)
        program.send_signal(signal.SIGKILL)
        program.wait()
    end = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < end, "a worker outlives its program"
        time.sleep(0.05)
