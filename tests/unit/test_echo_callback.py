"""`EchoCallback` by itself: its options, what it attaches to, and what is in its state; Trainers have only attributes here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from trainers import asked_by_lightning, trainer_in_fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, FactorSchedule, TargetIdle


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


def test_auto_is_a_controller_with_its_defaults() -> None:
    controller = EchoCallback(factor="auto").controller
    assert type(controller) is TargetIdle
    assert repr(controller) == repr(TargetIdle())
    assert EchoCallback(factor=4).controller is None


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


@pytest.mark.parametrize(("callback", "stage"), [(EchoCallback(), "fit"), (EchoCallback(factor=4), "validate")])
def test_where_nothing_is_to_be_echoed_nothing_is_attached(callback: EchoCallback, stage: str) -> None:
    data = Data()
    trainer = set_up(callback, data, stage=stage)
    before = vars(trainer.strategy).keys()
    assert isinstance(data.train_dataloader(), DataLoader)
    assert callback.attachment.trainer is None
    callback.teardown(trainer, Model(), stage)
    assert vars(trainer.strategy).keys() == before


def test_the_first_factor_is_the_controllers() -> None:
    data = Data()
    trainer = set_up(EchoCallback(FactorSchedule({0: 3})), data)
    assert asked_by_lightning(trainer, data).factor == 3
    echoed = EchoDataModule(Data(), 2)
    set_up(EchoCallback(FactorSchedule({0: 3})), echoed)
    assert echoed.factor == 3


def test_a_controller_does_not_begin_where_loaders_have_different_factors() -> None:
    options = {"a": EchoConfig(2), "b": EchoConfig(4)}
    for callback, data in (
        (EchoCallback(FactorSchedule({0: 3}), echo=options), Data()),
        (EchoCallback(FactorSchedule({0: 3})), EchoDataModule(Data(), loaders=options)),
    ):
        with pytest.raises(MisconfigurationException, match=r"different echo factors \(a 2, b 4\)"):
            set_up(callback, data)


def test_two_of_them_in_a_trainer_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match="the Trainer has 2 EchoCallbacks, of which only one can echo and decide"):
        set_up(EchoCallback(), others=[EchoCallback(factor=2)])


def test_a_second_fit_is_refused_and_leaves_the_first_one_echoed() -> None:
    callback, data = EchoCallback(factor=4), Data()
    trainer = set_up(callback, data)
    with pytest.raises(MisconfigurationException, match=r"^EchoCallback is in use by another Trainer") as refused:
        set_up(callback, Data())
    callback.on_exception(SimpleNamespace(), Model(), refused.value)  # type: ignore[arg-type]  # of the Trainer that was refused
    assert isinstance(asked_by_lightning(trainer, data), EchoLoader)


def test_a_data_module_that_leaves_the_factor_open_is_decided_for_by_a_callback_without_options() -> None:
    callback, data = EchoCallback(), EchoDataModule(Data(), "auto")
    set_up(callback, data)
    assert data.factor == 1
    assert callback.state_dict()["controller"] != {}
    assert EchoCallback().state_dict()["controller"] == {}


def test_the_state_says_whether_the_loader_was_echoed_here_and_where_it_stands() -> None:
    callback, data = EchoCallback(factor=4, seed=3), Data()
    trainer = set_up(callback, data)
    keys = {"epoch", "attached", "wrapped", "loader", "meter", "controller", "recent", "reports", "decisions", "asked"}
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


@pytest.mark.parametrize(("callback", "kept"), [(EchoCallback(), False), (EchoCallback(factor=4), True)])
def test_a_loaders_state_stays_in_the_checkpoint_only_where_it_can_be_taken(callback: EchoCallback, kept: bool) -> None:
    trainer = set_up(callback, Data())
    loop = {"combined_loader": [EchoLoader(DataLoader(range(16), 4), 4).state_dict()]}  # type: ignore[arg-type]
    saved = {"callbacks": {callback.state_key: {"wrapped": True}}, "loops": {"fit_loop": {"state_dict": loop}}}
    callback.on_load_checkpoint(trainer, Model(), saved)
    assert ("combined_loader" in loop) is kept
