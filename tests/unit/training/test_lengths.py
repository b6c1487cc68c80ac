"""How long a run will be, how a Trainer learns of a new length, and what forbids one; the Trainers here only have attributes."""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo import EchoLoader
from lightning_echo.training.trainer import Reload, StepsEstimate, check_factor_during_training, forecast, too_short_schedules


def attached(**attributes):
    return SimpleNamespace(trainer=SimpleNamespace(**attributes))


def scheduled(make, interval="step", **attributes):
    """Returns a Trainer with a schedule, after a model that has read 100 steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    configs = [] if make is None else [SimpleNamespace(scheduler=make(optimizer), interval=interval)]
    return SimpleNamespace(**{"lr_scheduler_configs": configs, "estimated_stepping_batches": 100, "max_steps": -1, **attributes})


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.1, total_steps=100)


def warmup(optimizer):
    return LambdaLR(optimizer, lambda step: 1.0)


def echoed(factor=2.0, epoch_length="full_pass"):
    return EchoLoader(DataLoader(range(22), 4), factor, insertion_point="after_augmentation", epoch_length=epoch_length)


@pytest.mark.parametrize("users", [0, 3])
def test_a_reload_is_ordered_once_and_the_users_setting_given_back(users):
    run = attached(reload_dataloaders_every_n_epochs=users)
    reload = Reload(run)
    assert reload.end() is False
    for _ in range(2):  # also after its end
        for _ in range(2):
            reload.order()
            assert run.trainer.reload_dataloaders_every_n_epochs == 1
        assert reload.end() is (users == 0), "a user who reloads has asked, too"
        assert run.trainer.reload_dataloaders_every_n_epochs == users
    reload.order()
    run.trainer = None
    assert reload.end() is (users == 0)


@pytest.mark.parametrize(
    ("asked_for", "was_read"), [("before optimizers are configured", True), ("after", False), ("without our hook", True)]
)
def test_a_loader_that_is_there_before_optimizers_are_configured_was_read_for_the_estimate(asked_for, was_read):
    """Lightning sets optimizers when they are configured, and the training loader when it is asked for."""
    trainer, estimate = SimpleNamespace(optimizers=["those of an earlier fit"], train_dataloader=None), StepsEstimate()
    estimate.begin_fit(trainer)
    if asked_for == "before optimizers are configured":
        estimate.loader_asked(trainer)
    trainer.optimizers = ["of this fit"]
    trainer.train_dataloader = ["batches"] if asked_for == "without our hook" else None
    estimate.optimizers_configured(trainer)
    if asked_for == "after":
        estimate.loader_asked(trainer)
    assert estimate.was_read is was_read
    estimate.begin_fit(trainer)
    assert not estimate.was_read


@pytest.mark.parametrize(
    ("make", "interval", "epoch_length", "factor", "max_steps", "refused", "too_short"),
    [
        (one_cycle, "step", "full_pass", 2.5, -1, True, True),
        (one_cycle, "step", "full_pass", 2.0, -1, False, False),  # as long as now
        (one_cycle, "step", "fixed", 8.0, -1, False, False),
        (one_cycle, "epoch", "full_pass", 8.0, -1, False, False),
        (warmup, "step", "full_pass", 4.0, -1, False, True),
        (warmup, "step", "full_pass", 4.0, 100, False, False),  # the run ends there anyway
        (warmup, "epoch", "full_pass", 4.0, -1, False, False),
        (None, "step", "full_pass", 8.0, -1, False, False),
    ],
)
def test_schedules_that_count_steps_forbid_longer_epochs_or_are_through_too_soon(
    make, interval, epoch_length, factor, max_steps, refused, too_short
):
    trainer, loader = scheduled(make, interval, max_steps=max_steps), echoed(epoch_length=epoch_length)
    with pytest.raises(MisconfigurationException, match=r"OneCycleLR.* Use epoch_length='fixed'") if refused else nullcontext():
        check_factor_during_training(trainer, loader, factor)
    assert loader.factor == 2.0, "it is only asked"
    said = too_short_schedules(trainer, loader, factor)
    assert bool(said) is too_short
    if too_short:
        assert "LR is stepped with each batch (interval='step')" in said
        assert "100 steps" in said
        assert f"(up to {factor:g} here)" in said


def sixteen_batches(factor: float | str = 4.0, **options: Any) -> EchoLoader:
    """Returns a loader of 16 batches in a pass."""
    data: Any = list(range(64))
    return EchoLoader(DataLoader(data, 4), factor, insertion_point="after_augmentation", **options)


def trainer_for(max_epochs: int | None = 8, limit_train_batches: int | float = 1.0) -> Any:
    return SimpleNamespace(max_epochs=max_epochs, limit_train_batches=limit_train_batches)


@pytest.mark.parametrize(
    ("options", "told", "expected"),
    [
        ({}, {}, "8 epochs x 16 steps = 2 passes over the data at factor 4"),
        ({}, {"max_epochs": 4}, "4 epochs x 16 steps = 1 pass over the data at factor 4"),
        ({"epoch_length": "full_pass"}, {}, "8 epochs x 64 steps = 8 passes over the data at factor 4"),
        ({}, {"limit_train_batches": 4}, "8 epochs x 4 steps = 0.5 passes over the data at factor 4"),
        ({}, {"limit_train_batches": 100}, "8 epochs x 16 steps = 2 passes over the data at factor 4"),
        ({}, {"limit_train_batches": 0.5}, "8 epochs x 8 steps = 1 pass over the data at factor 4"),
        ({"factor": 2.5}, {"max_epochs": 1000}, "1,000 epochs x 16 steps = 400 passes over the data at factor 2.5"),
    ],
)
def test_passes_are_the_steps_over_those_of_a_pass_and_the_factor(options: Any, told: Any, expected: str) -> None:
    line = forecast(trainer_for(**told), sixteen_batches(**options))
    assert line.startswith(expected)


def test_on_demand_it_is_the_most_that_fresh_examples_alone_come_to() -> None:
    """Without an echo, 8 epochs are 8 passes."""
    line = forecast(trainer_for(), sixteen_batches("demand", max_factor=4))
    assert line == "8 epochs x 16 steps on demand: at most 8 passes over the data, less what is echoed"


def test_of_a_stream_the_run_says_where_its_epochs_end_and_nothing_is_said_twice() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    loader = EchoLoader(DataLoader(Stream(), 4), "demand", max_factor=3, insertion_point="after_augmentation")
    assert forecast(trainer_for(), loader) == ""


@pytest.mark.parametrize(
    ("reuse", "epochs", "factor", "workers"),
    [
        ("each", 2, 4.0, 0),
        ("each", 3, 2.5, 1),
        ("memory", 1, 4.0, 2),  # all of the first batch of each worker is fresh: 70 examples instead of 64
    ],
)
def test_a_short_run_is_told_how_far_it_really_comes(reuse: str, epochs: int, factor: float, workers: int) -> None:
    def make() -> EchoLoader:
        plain = DataLoader(list(range(256)), 4, shuffle=True, num_workers=workers)  # type: ignore[arg-type]
        return EchoLoader(plain, factor, insertion_point="after_augmentation", seed=3, reuse=reuse)

    loader = make()
    for _ in range(epochs):
        deque(loader, maxlen=0)
    loader.close()
    line = forecast(trainer_for(max_epochs=epochs), make())
    assert line.endswith(f", {loader.counts.fresh / 256:.3g} with the fresh examples of the first batches")
    assert forecast(trainer_for(max_epochs=epochs), loader) == line.rpartition(", ")[0], "a run that goes on has had them"


@pytest.mark.parametrize(
    ("reuse", "epochs", "factor"),
    [("each", 400, 4.0), ("each", 8, 1.0), ("memory", 8, 4.0), ("memory", 8, 1.0)],  # memory: 131 fresh examples instead of 128
)
def test_where_it_makes_no_difference_nothing_is_line_of_it(reuse: str, epochs: int, factor: float) -> None:
    assert "first batches" not in forecast(trainer_for(max_epochs=epochs), sixteen_batches(factor, reuse=reuse))
