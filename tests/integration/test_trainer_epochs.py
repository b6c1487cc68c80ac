"""Epochs in a Trainer: length, order, workers, and every Trainer option that counts batches."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR
from trainer_runs import POINTS, At, Data, Recorder, chunks, echoed, first_uses, fit, fresh_stream, trainer

from lightning_echo import EchoDataModule, EchoLoader

PLAIN_SIZES = [4, 4, 4, 4, 4, 2]  # 22 examples in batches of 4


@pytest.mark.grid
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fixed_epoch_has_the_plain_loaders_batch_sizes(point: str, workers: int) -> None:
    plain = fit(Data(workers)).model
    run = fit(echoed(point=point, workers=workers))
    assert plain.sizes == [PLAIN_SIZES] * 3
    assert len(run.loader) == len(PLAIN_SIZES)
    if point in ("after_batching", "after_transfer"):  # which batch is the short one depends on what is reused
        assert run.model.steps == plain.steps
        assert set(map(len, (indices for indices, _ in run.model.batches))) == {4, 2}
    else:
        assert run.model.sizes == plain.sizes


@pytest.mark.parametrize(("drop_last", "kept"), [(False, 70), (True, 68)])
def test_no_example_is_fresh_a_second_time_before_the_pass_is_through(drop_last: bool, kept: int) -> None:
    options = {"shuffle": True, "drop_last": drop_last}
    model = fit(echoed(workers=2, length=70, loader_options=options), max_epochs=8).model
    fresh = fresh_stream(model.batches)
    passes = chunks(fresh, kept)
    assert len(passes) == 3  # 8 epochs at factor 2.5
    assert all(len(set(one)) == kept for one in passes)
    assert len(set(map(tuple, passes))) == len(passes)  # every pass in an order of its own


@pytest.mark.parametrize("point", POINTS)
def test_workers_live_on_from_epoch_to_epoch_through_validation(point: str) -> None:
    model = fit(echoed(point=point, workers=2), max_epochs=4).model
    epochs = [set().union(*(model.pids[i] for i, epoch in enumerate(model.epochs) if epoch == number)) for number in range(4)]
    assert all(len(pids) == 2 for pids in epochs)
    assert len(set().union(*epochs)) == 2
    assert len(model.validated_at) == 4


def test_what_the_workers_have_queued_is_used_in_the_next_epoch(tmp_path: Any) -> None:
    run = fit(echoed(workers=2, log=tmp_path / "reads"), max_epochs=8, limit_train_batches=2)
    reads = len((tmp_path / "reads").read_text().split())
    counts = run.loader.counts
    in_flight = 2 * 2 + 2 + 1  # batches: two workers with two each, two in the thread, one on its way
    looked_at = 2 + 8  # examples, when the loader is built: what one is, and what eight of them weigh
    assert counts.fresh + counts.refetched <= reads <= counts.fresh + in_flight * 4 + looked_at
    assert counts.refetched == 0


@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (5, 5), (0.5, 3)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_limited_epoch_is_followed_by_the_batch_where_it_stopped(limit: float, steps: int, workers: int) -> None:
    whole = fit(echoed(workers=workers), max_epochs=4).model
    cut = fit(echoed(workers=workers), max_epochs=4, limit_train_batches=limit).model
    assert cut.steps == [steps] * 4
    assert cut.validated_at == [steps * epoch for epoch in (1, 2, 3, 4)]
    assert cut.batches == whole.batches[: 4 * steps]


@pytest.mark.parametrize(("interval", "expected"), [(2, [2, 4, 6, 8, 10, 12]), (0.5, [3, 6, 9, 12]), (4, [4, 10])])
def test_validation_within_an_epoch_moves_nothing(interval: float, expected: list[int]) -> None:
    undisturbed = fit(echoed(workers=2), max_epochs=2).model
    model = fit(echoed(workers=2), max_epochs=2, val_check_interval=interval).model
    assert model.validated_at == expected
    assert model.batches == undisturbed.batches


def test_validation_counted_over_epochs_comes_when_it_should() -> None:
    model = fit(echoed(), max_epochs=3, val_check_interval=4, check_val_every_n_epoch=None).model
    assert model.validated_at == [4, 8, 12, 16]


def test_accumulated_gradients_step_after_the_same_batches() -> None:
    undisturbed = fit(echoed()).model
    run = fit(echoed(), accumulate_grad_batches=4)
    assert run.model.batches == undisturbed.batches
    assert run.trainer.global_step == 3 * math.ceil(6 / 4)


def test_max_steps_ends_the_run_at_that_batch() -> None:
    undisturbed = fit(echoed(workers=2)).model
    run = fit(echoed(workers=2), max_epochs=-1, max_steps=11)
    assert run.trainer.global_step == 11
    assert run.model.batches == undisturbed.batches[:11]
    assert run.loader.counts.delivered == 22 + 5 * 4


def test_overfit_batches_are_the_same_first_ones_unshuffled_in_each_epoch() -> None:
    with pytest.warns(UserWarning, match="turning off the train dataloader shuffling"):
        model = fit(echoed(), overfit_batches=2).model
    assert [[indices for indices, _ in epoch] for epoch in model.by_epoch] == [[(0, 1, 2, 3), (4, 5, 6, 7)]] * 3


def test_overfit_batches_of_a_loader_that_is_not_shuffled_come_without_a_warning() -> None:
    model = fit(echoed(loader_options={}), overfit_batches=0.5).model
    assert [[indices for indices, _ in epoch] for epoch in model.by_epoch] == [[(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_fast_dev_run_takes_one_batch_and_validates(workers: int) -> None:
    run = fit(echoed(workers=workers), fast_dev_run=True)
    assert run.model.sizes == [[4]]
    assert run.model.validated_at == [1]


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
    run = fit(echoed(workers=2, **options), model=OneCycle(), limit_train_batches=limit)
    assert run.model.estimated == len(run.model.batches) == trained
    schedule = run.trainer.lr_scheduler_configs[0].scheduler
    with pytest.raises(ValueError, match="Tried to step"):  # it has taken all its steps
        schedule.step()


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
    automatic, manual = fit(echoed(workers=2)).model, fit(echoed(workers=2), model=Manual()).model
    assert manual.batches == automatic.batches
    assert manual.weights == automatic.weights


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_fit_goes_on_with_the_pass(workers: int) -> None:
    whole = fit(echoed(workers=workers), max_epochs=5)
    data = echoed(workers=workers)
    batches = fit(data, max_epochs=2).model.batches + fit(data, max_epochs=3).model.batches
    assert batches == whole.model.batches
    assert (data.loader.counts.fresh, data.loader.counts.echoed) == (whole.loader.counts.fresh, whole.loader.counts.echoed)


@pytest.mark.parametrize("bare", [False, True])
def test_a_fit_after_one_that_was_cut_short_trains_whole_epochs(bare: bool) -> None:
    whole = fit(echoed(workers=2), max_epochs=5).model
    data: Any = echoed(workers=2)
    if bare:
        data = EchoLoader(Data(2).train_dataloader(), 2.5, insertion_point="after_augmentation", seed=7)
    cut = fit(data, max_epochs=-1, max_steps=8).model
    more = fit(data, max_epochs=2).model
    assert more.steps == [6, 6]
    assert cut.batches + more.batches == whole.batches[: 8 + 12]


def test_the_same_trainer_fits_again_when_max_epochs_is_raised() -> None:
    whole = fit(echoed(workers=2), max_epochs=4).model
    run = fit(echoed(workers=2), max_epochs=2)
    run.trainer.fit_loop.max_epochs = 4
    run.trainer.fit(run.model, datamodule=run.data)
    assert run.model.batches == whole.batches


@pytest.mark.parametrize(("factor", "steps"), [(1, 6), (1.5, 9), (2.37, 14), (4, 24)])
def test_a_full_pass_epoch_has_factor_times_the_plain_loaders_steps(factor: float, steps: int) -> None:
    run = fit(echoed(factor, epoch_length="full_pass", workers=2))
    assert run.model.steps == [steps] * 3
    assert run.trainer.num_training_batches == steps
    assert run.model.validated_at == [steps, 2 * steps, 3 * steps]


def test_a_full_pass_epoch_holds_one_pass_of_fresh_examples_and_is_otherwise_the_same_stream() -> None:
    full = fit(echoed(epoch_length="full_pass", workers=2), max_epochs=4)
    fixed = fit(echoed(workers=2), max_epochs=10)
    assert full.model.batches == fixed.model.batches  # 4 x 15 = 10 x 6
    fresh = [len(new) for new in first_uses(full.model.batches)]
    per_epoch = [sum(epoch) for epoch in chunks(fresh, 15)]
    assert all(abs(count - 22) <= full.loader.buffer_size for count in per_epoch)
    assert abs(sum(per_epoch) - 4 * 22) <= full.loader.buffer_size


def test_a_full_pass_epoch_is_limited_and_validated_by_fractions_of_its_own_length() -> None:
    model = fit(echoed(epoch_length="full_pass"), limit_train_batches=0.4, val_check_interval=0.5, max_epochs=2).model
    assert model.steps == [6, 6]  # of 15
    assert model.validated_at == [3, 6, 9, 12]


def test_counts_in_a_trainer_are_what_was_delivered_and_their_batches_sum_up() -> None:
    data = echoed(workers=2)
    per_batch = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
            per_batch.append(data.loader.last_batch_counts)

    run = fit(data, callbacks=[Watch()], max_epochs=5)
    assert [counts.fresh for counts in per_batch] == [len(new) for new in first_uses(run.model.batches)]
    assert [counts.delivered for counts in per_batch] == [len(indices) for indices, _ in run.model.batches]
    assert sum(per_batch[1:], per_batch[0]) == run.loader.counts


def test_factor_one_trains_like_the_plain_loader() -> None:
    plain = fit(Data(2, loader_options={})).model
    model = fit(echoed(1, workers=2, loader_options={})).model
    assert [indices for indices, _ in model.batches] == [indices for indices, _ in plain.batches]
    assert len({noise for _, noises in model.batches for noise in noises}) == 3 * 22


def test_a_combination_of_echo_loaders_is_echoed_leaf_by_leaf() -> None:
    class Both(Recorder):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.parts.append({name: tuple(part["index"].tolist()) for name, part in batch.items()})
            return self.loss(batch["long"])

    model = Both()
    model.parts = []
    loaders = {
        "long": EchoLoader(Data(2).train_dataloader(), 2, seed=7),
        "short": EchoLoader(Data(length=12).train_dataloader(), 3, seed=8),
    }
    fit(loaders, model=model, max_epochs=4)
    assert len(model.parts) == 4 * 6
    for name, length in (("long", 22), ("short", 12)):
        assert set(sum((part[name] for part in model.parts), ())) == set(range(length))
    assert loaders["long"].counts.delivered == 4 * 22
    assert loaders["short"].counts.delivered == 4 * 6 * 4


def test_seed_everything_with_workers_reaches_a_bare_loader() -> None:
    pl.seed_everything(3, workers=True, verbose=False)
    loader = EchoLoader(Data(2).train_dataloader(), 2)
    fit(loader, max_epochs=1)
    assert loader.worker_init_fn is not None  # Lightning's, which it sets on loaders that have none
    assert loader.seed == 3


def test_an_endless_run_stops_when_a_callback_says_so() -> None:
    run = fit(echoed(workers=2), max_epochs=-1, callbacks=[At({3: lambda trainer: setattr(trainer, "should_stop", True)})])
    assert run.model.steps == [6, 6, 6, 6]


def test_a_data_module_from_loaders_trains_and_validates_like_one_that_was_written() -> None:
    user = Data(2)
    data = EchoDataModule.from_dataloaders(
        user.train_dataloader(), user.val_dataloader(), factor=2.5, insertion_point="after_augmentation", seed=7
    )
    written, made = fit(echoed(workers=2)).model, fit(data).model
    assert made.batches == written.batches
    assert made.validated_at == written.validated_at


def test_trainer_without_a_data_module_takes_a_bare_loader_with_a_validation_loader() -> None:
    user, model = Data(2), Recorder()
    loader = EchoLoader(user.train_dataloader(), 2.5, insertion_point="after_augmentation", seed=7)
    trainer(max_epochs=3).fit(model, loader, user.val_dataloader())
    assert model.batches == fit(echoed(workers=2)).model.batches
    assert model.validated_at == [6, 12, 18]
