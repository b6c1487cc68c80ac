"""What the tests of public projects share: a model that remembers what it was given, three ways into a Trainer, what must hold.

A project's own data set, loader or data module is trained on as it is: nothing of it is exchanged. A test says how a batch is
taken apart into examples: the number that the test has written into each, and what the model sees of it. Which of them are fresh
is told by the loader's counts: the fresh examples of a batch come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader

WAYS = [(0, "callback"), (2, "datamodule")]  # with the number of workers
LENGTH, BATCH, STEPS = 22, 4, 6  # of most data sets: examples, and how a pass is cut into batches
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
        on_device: What `on_after_batch_transfer` does.
    """

    def __init__(self, see: See, on_device: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.see = see
        if on_device is not None:
            self.on_after_batch_transfer = lambda batch, dataloader_idx: on_device(batch)  # type: ignore[method-assign]
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
    model = Watcher(see, on_device)
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
    if way == "loader":
        assert callable(data)
        with closing(EchoLoader(data(), **how)) as loader:
            trainer.fit(model, loader, ckpt_path=ckpt_path)
    else:
        module = data if isinstance(data, pl.LightningDataModule) else Module(data)
        trainer.fit(model, datamodule=EchoDataModule(module, **how) if way == "datamodule" else module, ckpt_path=ckpt_path)
    return Run(model, trainer.train_dataloader, trainer)


# ------------------------------------------------------------------ what must hold


def assert_right(
    run: Run,
    plain: Sequence[int],
    *,
    point: str | None = None,
    steps: int | None = None,
    passes: int = 1,
    values: dict[int, Any] | None = None,
    noise: str | None = None,
) -> None:
    """Counts are exact, and each pass delivers what the plain loader delivers, fresh exactly once.

    Args:
        run: A run that was not resumed.
        plain: The numbers of a pass, in any order.
        point: Where it must be echoed.
        steps: Of each epoch. None: it has no length, so that each epoch must be a pass.
        passes: As many at least must be through.
        values: What the plain loader delivers: every use of an example must be that.
        noise: "redone": each use has random numbers of its own; "reused": an echo repeats those of the fresh use.
    """
    fresh, length = run.fresh, len(plain)
    assert point is None or run.loader.insertion_point == point
    assert len(fresh) >= passes * length
    for start in range(0, len(fresh), length):
        part = fresh[start : start + length]
        if len(part) == length:
            assert sorted(part) == sorted(plain), f"pass {start // length}"
        else:
            assert not Counter(part) - Counter(plain), "the pass that was cut short"
    assert run.loader.counts.fresh == len(fresh)
    assert run.loader.counts.echoed == len(run.uses) - len(fresh) > 0
    assert_echoes_from_memory(run)
    if steps is None:
        with pytest.raises(TypeError):
            len(run.loader)
        assert len(fresh) == len(run.steps) * length
    else:
        assert_epochs(run, steps)
    if values is not None:
        assert_unchanged(run, values)
    if noise == "redone":
        assert len({(use.index, use.value) for use in run.uses}) == len(run.uses)
    elif noise == "reused":
        assert {use.value for use in run.uses if not use.fresh} <= {use.value for use in run.uses if use.fresh}
        assert len({(use.index, use.value) for use in run.uses}) == len(run.fresh)


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
    assert len(run.loader) == run.trainer.num_training_batches == steps
    assert run.steps == [steps] * len(run.steps)
    assert run.loader.counts.delivered == len(run.uses)


def assert_unchanged(run: Run, values: dict[int, Any]) -> None:
    """Every use of an example is what the plain loader delivers."""
    assert [(use.index, use.value) for use in run.uses if use.value != values[use.index]] == []


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


def said(caplog: Any) -> str:
    """The lines of a fit that say where the loader is echoed, and why there: one begins them, and the next two belong to it."""
    messages = [record.getMessage() for record in caplog.records if record.name == "lightning_echo"]
    (first,) = [number for number, message in enumerate(messages) if "live" in message and "reuse [" in message]
    return "\n".join(messages[first : first + 3])


# ------------------------------------------------------------------ examples that are their numbers


def see_numbers(batch: Any) -> Iterable[tuple[int, int]]:
    """Of a batch with nothing in it but the numbers of its examples."""
    return ((index, index) for index in batch["index"].tolist())


class OwnOrder:
    """What must hold of a sized loader with an order and a state of its own, and of its data set in a plain ``DataLoader``.

    A subclass says how loader and data set are made; its module has a fixture ``folder`` with `LENGTH` examples.
    """

    def data(self, folder: str) -> Any:
        raise NotImplementedError

    def loader(self, folder: str, workers: int, **options: Any) -> Any:
        raise NotImplementedError

    @pytest.mark.parametrize(("workers", "way"), [*WAYS, (2, "loader")])
    def test_each_pass_is_fresh_exactly_once_in_the_loaders_own_order(self, workers: int, way: str, folder: str) -> None:
        run = train(lambda: self.loader(folder, workers), see_numbers, way=way, epochs=4)
        assert_right(run, range(LENGTH), point="after_batching", passes=2, steps=STEPS)
        plain = self.loader(folder, workers)
        orders = [[index for batch in plain for index in batch["index"].tolist()] for _ in range(2)]
        assert run.fresh[: 2 * LENGTH] == [*orders[0], *orders[1]]
        assert orders[0] != orders[1]

    def test_two_epochs_are_as_long_as_without_echoing_where_the_rest_is_dropped(self, folder: str) -> None:
        run = train(lambda: self.loader(folder, 2, drop_last=True), see_numbers, epochs=2)
        assert_epochs(run, LENGTH // BATCH)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_killed_run_goes_on_with_the_same_batches(self, workers: int, folder: str, tmp_path: Path) -> None:
        assert_resumes_exactly(lambda: self.loader(folder, workers), see_numbers, tmp_path, (1, 6, 11, 15), epochs=4)

    def test_in_a_plain_loader_its_data_set_is_a_stream_that_cannot_be_set_back(self, folder: str, tmp_path: Path) -> None:
        """The data set's own state wants to be told how many examples were delivered, which only its own loader knows."""

        def make() -> Any:
            return torch.utils.data.DataLoader(self.data(folder), BATCH, num_workers=2)

        run = train(make, see_numbers)
        assert run.loader.insertion_point == "after_augmentation"
        assert sorted(run.fresh[:LENGTH]) == list(range(LENGTH))
        with pytest.raises(ValueError, match="state_dict"):
            train(make, see_numbers, ckpt_path=kill(make, see_numbers, tmp_path, 3))
