"""Two Trainers at the same time: each has its own echoing, or the second one is told why it cannot begin."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from trainer_runs import Data, Recorder, echoed, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader

PATIENCE = 60  # seconds after which a test that hangs fails
OPTIONS: dict[str, Any] = {"factor": 2.5, "insertion_point": "after_augmentation", "seed": 7}


class Standing(Recorder):
    """Stands in its first step until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.stands, self.may_go_on = threading.Event(), threading.Event()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.stands.set()
        assert self.may_go_on.wait(PATIENCE)
        return super().training_step(batch, batch_idx)


def beside(first: Callable[[Standing], Any], second: Callable[[], Any]) -> Standing:
    """Does something while a training is in its first step; returns the model that was trained."""
    model = Standing()
    thread = threading.Thread(target=first, args=[model])
    thread.start()
    try:
        assert model.stands.wait(PATIENCE)
        second()
    finally:
        model.may_go_on.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    return model


def config() -> EchoConfig:
    return EchoConfig(**OPTIONS)


def uses(data: Any, *callbacks: Any, model: Any = None) -> Callable[..., Any]:
    """A training over data, with callbacks."""
    return lambda model=model: fit(data, model=model, callbacks=list(callbacks))


@pytest.mark.parametrize("same", ["data module inside", "data module", "callback"])
def test_a_second_trainer_is_told_that_what_it_would_echo_is_in_use_and_the_first_one_goes_on(same: str) -> None:
    data, callback = Data(workers=int(same == "data module")), EchoCallback(echo=config())
    second, message = {
        "data module inside": (uses(EchoDataModule(data, **OPTIONS)), "the data module Data"),
        "data module": (uses(data, EchoCallback(echo=config())), "Data"),
        "callback": (uses(Data(), callback), "EchoCallback"),
    }[same]

    def refused() -> None:
        with pytest.raises(
            MisconfigurationException, match=f"^{message} is in use by another Trainer, whose fit is still running"
        ):
            second()

    model = beside(uses(data, callback), refused)
    assert model.batches == fit(echoed()).model.batches
    assert len(set().union(*model.pids)) == 1, "the same worker as before"
    assert len(second().model.batches) == 18, "and after it is over the second one may begin"


def test_an_echo_loader_in_two_trainings_says_that_each_needs_its_own() -> None:
    loader = EchoLoader(Data().train_dataloader(), **OPTIONS)

    def refused() -> None:
        with pytest.raises(RuntimeError, match="Two trainings need an EchoLoader each"):
            fit(loader)

    assert beside(uses(loader), refused).batches == fit(echoed()).model.batches


def test_two_trainers_with_data_modules_and_callbacks_of_their_own_do_not_disturb_each_other() -> None:
    expected, data = fit(echoed()).model.batches, echoed()
    found: list[Any] = []

    def second() -> None:
        found.append(fit(Data(), callbacks=[EchoCallback(echo=config())]))
        trainer().validate(Recorder(), data, verbose=False)

    assert beside(uses(data, EchoCallback()), second).batches == expected
    assert found[0].model.batches == expected
