"""The echo factor changed while a Trainer runs: when it counts, what it does to epochs, and that timing has no say in it."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from test_trainer_epochs import OneCycle
from trainer_runs import At, Data, Killed, Recorder, Run, SaveAt, SetFactor, assert_resumes, echoed, first_uses, fit, trainer

from lightning_echo import EchoLoader

LENGTH = 66  # examples: 17 batches of 4, so that the buffer is small beside a pass


def changing(factors: dict[int, float], *, start: float = 2, callbacks: Any = (), **options: Any) -> Run:
    """A run whose factor a user's callback sets at the ends of epochs."""
    names = ("max_epochs", "limit_train_batches", "ckpt_path", "model", "val_check_interval")
    of_fit = {name: options.pop(name) for name in names if name in options}
    data = echoed(start, length=LENGTH, **options)
    return fit(data, callbacks=[SetFactor(data, factors), *callbacks], **{"max_epochs": 3, **of_fit})


@pytest.mark.parametrize(("workers", "reuse"), [(0, "each"), (2, "memory")])
def test_a_new_factor_counts_from_the_first_batch_that_cannot_be_in_flight(workers: int, reuse: str) -> None:
    model = changing({0: 1}, workers=workers, max_epochs=2, reuse=reuse).model
    in_flight = workers * 2 + 2 if workers else 0  # asked of each worker, and what the fetching thread holds
    all_fresh = [len(new) == len(indices) for new, (indices, _) in zip(first_uses(model.batches), model.batches, strict=True)]
    assert all_fresh[2:].index(True) + 2 == 17 + in_flight  # while the buffer fills, batches may be all fresh too
    assert all(all_fresh[17 + in_flight :])


def test_the_fresh_share_is_level_before_the_change_and_again_after_one_buffer() -> None:
    start, then = 1.5, 2.37
    model = changing({1: then}, start=start, max_epochs=5, buffer_size=16, reuse="each").model
    fresh = [len(new) for new in first_uses(model.batches)]
    full = [len(indices) == 4 for indices, _ in model.batches]
    assert model.steps == [17] * 5
    switch, buffer = 2 * 17, 4
    for factor, first, last in ((start, buffer, switch), (then, switch + buffer, len(fresh))):
        shares = {fresh[i] for i in range(first, last) if full[i]}
        assert shares <= {math.floor(4 / factor), math.ceil(4 / factor)}
        delivered = sum(len(indices) for indices, _ in model.batches[first:last])
        assert abs(sum(fresh[first:last]) - delivered / factor) <= 16


def test_full_pass_epochs_follow_the_factor_up_and_down() -> None:
    run = changing({0: 3, 1: 1.5, 2: 2}, start=1, max_epochs=5, workers=1, point="after_batching", epoch_length="full_pass")
    expected = [17, 51, 26, 34, 34]  # round(factor * 17); 25.5 rounds to the even number
    assert run.model.steps == expected
    assert run.model.validated_at == [sum(expected[: i + 1]) for i in range(5)]
    assert run.data.datamodule.asked == {"train": 1, "val": 1}  # neither loader was built again
    assert len(set().union(*run.model.pids)) == 1  # nor was a worker
    assert run.trainer.reload_dataloaders_every_n_epochs == 0


def test_full_pass_epochs_under_limits_follow_the_factor() -> None:
    fraction = changing({0: 3, 1: 1}, epoch_length="full_pass", limit_train_batches=0.5, val_check_interval=0.5).model
    assert fraction.steps == [17, 25, 8]
    assert fraction.validated_at == [8, 16, 17 + 12, 17 + 24, 42 + 4, 42 + 8]
    number = changing({0: 3, 1: 1}, epoch_length="full_pass", limit_train_batches=20).model
    assert number.steps == [20, 20, 17]
    assert number.validated_at == [20, 40, 57]


class SetIn(pl.Callback):
    """Sets a factor in a hook, where a number of steps is done."""

    def __init__(self, data: Any, hook: str, step: int, factor: float) -> None:
        def act(runner: Any, *args: Any) -> None:
            if runner.global_step == step:
                data.factor = factor

        setattr(self, hook, act)


@pytest.mark.parametrize(("hook", "step", "factor"), [("on_train_epoch_start", 12, 3), ("on_train_batch_end", 15, 1)])
def test_a_factor_set_when_an_epoch_has_begun_changes_the_length_of_the_next(hook: str, step: int, factor: int) -> None:
    data = echoed(2, epoch_length="full_pass")
    run = fit(data, callbacks=[SetIn(data, hook, step, factor)], max_epochs=4)
    expected = [12, 12, 6 * factor, 6 * factor]
    assert run.model.steps == expected
    assert run.model.validated_at == [sum(expected[: i + 1]) for i in range(4)]


def test_a_bare_full_pass_loader_follows_the_factor_where_the_trainer_asks_again() -> None:
    loader = EchoLoader(Data().train_dataloader(), 1, epoch_length="full_pass", seed=7)
    model = fit(loader, callbacks=[SetFactor(loader, {0: 3, 1: 2})], reload_dataloaders_every_n_epochs=1).model
    assert model.steps == [6, 18, 12]
    assert model.validated_at == [6, 24, 36]


def test_a_refused_factor_leaves_the_run_as_it_was() -> None:
    data = echoed(2, epoch_length="full_pass")
    refused = []

    def attempt(runner: pl.Trainer) -> None:
        for bad, error in ((0.5, ValueError), ("2x", TypeError), (3, MisconfigurationException)):
            with pytest.raises(error):
                data.factor = bad  # type: ignore[assignment]
            refused.append(data.factor)

    run = fit(data, callbacks=[At({0: attempt})], model=OneCycle())
    assert refused == [2, 2, 2]
    assert run.model.batches == fit(echoed(2, epoch_length="full_pass")).model.batches


def test_changing_factors_deliver_the_same_whatever_the_timing_also_resumed_before_the_switch(tmp_path: Any) -> None:
    def delayed(delay: float, **options: Any) -> Run:
        """Source and step take random times, another one in every run."""
        model = Recorder(delay=delay)
        return changing({0: 4, 1: 1, 2: 2.5}, workers=2, delay=delay, max_epochs=4, model=model, **options)

    save = SaveAt(tmp_path, [20, 36])  # after the changes at 17 and 34, six and more batches before they count
    whole = delayed(0, callbacks=[save])
    for step in save.steps:
        resumed = delayed(0.004, ckpt_path=save.path(step))
        assert resumed.model.batches == whole.model.batches[step:]
        assert resumed.loader.counts.fresh == whole.loader.counts.fresh
        assert resumed.model.weights == whole.model.weights
        assert resumed.data.factor == 2.5


def test_a_full_pass_run_resumes_around_a_change_within_an_epoch_exactly(tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        data = echoed(2, length=LENGTH, workers=1, epoch_length="full_pass")
        return fit(data, callbacks=[SetIn(data, "on_train_batch_end", 34 + 2, 1), *callbacks], **options)

    assert assert_resumes(make, tmp_path, [34 + 3]).model.steps == [34, 34, 17]


def test_full_pass_takes_a_factor_on_the_data_module_alone_and_says_so() -> None:
    """Set on the loader, the Trainer would not hear of the new length: epochs cut short, validation at the wrong step."""
    data = echoed(2, epoch_length="full_pass")

    def on_the_loader(runner: pl.Trainer) -> None:
        with pytest.raises(AttributeError, match=r"and the Trainer must be told\. Set \.factor on the EchoDataModule instead"):
            runner.train_dataloader.factor = 3  # type: ignore[union-attr]

    run = fit(data, callbacks=[At({0: on_the_loader})], max_epochs=2)
    assert run.model.steps == [12, 12]
    assert data.factor == 2


@pytest.mark.parametrize(("at", "fails"), [(0, False), (1, True)])
def test_of_two_factors_in_one_epoch_the_last_counts_and_the_trainers_own_setting_is_back_after_fit(at: int, fails: bool) -> None:
    data = echoed(2, epoch_length="full_pass")

    def twice(runner: Any) -> None:
        data.factor = 3
        data.factor = 4  # the second one must not take the first one's reload for the user's setting
        assert runner.reload_dataloaders_every_n_epochs == 1
        if fails:
            raise Killed

    run = Run(Recorder(), data, trainer(max_epochs=2, callbacks=[At({at: twice})]))
    with pytest.raises(Killed) if fails else nullcontext():
        run.trainer.fit(run.model, datamodule=data)
    assert run.model.steps == [12, 24 if at == 0 else 12]
    assert run.trainer.reload_dataloaders_every_n_epochs == 0  # type: ignore[attr-defined]
    assert data.factor == 4
