"""A replay repeats a run over whole batches on demand to the bit, at another speed: resumes, damage, other data."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_cases import BATCH_SIZE, LENGTH, Called, Staged, Waits, Whole, assert_repeated, journal_in, trained
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from trainer_runs import Data, Killed, SaveAt, fit

from lightning_echo import EchoCallback, EchoLoader, Replay
from lightning_echo.pipeline.journal import journal_path, read_journal

pytestmark = pytest.mark.usefixtures("read_here")

STEPS = 60  # more than two passes, with echoes


def by_batches(dataset: Waits, workers: int, seed: int = 5) -> DataLoader[Any]:
    data: Any = dataset
    return DataLoader(data, BATCH_SIZE, num_workers=workers, shuffle=True)


def by_own_sampler(dataset: Waits, workers: int, seed: int = 5) -> DataLoader[Any]:
    data: Any = dataset
    sampler = RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(seed))
    return DataLoader(data, batch_sampler=BatchSampler(sampler, BATCH_SIZE, drop_last=False), num_workers=workers)


KINDS = {
    "examples": (Whole, by_batches, {}),
    "in calls": (Called, by_batches, {}),
    "own batch sampler": (Whole, by_own_sampler, {}),
    "reads in flight": (Staged, by_batches, {"reads_in_flight": 4}),
    "small memory": (Whole, by_batches, {"buffer_size": 3}),
    "cached": (Staged, by_batches, {"cache": "1MiB"}),
}


def loader(factor: Any, seconds: float, kind: str = "examples", workers: int = 2, **options: Any) -> EchoLoader:
    dataset, make, usual = KINDS[kind]
    plain = make(dataset(seconds), workers)
    return EchoLoader(plain, factor, **{"seed": 3, "insertion_point": "after_batching", **usual, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_over_whole_batches_has_the_batches_of_its_run(kind: str, tmp_path: Path) -> None:
    run = loader("demand", 0.012, kind, journal=tmp_path / "run")
    batches = trained(run, 2 * STEPS, 0.002)  # on a busy machine, fewer of them are fresh
    again = loader(Replay(tmp_path / "run"), 0.001, kind, journal=tmp_path / "again")
    assert trained(again, 2 * STEPS) == batches
    assert again.counts == run.counts
    assert run.counts.echoed > 0
    assert run.counts.fresh > LENGTH, "more than a pass"
    assert journal_in(tmp_path / "again") == journal_in(tmp_path / "run")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_replay_that_is_slower_than_its_run_waits_for_the_same_batches(workers: int, tmp_path: Path) -> None:
    batches = trained(loader("demand", 0.002, workers=workers, journal=tmp_path), STEPS, 0.001)
    assert trained(loader(f"replay:{tmp_path}", 0.01, workers=workers), STEPS) == batches


def test_a_replay_over_whole_batches_changes_max_factor_where_its_run_did(tmp_path: Path) -> None:
    changes = {10: 1, 25: 3, 40: 8}
    batches = trained(loader("demand", 0.012, journal=tmp_path), STEPS, 0.002, changes)
    assert trained(loader(Replay(str(tmp_path)), 0.0), STEPS) == batches


def test_each_rank_of_a_run_has_a_journal_and_a_replay(tmp_path: Path) -> None:
    for rank in range(2):
        options: dict[str, Any] = {"num_replicas": 2, "rank": rank}
        batches = trained(loader("demand", 0.012, journal=tmp_path, **options), STEPS, 0.002)
        assert trained(loader(Replay(tmp_path), 0.0, **options), STEPS) == batches
        with pytest.raises(ValueError, match=f"rank={rank} .here {1 - rank}"):
            _with_journal_of(tmp_path, rank, 1 - rank)


def _with_journal_of(folder: Path, rank: int, other: int) -> None:
    found = Path(journal_path(str(folder), "", rank)).read_bytes()
    mixed = folder / f"as {other}"
    mixed.mkdir()
    Path(journal_path(str(mixed), "", other)).write_bytes(found)
    trained(loader(Replay(mixed), 0.0, num_replicas=2, rank=other), 1)


def test_a_resumed_run_over_whole_batches_is_marked_and_repeated_from_its_start_and_from_its_checkpoint(tmp_path: Path) -> None:
    first = loader("demand", 0.012, journal=tmp_path)
    before = [batch.tolist() for batch in islice(first, 9)]
    state = first.state_dict()
    trained(first, 8, 0.002)  # after the checkpoint: lost
    resumed = loader("demand", 0.012, journal=tmp_path)
    resumed.load_state_dict(state)
    batches = before + trained(resumed, 30, 0.002)
    assert [each.begin.number for each in read_journal(journal_path(str(tmp_path), "", 0)).stretches] == [0, 9]
    assert trained(loader(Replay(tmp_path), 0.0), 39) == batches
    again = loader(Replay(tmp_path), 0.0)
    again.load_state_dict(state)
    assert trained(again, 30) == batches[9:]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lightning_echo. the journal of an earlier run is now")
@pytest.mark.parametrize("first", [0, 3])
def test_a_run_over_whole_batches_that_is_stopped_and_resumed_anywhere_is_repeated(first: int, tmp_path: Path) -> None:
    def loader_of(draw: random.Random) -> Any:
        options: dict[str, Any] = {"kind": draw.choice(["in calls", "own batch sampler", "small memory"]), "workers": 2}
        return lambda factor, **others: loader(factor, 0.006 if factor == "demand" else 0.0, **options, **others)

    assert_repeated(range(first, first + 3), loader_of, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, r"seed=3 \(here 4\)"),
        ({"workers": 3}, r"workers=2 \(here 3\)"),
        ({"buffer_size": 2}, r"batches_held=\d+ \(here 2\)"),
        ({"insertion_point": "after_augmentation"}, "insertion_point='after_batching' .here 'after_augmentation'"),
    ],
)
def test_a_replay_over_whole_batches_with_other_options_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    trained(loader("demand", 0.0, journal=tmp_path), 6)
    with pytest.raises(ValueError, match=f"is of another run: .*{message}"):
        trained(loader(Replay(tmp_path), 0.0, **options), 6)


def in_order(dataset: Waits, workers: int, seed: int = 5) -> DataLoader[Any]:
    data: Any = dataset
    return DataLoader(data, BATCH_SIZE, num_workers=workers)


@pytest.mark.parametrize(("make", "other"), [(by_batches, in_order), (by_own_sampler, by_own_sampler)])
def test_a_replay_over_whole_batches_in_another_order_is_refused(make: Any, other: Any, tmp_path: Path) -> None:
    def over(plain: Any, factor: Any, **options: Any) -> EchoLoader:
        return EchoLoader(plain, factor, insertion_point="after_batching", seed=3, **options)

    trained(over(make(Whole(0.0), 2, 5), "demand", journal=tmp_path), 6)
    with pytest.raises(ValueError, match="another order: in batch 0 or shortly before it, that had other indices"):
        trained(over(other(Whole(0.0), 2, 6), Replay(tmp_path)), 6)


def test_a_replay_over_whole_batches_ends_with_an_error_where_its_journal_ends(tmp_path: Path) -> None:
    batches = trained(loader("demand", 0.002, journal=tmp_path), 12)
    again = loader(Replay(tmp_path), 0.0)
    assert [batch.tolist() for batch in islice(again, 11)] == batches[:11]
    with pytest.raises(ValueError, match="ends before batch 12: that run ended there"):
        trained(again, 10)
    path = Path(journal_path(str(tmp_path), "", 0))
    data = path.read_bytes()
    path.write_bytes(data[:-1])  # the last frame is not whole, and it is the only one with batches
    with pytest.raises(ValueError, match="ends before batch 0: that run was killed, or the file was cut off"):
        trained(loader(Replay(tmp_path), 0.0), 6)
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    with pytest.raises(ValueError, match="is damaged: its bytes"):
        trained(loader(Replay(tmp_path), 0.0), 6)


# ---------------------------------------------------------------------- with a Trainer


def train(folder: Path, factor: Any, delay: float, *callbacks: Any, version: int = 0, **options: Any) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    echo = EchoCallback(factor=factor, insertion_point="after_batching", seed=7)
    logger = CSVLogger(folder, name="", version=version)
    return fit(Data(workers=2, delay=delay), logger=logger, callbacks=[echo, *callbacks], log_every_n_steps=2, **options)


def test_a_resumed_trainer_over_whole_batches_is_repeated_from_its_start(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8], dies=True)
    with pytest.raises(Killed):
        train(tmp_path, "demand", 0.01, save)
    resumed = train(tmp_path, "demand", 0.01, version=1, ckpt_path=save.path(8))
    again = train(tmp_path, Replay(tmp_path / "version_1"), 0.0, version=2)
    assert again.model.batches[8:] == resumed.model.batches
    assert again.model.weights == resumed.model.weights
