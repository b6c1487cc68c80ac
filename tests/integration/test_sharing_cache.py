"""A cache in the reader: what it holds is not read again, every training gets the same, and each sees its counts."""

import logging
import os
import re
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_cases import Remembering
from sharing_cache_runs import CACHE, IGNORED, LENGTH, Shots, Together, cached_loader, left_to_read, reads
from sharing_runs import (
    Numbers,
    closing,
    end_readers,
    epochs_of,
    examples,
    in_process,
    indices,
    resumed,
    sleeps,
    status,
    together,
    wait_until,
)
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from trainer_runs import fit

from lightning_echo import CacheConfig, EchoCallback, EchoDataModule, EchoLoader, ShareConfig, serve
from lightning_echo.share.config import log_of
from lightning_echo.share.connecting import SharedDataDiffers
from lightning_echo.share.packing import SharedReadError
from lightning_echo.share.process import ReaderError
from lightning_echo.share.sharing import status_of

pytestmark = pytest.mark.usefixtures("own_folder")

HELD = 127
PASSES = 3


def delivered(make, count, passes=PASSES):
    """What trainings get that share, with batches of 8, 9 ..., with their loaders."""
    loaders = [make(8 + number, wait_for=count) for number in range(count)]
    return together(*(closing(loader, passes) for loader in loaders)), loaders


def check_same(found):
    """All trainings have had the same examples, each once a pass, with the same noise."""
    for epochs in found:
        assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(LENGTH))] * len(epochs)
        assert [examples(epoch) for epoch in epochs] == [examples(epoch) for epoch in found[0]]


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("hold", ["raw", "loaded"])
@pytest.mark.parametrize("workers", [1, 2])
def test_trainings_get_the_same_with_and_without_it_and_it_is_not_read_again(tmp_path, hold, workers):
    found = {}
    for cache in (None, CacheConfig(CACHE, hold=hold)):
        log = tmp_path / f"reads-{cache is None}"

        def make(batch_size, log=log, cache=cache, **share):
            return cached_loader(Shots(log=str(log)), batch_size, cache, workers=workers, **share)

        found[cache is None], loaders = delivered(make, 2)
        check_same(found[cache is None])
    assert found[False] == found[True]
    for loader in loaders:
        counts = loader.cache_counts
        assert counts.hits + counts.misses == loader.counts.fresh == PASSES * LENGTH
        # Two workers of each training: one may look for an example in the second pass that another one has not put there yet.
        late = 0 if workers == 1 else HELD // 8
        assert (PASSES - 1) * HELD - late <= counts.hits <= (PASSES - 1) * HELD
    times = Counter(reads(log))
    again = [index for index, count in times.items() if count > 1]
    assert set(times) == set(range(LENGTH))
    assert len(again) <= LENGTH - HELD + 6 * workers, "beside those that are not held, each worker looks at three hits again"


def test_from_its_second_pass_on_a_reader_reads_what_the_cache_does_not_hold(tmp_path):
    log = tmp_path / "reads"
    loader = cached_loader(Shots(log=str(log)), 8)
    order = [index for epoch in epochs_of(loader, PASSES) for index in indices(epoch)]
    counts = loader.cache_counts
    loader.close()
    expected = left_to_read(order, HELD)
    assert reads(log)[: len(expected)] == expected
    assert len(expected) == LENGTH + (PASSES - 1) * (LENGTH - HELD) + 3
    assert (counts.examples, counts.is_full, counts.size) == (HELD, True, 2**20)
    assert counts.bytes == pytest.approx(HELD * 8192, rel=0.02)


def test_data_that_is_read_in_one_call_for_a_batch_is_the_same_with_and_without_it(tmp_path):
    found = {}
    for cache in (None, CACHE):
        log = tmp_path / f"reads-{cache}"
        loader = cached_loader(Together(log=str(log)), 8, cache)
        found[cache] = closing(loader, PASSES)()
        assert loader.cache is None or loader.cache_counts.hits == (PASSES - 1) * HELD
    check_same(list(found.values()))
    assert sum(count == 1 for count in Counter(reads(log)).values()) >= HELD - 3


class Fixed(Numbers):
    """Returns the same each time, as `hold="whole"` needs it."""

    def __getitem__(self, index):
        data = torch.full((64,), index % 251, dtype=torch.uint8)
        return {"index": index, "noise": torch.tensor(float(index)), "data": data, "more": torch.zeros(8192, dtype=torch.uint8)}


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_whole_examples_and_spawned_workers(context):
    dataset = Fixed(LENGTH)
    plain = DataLoader(dataset, 8, shuffle=True, num_workers=2, multiprocessing_context=context)
    loader = EchoLoader(plain, 1, share={"name": "data", "linger_seconds": 0}, cache={"size": CACHE, "hold": "whole"}, seed=0)
    epochs = closing(loader, 2)()
    assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(LENGTH))] * 2
    counts = loader.cache_counts
    assert counts.hits == counts.examples > 100
    assert (counts.misses, counts.hold) == (2 * LENGTH - counts.hits, "whole")


@pytest.mark.slow
def test_threads_read_ahead_what_it_does_not_hold(tmp_path):
    found = {}
    for reads_in_flight in (1, 16):
        log = tmp_path / f"reads-{reads_in_flight}"
        loader = cached_loader(Shots(log=str(log)), 8, options={"reads_in_flight": reads_in_flight})
        found[reads_in_flight] = closing(loader, PASSES)()
        end_readers()  # the next one begins with an empty cache
        assert loader.cache_counts.hits == (PASSES - 1) * HELD
        assert sum(count == 1 for count in Counter(reads(log)).values()) >= HELD - 3 - 24, "24 are read to try the threads"
    check_same(list(found.values()))


def test_an_exception_of_one_example_comes_at_its_item_and_nowhere_else():
    loader = cached_loader(Shots(fails_at=40), 8, shuffle=False)
    epoch, had = iter(loader), []
    for _ in range(5):
        had += next(epoch)["index"].tolist()
    assert had == list(range(40))
    with pytest.raises(ValueError, match=r"this example is broken.*reading example 40 of the data set"):
        next(epoch)
    loader.close()


@pytest.mark.slow
def test_a_training_that_is_alone_resumes_exactly():
    found, rest = resumed(lambda: cached_loader(Shots(), 8, factor=2), 47, 2)
    assert found[47:] == rest


# ---------------------------------------------------------------------- data that changes


class Changing(Shots):
    """Reads something else as soon as a file is there."""

    def __init__(self, mark):
        super().__init__(48)
        self.mark = str(mark)

    def read(self, index):
        return super().read(index) + 1000 * os.path.exists(self.mark)


@pytest.mark.slow
def test_data_that_has_changed_is_an_error_for_every_training_and_the_reader_ends_with_its_cache(tmp_path):
    def run(batch_size):
        loader = cached_loader(Changing(tmp_path / "mark"), batch_size, wait_for=2, window=2**13)
        with pytest.raises(SharedReadError, match=r"StaleCacheError: example \d+ has changed since it was cached"):
            closing(loader, 10, sleeps(0.002))()

    pids = []

    def watch():
        wait_until(lambda: (said := status_of("data")) is not None and said["written"] > 8, "the reader reads")
        pids.append(status()["pid"])
        (tmp_path / "mark").touch()

    together(lambda: run(8), lambda: run(5), watch)
    wait_until(lambda: (said := status_of("data")) is None or said["pid"] != pids[0], "the reader has ended")
    loader = cached_loader(Changing(tmp_path / "mark"), 8)
    assert sorted(index for batch in loader for index in batch["index"].tolist()) == list(range(1000, 1048)), "as it is now"
    loader.close()


# ---------------------------------------------------------------------- which trainings fit together


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("1MiB", "2MiB", r"cache: 2,097,152 bytes and 1,048,576 bytes"),
        (None, "1MiB", r"cache: 1,048,576 bytes and none"),
        ("1MiB", None, r"cache: none and 1,048,576 bytes"),
        (CacheConfig("1MiB", hold="raw"), "1MiB", r"cache: 1,048,576 bytes and 1,048,576 bytes, hold='raw'"),
    ],
)
def test_a_training_that_asks_for_another_cache_is_refused_with_the_difference(first, second, what):
    there = cached_loader(Shots(), 8, first)
    epoch = iter(there)
    next(epoch)
    other = cached_loader(Shots(), 8, second)
    with pytest.raises(SharedDataDiffers, match=rf"reader of share='data' has another {what} .*give all trainings that share"):
        next(iter(other))
    other.close()
    there.close()


def test_a_reader_that_waits_for_nobody_makes_room_for_one_with_another_cache():
    closing(cached_loader(Shots(), 8, linger_seconds=60), 1)()
    pid = status()["pid"]
    loader = cached_loader(Shots(), 8, 2**21)
    epochs = closing(loader, 2)()
    assert loader.cache_counts.hits == LENGTH
    assert status()["pid"] != pid
    check_same([epochs])


def test_a_training_that_comes_later_has_what_the_reader_has_read_for_others(tmp_path):
    closing(cached_loader(Shots(log=str(tmp_path / "reads")), 8, 2**22, linger_seconds=60), 1)()
    loader = cached_loader(Shots(log=str(tmp_path / "reads")), 8, 2**22, linger_seconds=0)
    closing(loader, 1)()
    assert (loader.cache_counts.hits, loader.cache_counts.misses) == (LENGTH, 0)
    assert len(set(reads(tmp_path / "reads"))) == LENGTH
    assert len(reads(tmp_path / "reads")) <= LENGTH + 6


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


@pytest.mark.parametrize(
    ("loader", "cache", "message"),
    [
        (DataLoader(Stream(), 2), "1MiB", "cache is impossible here: the data set is a stream, which has no index"),
        ([torch.zeros(2)] * 3, "1MiB", "cache is impossible here: list does not tell which examples are in its batches"),
        (
            DataLoader(Shots(8), batch_sampler=BatchSampler(RandomSampler(range(8)), 2, drop_last=False)),
            *("1MiB", r"share and cache are impossible together here: what is shared is the examples of a batch.*CachedDataset"),
        ),
        (
            DataLoader(Shots(8), 2),
            *({"size": "1MiB", "partitioned": True}, r"share and cache\.partitioned=True are impossible together: .*Leave"),
        ),
        (DataLoader(Numbers(8), 2), "1MiB", r"cache is impossible here: Numbers has neither load"),
        (DataLoader(Shots(8), 2), {"size": "1MiB", "hold": "whole"}, "held whole"),
    ],
    ids=["stream", "batches", "batch sampler", "partitioned", "no cut", "whole"],
)
def test_what_cannot_have_a_cache_in_its_reader_is_refused_when_the_loader_is_made(loader: Any, cache: Any, message: str):
    with pytest.raises(ValueError, match=message):
        EchoLoader(loader, 1, share="data", cache=cache)
    assert status_of("data") is None


def test_a_cache_without_room_is_refused_by_the_reader_with_the_reason():
    loader = cached_loader(Shots(), 8, "100000GiB")
    with pytest.raises(
        ReaderError, match=r"could not begin: ValueError: cache\.size='100000GiB' is more than the .* that are free"
    ):
        next(iter(loader))
    loader.close()


def test_a_cache_under_a_name_is_there_for_the_next_reader(tmp_path):
    cache = CacheConfig("4MiB", path=str(tmp_path), name="train")
    for hits in (0, LENGTH):
        loader = cached_loader(Shots(), 8, cache, linger_seconds=0)
        closing(loader, 1)()
        # A few examples are in the file from its beginning, for a comparison.
        assert loader.cache_counts.hits == hits or (hits == 0 and loader.cache_counts.hits <= 8)
        wait_until(lambda: status_of("data") is None, "the reader has ended")


# ---------------------------------------------------------------------- where it is asked for


class Trained(pl.LightningModule):
    """Remembers the indices of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), list[list[int]]()

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen[-1] += batch["index"].tolist()
        return self.weight * batch["noise"].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Module(pl.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Shots(), self.batch_size, shuffle=True, num_workers=1)


def trains(connection: Any, by: str, share: dict[str, Any], batch_size: int) -> None:
    data: Any = Module(batch_size)
    logger, callback = Remembering(), EchoCallback(share=ShareConfig(**share), cache=CACHE)
    if by == "data module":
        data, callback = EchoDataModule(data, 1, share=share, cache=CACHE), EchoCallback()
    run = fit(data, model=Trained(), callbacks=[callback], logger=logger, max_epochs=PASSES, log_every_n_steps=5)
    logged = [metrics for _, metrics in logger.metrics if "echo/cached_examples" in metrics]
    connection.send((run.model.seen, logged, [(report.cache_is_full, report.cache_hold) for report in callback.reports]))


@pytest.mark.parametrize("by", ["callback", "data module"])
def test_real_trainers_log_its_counts_as_those_of_any_cache(by: str) -> None:
    share: dict[str, Any] = {"name": "fit", "linger_seconds": 0.5, "window": "1MiB", "wait_for": 2, "ignore": IGNORED}

    with in_process(trains, by, share, 8) as (_, first), in_process(trains, by, share, 5) as (_, second):
        found = [each.recv() for each in (first, second)]
    for seen, logged, reports in found:
        assert [sorted(epoch) for epoch in seen] == [list(range(LENGTH))] * PASSES
        assert [metrics["echo/cache_hit_fraction"] for metrics in logged] == pytest.approx([0, HELD / LENGTH, HELD / LENGTH])
        assert [metrics["echo/cached_examples"] for metrics in logged] == [HELD] * PASSES
        assert logged[-1]["echo/cache_bytes"] == pytest.approx(HELD * 8192, rel=0.02)
        assert reports in ([(True, "raw")] * PASSES, [(True, "loaded")] * PASSES)


def serving(connection: Any) -> None:
    serve(DataLoader(Shots(), shuffle=True, num_workers=2), ShareConfig("data", window="1MiB", ignore=IGNORED), cache=CACHE)


def test_a_reader_by_hand_has_the_cache_that_it_is_given():
    with in_process(serving):
        wait_until(lambda: status_of("data") is not None, "the reader is there")
        loader = cached_loader(Shots(), 8)
        closing(loader, 2)()
        assert loader.cache_counts.hits == HELD
        with pytest.raises(SharedDataDiffers, match="has another cache: none and 1,048,576 bytes"):
            next(iter(cached_loader(Shots(), 8, None)))


def test_the_log_says_what_it_holds(caplog):
    caplog.set_level(logging.INFO, "lightning_echo")
    loader = cached_loader(Shots(), 8)
    closing(loader, 1)()
    line = r"holds \[\w+\] \((raw|loaded)\), 8\.1\d* KiB per example; 1 MiB hold 52% of 240 examples"
    assert re.search(rf"share='data': the reader's cache: {line}", caplog.text)
    with open(log_of("data")) as log:
        assert re.search(line, log.read())
