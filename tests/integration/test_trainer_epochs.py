"""Epochs in a Trainer: length, order, workers, and every Trainer option that counts batches."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from trainer_runs import Data, Recorder, chunks, echoed, first_uses, fit

from lightning_echo import EchoLoader


def test_what_the_workers_have_queued_is_used_in_the_next_epoch(tmp_path: Any) -> None:
    run = fit(echoed(workers=2, log=tmp_path / "reads"), max_epochs=8, limit_train_batches=2)
    reads = len((tmp_path / "reads").read_text().split())
    counts = run.loader.counts
    in_flight = 2 * 2 + 2 + 1  # batches: two workers with two each, two in the thread, one on its way
    looked_at = 2 + 8  # examples, when the loader is built: what one is, and what eight of them weigh
    assert counts.fresh + counts.refetched <= reads <= counts.fresh + in_flight * 4 + looked_at
    assert counts.refetched == 0


@pytest.fixture(scope="module")
def undisturbed() -> Recorder:
    model: Recorder = fit(echoed(), max_epochs=10).model
    return model


@pytest.mark.parametrize(
    ("options", "steps", "validated_at", "optimizer_steps"),
    [
        ({"limit_train_batches": 2}, [2, 2, 2], [2, 4, 6], 6),
        ({"limit_train_batches": 0.5}, [3, 3, 3], [3, 6, 9], 9),
        ({"val_check_interval": 4}, [6, 6, 6], [4, 10, 16], 18),
        ({"val_check_interval": 0.5}, [6, 6, 6], [3, 6, 9, 12, 15, 18], 18),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [6, 6, 6], [4, 8, 12, 16], 18),
        ({"accumulate_grad_batches": 4}, [6, 6, 6], [2, 4, 6], 6),
        ({"max_epochs": -1, "max_steps": 11}, [6, 5], [6], 11),
        ({"fast_dev_run": True}, [1], [1], 1),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_options_that_count_batches_count_as_without_echoing_and_move_nothing(
    undisturbed: Recorder, options: Any, steps: list[int], validated_at: list[int], optimizer_steps: int
) -> None:
    run = fit(echoed(), **options)
    assert run.model.steps == steps
    assert run.model.validated_at == validated_at
    assert run.trainer.global_step == optimizer_steps
    assert run.model.batches == undisturbed.batches[: sum(steps)]
    assert run.loader.counts.delivered == sum(len(indices) for indices, _ in run.model.batches)


class Manual(Recorder):
    """The same steps by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_manual_optimization_sees_the_same_batches_and_ends_at_the_same_weights() -> None:
    automatic, manual = fit(echoed()).model, fit(echoed(), model=Manual()).model
    assert manual.batches == automatic.batches
    assert manual.weights == automatic.weights


class OneCycle(Recorder):
    """Steps a OneCycleLR of exactly the estimated length after each batch."""

    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=int(self.estimated), div_factor=10, final_div_factor=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(
    ("options", "trained", "limit"),
    [({}, 18, 1.0), ({"epoch_length": "full_pass"}, 3 * 15, 1.0), ({"epoch_length": "full_pass"}, 3 * 4, 4)],
)
def test_a_one_cycle_schedule_of_the_estimated_length_ends_with_the_run(options: Any, trained: int, limit: Any) -> None:
    run = fit(echoed(**options), model=OneCycle(), limit_train_batches=limit)
    assert run.model.estimated == len(run.model.batches) == trained
    schedule = run.trainer.lr_scheduler_configs[0].scheduler
    with pytest.raises(ValueError, match="Tried to step"):  # it has taken all its steps
        schedule.step()


@pytest.mark.parametrize("bare", [False, True])
def test_a_fit_after_one_that_was_cut_short_trains_whole_epochs_and_goes_on(undisturbed: Recorder, bare: bool) -> None:
    data: Any = echoed(workers=1)
    if bare:
        data = EchoLoader(Data(1).train_dataloader(), 2.5, insertion_point="after_augmentation", seed=7)
    cut = fit(data, max_epochs=-1, max_steps=8)
    more = fit(data, max_epochs=2).model
    assert more.steps == [6, 6]
    assert cut.model.batches + more.batches == undisturbed.batches[: 8 + 12]


def test_a_full_pass_epoch_holds_one_pass_of_fresh_examples_and_is_otherwise_the_same_stream(undisturbed: Recorder) -> None:
    full = fit(echoed(epoch_length="full_pass"), max_epochs=4)
    assert full.model.steps == [15] * 4
    assert full.model.validated_at == [15, 30, 45, 60]
    assert full.model.batches == undisturbed.batches  # 4 x 15 = 10 x 6
    fresh = [len(new) for new in first_uses(full.model.batches)]
    assert all(abs(sum(epoch) - 22) <= full.loader.buffer_size for epoch in chunks(fresh, 15))
    assert abs(sum(fresh) - 4 * 22) <= full.loader.buffer_size


def test_seed_everything_with_workers_reaches_a_bare_loader() -> None:
    pl.seed_everything(3, workers=True, verbose=False)
    loader = EchoLoader(Data(1).train_dataloader(), 2)
    fit(loader, max_epochs=1)
    assert loader.worker_init_fn is not None  # Lightning's, which it sets on loaders that have none
    assert loader.seed == 3
