"""mosaicml-streaming's ``StreamingDataset``: in its own loader a sized one with a state, in a plain loader a stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outside_runs import BATCH, WORKERS_AND_WAYS, assert_counts, assert_length, assert_resumes_exactly, fit, kill, passes, stamped
from torch.utils.data import DataLoader

from lightning_echo.echoing.state import EchoStateError

streaming = pytest.importorskip(
    "streaming", reason="mosaicml-streaming is not installed, which needs an older numpy: make test-mosaic"
)

LENGTH = 22


class Stamped(streaming.StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, at: Any) -> Any:
        return stamped(super().__getitem__(at))


@pytest.fixture
def shards(tmp_path: Path) -> Iterator[str]:
    """A folder of small shards."""
    folder = str(tmp_path / "shards")
    with streaming.MDSWriter(out=folder, columns={"index": "int"}, size_limit=300) as writer:
        for index in range(LENGTH):
            writer.write({"index": index})
    yield folder
    streaming.base.util.clean_stale_shared_memory()


def data(shards: str) -> Any:
    return Stamped(
        local=shards, batch_size=BATCH, shuffle=True, shuffle_seed=5, num_canonical_nodes=1, shuffle_block_size=1 << 18
    )


def loader(shards: str, workers: int, **options: Any) -> Any:
    return streaming.StreamingDataLoader(data(shards), batch_size=BATCH, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("options", "steps"), [({}, 6), ({"drop_last": True}, 5)])
def test_two_epochs_are_as_long_as_without_echoing(workers: int, options: Any, steps: int, shards: str) -> None:
    run = fit(lambda: loader(shards, workers, **options), epochs=2)
    assert_length(run, steps)
    assert len(loader(shards, workers, **options)) == steps
    assert run.loader.insertion_point == "after_batching"


@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_each_pass_is_fresh_exactly_once_in_the_loaders_own_order(workers: int, way: str, shards: str) -> None:
    run = fit(lambda: loader(shards, workers), way=way, epochs=4)
    assert_counts(run, range(LENGTH), complete=2)
    assert_length(run, 6)
    plain = loader(shards, workers)
    orders = [[index for batch in plain for index in batch["index"].tolist()] for _ in range(2)]
    assert passes(run, LENGTH)[:2] == orders
    assert orders[0] != orders[1]


@pytest.mark.parametrize(("workers", "way"), WORKERS_AND_WAYS)
def test_a_killed_run_goes_on_with_the_same_batches(workers: int, way: str, shards: str, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda: loader(shards, workers), tmp_path, (1, 4, 6, 10, 11, 12, 15), way=way)


@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_plain_loader_it_is_a_stream_that_cannot_be_set_back(workers: int, shards: str, tmp_path: Path) -> None:
    """The state of the data set by itself wants to be told how many examples were delivered, which only its own loader knows."""

    def make() -> Any:
        return DataLoader(data(shards), BATCH, num_workers=workers)

    run = fit(make, epochs=3)
    assert run.loader.insertion_point == "after_augmentation"
    assert_counts(run, range(LENGTH), complete=1)
    with pytest.raises(EchoStateError, match="state_dict"):
        fit(make, ckpt_path=kill(make, tmp_path, 3))
