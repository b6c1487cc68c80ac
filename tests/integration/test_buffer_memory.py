"""A buffer whose size is memory: a resumed run keeps it, a cache leaves room for it, callbacks and files take it in each form."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_cases import Remembering
from torch.utils.data import DataLoader, Dataset
from trainer_runs import Data, Recorder, SaveAt, Scans, fit

from lightning_echo import EchoCallback, EchoCLI, EchoLoader
from lightning_echo.data.copies import nbytes
from lightning_echo.loader import buffer as sizing

KIB = 2**10
LENGTH = 400


class Kibibytes(Dataset[torch.Tensor]):
    """Examples of 1 KiB that are views of their number."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(index)).expand(256)

    def __len__(self) -> int:
        return LENGTH


class Memory:
    """What is free, in KiB."""

    free: float = 10**6


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda: int(memory.free * KIB))
    return memory


def loader(factor: float = 4, workers: int = 0, **options: Any) -> EchoLoader:
    plain = DataLoader(Kibibytes(), batch_size=8, shuffle=True, num_workers=workers)
    return EchoLoader(plain, factor, **{"insertion_point": "after_augmentation", "seed": 3, **options})


def batches(echoed: EchoLoader, number: int) -> list[list[int]]:
    """The next batches, over the ends of epochs."""
    found: list[list[int]] = []
    while len(found) < number:
        found += [batch[:, 0].int().tolist() for batch in islice(echoed, number - len(found))]
    return found


MEMORY = {"reuse": "memory"}
SIZES = [  # what is asked for; its size with 1,000 KiB free; what is free later, and its size then
    (MEMORY, 64, 300, 16),  # as a power of two of batches
    ({"reuse": "each"}, 100, 300, 30),
    ({"buffer_size": 0.2}, 200, 5000, LENGTH - 8),
    ({**MEMORY, "buffer_size": 0.2, "insertion_point": "after_batching"}, 25, 5000, LENGTH // 8),
]


@pytest.mark.parametrize(("options", "size", "free", "later"), SIZES)
@pytest.mark.filterwarnings("ignore:lightning_echo. buffer_size is 30 instead of 100")
def test_a_resumed_run_keeps_the_size_of_its_state(memory: Memory, options: Any, size: int, free: int, later: int) -> None:
    memory.free = 1000
    whole = loader(**options)
    assert whole.buffer_size == size
    batches(whole, 70)
    state = whole.state_dict()
    memory.free = free
    resumed = loader(**options)
    assert resumed.buffer_size == later
    resumed.load_state_dict(state)
    assert resumed.buffer_size == size
    assert batches(resumed, 80) == batches(whole, 80)
    assert resumed.state_dict()["plan"] == whole.state_dict()["plan"]
    assert resumed.buffer_size == size


def test_a_loader_that_is_rebuilt_keeps_the_size_of_the_one_before(memory: Memory) -> None:
    memory.free = 1000
    whole, before = loader(reuse="memory"), loader(reuse="memory")
    batches(whole, 70)
    batches(before, 70)
    memory.free = 300
    after = loader(reuse="memory")
    after.follow(before)
    before.close()
    assert batches(after, 30) == batches(whole, 30)
    assert after.buffer_size == 64


def test_a_checkpoint_of_a_trainer_does_it(memory: Memory, tmp_path: Path) -> None:
    each, saves = nbytes(Scans()[0]) / KIB, SaveAt(tmp_path, [10])

    def make(free: float, *callbacks: Any, **options: Any) -> Any:
        memory.free = free
        echo = EchoCallback(factor=2, reuse="memory", insertion_point="after_augmentation", seed=7)
        return fit(Data(length=61), callbacks=[echo, *callbacks], max_epochs=2, **options)

    whole, resumed = make(10 * 20 * each, saves), make(10 * 11 * each, ckpt_path=saves.path(10))
    assert whole.trainer.train_dataloader.buffer_size == resumed.trainer.train_dataloader.buffer_size == 16
    assert resumed.model.batches == whole.model.batches[10:]


@pytest.mark.parametrize(("on_disk", "size"), [(False, 16 * 8), (True, 32 * 8)])
def test_memory_that_a_cache_will_take_is_not_counted_as_free(memory: Memory, tmp_path: Path, on_disk: bool, size: int) -> None:
    memory.free = 3000

    class Long(Kibibytes):
        def __len__(self) -> int:
            return 10_000

    cache = {"size": "1MiB", "hold": "whole", **({"path": str(tmp_path)} if on_disk else {})}
    plain = DataLoader(Long(), batch_size=8)
    made = EchoLoader(plain, 4, insertion_point="after_augmentation", reuse="memory", cache=cache)
    assert made.buffer_size == size
    shared = EchoLoader(plain, 4, insertion_point="after_augmentation", buffer_size=0.1, cache=cache)
    assert shared.buffer_size == (300 if on_disk else int((3000 - 1024) * 0.1))


def test_a_size_is_settled_before_it_is_logged(memory: Memory) -> None:
    each = nbytes(Scans()[0]) / KIB

    class TakesMemory(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            memory.free = 10 * 12 * each

    memory.free, logger = 10 * 20 * each, Remembering()
    echo = EchoCallback(factor=2, reuse="memory", insertion_point="after_augmentation")
    run = fit(Data(length=61), callbacks=[TakesMemory(), echo], logger=logger, max_epochs=1, log_every_n_steps=1)
    assert run.trainer.train_dataloader.buffer_size == 8  # type: ignore[union-attr]
    assert [params["echo"]["buffer_size"] for params in logger.params if "echo" in params] == [8]


# Of 22 examples in batches of 4. A pass allows 18 of them; the default is half of that.
SIZES_OF_FORMS = {"1.5 GiB": 18, 0.5: 18, 10: 10, "null": 18 // 2}


@pytest.mark.parametrize("asked", SIZES_OF_FORMS)
def test_the_command_line_takes_every_form(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other places: tests/unit/test_echo_cli.py."""
    monkeypatch.setattr(sys, "argv", ["program"])
    arguments = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]
    arguments += ["--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=0"]
    arguments += ["--echo.factor=2", "--echo.insertion_point=after_augmentation", f"--echo.buffer_size={asked}"]
    cli = EchoCLI(Recorder, Data, args=arguments, run=False, save_config_callback=None, seed_everything_default=False)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.train_dataloader.buffer_size == SIZES_OF_FORMS[asked]  # type: ignore[union-attr]
