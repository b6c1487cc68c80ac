"""An `EchoLoader` that is made anew goes on where the one before stood, if a Trainer goes on; else it says that it does not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, SaveAt, Scans, fit, trainer

from lightning_echo import EchoLoader

LENGTH, BATCH_SIZE, EPOCHS = 64, 8, 4


def loader(data: Any, factor: float = 4.0, seed: int | None = 0, **options: Any) -> EchoLoader:
    plain = DataLoader(data, BATCH_SIZE, shuffle=True, **options)
    return EchoLoader(plain, factor, insertion_point="after_augmentation", seed=seed)


class MakesAnew(Recorder):
    """Its hook returns a new `EchoLoader` each time."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.asked = make, 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return self.make(self.asked - 1)

    def val_dataloader(self) -> Any:
        return Data().val_dataloader()


def trained(make: Any, every: int = 1, **options: Any) -> MakesAnew:
    model = MakesAnew(make)
    trainer(**{"max_epochs": EPOCHS, "reload_dataloaders_every_n_epochs": every, **options}).fit(model)
    return model


@pytest.mark.parametrize(("every", "workers"), [(1, 1), (3, 0)])
def test_one_for_each_epoch_delivers_what_one_for_all_of_them_does(every: int, workers: int) -> None:
    data = Scans(LENGTH)
    model = trained(lambda asked: loader(data, num_workers=workers), every)
    assert model.asked == -(-EPOCHS // every)
    whole = fit(loader(Scans(LENGTH), num_workers=workers), max_epochs=EPOCHS).model
    assert model.batches == whole.batches


def test_a_state_that_lightning_leaves_out_is_said(tmp_path: Path) -> None:
    class SaveAtEnds(SaveAt):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(self.path(trainer.current_epoch))

    save = SaveAtEnds(tmp_path, [])
    fit(loader(Scans(LENGTH)), callbacks=[save], max_epochs=1)
    with pytest.warns(UserWarning, match=r"the Trainer is in epoch 1, .* Use EchoDataModule or EchoCallback"):
        fit(loader(Scans(LENGTH)), ckpt_path=save.path(0), max_epochs=2)


def test_a_length_that_only_the_state_knows_is_said(tmp_path: Path) -> None:
    def make(factor: float) -> EchoLoader:
        return EchoLoader(DataLoader(Scans(LENGTH), BATCH_SIZE), factor, seed=0, epoch_length="full_pass")

    first = make(1)
    first.factor = 2
    list(first)
    state = first.state_dict()
    told, asked = make(1), make(2)
    assert (len(told), len(asked)) == (8, 16)
    said = []
    for each in (told, asked):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            each.load_state_dict(state)
        said.append([str(warning.message) for warning in caught])
    assert [len(messages) for messages in said] == [1, 1]
    assert "Lightning has asked already, and takes 8 batches in this epoch. Make the EchoLoader with factor=2" in said[0][0]
    assert "factor=2 is not used" in said[1][0]  # since the run began with another
