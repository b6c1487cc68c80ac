"""torchdata's ``StatefulDataLoader``: a ``DataLoader`` with an ``__iter__`` and a state of its own, so echoed by batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from outside_runs import (
    BATCH,
    LENGTH,
    RULES,
    WAYS,
    WORKERS_AND_WAYS,
    assert_an_epoch_is_a_pass,
    assert_counts,
    assert_length,
    assert_resumes_exactly,
    fit,
    stamped,
)
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_echo import EchoLoader

torchdata = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install 'lightning-echo[test-loaders]'"
)

# torchdata 0.11 calls a torch function that torch 2.15 deprecates, in every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return stamped({"index": index})


class Stream(IterableDataset[Any]):
    """The numbers, dealt out to the workers, with a state as torchdata asks for."""

    def __init__(self) -> None:
        self.position = 0
        self.resumed = False

    def __iter__(self) -> Any:
        self.position, self.resumed = (self.position if self.resumed else 0), False
        info = get_worker_info()
        share = range(LENGTH)[info.id :: info.num_workers] if info else range(LENGTH)
        while self.position < len(share):
            self.position += 1
            yield stamped({"index": share[self.position - 1]})

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.resumed = state["position"], True


def numbers(workers: int, shuffle: bool = True, **options: Any) -> Any:
    return torchdata.StatefulDataLoader(Numbers(), BATCH, shuffle=shuffle, num_workers=workers, **options)


def stream(workers: int) -> Any:
    return torchdata.StatefulDataLoader(Stream(), BATCH, num_workers=workers)


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("drop_last", "kept"), [(False, LENGTH), (True, 20)])
def test_two_epochs_are_as_long_as_without_echoing(workers: int, drop_last: bool, kept: int, reuse: str) -> None:
    def make() -> Any:
        return numbers(workers, shuffle=False, drop_last=drop_last)

    run = fit(make, epochs=2, reuse=reuse)
    assert_length(run, len(make()))
    assert_counts(run, range(kept), complete=1)
    assert run.loader.insertion_point == "after_batching"


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_each_pass_is_fresh_exactly_once(way: str, reuse: str) -> None:
    run = fit(lambda: numbers(2), way=way, epochs=5, reuse=reuse)
    assert_counts(run, range(LENGTH), complete=2)
    assert_length(run, -(-LENGTH // BATCH))


@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_a_killed_run_goes_on_with_the_same_batches(workers: int, way: str, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: numbers(workers), tmp_path, (1, 4, 6, 11, 14), way=way)


class Noisy(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "noise": torch.rand(())}


@pytest.mark.parametrize("factor", [1, 2])
def test_without_workers_the_noise_of_each_batch_is_the_same_too(factor: float) -> None:
    def make() -> EchoLoader:
        loader = torchdata.StatefulDataLoader(Noisy(), BATCH, shuffle=True)
        return EchoLoader(loader, factor, insertion_point="after_batching", seed=0)

    first = make()
    noise = [batch["noise"].tolist() for _ in range(2) for batch in first]
    first = make()
    states = [first.state_dict() for _ in range(2) for _ in first]
    for at, state in enumerate(states[:-1], 1):
        second = make()
        second.load_state_dict(state)
        assert next(iter(second))["noise"].tolist() == noise[at]


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_ends_its_epoch_and_resumes_exactly(workers: int, reuse: str, tmp_path: Path) -> None:
    run = fit(lambda: stream(workers), epochs=2, reuse=reuse)
    assert_an_epoch_is_a_pass(run, range(LENGTH), 2)
    assert_counts(run, range(LENGTH), complete=2)
    assert_resumes_exactly(lambda: stream(workers), tmp_path, (1, 5, run.steps[0] + 3), epochs=2, reuse=reuse)


class Sized(Stream):
    def __len__(self) -> int:
        return LENGTH


def test_a_stream_whose_workers_drop_their_own_rests_goes_on_with_the_next_pass(tmp_path: Path) -> None:
    """torch's length says five batches, and three workers make four."""

    def make() -> Any:
        return torchdata.StatefulDataLoader(Sized(), BATCH, num_workers=3, drop_last=True)

    kept = sorted(index for batch in make() for index in batch["index"].tolist())
    run = fit(make, epochs=3)
    assert (len(make()), len(kept)) == (5, 16)
    assert run.steps == [5, 5, 5]
    assert_counts(run, kept, complete=1)
    assert_resumes_exactly(make, tmp_path, (3, 9, 12), epochs=3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("has_batch_sampler", [False, True])
def test_an_order_that_is_no_part_of_its_state_is_that_of_the_pass_after_a_resume(
    has_batch_sampler: bool, workers: int, tmp_path: Path
) -> None:
    """Samplers of torch have no state: torchdata draws their order again, and skips what was read."""

    def make() -> Any:
        if has_batch_sampler:
            batches = BatchSampler(RandomSampler(Numbers()), BATCH, drop_last=False)
            return torchdata.StatefulDataLoader(Numbers(), batch_sampler=batches, num_workers=workers)
        sampler = WeightedRandomSampler(torch.ones(LENGTH), LENGTH, replacement=False)
        return torchdata.StatefulDataLoader(Numbers(), BATCH, sampler=sampler, num_workers=workers)

    assert_counts(fit(make, epochs=4), range(LENGTH), complete=2)
    assert_resumes_exactly(make, tmp_path, (1, 4, 6, 11, 14))
