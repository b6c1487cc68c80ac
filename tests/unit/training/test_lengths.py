"""How a Trainer comes to hear of a new length, and what forbids one; the Trainers here have attributes and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader
from lightning_echo.training.lengths import Estimate, Reload, check_factor, too_short_schedules


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


class TestReload:
    @pytest.mark.parametrize("users", [0, 1, 3])
    def test_is_ordered_once_and_the_users_setting_given_back(self, users):
        run = attached(reload_dataloaders_every_n_epochs=users)
        reload = Reload(run)
        for _ in range(2):
            reload.order()
            assert run.trainer.reload_dataloaders_every_n_epochs == 1
        assert reload.end() is (users == 0), "a user who reloads has asked, too"
        assert run.trainer.reload_dataloaders_every_n_epochs == users

    def test_that_nobody_has_ordered_has_no_end(self):
        run = attached(reload_dataloaders_every_n_epochs=2)
        assert Reload(run).end() is False
        assert run.trainer.reload_dataloaders_every_n_epochs == 2

    def test_without_a_trainer_is_not_ordered(self):
        run = SimpleNamespace(trainer=None)
        reload = Reload(run)
        reload.order()
        assert reload.end() is False

    def test_may_be_ordered_again_after_its_end(self):
        run = attached(reload_dataloaders_every_n_epochs=0)
        reload = Reload(run)
        reload.order()
        reload.end()
        reload.order()
        assert run.trainer.reload_dataloaders_every_n_epochs == 1
        assert reload.end() is True

    def test_ends_without_a_trainer_too(self):
        run = attached(reload_dataloaders_every_n_epochs=0)
        reload = Reload(run)
        reload.order()
        run.trainer = None
        assert reload.end() is True


class TestEstimate:
    """Lightning sets optimizers when they are configured, and the training loader when it is asked for."""

    def estimate(self, optimizers):
        trainer, estimate = SimpleNamespace(optimizers=optimizers, train_dataloader=None), Estimate()
        estimate.begin(trainer)
        return estimate, trainer

    def test_a_loader_that_is_asked_for_before_optimizers_are_configured_was_read_for_the_estimate(self):
        estimate, trainer = self.estimate(["those of an earlier fit"])
        estimate.asked(trainer)
        assert estimate.was_read

    def test_one_that_is_asked_for_after_was_not(self):
        estimate, trainer = self.estimate([])
        trainer.optimizers = ["of this fit"]
        estimate.configured(trainer)
        estimate.asked(trainer)
        assert not estimate.was_read

    def test_one_that_is_there_when_optimizers_are_configured_was(self):
        estimate, trainer = self.estimate([])
        trainer.train_dataloader = ["batches"]
        estimate.configured(trainer)
        assert estimate.was_read

    def test_the_next_fit_begins_anew(self):
        estimate, trainer = self.estimate([])
        estimate.asked(trainer)
        estimate.begin(trainer)
        assert not estimate.was_read


class TestAFactorDuringTraining:
    @pytest.mark.parametrize("factor", [2.5, 8.0])
    def test_that_makes_epochs_longer_than_one_cycle_is_refused(self, factor):
        with pytest.raises(MisconfigurationException, match=r"'full_pass' and OneCycleLR: .* Use epoch_length='fixed'"):
            check_factor(scheduled(one_cycle), echoed(), factor)

    @pytest.mark.parametrize(
        ("make", "interval", "epoch_length", "factor"),
        [
            (one_cycle, "step", "full_pass", 2.0),  # as long as now
            (one_cycle, "step", "full_pass", 1.0),  # shorter
            (one_cycle, "step", "fixed", 8.0),
            (one_cycle, "epoch", "full_pass", 8.0),
            (warmup, "step", "full_pass", 8.0),
            (None, "step", "full_pass", 8.0),
        ],
    )
    def test_of_any_other_kind_is_not(self, make, interval, epoch_length, factor):
        loader = echoed(epoch_length=epoch_length)
        assert check_factor(scheduled(make, interval), loader, factor) is None
        assert loader.factor == 2.0, "it is only asked"

    def test_that_the_buffer_cannot_hold_is_refused(self):
        loader = EchoLoader(DataLoader(range(22), 4), 1.5, insertion_point="after_augmentation", buffer_size=2)
        with pytest.raises(ValueError, match="buffer_size=2 is too small for factor=8"):
            check_factor(scheduled(None), loader, 8.0)


class TestSchedulesThatAreThroughTooSoon:
    def test_are_named_with_the_steps_that_they_were_made_for(self):
        said = too_short_schedules(scheduled(warmup), echoed(), 4.0)
        assert said.startswith("LambdaLR is stepped with each batch")
        assert "100 steps" in said
        assert "(up to 4 here)" in said

    @pytest.mark.parametrize(
        ("make", "interval", "epoch_length", "factor", "max_steps"),
        [
            (None, "step", "full_pass", 4.0, -1),
            (warmup, "epoch", "full_pass", 4.0, -1),
            (warmup, "step", "fixed", 4.0, -1),
            (warmup, "step", "full_pass", 2.0, -1),  # as long as now
            (warmup, "step", "full_pass", 4.0, 100),  # the run ends there anyway
        ],
    )
    def test_there_are_none_where_no_epoch_gets_longer_or_the_schedule_does_not_count_steps(
        self, make, interval, epoch_length, factor, max_steps
    ):
        trainer = scheduled(make, interval, max_steps=max_steps)
        assert too_short_schedules(trainer, echoed(epoch_length=epoch_length), factor) == ""
