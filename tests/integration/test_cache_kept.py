"""A cache under a name outlives its job: the next one reads nothing that is held, and goes on filling."""

import gc
import os
import re
import resource
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.cache.kept import CacheConfig

EXAMPLES, SIZE = 40, 30_000  # values of 4 bytes
RECORD = 4 * SIZE + 320  # about, with what stands before it


class Images(StagedDataset):
    """Counts its reads, in whichever process they happen."""

    def __init__(self, offset=0, length=EXAMPLES):
        self.offset, self.length = offset, length
        self.reads = torch.zeros(length, dtype=torch.long).share_memory_()

    def load(self, index):
        self.reads[index] += 1
        return {"image": torch.arange(SIZE, dtype=torch.int32) + self.offset + 100 * index, "index": index}

    def augment(self, example):
        example["image"] += torch.randint(10, ())  # in place
        return example

    def __len__(self):
        return self.length


def loader_of(dataset, path, size="8MiB", name="train", hold="auto", factor=1, workers=0, seed=1):
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    return EchoLoader(loader, factor, cache=CacheConfig(size, hold, path=str(path), name=name), seed=seed)


def run(dataset, path, passes=1, **options):
    """Returns what was delivered in a job, and its counts after the first pass and after the last one."""
    loader = loader_of(dataset, path, **options)
    passes_seen = []
    for number in range(passes):
        passes_seen.append([(batch["index"].tolist(), batch["image"][:, 0].tolist()) for batch in loader])
        if not number:
            counts = loader.cache_counts
    last = loader.cache_counts
    loader.close()
    del loader
    gc.collect()
    return passes_seen, counts, last


def plain(passes=1, factor=1, workers=0):
    loader = EchoLoader(DataLoader(Images(), batch_size=4, shuffle=True, num_workers=workers), factor, seed=1)
    return [[(batch["index"].tolist(), batch["image"][:, 0].tolist()) for batch in loader] for _ in range(passes)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_job_has_no_miss_and_the_same_batches(tmp_path, workers):
    first, counts, _ = run(Images(), tmp_path, workers=workers)
    assert counts.examples == EXAMPLES
    assert counts.hits + counts.misses == EXAMPLES
    dataset = Images()
    second, counts, _ = run(dataset, tmp_path, workers=workers)
    assert (counts.hits, counts.misses) == (EXAMPLES, 0)
    assert first == second == plain(workers=workers)
    assert int(dataset.reads.sum()) <= 1 + 8 + max(workers, 1), "in workers; the proof and the trial read copies"
    (name,) = os.listdir(tmp_path)
    assert re.fullmatch(r"train-loaded-\w{16}\.cache", name)


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    dataset = Images()
    loader = loader_of(dataset, tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        iterator = iter(loader)
        next(iterator)  # the file is made, with its full length
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20 * RECORD, before[1]))
            rest = list(iterator)
            again = list(loader)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (len(rest), len(again)) == (9, 10)
    counts = loader.cache_counts
    assert counts.is_full
    assert 10 < counts.examples < 20
    assert counts.hits + counts.misses == 2 * EXAMPLES
    messages = [str(each.message) for each in said if "cache" in str(each.message)]
    assert len(messages) == 1
    assert "the cache is full with" in messages[0]
    assert "before it has reached its size: no more can be written: File too large" in messages[0]
    loader.close()
    del loader, iterator
    gc.collect()
    _, _, last = run(Images(), tmp_path)
    assert last.examples == EXAMPLES, "there is room again in the next job"


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_cache_kept import Images, loader_of
loader = loader_of(Images(), {path!r}, workers={workers}, seed={seed})
for number, batch in enumerate(loader):
    if number == {stop}:
        os.kill(os.getpid(), signal.SIGKILL)
    assert all((image - image[0] == image.new_tensor(range(len(image)))).all() for image in batch["image"])
counts = loader.cache_counts
print(counts.examples, counts.hits, counts.misses)
"""


def start(path, workers=0, seed=1, stop=-1):
    program = PROGRAM.format(tests=os.path.dirname(__file__), path=str(path), workers=workers, seed=seed, stop=stop)
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_job_that_is_killed_leaves_what_it_has_written_and_nothing_else(tmp_path):
    killed = start(tmp_path, workers=2, stop=4)
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, errors
    assert len(os.listdir(tmp_path)) == 1
    delivered, _, last = run(Images(), tmp_path)
    assert last.hits >= 16
    assert last.examples == EXAMPLES, "none is lost"
    assert delivered == plain()


def test_two_jobs_at_once_share_it(tmp_path):
    jobs = [start(tmp_path, seed=seed) for seed in (1, 2)]
    for job in jobs:
        told, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors
        examples, hits, misses = map(int, told.split())
        assert hits + misses == EXAMPLES
        assert examples <= EXAMPLES
    _, counts, _ = run(Images(), tmp_path)
    assert (counts.hits, counts.examples) == (EXAMPLES, EXAMPLES)


class Values(Dataset):
    """Workers may add an offset."""

    offset = 0

    def __getitem__(self, index):
        return torch.tensor([index, index + self.offset])

    def __len__(self):
        return EXAMPLES


def set_offset(number):
    """Seeds, as many do. What else it does, its code does not show."""
    np.random.seed(number)
    torch.utils.data.get_worker_info().dataset.dataset.offset = int(os.environ.get("OFFSET", "0"))


def values_of(path, part, workers=1):
    """Reads a part of the data twice. Returns what was read, the counts, and what was warned."""
    loader = DataLoader(Subset(Values(), part), 4, shuffle=True, num_workers=workers, worker_init_fn=set_offset)
    cache = CacheConfig("8MiB", "whole", path=str(path), name="train")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        echoed = EchoLoader(loader, 1, insertion_point="after_augmentation", cache=cache, seed=1)
        try:
            values = [sorted(map(tuple, torch.cat(list(echoed)).tolist())) for _ in range(2)]
            return values, echoed.cache_counts, [str(each.message) for each in said if "cache" in str(each.message)]
        finally:
            echoed.close()


def test_parts_of_the_data_share_a_kept_cache_also_with_a_harmless_worker_init_fn(tmp_path):
    held = set()
    for part in ([*range(30)], [*range(10, 40)], [*range(40)]):
        values, counts, said = values_of(tmp_path, part)
        assert values == [[(index, index) for index in sorted(part)]] * 2
        assert counts.hits == 2 * len(part) - len({*part} - held)
        held |= {*part}
        assert said == []
    assert len(os.listdir(tmp_path)) == 1


def test_a_part_whose_workers_have_other_data_is_refused(tmp_path, monkeypatch):
    values_of(tmp_path, [*range(30)])
    monkeypatch.setenv("OFFSET", "7")
    with pytest.raises(RuntimeError, match=r"another one in this worker, after worker_init_fn, than in the cache 'train' \("):
        values_of(tmp_path, [*range(10, 40)], workers=2)


def test_parts_without_a_common_example_cannot_be_compared_and_are_not_mixed(tmp_path, monkeypatch):
    values_of(tmp_path, [*range(20)])
    monkeypatch.setenv("OFFSET", "7")
    values, counts, said = values_of(tmp_path, [*range(20, 40)])
    assert values == [[(index, index + 7) for index in range(20, 40)]] * 2
    assert (counts.examples, counts.hits) == (20, 20)
    assert len(said) == 1
    assert "holds none of the examples that are read here" in said[0]
    monkeypatch.delenv("OFFSET")
    assert values_of(tmp_path, [*range(40)])[0] == [[(index, index) for index in range(40)]] * 2
