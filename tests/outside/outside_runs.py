"""What the tests of outside loaders share: examples that name the read they come from, three ways into a Trainer, what must hold.

An example is ``{"index", "stamp"}``. No two reads have the same stamp, so that fresh and echoed examples are told apart and uses
are counted by what reaches the model alone.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader

WAYS = ("datamodule", "callback", "loader")
WORKERS_AND_WAYS = [(0, "callback"), (2, "datamodule"), (2, "loader")]
RULES = ("memory", "each")
LENGTH = 22  # examples of most data sets
BATCH = 4
FACTOR = 2
_reads = itertools.count()


def stamp() -> int:
    """A number that no other read has, in whichever process."""
    return (os.getpid() << 32) + next(_reads)


def stamped(example: dict[str, Any]) -> dict[str, Any]:
    """What every pipeline here does last with an example that it has read."""
    return {**example, "stamp": stamp()}


class Recorder(pl.LightningModule):
    """Remembers every batch that reaches it, as pairs of index and stamp."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[tuple[int, int]]] = []
        self.epochs: list[int] = []  # for each batch the epoch that it came in

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        self.batches.append(list(zip(batch["index"].tolist(), batch["stamp"].tolist(), strict=True)))
        self.epochs.append(self.current_epoch)
        return self.layer(batch["index"].float()[:, None]).pow(2).mean() * 1e-6

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    """A data module as a user writes it."""

    def __init__(self, make_loader: Callable[[], Any]) -> None:
        super().__init__()
        self.make_loader = make_loader

    def train_dataloader(self) -> Any:
        return self.make_loader()


@dataclass
class Run:
    """What is left after ``fit``."""

    model: Recorder
    loader: EchoLoader
    trainer: pl.Trainer

    @property
    def indices(self) -> list[list[int]]:
        return [[index for index, _ in batch] for batch in self.model.batches]

    @property
    def steps(self) -> list[int]:
        """Batches of each epoch."""
        return [len(batches) for batches in self.by_epoch]

    @property
    def by_epoch(self) -> list[list[list[tuple[int, int]]]]:
        pairs = list(zip(self.model.epochs, self.model.batches, strict=True))
        return [[batch for epoch, batch in pairs if epoch == number] for number in sorted(set(self.model.epochs))]


def fit(
    make_loader: Callable[[], Any],
    *,
    way: str = "datamodule",
    epochs: int = 4,
    buffer_size: int | None = None,
    reuse: str = "memory",
    callbacks: Sequence[pl.Callback] = (),
    ckpt_path: str | None = None,
    **options: Any,
) -> Run:
    """Trains on a loader that is made for this run, echoed in one of three ways; ``options`` are the Trainer's."""
    how: dict[str, Any] = {"factor": FACTOR, "buffer_size": buffer_size, "reuse": reuse, "seed": 7}
    model, data = Recorder(), Data(make_loader)
    echo = EchoCallback(echo=EchoConfig(**how), summary=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *([echo] if way == "callback" else [])],
        **options,
    )
    if way == "loader":
        with closing(EchoLoader(make_loader(), **how)) as loader:
            trainer.fit(model, loader, ckpt_path=ckpt_path)
    else:
        trainer.fit(model, datamodule=EchoDataModule(data, **how) if way == "datamodule" else data, ckpt_path=ckpt_path)
    return Run(model, trainer.train_dataloader, trainer)


# ------------------------------------------------------------------ what must hold


def first_uses(batches: Iterable[Sequence[tuple[int, int]]]) -> list[int]:
    """Indices of the fresh examples, in the order in which they came."""
    seen: set[int] = set()
    fresh = []
    for index, mark in itertools.chain.from_iterable(batches):
        if mark not in seen:
            seen.add(mark)
            fresh.append(index)
    return fresh


def passes(run: Run, length: int) -> list[list[int]]:
    """The fresh examples cut into passes of ``length``; the last one may be cut short."""
    fresh = first_uses(run.model.batches)
    return [fresh[start : start + length] for start in range(0, len(fresh), length)]


def assert_counts(run: Run, plain: Sequence[int], *, complete: int) -> None:
    """Each pass delivers what the plain loader delivers, fresh exactly once; reads are used again as the rule of reuse says.

    Args:
        run: A run that was not resumed.
        plain: The examples of a pass, in any order.
        complete: Passes that the run must have been through.
    """
    *whole, last = [*passes(run, len(plain)), []]
    if whole and len(whole[-1]) < len(plain):
        last = whole.pop()
    assert len(whole) >= complete
    assert [sorted(one) for one in whole] == [sorted(plain)] * len(whole)
    assert len(set(last)) == len(last)
    uses = Counter(mark for batch in run.model.batches for _, mark in batch)
    if run.loader.reuse == "each":
        assert max(uses.values()) == FACTOR
        live = sum(count < FACTOR for count in uses.values())
        assert live <= run.loader.buffer_size * (BATCH if run.loader.insertion_point == "after_batching" else 1)
    else:
        assert_echoes_from_memory(run)
    assert run.loader.counts.fresh == len(uses)
    assert run.loader.counts.echoed == uses.total() - len(uses)
    assert all(len(set(batch)) == len(batch) for batch in run.model.batches)


def assert_echoes_from_memory(run: Run) -> None:
    """Each echo is of an example, or a batch, that its worker's share of the buffer still holds. One in `FACTOR` is fresh.

    The share is exact from the second batch of each worker on, since the first one is all fresh. A worker holds the latest that
    it has read, and is told by the process in a stamp. Whole batches are held all together, in the main process.
    """
    by_batches = run.loader.insertion_point == "after_batching"
    held_by: dict[int, list[Any]] = {}
    delivered = fresh = 0
    share = run.loader.buffer_size // (1 if by_batches else max(run.loader.num_workers, 1))
    for batch in run.model.batches:
        marks = tuple(mark for _, mark in batch)
        (worker,) = {0} if by_batches else {mark >> 32 for mark in marks}
        read, items = held_by.setdefault(worker, []), [marks] if by_batches else marks
        new = [item for item in items if item not in read]
        assert {*items} - {*new} <= {*read[-share:]}
        read += new
        delivered, fresh = delivered + len(items), fresh + len(new)
    first_batches = len(held_by) * (1 if by_batches else BATCH)
    # Error diffusion leaves less than one example to each worker, that is, fewer than `FACTOR` deliveries.
    assert -len(held_by) * FACTOR < FACTOR * fresh - delivered <= (FACTOR - 1) * first_batches


def assert_length(run: Run, steps: int) -> None:
    """A sized loader keeps its length, in the loader, in the Trainer, and in what was trained."""
    assert len(run.loader) == run.trainer.num_training_batches == steps
    assert run.steps == [steps] * len(run.steps)


def assert_an_epoch_is_a_pass(run: Run, plain: Sequence[int], epochs: int) -> None:
    """Without a length an epoch ends when the stream ends: its fresh examples are those of one pass."""
    with pytest.raises(TypeError):
        len(run.loader)
    assert run.trainer.num_training_batches == float("inf")
    seen: set[int] = set()
    assert len(run.by_epoch) == epochs
    for batches in run.by_epoch:
        fresh = {mark: index for batch in batches for index, mark in batch if mark not in seen}
        seen.update(fresh)
        assert sorted(fresh.values()) == sorted(plain)


# ------------------------------------------------------------------ resume


class Killed(Exception):
    """The end of a run that was meant to be killed."""


class DieAt(pl.Callback):
    """Saves a checkpoint after a step, counted over the run, and dies."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path, self.step = str(folder / f"step-{step}.ckpt"), step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        del args
        if trainer.fit_loop.total_batch_idx + 1 == self.step:
            trainer.save_checkpoint(self.path)
            raise Killed


def kill(make_loader: Callable[[], Any], folder: Path, step: int, **options: Any) -> str:
    """Path of the checkpoint of a run that was killed after a step."""
    die = DieAt(folder, step)
    torch.manual_seed(1)
    with pytest.raises(Killed):
        fit(make_loader, callbacks=[die], **options)
    return die.path


def assert_resumes_exactly(make_loader: Callable[[], Any], folder: Path, steps: Iterable[int], **options: Any) -> None:
    """Killed after each of the steps, a run goes on with the batches of the uninterrupted one.

    The resumed run has other global random states, as a process that was started later: what the loader shuffles by must come
    from its state.
    """
    torch.manual_seed(1)
    whole = fit(make_loader, **options)
    for step in steps:
        path = kill(make_loader, folder, step, **options)
        torch.manual_seed(2)
        resumed = fit(make_loader, ckpt_path=path, **options)
        assert resumed.indices == whole.indices[step:], f"resumed after step {step}"
        assert resumed.model.epochs == whole.model.epochs[step:]
        assert len(resumed.indices) > 0
        counts = [(run.loader.counts.fresh, run.loader.counts.echoed) for run in (resumed, whole)]
        assert counts[0] == counts[1]
