"""Checkpoints of an earlier version resume: the run goes on with the batches that it would have had. See ``stored/README.md``.

They are runs of the rule of reuse that was the default then, and say nothing of it: ``reuse="each"`` goes on with them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from packaging.version import Version
from trainer_runs import Data, Run, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader
from lightning_echo.loader.state import EchoState

STORED = Path(__file__).parent / "stored"


def by_callback(callbacks: list[Any], **options: Any) -> Run:
    echo = EchoCallback(echo=EchoConfig(2.5, "after_augmentation", reuse="each", seed=7))
    return fit(Data(), callbacks=[*callbacks, echo], max_epochs=4, **options)


def by_datamodule(**options: Any) -> Run:
    echo = EchoDataModule(Data(2), 2.5, insertion_point="before_augmentation", buffer_size=12, reuse="each", seed=7)
    return fit(echo, max_epochs=4, **options)


def by_batches(**options: Any) -> Run:
    return fit(EchoDataModule(Data(), 3, insertion_point="after_batching", reuse="each", seed=7), max_epochs=4, **options)


RUNS: dict[str, Callable[..., Run]] = {"callback": by_callback, "datamodule": by_datamodule, "batches": by_batches}


class AtStart(pl.Callback):
    """Remembers what the loader knows before the first batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del pl_module
        loader = trainer.train_dataloader
        assert isinstance(loader, EchoLoader)
        self.buffer_size, self.state = loader.buffer_size, loader.state_dict()


def stored(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint, and the state of its loader."""
    checkpoint = torch.load(STORED / f"{name}.ckpt", weights_only=True)
    echo = checkpoint["callbacks"]["EchoCallback"] if name == "callback" else checkpoint["EchoDataModule"]
    return checkpoint, echo["loader"]


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_checkpoint_goes_on_with_the_batches_of_its_run(name: str) -> None:
    recorded = json.loads((STORED / f"{name}.json").read_text())
    checkpoint, state = stored(name)
    version = checkpoint["pytorch-lightning_version"]
    if Version(version) > Version(pl.__version__):
        pytest.skip(f"Lightning {pl.__version__} promises nothing of checkpoints of {version}")
    at_start = AtStart()
    resumed = RUNS[name](callbacks=[at_start], ckpt_path=STORED / f"{name}.ckpt")
    assert [list(indices) for indices, _ in resumed.model.batches] == recorded["indices"][recorded["step"] :]
    assert at_start.buffer_size == state["buffer_size"]
    known = {name: value for name, value in at_start.state.items() if name != "trainer"}
    assert known == {name: value for name, value in state.items() if name != "trainer"}


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_state_is_written_as_it_was_read(name: str) -> None:
    _, state = stored(name)
    assert EchoState.from_dict(state, by_index=True).to_dict() == state


@pytest.mark.parametrize("name", RUNS)
def test_the_loader_alone_goes_on_from_a_stored_state_whatever_the_version_of_lightning(name: str) -> None:
    _, state = stored(name)
    recorded = json.loads((STORED / f"{name}.json").read_text())
    loader = EchoLoader(
        Data(workers=state["workers"]).train_dataloader(),
        state["factor"],
        insertion_point=state["insertion_point"],
        buffer_size=state["buffer_size"],
        reuse="each",
    )
    loader.load_state_dict(state)
    batches = [batch["index"].tolist() for _ in range(3) for batch in loader]
    loader.close()
    assert batches == recorded["indices"][recorded["step"] :]
