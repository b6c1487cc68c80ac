"""What the tests of public projects share: a model that remembers what it was given, two ways into a Trainer, what must hold.

A project's own data set, loader or data module is trained on as it is: nothing of it is exchanged. A test says how a batch is
taken apart into examples: the number that the test has written into each, and what the model sees of it. Which of them are fresh
is told by the loader's counts: the fresh examples of a batch come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader

WAYS = [(0, "callback"), (2, "datamodule")]  # with the number of workers
FACTOR = 2

See = Callable[[Any], Iterable[tuple[int, Any]]]


class Use(NamedTuple):
    """An example in a batch, and what the model sees of it: something that can be hashed."""

    index: int
    value: Any
    fresh: bool


class Watcher(pl.LightningModule):
    """Remembers every example that reaches it.

    Args:
        see: Number and value of each example in a batch.
    """

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see = see
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.batches: list[list[Use]] = []
        self.epochs: list[int] = []  # for each batch the epoch that it came in
        self._fresh = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        before, self._fresh = self._fresh, self.trainer.train_dataloader.counts.fresh
        fresh = self._fresh - before
        self.batches.append([Use(int(index), value, place < fresh) for place, (index, value) in enumerate(self.see(batch))])
        self.epochs.append(self.current_epoch)
        return self.weight * 1.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class WatcherWithHook(Watcher):
    """A model that augments on the device.

    Args:
        see: As above.
        on_device: What `on_after_batch_transfer` does.
    """

    def __init__(self, see: See, on_device: Callable[[Any], Any]) -> None:
        super().__init__(see)
        self.on_device = on_device

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.on_device(super().on_after_batch_transfer(batch, dataloader_idx))


class Module(pl.LightningDataModule):
    """A data module as a user writes it around a project's loader."""

    def __init__(self, make_loader: Callable[[], Any]) -> None:
        super().__init__()
        self.make_loader = make_loader

    def train_dataloader(self) -> Any:
        return self.make_loader()


@dataclass
class Run:
    """What is left after ``fit``."""

    model: Watcher
    loader: EchoLoader
    trainer: pl.Trainer

    @property
    def uses(self) -> list[Use]:
        return [use for batch in self.model.batches for use in batch]

    @property
    def fresh(self) -> list[int]:
        """Numbers of the fresh examples, in the order in which they came."""
        return [use.index for use in self.uses if use.fresh]

    @property
    def steps(self) -> list[int]:
        """Batches of each epoch."""
        return [self.model.epochs.count(epoch) for epoch in sorted(set(self.model.epochs))]

    def values_of(self, index: int) -> list[Any]:
        return [use.value for use in self.uses if use.index == index]


def train(
    data: pl.LightningDataModule | Callable[[], Any],
    see: See,
    *,
    way: str = "datamodule",
    epochs: int = 3,
    on_device: Callable[[Any], Any] | None = None,
    seed: int = 7,
    ckpt_path: str | None = None,
    callbacks: Sequence[pl.Callback] = (),
    **how: Any,
) -> Run:
    """Trains on a project's data module, or on what makes its loader, at factor 2; ``how`` are further options of the echo."""
    how = {"factor": FACTOR, "seed": seed, **how}
    module = data if isinstance(data, pl.LightningDataModule) else Module(data)
    model = Watcher(see) if on_device is None else WatcherWithHook(see, on_device)
    echo = [EchoCallback(echo=EchoConfig(**how), summary=False)] if way == "callback" else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[*callbacks, *echo],
    )
    datamodule = EchoDataModule(module, **how) if way == "datamodule" else module
    trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    return Run(model, trainer.train_dataloader, trainer)


# ------------------------------------------------------------------ what must hold


def assert_exact(run: Run, plain: Sequence[int], *, passes: int = 1) -> None:
    """Counts are exact, and each pass delivers what the plain loader delivers, fresh exactly once.

    Args:
        run: A run that was not resumed.
        plain: The numbers of a pass, in any order.
        passes: As many at least must be through.
    """
    fresh, length = run.fresh, len(plain)
    assert len(fresh) >= passes * length
    for start in range(0, len(fresh), length):
        part = fresh[start : start + length]
        if len(part) == length:
            assert sorted(part) == sorted(plain), f"pass {start // length}"
        else:
            assert not Counter(part) - Counter(plain), "the pass that was cut short"
    assert run.loader.counts.fresh == len(fresh)
    assert run.loader.counts.echoed == len(run.uses) - len(fresh) > 0
    read, used = Counter(fresh), Counter(use.index for use in run.uses)
    if run.loader.reuse == "each":
        assert all(used[index] <= FACTOR * read[index] for index in used)
    else:
        assert_echoes_from_memory(run)
    assert max(used[index] - read[index] for index in used) > 0


def assert_echoes_from_memory(run: Run) -> None:
    """Each echo is of an example that came before, and of all examples, or batches, one in `FACTOR` is fresh.

    That is exact from the second batch of each worker on, since the first one is all fresh.
    """
    before: set[int] = set()
    for batch in run.model.batches:
        assert {use.index for use in batch if not use.fresh} <= before
        before.update(use.index for use in batch if use.fresh)
    by_batches = run.loader.insertion_point in ("after_batching", "after_transfer")
    items = [batch[:1] if by_batches else batch for batch in run.model.batches]
    fresh, delivered = (sum(use.fresh for batch in items for use in batch), sum(map(len, items)))
    workers = 1 if by_batches else max(run.loader.num_workers, 1)
    first_batches = sum(map(len, items[:workers]))
    # Error diffusion leaves less than one example to each worker, that is, fewer than `FACTOR` deliveries.
    assert -workers * FACTOR < FACTOR * fresh - delivered <= (FACTOR - 1) * first_batches


def assert_epochs(run: Run, steps: int) -> None:
    """Epochs are as long as without echoing."""
    assert len(run.loader) == steps
    assert run.steps == [steps] * len(run.steps)


def assert_unchanged(run: Run, plain: dict[int, Any]) -> None:
    """Every use of an example is what the plain loader delivers."""
    assert [(use.index, use.value) for use in run.uses if use.value != plain[use.index]] == []


def assert_noise_redone(run: Run) -> None:
    """Each use of an example has random numbers of its own."""
    assert len({(use.index, use.value) for use in run.uses}) == len(run.uses)


def assert_noise_reused(run: Run) -> None:
    """An echo repeats the random numbers of the fresh use that it comes from; each fresh one has its own."""
    assert {use.value for use in run.uses if not use.fresh} <= {use.value for use in run.uses if use.fresh}
    assert len({(use.index, use.value) for use in run.uses}) == len(run.fresh)


def assert_repeatable(train_once: Callable[[int], Run]) -> None:
    """With the same seed two runs see the same, with another one something else."""
    first, second, other = train_once(3), train_once(3), train_once(4)
    assert first.model.batches == second.model.batches
    assert first.model.batches != other.model.batches


class _Killed(Exception):
    """The end of a run that was meant to be killed."""


class _DieAt(pl.Callback):
    """Saves a checkpoint after a step, counted over the run, and dies."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        del args
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise _Killed


def kill(data: Callable[[], Any], see: See, folder: Path, step: int, **how: Any) -> str:
    """Path of the checkpoint of a run that was killed after a step."""
    path = str(folder / f"step-{step}.ckpt")
    torch.manual_seed(1)
    with pytest.raises(_Killed):
        train(data, see, callbacks=[_DieAt(path, step)], **how)
    return path


def assert_resumes_exactly(data: Callable[[], Any], see: See, folder: Path, steps: Iterable[int], **how: Any) -> None:
    """Killed after each of the steps, a run goes on with the batches of the uninterrupted one, random numbers included."""
    torch.manual_seed(1)
    whole = train(data, see, **how)
    for step in steps:
        path = kill(data, see, folder, step, **how)
        torch.manual_seed(2)  # as in a process that was started later
        resumed = train(data, see, ckpt_path=path, **how)
        expected = [[(use.index, use.value) for use in batch] for batch in whole.model.batches[step:]]
        assert [[(use.index, use.value) for use in batch] for batch in resumed.model.batches] == expected, f"after step {step}"
        assert len(expected) > 0
        assert resumed.loader.counts.fresh == whole.loader.counts.fresh
        assert resumed.loader.counts.echoed == whole.loader.counts.echoed


# ------------------------------------------------------------------ what was said


def said(caplog: Any) -> str:
    """The lines of a fit that say where the loader is echoed, and why there: one begins them, and the next two belong to it."""
    messages = [record.getMessage() for record in caplog.records if record.name == "lightning_echo"]
    (first,) = [number for number, message in enumerate(messages) if "live" in message and "reuse [" in message]
    return "\n".join(messages[first : first + 3])
