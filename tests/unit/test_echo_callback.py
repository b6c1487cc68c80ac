"""`EchoCallback` by itself: its options, what it attaches to, and what is in its state; Trainers have only attributes here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from trainers import asked_by_lightning, trainer_in_fit

from lightning_echo import EchoCallback, EchoConfig, EchoLoader, FactorSchedule


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(range(16), batch_size=4)  # type: ignore[arg-type, var-annotated]


class Model(pl.LightningModule):
    """Has no data."""


def set_up(callback: EchoCallback, datamodule: Any = None, *, stage: str = "fit", others: Any = ()) -> Any:
    """Returns a Trainer that has set the callback up."""
    trainer = trainer_in_fit(datamodule, callbacks=[callback, *others])
    callback.setup(trainer, Model(), stage)
    return trainer


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"summary": "false"}, TypeError, "summary must be True or False, got str "),  # a text would count as on
        ({"plot": 0}, TypeError, "plot must be True or False, got int "),
        ({"controller": 4}, TypeError, r"controller must be a Controller such as TargetIdle\(\), or None, got 4"),
        ({"factor": "auto", "controller": FactorSchedule({0: 2})}, ValueError, "leave one of the two out"),
        ({"factor": 2, "echo": EchoConfig(2)}, ValueError, r"has options in echo=EchoConfig.* and in factor=2: give all of them"),
        ({"echo": {}}, ValueError, "echo is empty"),
        ({"echo": 4}, TypeError, "echo must be an EchoConfig"),
        ({"seed": "x"}, TypeError, "seed must be an integer"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EchoCallback(**arguments)


def test_the_callback_comes_before_all_others_from_setup_on() -> None:
    """Lightning iterates over the list while setup moves the callback in it: no other may be called twice or not at all."""
    called: list[pl.Callback] = []

    class Other(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            called.append(self)

    others, callback = [Other() for _ in range(4)], EchoCallback()
    trainer = SimpleNamespace(callbacks=[*others[:2], callback, *others[2:]], datamodule=None)
    for each in trainer.callbacks:
        each.setup(trainer, Model(), "fit")
    assert called == others
    assert trainer.callbacks == [callback, *others]


def test_a_checkpoint_of_a_rank_that_failed_reads_no_metrics() -> None:
    """Lightning would join them over the ranks, and the other ranks do not come."""
    callback = EchoCallback(FactorSchedule({0: 2}))
    trainer = set_up(callback, Data())
    for has_failed in (False, True):
        if has_failed:
            del trainer.callback_metrics
            callback.on_exception(trainer, Model(), RuntimeError())
        else:
            trainer.callback_metrics = {}
        checkpoint: dict[str, Any] = {"callbacks": {callback.state_key: {}}}
        callback.on_save_checkpoint(trainer, Model(), checkpoint)
        assert checkpoint["callbacks"][callback.state_key] == ({} if has_failed else {"metrics": {}})


def test_the_state_says_whether_the_loader_was_echoed_here_and_where_it_stands() -> None:
    callback, data = EchoCallback(factor=4, seed=3), Data()
    trainer = set_up(callback, data)
    keys = {"epoch", "began", "attached", "wrapped", "loader", "meter", "controller", "recent", "reports", "decisions"}
    state = callback.state_dict()
    assert set(state) == keys
    assert (state["attached"], state["wrapped"], state["loader"]) == (True, False, None)
    loader = asked_by_lightning(trainer, data)
    assert (type(loader), loader.factor, loader.seed) == (EchoLoader, 4, 3)
    state = callback.state_dict()
    assert (state["wrapped"], state["loader"]) == (True, loader.state_dict())
    callback.teardown(trainer, Model(), "fit")
    assert callback.state_dict()["attached"], "a checkpoint may be saved after the fit"
    assert isinstance(data.train_dataloader(), DataLoader)
