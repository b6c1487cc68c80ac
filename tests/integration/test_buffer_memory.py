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
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Dataset
from trainer_runs import Data, Recorder, SaveAt, Scans, fit

from lightning_echo import EchoCallback, EchoCLI, EchoDataModule, EchoLoader, StagedDataset
from lightning_echo.data.copies import nbytes
from lightning_echo.loader import sizing

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
SIZES = [  # what is asked for; its size with 1,000 KiB free; and with 300, and with 5,000 of them
    (MEMORY, 64, 16, (LENGTH - 8) // 2),  # as a power of two of batches
    ({"reuse": "each"}, 100, 30, 100),
    ({"buffer_size": 0.2}, 200, 60, LENGTH - 8),
    ({**MEMORY, "buffer_size": 0.2, "insertion_point": "after_batching"}, 25, 7, LENGTH // 8),
]


@pytest.mark.parametrize(("options", "size", "less", "more"), SIZES)
@pytest.mark.filterwarnings("ignore:lightning_echo. buffer_size is 30 instead of 100")
@pytest.mark.parametrize("free", [300, 5000])
def test_a_resumed_run_keeps_the_size_of_its_state(
    memory: Memory, options: Any, size: int, less: int, more: int, free: int
) -> None:
    memory.free = 1000
    whole = loader(**options)
    assert whole.buffer_size == size
    batches(whole, 70)
    state = whole.state_dict()
    memory.free = free
    resumed = loader(**options)
    assert resumed.buffer_size == (less if free == 300 else more)
    resumed.load_state_dict(state)
    assert resumed.buffer_size == size
    assert batches(resumed, 80) == batches(whole, 80)
    assert resumed.state_dict()["plan"] == whole.state_dict()["plan"]
    assert resumed.buffer_size == size


@pytest.mark.parametrize("other", [{"reuse": "each"}, {"workers": 2}, {"insertion_point": "before_augmentation"}])
def test_a_run_that_cannot_go_on_exactly_takes_the_size_of_now(memory: Memory, other: Any) -> None:
    def made(**options: Any) -> EchoLoader:
        plain = DataLoader(
            StagedDataset.of(Kibibytes(), augment=torch.clone),  # type: ignore[arg-type]
            batch_size=8,
            num_workers=options.pop("workers", 0),
        )
        return EchoLoader(plain, 4, **{"insertion_point": "after_augmentation", "reuse": "memory", "seed": 3, **options})

    memory.free = 1000
    whole = made()
    next(iter(whole))
    memory.free = 1500
    resumed = made(**other)
    size = resumed.buffer_size
    resumed.load_state_dict(whole.state_dict())
    assert resumed.buffer_size == size != whole.buffer_size


def test_a_loader_that_is_made_anew_keeps_the_size_of_the_one_before(memory: Memory) -> None:
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


def test_a_checkpoint_of_a_trainer_does_it_with_a_callback_and_with_a_data_module(memory: Memory, tmp_path: Path) -> None:
    each = nbytes(Scans()[0]) / KIB

    def with_callback() -> tuple[Any, list[Any]]:
        return Data(length=61), [EchoCallback(factor=2, reuse="memory", insertion_point="after_augmentation", seed=7)]

    def with_module() -> tuple[Any, list[Any]]:
        return EchoDataModule(Data(length=61), 2, reuse="memory", insertion_point="after_augmentation", seed=7), []

    for made, step in ((with_callback, 10), (with_module, 16)):  # within an epoch, and at the end of one
        memory.free = 10 * 20 * each
        data, callbacks = made()
        saves = SaveAt(tmp_path, [step])
        whole = fit(data, callbacks=[*callbacks, saves], max_epochs=2)
        assert whole.trainer.train_dataloader.buffer_size == 16  # type: ignore[union-attr]
        memory.free = 10 * 11 * each
        data, callbacks = made()
        resumed = fit(data, callbacks=callbacks, ckpt_path=saves.path(step), max_epochs=2)
        assert resumed.model.batches == whole.model.batches[step:]
        assert resumed.trainer.train_dataloader.buffer_size == 16  # type: ignore[union-attr]


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


def test_what_a_cache_holds_already_is_no_longer_free_and_not_counted_twice(memory: Memory) -> None:
    """The second loader has a worker more, and so works its size out anew.

    With ``reuse="memory"`` its size would not depend on what is free: the cache holds all examples.
    """
    memory.free = 3000
    options = {"cache": {"size": "1MiB", "hold": "whole"}, "buffer_size": 0.1, "reuse": "each"}
    before = loader(1, **options)
    list(before)
    held = before.cache_counts
    assert held is not None
    assert held.examples == LENGTH
    memory.free = 3000 - held.bytes / KIB
    after = loader(1, workers=1, **options)
    after.follow(before)
    after.settle()
    assert after.buffer_size == before.buffer_size == int((3000 - 1024) * 0.1)


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


# Of 61 examples in batches of 4, with 20 KiB free. A pass allows 57 of them; the default is half of that.


QUIET = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
HIDDEN = {"enable_progress_bar": False, "enable_model_summary": False}
CALLBACK = "--trainer.callbacks+=lightning_echo.EchoCallback"
MODULE = ["--data=lightning_echo.EchoDataModule", "--data.datamodule=trainer_runs.Data"]
PLACES: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "group": ([], "--echo", {}),
    "callback": ([CALLBACK], "--trainer.callbacks", {"cli": LightningCLI}),
    "echo=": ([CALLBACK], "--trainer.callbacks.echo", {"cli": LightningCLI}),
    "data module": (MODULE, "--data", {"cli": LightningCLI, "data": None}),
}


def run(*arguments: str, cli: type[LightningCLI] = EchoCLI, data: Any = Data, **options: Any) -> Any:
    defaults: dict[str, Any] = {"save_config_callback": None, "seed_everything_default": False}
    return cli(Recorder, data, args=["fit", *arguments], trainer_defaults={**QUIET, **HIDDEN}, **{**defaults, **options})


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program"])


# Of 22 examples in batches of 4. A pass allows 18 of them; the default is half of that.
SIZES_OF_FORMS = {"1.5 GiB": 18, 0.5: 18, 10: 10, "null": 18 // 2}


@pytest.mark.grid
@pytest.mark.parametrize("asked", SIZES_OF_FORMS)
@pytest.mark.parametrize("where", PLACES)
def test_every_place_takes_every_form(where: str, asked: Any) -> None:
    if (where, asked) == ("echo=", "null"):
        asked = 10  # with jsonargparse 4.53, null is a string there; in a file it is none
    arguments, prefix, options = PLACES[where]
    of_echo = [f"{prefix}.factor=2", f"{prefix}.insertion_point=after_augmentation", f"{prefix}.buffer_size={asked}"]
    assert run(*arguments, *of_echo, **options).trainer.train_dataloader.buffer_size == SIZES_OF_FORMS[asked]
