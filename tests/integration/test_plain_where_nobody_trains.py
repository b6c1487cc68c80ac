"""Only the Trainer's own loop of a training is echoed: an evaluation, and a user's own look at the data, get plain loaders."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, Scans, trainer

from lightning_echo import EchoCallback, EchoDataModule, EchoLoader

LENGTH = 16
ALL = list(range(LENGTH))


def loader(length: int = LENGTH) -> DataLoader[Any]:
    return DataLoader(Scans(length), batch_size=4)


def echo_loader(factor: float = 4, **options: Any) -> EchoLoader:
    return EchoLoader(loader(), factor, insertion_point="after_augmentation", seed=0, **options)


class Looks(Recorder):
    """Remembers what each stage gets, and what it gets that looks at its training data in a hook."""

    def __init__(self, hook: str = "", look: Any = None) -> None:
        super().__init__()
        self.stages: dict[str, list[int]] = {"validate": [], "test": [], "predict": []}
        self.looked: list[list[int]] = []
        if hook:
            setattr(self, hook, lambda *args: self.looked.append(look(self.trainer)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.stages["validate"] += batch["index"].tolist()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.stages["test"] += batch["index"].tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.stages["predict"] += batch["index"].tolist()
        return batch["index"]


@pytest.mark.parametrize(("stage", "epoch_length"), [("validate", "full_pass"), ("test", "fixed"), ("predict", "full_pass")])
def test_an_evaluation_gets_each_example_once_and_says_so(stage: str, epoch_length: str) -> None:
    model, echoed = Looks(), echo_loader(epoch_length=epoch_length)
    with pytest.warns(UserWarning, match=f"only a training is echoed: stage '{stage}' gets the plain loader"):
        getattr(trainer(limit_val_batches=1.0), stage)(model, echoed)
    assert model.stages[stage] == ALL
    assert echoed.counts.delivered == 0


def test_the_validation_of_a_training_does_too_also_with_the_loader_that_is_trained_on() -> None:
    model, echoed = Looks(), echo_loader()
    with pytest.warns(UserWarning, match="only a training is echoed"):
        trainer(max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=2).fit(model, echoed, echoed)
    assert model.stages["validate"] == ALL * 2
    assert echoed.counts.delivered == 2 * LENGTH
    assert len({index for batch in model.batches for index in batch[0]}) < LENGTH, "the training is echoed"


HOOKS = ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_validation_epoch_end", "on_train_epoch_end"]


def indices(batches: Any) -> list[int]:
    return sorted(int(index) for batch in batches for index in batch["index"])


LOOKS = {
    "datamodule": lambda run: indices(run.datamodule.train_dataloader()),
    "trainer": lambda run: indices(run.train_dataloader or []),
}


@pytest.mark.filterwarnings("ignore:lightning_echo. only a training is echoed")
@pytest.mark.parametrize(
    ("echo", "hook", "look"),
    list(zip(itertools.cycle(["callback", "module", "cache"]), HOOKS, itertools.cycle(LOOKS), strict=False)),
)
def test_a_look_at_the_training_data_in_a_hook_sees_all_of_it_and_takes_nothing_from_the_training(
    echo: str, hook: str, look: str
) -> None:
    def run(looks: bool) -> tuple[Looks, Any]:
        model = Looks(hook, LOOKS[look]) if looks else Looks()
        data: pl.LightningDataModule = Data(length=LENGTH)
        callbacks: list[Any] = []
        options: dict[str, Any] = {"insertion_point": "after_augmentation", "seed": 3}
        if echo == "module":
            data = EchoDataModule(data, 4, **options)
        elif echo == "callback":
            callbacks = [EchoCallback(factor=4, summary=False, **options)]
        else:
            callbacks = [EchoCallback(cache="1MiB", seed=3, summary=False)]
        fit = trainer(max_epochs=2, callbacks=callbacks, limit_val_batches=1.0)
        fit.fit(model, datamodule=data)
        return model, fit

    looking, _ = run(looks=True)
    plain, _ = run(looks=False)
    asked = [seen for seen in looking.looked if seen or look == "datamodule"]  # before its loop, a Trainer has no loader
    assert asked == [ALL] * len(asked)
    assert asked or (look, hook) == ("trainer", "on_fit_start")
    assert [batch[0] for batch in looking.batches] == [batch[0] for batch in plain.batches]


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_with_several_ranks_an_evaluation_is_refused_with_the_loader_to_pass(stage: str, monkeypatch: Any) -> None:
    """Lightning divides plain loaders alone: each rank would get all examples, and a prediction would have each of them twice."""
    monkeypatch.setattr("lightning_echo.loader.loader.world", lambda: (2, 0))
    monkeypatch.setattr(pl.Trainer, "distributed_sampler_kwargs", {"num_replicas": 2, "rank": 0})
    with pytest.raises(RuntimeError, match=rf"'{stage}', .*among the 2 ranks: pass the plain loader there \(its \.loader\)"):
        getattr(trainer(limit_val_batches=1.0), stage)(Looks(), echo_loader())


def test_a_second_echo_loader_of_the_model_s_own_is_echoed_in_a_step() -> None:
    """It is not the loader that the Trainer trains on, so that the step is the loop that it is for."""

    class Draws(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.own = echo_loader()
            self.drawn: set[int] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.drawn = {int(index) for each in self.own for index in each["index"]}
            return super().training_step(batch, batch_idx)

    model = Draws()
    trainer(max_epochs=1, callbacks=[EchoCallback(summary=False)]).fit(model, datamodule=Data(length=LENGTH))
    assert 0 < len(model.drawn) < LENGTH
    assert model.own.counts.delivered == LENGTH


def test_a_loader_that_is_needed_during_the_sanity_check_is_echoed() -> None:
    """A model that asks there how long the run will be makes Lightning ask for the training loader."""

    steps = []

    class Asks(Recorder):
        def on_validation_start(self) -> None:
            if self.trainer.sanity_checking:
                steps.append(self.trainer.estimated_stepping_batches)

    model, data = Asks(), EchoDataModule(Data(length=LENGTH), 4, insertion_point="after_augmentation", seed=3)
    trainer(max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=1).fit(model, datamodule=data)
    assert steps == [8]
    assert data.loader.counts.delivered == 2 * LENGTH
    assert data.loader.counts.echoed > LENGTH
