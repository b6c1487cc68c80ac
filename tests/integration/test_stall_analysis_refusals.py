"""StallAnalyzer: what it refuses, and which options of a training it leaves out."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel
from test_stall_analysis import CPU, Staged, analyze, loader_of

from lightning_echo.analysis.analyzer import StallAnalyzer
from lightning_echo.analysis.verdict import VerdictKind


def test_a_loader_shorter_than_the_steps_asked_for_is_refused():
    with pytest.raises(ValueError, match="steps must be at most 25, the batches of the training loader, got 26"):
        analyze(BoringModel(), loader_of(Staged(length=100)), 26)
    _, found = analyze(BoringModel(), loader_of(Staged(length=100), workers=0), 25)
    assert any("too short for examples that were not read before" in note for note in found.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 3}, "steps must be >= 4, got 3"), ({"seconds": 0}, "seconds must be > 0, got 0")],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StallAnalyzer(BoringModel(), loader_of(Staged()), trainer_kwargs=CPU).run(**options)


def test_without_a_training_loader_there_is_nothing_to_analyze():
    class Nothing(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        training_step = BoringModel.training_step
        configure_optimizers = BoringModel.configure_optimizers

    with pytest.raises(MisconfigurationException, match="train_dataloader"):
        analyze(Nothing(), None)
    with pytest.raises(MisconfigurationException, match="datamodule has no training batch to analyze"):
        analyze(BoringModel(), [])


def test_several_loaders_are_refused():
    with pytest.raises(MisconfigurationException, match=r"must train on one DataLoader, got dict: analyze each loader by itself"):
        analyze(BothOf(), {"a": loader_of(Staged()), "b": loader_of(Staged())})


class BothOf(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["a"], batch_idx)


@pytest.mark.slow
def test_a_strategy_whose_processes_do_not_stay_is_refused():
    kwargs = {"accelerator": "cpu", "devices": 1, "strategy": "ddp_spawn"}
    with pytest.raises(MisconfigurationException, match="use strategy='ddp'"):
        StallAnalyzer(BoringModel(), loader_of(Staged()), trainer_kwargs=kwargs, say=str).run(10)


def test_what_the_model_raises_comes_through():
    class Failing(BoringModel):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("a mistake of the model's")

    with pytest.raises(RuntimeError, match="a mistake of the model's"):
        analyze(Failing(), loader_of(Staged(), workers=0))


def test_nothing_can_be_checked_before_it_was_analyzed():
    _, found = analyze(BoringModel(), loader_of(Staged(), workers=0))
    with pytest.raises(RuntimeError, match=r"call run\(\) first"):
        StallAnalyzer(BoringModel(), loader_of(Staged())).check(found)


def test_options_of_a_training_that_would_end_or_disturb_it_are_left_out(tmp_path):
    kwargs = {**CPU, "fast_dev_run": True, "max_steps": 3, "min_epochs": 5, "val_check_interval": 1000, "max_time": "00:00:00:01"}
    kwargs |= {"default_root_dir": tmp_path, "limit_train_batches": 2, "profiler": "simple", "overfit_batches": 1}
    found = StallAnalyzer(BoringModel(), loader_of(Staged(), workers=0), trainer_kwargs=kwargs, say=str).run(20)
    assert found.verdict.kind in VerdictKind
    assert list(tmp_path.iterdir()) == []
