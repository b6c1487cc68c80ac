"""WebDataset from tar files: examples in a ``DataLoader`` are a stream, a ``WebLoader`` is an iterable of batches.

It has neither a length of its own nor a state.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outside_runs import BATCH, RULES, WAYS, assert_an_epoch_is_a_pass, assert_counts, assert_length, fit, kill, stamped
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
    return stamped({"index": sample["index.cls"]})


def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: torch.tensor([one[key] for one in examples]) for key in ("index", "stamp")}


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


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_ends_where_the_stream_ends(kind: str, workers: int, reuse: str, shards: list[str]) -> None:
    run = fit(lambda: loader(shards, kind, workers), epochs=2, reuse=reuse)
    assert run.loader.insertion_point == ("after_augmentation" if kind == "examples" else "after_batching")
    assert_an_epoch_is_a_pass(run, range(LENGTH), 2)
    assert_counts(run, range(LENGTH), complete=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["examples", "WebLoader"])
def test_every_way_in_takes_it(way: str, kind: str, shards: list[str]) -> None:
    run = fit(lambda: loader(shards, kind, 2), way=way, epochs=2)
    assert_an_epoch_is_a_pass(run, range(LENGTH), 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_begin_every_pass_anew(workers: int, shards: list[str]) -> None:
    run = fit(lambda: loader(shards, "examples", workers, persistent_workers=workers > 0), epochs=3)
    assert_an_epoch_is_a_pass(run, range(LENGTH), 3)


@pytest.mark.parametrize("reuse", RULES)
@pytest.mark.parametrize("workers", [0, 2])
def test_with_length_it_keeps_that_length(workers: int, reuse: str, shards: list[str]) -> None:
    run = fit(lambda: loader(shards, "WebLoader", workers).with_length(6, silent=True), epochs=4, reuse=reuse)
    assert_length(run, LENGTH // BATCH)
    assert_counts(run, range(LENGTH), complete=2)


def test_with_epoch_an_epoch_is_that_long(shards: list[str]) -> None:
    """A shuffle with replacement that never ends, cut into epochs of five batches."""

    def make() -> Any:
        stream = webdataset.WebDataset(shards, resampled=True, shardshuffle=False).decode().map(example)
        batches = stream.batched(BATCH, collation_fn=collate)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=2).with_epoch(5)

    run = fit(make, epochs=2, buffer_size=2)
    assert len(run.by_epoch) == 2
    for batches in run.by_epoch:
        assert sum(len(batch) for batch in batches) > 5 * BATCH
    assert run.loader.counts.fresh == 2 * 5 * BATCH


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_within_an_epoch_is_refused_with_the_reason(kind: str, shards: list[str], tmp_path: Path) -> None:
    path = kill(lambda: loader(shards, kind, 2), tmp_path, 3)
    with pytest.raises(EchoStateError, match="state_dict"):
        fit(lambda: loader(shards, kind, 2), ckpt_path=path)


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_epoch_it_resumes_with_the_next_pass(kind: str, shards: list[str], tmp_path: Path) -> None:
    one = fit(lambda: loader(shards, kind, 2), epochs=1)
    path = str(tmp_path / "epoch.ckpt")
    one.trainer.save_checkpoint(path)
    resumed = fit(lambda: loader(shards, kind, 2), epochs=2, ckpt_path=path)
    assert set(resumed.model.epochs) == {1}
    assert_an_epoch_is_a_pass(resumed, range(LENGTH), 1)
