"""A run with `EchoCallback` goes on from a checkpoint, with and without echoing before and after."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callback_cases import STEPS, echo, guarded
from lightning.fabric.utilities.exceptions import MisconfigurationException
from trainer_runs import Data, Killed, Recorder, SaveAt, fit

from lightning_echo import EchoCallback, EchoDataModule, EchoLoader

pytestmark = pytest.mark.usefixtures("read_here")


def test_a_checkpoint_loads_with_weights_only(tmp_path: Path) -> None:
    step = STEPS + 2
    fit(Data(), callbacks=[guarded(), SaveAt(tmp_path, [step])])
    checkpoint = torch.load(SaveAt(tmp_path, []).path(step), weights_only=True)
    state = checkpoint["callbacks"]["EchoCallback"]
    of_decisions = {"controller", "recent", "metrics", "reports", "decisions"}
    assert set(state) == {"epoch", "began", "attached", "wrapped", "loader", "meter"} | of_decisions
    assert len(state["reports"]) == (step - 1) // STEPS


class Stateful(Data):
    """A data module with a state of its own."""

    def __init__(self, value: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def data(kind: str, value: int) -> tuple[Any, Stateful, list[EchoCallback]]:
    """Data of a run that is not echoed, echoed by the callback, or by a data module beside a callback."""
    inner = Stateful(value)
    if kind == "module":
        return EchoDataModule(inner, 2, seed=7, insertion_point="after_augmentation"), inner, [EchoCallback()]
    return inner, inner, [echo(2) if kind == "callback" else EchoCallback()]


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # a plain loader
@pytest.mark.parametrize("after", ["plain", "callback", "module"])
@pytest.mark.parametrize("before", ["plain", "callback", "module"])
@pytest.mark.parametrize("step", [4, STEPS])
def test_a_run_resumes_with_and_without_echoing_the_data_modules_state_included(
    tmp_path: Path, before: str, after: str, step: int
) -> None:
    first, _, callbacks = data(before, 5)
    with pytest.raises(Killed):
        fit(first, callbacks=[*callbacks, SaveAt(tmp_path, [step], dies=True)])
    second, inner, callbacks = data(after, 0)
    run = fit(second, callbacks=callbacks, ckpt_path=SaveAt(tmp_path, []).path(step))
    assert inner.value == 5
    assert run.trainer.global_step == 3 * STEPS
    assert [report.epoch for report in callbacks[0].reports] == [0, 1, 2]
    assert (callbacks[0].reports[-1].echoed_examples > 0) == (before != "plain" or after != "plain"), "counts go on"


class SaveIn(pl.Callback):
    """Saves a checkpoint in a hook, after the first step or later."""

    def __init__(self, hook: str, path: Path, after: int = 1) -> None:
        def save(trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step >= after and not path.exists():
                trainer.save_checkpoint(path)

        setattr(self, hook, save)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint")
@pytest.mark.parametrize("options", [{}, {"max_steps": 100}], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    ("hook", "after", "has_ended"),
    [
        ("on_train_batch_end", 4, False),
        ("on_train_batch_end", STEPS, False),
        ("on_validation_end", STEPS, False),
        ("on_train_epoch_end", STEPS, True),
        ("on_fit_end", STEPS, True),
    ],
)
def test_without_the_callback_lightning_refuses_what_was_saved_within_an_epoch(
    tmp_path: Path, hook: str, after: int, has_ended: bool, options: dict[str, int]
) -> None:
    """README, docs/concepts/resuming.md, docs/how_to and docs/faq.md say so; if this fails, they can say something better."""
    path = tmp_path / "one.ckpt"
    fit(Data(), callbacks=[echo(2), SaveIn(hook, path, after)], max_epochs=1)
    refused = pytest.raises(RuntimeError, match="0 stateful loaders, but found 1 states")
    with nullcontext() if has_ended and not options else refused:
        assert fit(Data(), ckpt_path=path, max_epochs=2, **options).trainer.global_step == 2 * STEPS


def test_what_is_saved_when_fit_is_over_resumes_like_any_other_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "end.ckpt")
    whole = fit(Data(), callbacks=[echo(2)], max_epochs=2)
    fit(Data(), callbacks=[echo(2)], max_epochs=1).trainer.save_checkpoint(path, weights_only=False)
    run = fit(Data(), model=Recorder(True), callbacks=[echo(2)], max_epochs=2, ckpt_path=path)
    assert run.model.batches == whole.model.batches[STEPS:]
    assert fit(Data(), callbacks=[EchoCallback()], max_epochs=2, ckpt_path=path).model.steps == [STEPS], "echoing switched off"


def test_the_factor_is_set_on_the_callback_before_a_fit_and_after_resuming(tmp_path: Path) -> None:
    class SetsFactor(pl.Callback):
        def on_train_start(self, runner: Any, pl_module: Any) -> None:
            callback.factor = 2

    first, callback = echo(4), echo(3)
    first.factor = 3
    fit(Data(), callbacks=[first, SaveAt(tmp_path, [3])], max_epochs=2)
    assert (first.reports[0].factor, first.factor, callback.factor) == (3, 3, 3)
    fit(Data(), callbacks=[callback, SetsFactor()], max_epochs=2, ckpt_path=SaveAt(tmp_path, []).path(3))
    assert callback.reports[-1].factor == callback.factor == 2


def test_a_callback_that_only_measures_reads_the_factor_and_refuses_to_set_it() -> None:
    measures = EchoCallback()
    with pytest.raises(MisconfigurationException, match=r"only measures: give it a factor, EchoCallback\(factor=\.\.\.\)"):
        measures.factor = 2
    assert measures.factor == 1
    fit(EchoLoader(Data().train_dataloader(), 4, seed=7), callbacks=[measures], max_epochs=1)
    assert measures.factor == 4
    with pytest.raises(MisconfigurationException, match="only measures"):
        measures.factor = 2
