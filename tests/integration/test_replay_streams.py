"""A replay repeats a run on demand over a stream to the bit, at another speed: ends of passes, resumes, damage, other streams."""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from replay_cases import assert_repeated, epochs_of, journal_in, noise, trained
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from trainer_runs import Data, Killed, SaveAt, fit

from lightning_echo import EchoCallback, EchoDataModule, EchoLoader, Replay
from lightning_echo.pipeline.journal import journal_path, read_journal

pytestmark = pytest.mark.usefixtures("read_here")

BATCH_SIZE = 4


class Stream(IterableDataset[Any]):
    """Has a length for each worker and pass. An example is [worker, pass, place, noise], after a time that no seed decides."""

    def __init__(self, lengths: list[list[int]], seconds: float) -> None:
        self.lengths, self.seconds, self.at, self.number = lengths, seconds, 0, 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        lengths = self.lengths[worker]
        while self.at < lengths[self.number % len(lengths)]:
            time.sleep(self.seconds * random.SystemRandom().random())
            example = self.example(worker)
            self.at += 1
            yield example
        self.at, self.number = 0, self.number + 1

    def example(self, worker: int) -> Any:
        return torch.tensor([worker, self.number, self.at, *noise()], dtype=torch.float64)


class Stateful(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.number = state["at"], state["number"]


class Sized(Stream):
    def __len__(self) -> int:
        return sum(lengths[0] for lengths in self.lengths)


LENGTHS = [[33, 20], [22, 40], [14, 27]]


def loader(
    factor: Any, seconds: float, *, kind: Any = Stateful, lengths: Any = None, workers: int = 2, **options: Any
) -> EchoLoader:
    of_loader = {name: options.pop(name) for name in ("drop_last", "prefetch_factor") if name in options}
    dataset = kind(lengths or LENGTHS[: max(workers, 1)], seconds)
    plain = DataLoader(dataset, BATCH_SIZE, num_workers=workers, **of_loader)
    return EchoLoader(plain, factor, **{"seed": 3, **options})


@pytest.mark.grid
@pytest.mark.parametrize("kind", [Stream, Stateful])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_replay_over_a_stream_has_the_epochs_of_its_run(workers: int, drop_last: bool, kind: Any, tmp_path: Path) -> None:
    options = {"workers": workers, "drop_last": drop_last, "kind": kind}
    run = loader("demand", 0.01, journal=tmp_path / "run", **options)
    epochs = epochs_of(run, 3, 0.002)
    again = loader(Replay(tmp_path / "run"), 0.001, journal=tmp_path / "again", prefetch_factor=5, **options)
    assert epochs_of(again, 3) == epochs
    assert again.counts == run.counts
    assert run.counts.echoed > 0
    assert journal_in(tmp_path / "again") == journal_in(tmp_path / "run")


def test_without_workers_nothing_is_echoed_and_a_replay_repeats_that(tmp_path: Path) -> None:
    epochs = epochs_of(loader("demand", 0.001, workers=0, journal=tmp_path), 2)
    assert epochs_of(loader(Replay(tmp_path), 0.0, workers=0), 2) == epochs


def test_epochs_of_a_known_length_cross_the_ends_of_passes_in_a_replay_too(tmp_path: Path) -> None:
    run = loader("demand", 0.01, kind=Sized, journal=tmp_path / "run")
    batches = trained(run, 70, 0.002, {10: 1, 25: 3, 40: 8})
    again = loader(Replay(tmp_path / "run"), 0.0, kind=Sized, journal=tmp_path / "again")
    assert trained(again, 70) == batches
    assert run.counts.fresh > 55, "more than a pass"
    assert journal_in(tmp_path / "again") == journal_in(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:lightning_echo. the present pass cannot be continued")
@pytest.mark.parametrize("kind", [Stateful, Sized])
def test_a_stream_that_is_stopped_and_continued_is_repeated_in_one_go(kind: Any, tmp_path: Path) -> None:
    """Without a state, workers that are started again read the next pass."""

    def train(echo: EchoLoader) -> list[Any]:
        return trained(echo, 9, 0.002) + trained(echo, 21, 0.002) + trained(echo, 10, 0.002)

    run = loader("demand", 0.01, kind=kind, journal=tmp_path / "run")
    batches = train(run)
    assert [each.begin.number for each in read_journal(journal_path(str(tmp_path / "run"), "", 0)).stretches] == [0, 9, 30]
    assert trained(loader(Replay(tmp_path / "run"), 0.0, kind=kind), 40) == batches
    assert train(loader(Replay(tmp_path / "run"), 0.0, kind=kind, journal=tmp_path / "again")) == batches
    assert journal_in(tmp_path / "again") == journal_in(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lightning_echo. the journal of an earlier run is now")
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_a_run_that_is_stopped_and_resumed_anywhere_is_repeated_epoch_by_epoch(first: int, tmp_path: Path) -> None:
    def loader_of(draw: random.Random) -> Any:
        lengths = [[draw.randint(BATCH_SIZE, 25) for _ in range(3)] for _ in range(draw.randint(1, 3))]
        options = {"lengths": lengths, "workers": len(lengths), "drop_last": draw.random() < 0.3, "buffer_size": 30}

        def make(factor: Any, **others: Any) -> EchoLoader:
            return loader(factor, 0.006 if factor == "demand" else 0.0, prefetch_factor=draw.randint(1, 3), **options, **others)

        return make

    assert_repeated(range(first, first + 3), loader_of, tmp_path)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 4}, r"seed=3 \(here 4\)"),
        ({"workers": 3}, r"workers=2 \(here 3\)"),
        ({"buffer_size": 8}, r"examples_held=\d+ \(here 4\)"),
        ({"drop_last": True}, r"drop_last=False \(here True\)"),
    ],
)
def test_a_replay_over_a_stream_with_other_options_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    trained(loader("demand", 0.0, journal=tmp_path), 6)
    with pytest.raises(ValueError, match=f"is of another run: .*{message}"):
        trained(loader(Replay(tmp_path), 0.0, **options), 6)


@pytest.mark.parametrize(
    ("there", "here", "message"),
    [
        (
            [[33], [22]],
            [[33], [13]],
            r"in pass 0, batch \d+ of worker 1 had \d fresh examples; here it had \d fresh .*the stream ended",
        ),
        (
            [[33], [13]],
            [[33], [22]],
            r"in pass 0, batch \d+ of worker 1 had \d fresh .*the stream ended; here it had \d fresh examples",
        ),
        (
            [[33], [12]],
            [[33], [90]],
            r"in pass 0, batch \d+ of worker 1 left out what was left, and the stream ended; here it had 4",
        ),
    ],
)
def test_a_stream_that_ends_elsewhere_than_in_the_run_is_refused(there: Any, here: Any, message: str, tmp_path: Path) -> None:
    run = loader("demand", 0.0, lengths=there, max_factor=1, journal=tmp_path)  # all batches are full of fresh examples
    epochs_of(run, 1)
    with pytest.raises(ValueError, match=f"this is not the stream of the run that is repeated: {message}"):
        epochs_of(loader(Replay(tmp_path), 0.0, lengths=here), 1)


class Unseeded(Stateful):
    """From some place on, draws a number that no seed decides."""

    def example(self, worker: int) -> Any:
        drawn = random.SystemRandom().random() if self.at >= 8 else 0.0
        return torch.cat([super().example(worker), torch.tensor([drawn])])


def test_a_stream_with_other_examples_than_in_the_run_is_refused(tmp_path: Path) -> None:
    epochs_of(loader("demand", 0.0, kind=Unseeded, journal=tmp_path), 1)
    said = r"is of a run with another stream: in batch \d+ or shortly before it, that had other examples"
    with pytest.raises(ValueError, match=said):
        epochs_of(loader(Replay(tmp_path), 0.0, kind=Unseeded), 1)


def test_a_replay_over_a_stream_ends_with_an_error_where_its_journal_ends(tmp_path: Path) -> None:
    batches = trained(loader("demand", 0.002, journal=tmp_path), 12)
    again = loader(Replay(tmp_path), 0.0)
    assert [batch.tolist() for batch in islice(again, 12)] == batches
    with pytest.raises(ValueError, match="ends before batch 12: that run ended there"):
        next(iter(again))
    path = Path(journal_path(str(tmp_path), "", 0))
    data = path.read_bytes()
    path.write_bytes(data[:-1])  # the last frame is not whole, and it is the only one with batches
    with pytest.raises(ValueError, match="ends before batch 0: that run was killed, or the file was cut off"):
        trained(loader(Replay(tmp_path), 0.0), 6)
    path.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    with pytest.raises(ValueError, match="is damaged: its bytes"):
        trained(loader(Replay(tmp_path), 0.0), 6)


# ---------------------------------------------------------------------- with a Trainer


class Rows(Stateful):
    """Examples as `Recorder` wants them."""

    def example(self, worker: int) -> Any:
        return {"index": self.at, "pid": worker, "noise": torch.tensor(noise(), dtype=torch.float64)}


class StreamData(Data):
    def train_dataloader(self) -> Any:
        return DataLoader(Rows(LENGTHS[:2], self.scans["delay"]), BATCH_SIZE, num_workers=2)


def train(folder: Path, factor: Any, delay: float, *callbacks: Any, version: int = 0, **options: Any) -> Any:
    echo = EchoCallback(factor=factor, seed=7)
    logger = CSVLogger(folder, name="", version=version)
    return fit(StreamData(delay=delay), logger=logger, callbacks=[echo, *callbacks], log_every_n_steps=2, **options)


class SaveAtEnd(pl.Callback):
    """Saves a checkpoint at the end of the first epoch, and dies in the next one."""

    def __init__(self, path: Path) -> None:
        self.saved, self._path = 0, path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._path)
        self.saved = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.saved and trainer.global_step == self.saved + 3:
            raise Killed


@pytest.mark.slow
def test_a_trainer_that_was_resumed_at_the_end_of_an_epoch_is_repeated_epoch_by_epoch(tmp_path: Path) -> None:
    save = SaveAtEnd(tmp_path / "end.ckpt")
    with pytest.raises(Killed):
        train(tmp_path, "demand", 0.01, save)
    resumed = train(tmp_path, "demand", 0.01, version=1, ckpt_path=tmp_path / "end.ckpt")
    again = train(tmp_path, Replay(tmp_path / "version_1"), 0.0, version=2)
    assert again.model.batches[save.saved :] == resumed.model.batches
    assert again.model.epochs[save.saved :] == resumed.model.epochs
    assert again.model.weights == resumed.model.weights


def test_an_echoed_data_module_beside_a_callback_that_measures_has_a_journal_from_its_first_batch(tmp_path: Path) -> None:
    def run(factor: Any, version: int) -> Any:
        logger = CSVLogger(tmp_path, name="", version=version)
        return fit(
            EchoDataModule(StreamData(delay=0.01), factor, seed=7),
            callbacks=[EchoCallback()],
            logger=logger,
            max_epochs=2,
            log_every_n_steps=2,
        )

    first = run("demand", 0)
    again = run(Replay(tmp_path / "version_0"), 1)
    assert (again.model.batches, again.model.epochs) == (first.model.batches, first.model.epochs)
    assert journal_in(tmp_path / "version_1") == journal_in(tmp_path / "version_0")


def test_a_users_loader_over_a_stream_has_a_journal_if_its_folder_is_given_at_the_start(tmp_path: Path, caplog: Any) -> None:
    def run(factor: Any, version: int, **options: Any) -> Any:
        data = EchoLoader(DataLoader(Rows(LENGTHS[:2], 0.01), BATCH_SIZE, num_workers=2), factor, seed=7, **options)
        found = fit(data, callbacks=[EchoCallback()], logger=CSVLogger(tmp_path, name="", version=version), max_epochs=1)
        data.close()
        return found

    with caplog.at_level("INFO", logger="lightning_echo"):
        first = run("demand", 0, journal=tmp_path)
        assert "not written down" not in caplog.text
        again = run(Replay(tmp_path), 1)
    assert again.model.batches == first.model.batches
    assert "this run is not written down for a Replay, because its first batch was fetched before" in caplog.text
    assert not Path(journal_path(str(tmp_path / "version_1"), "", 0)).exists()


@pytest.mark.slow
@pytest.mark.parametrize("step", [8, 16])
def test_a_resumed_trainer_over_a_stream_is_repeated_epoch_by_epoch(step: int, tmp_path: Path) -> None:
    """Lightning fetches one batch ahead, since the length of an epoch is not known."""
    save = SaveAt(tmp_path, [step], dies=True)
    with pytest.raises(Killed):
        train(tmp_path, "demand", 0.01, save)
    resumed = train(tmp_path, "demand", 0.01, version=1, ckpt_path=save.path(step))
    again = train(tmp_path, Replay(tmp_path / "version_1"), 0.0, version=2)
    assert again.model.batches[step:] == resumed.model.batches
    assert again.model.epochs[step:] == resumed.model.epochs
    assert again.model.weights == resumed.model.weights
    rest = train(tmp_path, Replay(tmp_path / "version_1"), 0.0, version=3, ckpt_path=save.path(step))
    assert rest.model.batches == resumed.model.batches
    assert rest.model.weights == resumed.model.weights
