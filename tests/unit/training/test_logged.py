"""What loggers and the progress bar are given, with small fakes; that Lightning calls them so is tested with a Trainer."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader, TargetIdle
from lightning_echo.training.logged import ProgressText, log_directory, log_hyperparameters, log_metrics


class Logger:
    def __init__(self):
        self.metrics, self.hyperparameters = [], []

    def log_metrics(self, metrics, step):
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params):
        self.hyperparameters.append(params)


class Bar:
    def __init__(self, **items):
        self.items = items

    def get_metrics(self, trainer, pl_module):
        assert (trainer, pl_module) == ("trainer", "module")
        return dict(self.items)


def trainer_with(*loggers, global_step=0, bar=None):
    return SimpleNamespace(
        loggers=list(loggers),
        global_step=global_step,
        lightning_module=SimpleNamespace(automatic_optimization=True),
        callback_metrics={},
        current_epoch=3,
        progress_bar_callback=bar,
    )


@pytest.mark.parametrize(("is_automatic", "logged_at"), [(True, 49), (False, 24)])
def test_metrics_go_to_every_logger_at_the_step_that_lightning_logs_its_own_at(is_automatic, logged_at):
    """With manual optimization each batch is one step, whatever its optimizers do."""
    loggers = [Logger(), Logger()]
    for global_step, batches, at in ((50, 25, logged_at), (0, 0, 0)):
        trainer = trainer_with(*loggers, global_step=global_step)
        trainer.lightning_module.automatic_optimization = is_automatic
        trainer.fit_loop = SimpleNamespace(total_batch_idx=batches - 1)
        log_metrics(trainer, {"echo/factor": 2.0, "echo/passes": 0.5})
        values = {"echo/factor": 2.0, "echo/passes": 0.5, "epoch": 3}
        assert [logger.metrics.pop() for logger in loggers] == [(at, values)] * 2


def test_metrics_are_among_the_callback_metrics_as_tensors_also_without_a_logger():
    trainer = trainer_with()
    log_metrics(trainer, {"echo/factor": 2.0})
    log_metrics(trainer, {"echo/passes": 0.5})
    assert trainer.callback_metrics == {"echo/factor": torch.tensor(2.0), "echo/passes": torch.tensor(0.5)}


def echo_loader(**options):
    loader = DataLoader(torch.arange(24), 4)
    return EchoLoader(loader, 2, insertion_point="after_augmentation", buffer_size=16, seed=7, **options)


def test_hyperparameters_are_what_auto_and_defaults_came_to_in_plain_types(tmp_path):
    loggers = [Logger(), Logger()]
    log_hyperparameters(trainer_with(*loggers), echo_loader(epoch_length="full_pass"), TargetIdle(0.1))
    for logger in loggers:
        (params,) = logger.hyperparameters
        assert params == {
            "echo": {
                "factor": 2.0,
                "insertion_point": "after_augmentation",
                "buffer_size": 16,
                "reuse": "memory",
                "epoch_length": "full_pass",
                "seed": 7,
                "cache": None,
                "share": None,
                "controller": "TargetIdle(0.1, min_factor=1, max_factor=8)",
            }
        }
        torch.save(params, tmp_path / "params.pt")
        assert torch.load(tmp_path / "params.pt", weights_only=True) == params


def items_of(bar):
    return bar.get_metrics("trainer", "module")


def test_what_somebody_else_has_put_on_the_bar_is_asked_and_put_back():
    bar, progress = Bar(), ProgressText(lambda: "2.0x")

    def others(trainer, pl_module):
        return {"others": 1}

    bar.get_metrics = others
    progress.show(trainer_with(bar=bar))
    assert items_of(bar) == {"others": 1, "echo": "2.0x"}
    progress.hide()
    assert vars(bar)["get_metrics"] is others


def run_with(loggers, *, fast_dev_run=False, log_dir="there"):
    strategy = SimpleNamespace(broadcast=lambda value: value)
    return SimpleNamespace(loggers=loggers, fast_dev_run=fast_dev_run, log_dir=log_dir, strategy=strategy)


def test_the_file_is_kept_where_a_logger_keeps_its_files():
    for logger in (CSVLogger("there"), TensorBoardLogger("there")):
        assert log_directory(run_with([logger])) == "there"
    assert log_directory(run_with([Logger()], log_dir=None)) is None
    assert log_directory(run_with([], log_dir="default_root_dir")) is None
    assert log_directory(run_with([Logger()], fast_dev_run=1)) is None
