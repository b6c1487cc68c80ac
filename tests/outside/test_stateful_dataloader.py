"""torchdata's ``StatefulDataLoader``: a ``DataLoader`` with an ``__iter__`` and a state of its own, so echoed by batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from project_runs import BATCH, LENGTH, STEPS, WAYS, assert_resumes_exactly, assert_right, see_numbers, train
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler, get_worker_info

torchdata = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install 'lightning-echo[test-loaders]'"
)

# torchdata 0.11 calls a torch function that torch 2.15 deprecates, in every loader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "noise": torch.rand(())}


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
            yield {"index": share[self.position - 1]}

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.resumed = state["position"], True


def numbers(workers: int, **options: Any) -> Any:
    return torchdata.StatefulDataLoader(Numbers(), BATCH, num_workers=workers, **{"shuffle": True, **options})


@pytest.mark.parametrize(("workers", "way"), [*WAYS, (2, "loader")])
def test_each_pass_is_fresh_exactly_once_and_a_killed_run_goes_on(workers: int, way: str, tmp_path: Path) -> None:
    run = train(lambda: numbers(workers), see_numbers, way=way, epochs=5)
    assert_right(run, range(LENGTH), point="after_batching", passes=2, steps=STEPS)
    assert_resumes_exactly(lambda: numbers(workers), see_numbers, tmp_path, (1, 6, 11), way=way)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_ends_its_epoch_and_resumes_exactly(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return torchdata.StatefulDataLoader(Stream(), BATCH, num_workers=workers)

    run = train(make, see_numbers, epochs=2)
    assert_right(run, range(LENGTH), passes=2)
    assert_resumes_exactly(make, see_numbers, tmp_path, (1, 5, run.steps[0] + 3), epochs=2)


@pytest.mark.parametrize("has_batch_sampler", [False, True])
def test_an_order_that_is_no_part_of_its_state_is_that_of_the_pass_after_a_resume(
    has_batch_sampler: bool, tmp_path: Path
) -> None:
    """Samplers of torch have no state: torchdata draws their order again, and skips what was read."""

    def make() -> Any:
        if has_batch_sampler:
            batches = BatchSampler(RandomSampler(Numbers()), BATCH, drop_last=False)
            return torchdata.StatefulDataLoader(Numbers(), batch_sampler=batches, num_workers=2)
        return numbers(2, shuffle=None, sampler=WeightedRandomSampler(torch.ones(LENGTH), LENGTH, replacement=False))

    assert_right(train(make, see_numbers, epochs=4), range(LENGTH), passes=2, steps=STEPS)
    assert_resumes_exactly(make, see_numbers, tmp_path, (1, 6, 11, 14), epochs=4)
