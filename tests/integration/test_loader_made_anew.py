"""An `EchoLoader` that is made anew goes on where the one before stood, if a Trainer goes on; else it says that it does not."""

from __future__ import annotations

import gc
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from trainer_runs import Data, Recorder, SaveAt, Scans, first_uses, fit, fresh_stream, trainer

from lightning_echo import EchoLoader

LENGTH, BATCH_SIZE, EPOCHS = 64, 8, 8


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_one_for_each_epoch_delivers_what_one_for_all_of_them_does(every: int, workers: int) -> None:
    data = Scans(LENGTH)
    model = trained(lambda asked: loader(data, num_workers=workers), every)
    assert model.asked == -(-EPOCHS // every)
    whole = fit(loader(Scans(LENGTH), num_workers=workers), max_epochs=EPOCHS).model
    assert [indices for indices, _ in model.batches] == [indices for indices, _ in whole.batches]
    assert [noises for _, noises in model.batches] == [noises for _, noises in whole.batches]


def test_a_factor_of_its_own_counts_for_each() -> None:
    data, factors = Scans(LENGTH), [4, 4, 1, 1, 2, 2, 2, 2]
    model = trained(lambda asked: loader(data, factors[asked]))
    fresh = [sum(map(len, first_uses(model.batches)[start : start + 8])) for start in range(0, 64, 8)]
    assert fresh[1] < LENGTH / 3
    assert fresh[3] == LENGTH  # factor 1
    assert max(Counter(fresh_stream(model.batches)[:LENGTH]).values()) == 1  # a pass repeats nothing


def test_another_seed_is_another_run() -> None:
    data = Scans(LENGTH)
    with pytest.warns(UserWarning, match=r"the Trainer is in epoch \d, but this EchoLoader is at the start of its run") as said:
        trained(lambda asked: loader(data, seed=asked))
    assert len([each for each in said if "at the start of its run" in str(each.message)]) == EPOCHS - 1


def test_without_a_predecessor_it_is_said() -> None:
    with pytest.warns(UserWarning, match=r"the Trainer is in epoch 1, .* so that the data of epoch 0 comes again"):
        trained(lambda asked: loader(Scans(LENGTH)), max_epochs=2)


def test_a_state_that_lightning_leaves_out_is_said(tmp_path: Path) -> None:
    class SaveAtEnds(SaveAt):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(self.path(trainer.current_epoch))

    save = SaveAtEnds(tmp_path, [])
    fit(loader(Scans(LENGTH)), callbacks=[save])
    with pytest.warns(UserWarning, match=r"the Trainer is in epoch 1, .* Use EchoDataModule or EchoCallback"):
        fit(loader(Scans(LENGTH)), ckpt_path=save.path(0))


def test_a_state_that_lightning_loads_is_gone_on_with_and_nothing_is_said(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [12])
    whole = fit(loader(Scans(LENGTH)), callbacks=[save]).model
    resumed = fit(loader(Scans(LENGTH)), ckpt_path=save.path(12)).model
    assert resumed.batches == whole.batches[12:]


def test_trainings_that_begin_with_the_same_part_of_the_data_are_warned_about() -> None:
    data = Scans(LENGTH)
    fit(loader(data), max_epochs=1)
    gc.collect()  # whether the first loader is still there does not matter
    with pytest.warns(UserWarning, match="begins where the one before it over the same data set began.* the same part of a pass"):
        fit(loader(data), max_epochs=1)


@pytest.mark.parametrize(
    ("first", "second", "epochs"),
    [({}, {"seed": 1}, 1), ({"factor": 1.0}, {}, 1), ({}, {}, 4), ({"seed": None}, {"seed": None}, 1)],
    ids=["another seed", "a whole pass", "several epochs", "a seed that is drawn"],
)
def test_trainings_that_do_not_are_not(
    first: dict[str, Any], second: dict[str, Any], epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = Scans(LENGTH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        fit(loader(data, **first), max_epochs=epochs)
        fit(loader(data, **second), max_epochs=epochs)
    assert [str(each.message) for each in said if issubclass(each.category, UserWarning)] == []


def test_one_loader_for_all_trainings_goes_on() -> None:
    echoed, data = loader(Scans(LENGTH)), Recorder()
    for _ in range(3):
        fit(echoed, model=data, max_epochs=1)
    stream = fresh_stream(data.batches)
    assert len(set(stream)) == len(stream) > LENGTH / 2


def test_without_a_trainer_each_begins_anew_and_nothing_is_kept() -> None:
    data = Scans(LENGTH)
    first, second = loader(data), loader(data)
    assert [batch["index"].tolist() for batch in first] == [batch["index"].tolist() for batch in second]
    assert second._run.predecessor is None


def test_what_a_later_one_could_go_on_from_still_ends_with_its_own_loader() -> None:
    data = Scans(LENGTH)
    first = loader(data, num_workers=1)
    workers = {batch["pid"][0].item() for batch in first}
    later = loader(data)
    assert later._run.predecessor is first._run
    del first
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert pickle.loads(pickle.dumps(later))._run.predecessor is None


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
