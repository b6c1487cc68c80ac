"""Streams and loaders without a length in a Trainer: epochs end where passes do, counts hold, runs resume exactly or not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from trainer_runs import At, Data, Recorder, SaveAt, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoStateError

LENGTH, BATCH = 30, 4


class Stream(IterableDataset):  # type: ignore[type-arg]
    """What `Recorder` expects of an example; dealt out to the workers."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.example(index) for index in range(first, self.length, step))

    def example(self, index: int) -> Any:
        noise = [torch.rand((), dtype=torch.float64).item(), np.random.rand(), 0.0]
        return {"index": index, "pid": 0, "noise": torch.tensor(noise, dtype=torch.float64)}


class Saves:
    """Where in which pass."""

    at = number = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.number = state["at"], state["number"]


class Stateful(Saves, Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in islice(range(first, self.length, step), self.at, None):
            self.at += 1
            yield self.example(100 * self.number + index)
        self.at, self.number = 0, self.number + 1


class Batches:
    """Batches without a length; made anew in each pass."""

    def __init__(self, count: int = 7) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (self.batch(number) for number in range(self.count))

    def batch(self, number: int) -> Any:
        noise = torch.stack([torch.full((BATCH,), number / 1000), torch.rand(BATCH), torch.rand(BATCH)], 1)
        return {"index": torch.arange(BATCH) + BATCH * number, "pid": torch.zeros(BATCH), "noise": noise.double()}


class StatefulBatches(Saves, Batches):
    def __iter__(self) -> Iterator[Any]:
        while self.at < self.count:
            self.at += 1
            yield self.batch(100 * self.number + self.at - 1)
        self.at, self.number = 0, self.number + 1


class StreamData(Data):
    """`Data` with another training loader: over a stream, or what ``make`` returns."""

    def __init__(self, make: Any, workers: int = 0) -> None:
        super().__init__(workers)
        self.make = make

    def train_dataloader(self) -> Any:
        self.asked["train"] += 1
        made = self.make()
        return DataLoader(made, BATCH, num_workers=self.workers) if isinstance(made, IterableDataset) else made


def live_of(make: Any, workers: int) -> int:
    """Few examples are live: a pass has no more than eight batches, and does not say so."""
    return 2 * BATCH * max(workers, 1) if make in (Stream, Stateful) else 4


def echoed(make: Any, factor: float = 2.5, workers: int = 0) -> EchoDataModule:
    return EchoDataModule(StreamData(make, workers), factor, buffer_size=live_of(make, workers), seed=7)


KINDS = [(Stream, 2), (Batches, 0)]
STATEFUL = [(Stateful, 2, 11), (StatefulBatches, 0, 5)]


def fresh_of(epoch: Any) -> list[int]:
    """Indices of the examples of an epoch, each reading of one once, in the order in which they came."""
    seen: dict[Any, int] = {}
    for indices, noises in epoch:
        seen.update((noise, index) for index, noise in zip(indices, noises, strict=True) if noise not in seen)
    return list(seen.values())


@pytest.mark.parametrize(("make", "workers"), KINDS)
def test_an_epoch_is_a_pass_that_validation_follows_and_a_callback_reports(make: Any, workers: int) -> None:
    callback = EchoCallback(echo=EchoConfig(2.5, buffer_size=live_of(make, workers), seed=7), summary=False)
    run = fit(StreamData(make, workers), callbacks=[callback])
    length = LENGTH if make is Stream else 7 * BATCH
    seen: set[Any] = set()
    for epoch in run.model.by_epoch:
        new = [(noise, index) for indices, noises in epoch for index, noise in zip(indices, noises, strict=True)]
        fresh = dict(each for each in new if each[0] not in seen)
        assert sorted(fresh.values()) == list(range(length))
        seen.update(fresh)
    steps, reports = run.model.steps, callback.reports
    assert run.model.validated_at == [sum(steps[: epoch + 1]) for epoch in range(3)]
    assert run.trainer.global_step == sum(steps)
    delivered = [sum(len(batch[0]) for batch in epoch) for epoch in run.model.by_epoch]
    assert [report.fresh_examples for report in reports] == [length, 2 * length, 3 * length]
    assert [report.fresh_examples + report.echoed_examples for report in reports] == list(accumulate(delivered))
    assert [(report.steps, report.passes) for report in reports] == list(zip(steps, (1, 2, 3), strict=True))
    plain = 8 if make is Stream else 7
    # The start fills the buffer with few uses each; what is live at an epoch's end is used in the next one.
    assert 1.5 * plain < steps[0] < steps[1] + 3
    assert steps[1] == pytest.approx(2.5 * plain, abs=2)


@pytest.mark.parametrize(("make", "workers", "step"), STATEFUL)
def test_with_a_state_of_its_own_a_run_resumes_exactly_from_the_middle_of_an_epoch_and_from_its_end(
    tmp_path: Any, make: Any, workers: int, step: int
) -> None:
    saver, end = SaveAt(tmp_path, [step]), str(tmp_path / "end.ckpt")
    saves_end = At({1: lambda trainer: trainer.save_checkpoint(end)})
    whole = fit(echoed(make, workers=workers), callbacks=[saver, saves_end])
    assert whole.model.steps[0] > 11
    rest = fit(echoed(make, workers=workers), ckpt_path=saver.path(step))
    assert rest.model.batches == whole.model.batches[step:]
    assert rest.model.epochs == whole.model.epochs[step:]
    assert rest.model.validated_at == whole.model.validated_at
    assert rest.loader.counts.fresh == whole.loader.counts.fresh
    assert rest.model.weights == whole.model.weights
    rest = fit(echoed(make, workers=workers), ckpt_path=end)
    assert rest.model.batches == whole.model.batches[sum(whole.model.steps[:2]) :]
    assert rest.model.steps == whole.model.steps[2:]


@pytest.mark.parametrize(("make", "workers"), KINDS)
def test_without_one_the_middle_of_an_epoch_is_refused_and_its_end_begins_the_next_pass(
    tmp_path: Any, make: Any, workers: int
) -> None:
    saver = SaveAt(tmp_path, [5])
    end = str(tmp_path / "end.ckpt")
    fit(echoed(make, workers=workers), max_epochs=2, callbacks=[saver, At({1: lambda trainer: trainer.save_checkpoint(end)})])
    with pytest.raises(EchoStateError, match=r"saved within a pass, and (Stream|Batches) cannot continue there"):
        fit(echoed(make, workers=workers), ckpt_path=saver.path(5))
    rest = fit(echoed(make, workers=workers), ckpt_path=end)
    assert sorted(fresh_of(rest.model.batches)) == list(range(LENGTH if make is Stream else 7 * BATCH))
    assert set(rest.model.epochs) == {2}


def test_a_loader_that_is_rebuilt_for_each_epoch_goes_on_counting() -> None:
    data = EchoDataModule(StreamData(lambda: Batches()), 2, seed=7)
    run = fit(data, reload_dataloaders_every_n_epochs=1)
    assert data.datamodule.asked["train"] == 3
    for epoch in run.model.by_epoch:
        assert sorted(fresh_of(epoch)) == list(range(7 * BATCH))
    assert run.loader.counts.fresh == 3 * 7 * BATCH
    assert run.loader.counts.delivered == 4 * len(run.model.batches)


def test_on_demand_an_epoch_is_a_pass_and_resumed_within_one_a_run_gets_the_rest_of_it(tmp_path: Any) -> None:
    def data() -> EchoDataModule:
        options = {"max_factor": 4, "buffer_size": 16, "epoch_length": "full_pass", "seed": 7}
        return EchoDataModule(StreamData(Stateful, 2), "demand", **options)

    saver = SaveAt(tmp_path, [3, 6, 10])
    whole = fit(data(), model=Recorder(delay=0.01), callbacks=[saver])
    passes = [[100 * number + index for index in range(LENGTH)] for number in range(3)]
    seen: set[int] = set()
    for epoch, expected in zip(whole.model.by_epoch, passes, strict=True):
        assert sorted(set(fresh_of(epoch)) - seen) == expected
        seen.update(expected)
    for step in (3, 6, 10):
        rest = fit(data(), model=Recorder(delay=0.01), ckpt_path=saver.path(step))
        assert sorted(fresh_of(whole.model.batches[:step] + rest.model.batches)) == [*passes[0], *passes[1], *passes[2]]
        assert rest.loader.counts.fresh == 3 * LENGTH
