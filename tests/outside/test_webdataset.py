"""WebDataset from tar files, which has neither a length nor a state: in a ``DataLoader`` a stream, a ``WebLoader`` of batches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from project_runs import BATCH, assert_right, kill, see_numbers, train
from torch.utils.data import DataLoader

from lightning_echo.schema import EchoStateError

webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed: pip install 'lightning-echo[test-loaders]'")

# It leaves the files that it has read to the garbage collector.
pytestmark = pytest.mark.filterwarnings(r"ignore:unclosed file .+\.tar:ResourceWarning")

LENGTH, SHARDS = 24, 4
KINDS = ("examples", "batches", "WebLoader", "WebLoader shuffled")


@pytest.fixture(autouse=True, scope="module")
def _files_are_closed_here() -> Iterator[None]:
    """Where their warnings are expected."""
    yield
    gc.collect()


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    """Four tar files with six examples each."""
    paths = [tmp_path / f"shard-{number}.tar" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        with webdataset.TarWriter(str(path)) as tar:
            for index in range(number * 6, number * 6 + 6):
                tar.write({"__key__": f"{index:03d}", "index.cls": index})
    return list(map(str, paths))


def example(sample: dict[str, Any]) -> dict[str, Any]:
    return {"index": sample["index.cls"]}


def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"index": torch.tensor([one["index"] for one in examples])}


def loader(shards: list[str], kind: str, workers: int, **options: Any) -> Any:
    """As WebDataset's own documentation builds them."""
    stream = webdataset.WebDataset(shards, shardshuffle=SHARDS).shuffle(8).decode().map(example)
    if kind == "examples":
        return DataLoader(stream, BATCH, num_workers=workers, **options)
    batches = stream.batched(BATCH, collation_fn=collate)
    if kind == "batches":
        return DataLoader(batches, batch_size=None, num_workers=workers, **options)
    whole = webdataset.WebLoader(batches, batch_size=None, num_workers=workers)
    return whole if kind == "WebLoader" else whole.unbatched().shuffle(12).batched(BATCH)


@pytest.mark.parametrize("way", ["datamodule", "callback", "loader"])
@pytest.mark.parametrize(("kind", "workers"), [("examples", 2), ("WebLoader", 2), ("WebLoader shuffled", 0), ("batches", 2)])
def test_every_way_in_takes_it(kind: str, workers: int, way: str, shards: list[str]) -> None:
    run = train(lambda: loader(shards, kind, workers), see_numbers, way=way, epochs=2)
    assert run.loader.insertion_point == ("after_augmentation" if kind == "examples" else "after_batching")
    assert {use.index for use in run.uses} == set(range(LENGTH))
    assert run.loader.counts.fresh == 2 * LENGTH < run.loader.counts.delivered == len(run.uses)
    if way != "loader":  # there Lightning takes a batch ahead, so that the counts do not tell which examples are fresh
        assert_right(run, range(LENGTH), passes=2)


def test_with_epoch_an_epoch_is_that_long(shards: list[str]) -> None:
    """A shuffle with replacement that never ends, cut into epochs of five batches."""

    def make() -> Any:
        stream = webdataset.WebDataset(shards, resampled=True, shardshuffle=False).decode().map(example)
        batches = stream.batched(BATCH, collation_fn=collate)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=2).with_epoch(5)

    run = train(make, see_numbers, epochs=2, buffer_size=2)
    assert len(run.steps) == 2
    assert min(run.steps) > 5
    assert run.loader.counts.fresh == 2 * 5 * BATCH


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_is_refused_within_an_epoch_and_goes_on_after_it(kind: str, shards: list[str], tmp_path: Path) -> None:
    def make() -> Any:
        return loader(shards, kind, 2)

    with pytest.raises(EchoStateError, match="state_dict"):
        train(make, see_numbers, ckpt_path=kill(make, see_numbers, tmp_path, 3))
    path = str(tmp_path / "epoch.ckpt")
    train(make, see_numbers, epochs=1).trainer.save_checkpoint(path)
    resumed = train(make, see_numbers, epochs=2, ckpt_path=path)
    assert set(resumed.model.epochs) == {1}
    assert sorted({use.index for use in resumed.uses}) == list(range(LENGTH))
