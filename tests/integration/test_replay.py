"""A replay repeats a run on demand to the bit, at another speed: each kind of data set, killed and resumed runs, Trainers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_cases import BATCH_SIZE, LENGTH, Called, Staged, Waits, Whole, journal_in, trained
from torch.utils.data import DataLoader
from trainer_runs import Data, Killed, SaveAt, fit

from lightning_echo import EchoCallback, EchoConfig, EchoLoader, Replay
from lightning_echo.pipeline.journal import journal_path, read_journal

pytestmark = pytest.mark.usefixtures("read_here")

KINDS: dict[str, tuple[type[Waits], dict[str, Any]]] = {
    "whole": (Whole, {"insertion_point": "after_augmentation"}),
    "in calls": (Called, {"insertion_point": "after_augmentation"}),
    "staged": (Staged, {}),
    "raw": (Staged, {"insertion_point": "after_read"}),
    "cached": (Staged, {"cache": "1MiB"}),
    "in flight": (Staged, {"reads_in_flight": 6}),
    "cached and in flight": (Staged, {"cache": "1MiB", "reads_in_flight": 6}),
    "one worker's memory": (Staged, {"buffer_size": 5}),
}


def loader(kind: str, factor: Any, seconds: float, workers: int = 2, **options: Any) -> EchoLoader:
    dataset, usual = KINDS[kind]
    plain: Any = DataLoader(dataset(seconds), BATCH_SIZE, num_workers=workers, shuffle=True)  # type: ignore[arg-type]
    return EchoLoader(plain, factor, **{"seed": 3, **usual, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_has_the_batches_of_its_run(kind: str, tmp_path: Path) -> None:
    run = loader(kind, "demand", 0.05 if "in flight" in kind else 0.012, journal=tmp_path / "run")  # slow enough for echoes
    batches = trained(run, seconds=0.002)
    again = loader(kind, Replay(tmp_path / "run"), 0.0, journal=tmp_path / "again")
    assert trained(again) == batches
    assert again.counts == run.counts
    assert run.counts.echoed > 0
    assert journal_in(tmp_path / "again") == journal_in(tmp_path / "run")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_replay_has_the_batches_of_its_run_with_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": workers, "reads_in_flight": 4}
    batches = trained(loader("staged", "demand", 0.01, journal=tmp_path, **options), seconds=0.002)
    assert trained(loader("staged", f"replay:{tmp_path}", 0.001, **options)) == batches


def test_a_replay_changes_max_factor_where_its_run_did(tmp_path: Path) -> None:
    changes = {10: 1, 25: 3, 40: 8}
    batches = trained(loader("whole", "demand", 0.012, journal=tmp_path), seconds=0.002, changes=changes)
    assert trained(loader("whole", Replay(str(tmp_path)), 0.0)) == batches


def test_workers_that_are_started_again_begin_with_an_empty_memory_in_the_replay_too(tmp_path: Path) -> None:
    def twice(factor: Any, seconds: float, folder: Path) -> list[Any]:
        echo = loader("in calls", factor, seconds, journal=folder)
        return trained(echo, 25, 0.002) + trained(echo, 25, 0.002)

    batches = twice("demand", 0.012, tmp_path / "run")
    assert [each.begin.number for each in read_journal(journal_path(str(tmp_path / "run"), "", 0)).stretches] == [0, 25]
    assert twice(Replay(tmp_path / "run"), 0.0, tmp_path / "again") == batches
    assert trained(loader("in calls", Replay(tmp_path / "run"), 0.0), 50) == batches  # in one go: the replay starts them again
    assert journal_in(tmp_path / "again") == journal_in(tmp_path / "run")


def test_a_resumed_run_continues_its_journal_and_its_replay_does_not_notice(tmp_path: Path) -> None:
    first = loader("staged", "demand", 0.012, journal=tmp_path / "run")
    before = [batch.tolist() for batch in islice(first, 9)]
    state = first.state_dict()
    trained(first, 8, 0.002)  # after the checkpoint: lost
    resumed = loader("staged", "demand", 0.012, journal=tmp_path / "resumed")
    resumed.load_state_dict(state)
    batches = before + trained(resumed, 30, 0.002)
    assert trained(loader("staged", Replay(tmp_path / "resumed"), 0.0), 39) == batches
    # In the same folder, the journal goes on behind what was lost.
    resumed = loader("staged", "demand", 0.012, journal=tmp_path / "run")
    resumed.load_state_dict(state)
    batches = before + trained(resumed, 30, 0.002)
    assert trained(loader("staged", Replay(tmp_path / "run"), 0.0), 39) == batches
    # A replay from the checkpoint is the rest.
    again = loader("staged", Replay(tmp_path / "run"), 0.0)
    again.load_state_dict(state)
    assert trained(again, 30) == batches[9:]


def test_the_replay_of_a_folder_with_two_branches_of_resumes_is_that_of_the_last_one(tmp_path: Path) -> None:
    def resumed(state: Any, steps: int) -> list[Any]:
        echo = loader("staged", "demand", 0.012, journal=tmp_path)
        echo.load_state_dict(state)
        return trained(echo, steps, 0.002)

    first = loader("staged", "demand", 0.012, journal=tmp_path)
    batches, states = [], []
    for batch in islice(first, 10):
        batches.append(batch.tolist())
        states.append(first.state_dict())
    trained(first, 8, 0.002)
    resumed(states[4], 30)
    found = batches[:9] + resumed(states[8], 20)
    assert trained(loader("staged", Replay(tmp_path), 0.0), 29) == found
    found = batches[:5] + resumed(states[4], 12)
    assert trained(loader("staged", Replay(tmp_path), 0.0), 17) == found


def test_a_resumed_run_whose_journal_is_gone_says_so_and_is_repeated_from_its_checkpoint(tmp_path: Path) -> None:
    first = loader("staged", "demand", 0.005, journal=tmp_path / "run")
    trained(first, 9)
    state = first.state_dict()
    Path(journal_path(str(tmp_path / "run"), "", 0)).unlink()
    resumed = loader("staged", "demand", 0.005, journal=tmp_path / "resumed")
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match="is not the journal of this run up to its checkpoint: the new one begins at batch 9"):
        batches = trained(resumed, 20, 0.002)
    again = loader("staged", Replay(tmp_path / "resumed"), 0.0)
    again.load_state_dict(state)
    assert trained(again, 20) == batches
    with pytest.raises(ValueError, match=r"a Replay cannot begin at batch 0: .*: 9\. Begin at one of them"):
        trained(loader("staged", Replay(tmp_path / "resumed"), 0.0), 1)


def _forever(folder: Path, seen: Any) -> None:
    echo = loader("staged", "demand", 0.002, journal=folder)
    while True:
        for batch in echo:
            seen.send(batch.tolist())


def test_of_a_killed_run_all_is_repeated_that_was_written(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_forever, args=(tmp_path, there))
    process.start()
    batches = [here.recv() for _ in range(200)]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    journal = read_journal(journal_path(str(tmp_path), "", 0))
    end = journal.stretches[-1].end
    assert end >= 128  # written in frames of 64 batches
    assert not journal.has_ended
    again = loader("staged", Replay(tmp_path), 0.0)
    assert trained(again, min(end, 200)) == batches[:end]
    with pytest.raises(ValueError, match=rf"ends before batch {end}: that run was killed, or the file was cut off"):
        trained(loader("staged", Replay(tmp_path), 0.0), end + 1)


def test_a_replay_ends_with_an_error_where_its_run_ended(tmp_path: Path) -> None:
    batches = trained(loader("staged", "demand", 0.0, journal=tmp_path), 12)
    again = loader("staged", Replay(tmp_path), 0.0)
    found = [batch.tolist() for batch in islice(again, 11)]
    assert found == batches[:11]
    with pytest.raises(ValueError, match=r"ends before batch \d+: that run ended there. Train for at most as many steps"):
        trained(again, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, r"seed=3 \(here 4\)"),
        ({"workers": 3}, r"workers=2 \(here 3\)"),
        ({"buffer_size": 8}, r"examples_held=\d+ \(here 4\)"),
        ({"insertion_point": "after_read"}, "insertion_point='before_augmentation' .here 'after_read'"),
    ],
)
def test_a_replay_with_other_options_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    trained(loader("staged", "demand", 0.0, journal=tmp_path), 6)
    with pytest.raises(ValueError, match=f"is of another run: {message}"):
        trained(loader("staged", Replay(tmp_path), 0.0, **options), 6)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"batch_size": 5, "shuffle": True}, "batch_size=4 .here 5"),
        ({"dataset": torch.utils.data.Subset(Staged(0.0), range(40)), "shuffle": True}, r"length=43 \(here 40\)"),  # type: ignore[type-var]
        ({"shuffle": False}, "another order: in batch 0 or shortly before it, that had other indices"),
    ],
)
def test_a_replay_over_other_data_is_refused(plain: dict[str, Any], message: str, tmp_path: Path) -> None:
    trained(loader("staged", "demand", 0.0, journal=tmp_path), 6)
    other: Any = DataLoader(**{"dataset": Staged(0.0), "batch_size": BATCH_SIZE, "num_workers": 2, **plain})
    with pytest.raises(ValueError, match=message):
        trained(EchoLoader(other, Replay(tmp_path), seed=3), 6)


def test_a_sampler_that_draws_another_order_later_is_noticed(tmp_path: Path) -> None:
    class Drifts(torch.utils.data.Sampler[int]):
        def __init__(self, by: int) -> None:
            self.by = by

        def __iter__(self) -> Any:
            return iter([*range(30), *(30 + (place + self.by) % 13 for place in range(13))])

        def __len__(self) -> int:
            return LENGTH

    def make(factor: Any, by: int, **options: Any) -> EchoLoader:
        plain: Any = DataLoader(Staged(0.0), BATCH_SIZE, num_workers=2, sampler=Drifts(by))  # type: ignore[arg-type]
        return EchoLoader(plain, factor, seed=3, **options)

    trained(make("demand", 0, journal=tmp_path, max_factor=1), 11)  # all of the pass
    assert trained(make(Replay(tmp_path), 0), 11)
    with pytest.raises(ValueError, match="is of a run with another order: in batch"):
        trained(make(Replay(tmp_path), 1), 11)


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    trained(loader("staged", "demand", 0.0, journal=tmp_path), 6)
    path = Path(journal_path(str(tmp_path), "", 0))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged: its bytes"):
        trained(loader("staged", Replay(tmp_path), 0.0), 6)
    path.unlink()
    with pytest.raises(ValueError, match=r"no journal is at .*echo_journal_rank0.bin \(No such file"):
        trained(loader("staged", Replay(tmp_path), 0.0), 6)


def test_the_journal_of_an_earlier_run_is_kept_under_another_name(tmp_path: Path) -> None:
    trained(loader("staged", "demand", 0.0, journal=tmp_path), 6)
    before = journal_in(tmp_path)
    with pytest.warns(UserWarning, match=r"the journal of an earlier run is now .*echo_journal_rank0.bin\.1$"):
        trained(loader("staged", "demand", 0.0, journal=tmp_path), 6)
    assert Path(f"{journal_path(str(tmp_path), '', 0)}.1").read_bytes() == before


def test_a_journal_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the journal .* cannot be written .*: Replay can repeat this run only up to here"):
        assert len(trained(loader("staged", "demand", 0.0, journal=tmp_path / "file"), 6)) == 6


# ---------------------------------------------------------------------- options


def test_a_replay_is_a_plain_value_in_a_configuration() -> None:
    assert EchoConfig(factor=Replay("runs/1")).factor == "replay:runs/1"  # type: ignore[arg-type]
    assert EchoConfig(factor="replay:runs/1") == EchoConfig(factor=Replay(Path("runs/1")))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_factor=4 is impossible with a Replay: its journal has the bound"):
        EchoConfig(factor="replay:runs/1", max_factor=4)
    with pytest.raises(ValueError, match="Replay's path must be the path of a folder, got ''"):
        EchoConfig(factor="replay:")
    with pytest.raises(TypeError, match="Replay's path must be the path of a folder, got 3"):
        Replay(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="journal='runs' is impossible here: only a run with factor='demand'"):
        EchoLoader(DataLoader(range(8)), 2, journal="runs")  # type: ignore[arg-type]


def test_a_run_that_shares_its_reading_has_no_journal() -> None:
    plain: Any = DataLoader(torch.arange(8), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"factor='replay:runs' is impossible here: .* Give a number, or 'demand'"):
        EchoLoader(plain, Replay("runs"), share="data")
    with pytest.raises(ValueError, match=r"journal='runs' is impossible here: .* Leave it out"):
        EchoLoader(plain, "demand", share="data", journal="runs")


# ---------------------------------------------------------------------- with a Trainer


def train(folder: Path, factor: Any, delay: float, *callbacks: Any, version: int = 0, **options: Any) -> Any:
    from lightning.pytorch.loggers import CSVLogger

    echo = EchoCallback(factor=factor, insertion_point="after_augmentation", seed=7)
    logger = CSVLogger(folder, name="", version=version)
    return fit(Data(workers=2, delay=delay), logger=logger, callbacks=[echo, *callbacks], log_every_n_steps=2, **options)


def test_a_trainer_writes_a_journal_and_another_one_repeats_it(tmp_path: Path) -> None:
    run = train(tmp_path, "demand", 0.01)
    again = train(tmp_path, Replay(tmp_path / "version_0"), 0.0, version=1)
    assert again.model.batches == run.model.batches
    assert again.model.weights == run.model.weights
    assert journal_in(tmp_path / "version_1") == journal_in(tmp_path / "version_0")
    (verdict,) = (each.verdict for each in again.trainer.callbacks if isinstance(each, EchoCallback))
    assert "as in the run that was repeated. A replay echoes what its journal says" in verdict.message
    assert verdict.next_line == ""


def test_a_resumed_trainer_has_the_journal_of_the_whole_run(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8], dies=True)
    with pytest.raises(Killed):
        train(tmp_path, "demand", 0.01, save)
    resumed = train(tmp_path, "demand", 0.01, version=1, ckpt_path=save.path(8))
    again = train(tmp_path, Replay(tmp_path / "version_1"), 0.0, version=2)
    assert again.model.batches[8:] == resumed.model.batches
    assert again.model.weights == resumed.model.weights
    rest = train(tmp_path, Replay(tmp_path / "version_1"), 0.0, version=3, ckpt_path=save.path(8))
    assert rest.model.batches == resumed.model.batches


def test_a_deterministic_trainer_is_told_of_replay(tmp_path: Path) -> None:
    try:
        with pytest.warns(
            UserWarning, match=r"Give a number as the factor, or repeat this run by factor=Replay\('.*version_0'\)"
        ):
            train(tmp_path, "demand", 0.0, deterministic=True, max_epochs=1)
    finally:
        torch.use_deterministic_algorithms(mode=False)
