"""litdata's ``StreamingDataLoader``: a sized ``DataLoader`` with an ``__iter__``, an order and a state of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from outside_runs import BATCH, WORKERS_AND_WAYS, assert_counts, assert_length, assert_resumes_exactly, fit, kill, passes, stamped
from torch.utils.data import DataLoader

from lightning_echo.echoing.state import EchoStateError

litdata = pytest.importorskip("litdata", reason="litdata is not installed: pip install 'lightning-echo[test-loaders]'")

LENGTH = 22


@pytest.fixture
def chunks(tmp_path: Path) -> str:
    """A folder of five chunks as ``litdata.optimize`` writes it, which itself starts processes and takes eight seconds."""
    from litdata.streaming import Cache

    folder = tmp_path / "chunks"
    cache = Cache(str(folder), chunk_size=5)
    for index in range(LENGTH):
        cache[index] = {"index": index}
    cache.done()
    cache.merge()
    return str(folder)


def loader(chunks: str, workers: int, **options: Any) -> Any:
    data = litdata.StreamingDataset(chunks, shuffle=True, transform=stamped)
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("options", "steps"), [({}, 6), ({"drop_last": True}, 5)])
def test_two_epochs_are_as_long_as_without_echoing(workers: int, options: Any, steps: int, chunks: str) -> None:
    run = fit(lambda: loader(chunks, workers, **options), epochs=2)
    assert_length(run, steps)
    assert len(loader(chunks, workers, **options)) == steps
    assert run.loader.insertion_point == "after_batching"


@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_each_pass_is_fresh_exactly_once_in_the_loaders_own_order(workers: int, way: str, chunks: str) -> None:
    run = fit(lambda: loader(chunks, workers), way=way, epochs=4)
    assert_counts(run, range(LENGTH), complete=2)
    assert_length(run, 6)
    plain = loader(chunks, workers)
    orders = [[index for batch in plain for index in batch["index"].tolist()] for _ in range(2)]
    assert passes(run, LENGTH)[:2] == orders
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_a_killed_run_goes_on_with_the_same_batches(workers: int, way: str, chunks: str, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: loader(chunks, workers), tmp_path, (1, 4, 6, 10, 11, 12, 15), way=way)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_plain_loader_its_data_set_is_a_stream_that_cannot_be_set_back(workers: int, chunks: str, tmp_path: Path) -> None:
    """The state of the data set by itself wants to be told how many examples were delivered, which only its own loader knows."""

    def make() -> Any:
        data = litdata.StreamingDataset(chunks, shuffle=True, transform=stamped)
        return DataLoader(data, BATCH, num_workers=workers, drop_last=False)

    run = fit(make, epochs=3)
    assert run.loader.insertion_point == "after_augmentation"
    assert_counts(run, range(LENGTH), complete=1)
    with pytest.raises(EchoStateError, match="state_dict"):
        fit(make, ckpt_path=kill(make, tmp_path, 3))
