"""A data set that grows or shrinks in place: the next epoch begins a pass over what it has now, and says so."""

import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler
from trainer_runs import trainer

from lightning_echo import EchoCallback, EchoLoader, EchoStateError


class Growing(Dataset):
    """Its examples are their indices and one draw for each reading."""

    def __init__(self, length):
        self.length = length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return torch.tensor(float(index)), torch.rand(())

    def __len__(self):
        return self.length


def shuffled(data, workers=0):
    return DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)


LOADERS = {
    "shuffled": shuffled,
    "shuffled, workers": lambda data: shuffled(data, workers=2),
    "in order": lambda data: DataLoader(data, batch_size=4),
    "own batches": lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)),
    "own sampler": lambda data: DataLoader(data, batch_size=4, sampler=type("Own", (RandomSampler,), {})(data)),
}


def fresh_of(loader, epochs):
    """The indices of the fresh examples of so many epochs: they come first in each batch."""
    return [
        int(index) for _ in range(epochs) for indices, _ in loader for index in indices[: loader.last_batch_counts.fresh].tolist()
    ]


@pytest.mark.grid
@pytest.mark.parametrize("new_length", [36, 20])
@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("name", LOADERS)
def test_the_next_epoch_begins_a_pass_over_all_that_is_there(name, factor, new_length):
    data, by_batches = Growing(24), name == "own batches"
    point = "auto" if by_batches else "after_augmentation"
    loader = EchoLoader(LOADERS[name](data), factor, insertion_point=point, seed=0)
    fresh_of(loader, 2 * factor - 1)
    passes, data.length = math.ceil(loader.passes), new_length
    items = new_length // 4 if by_batches else new_length
    with pytest.warns(UserWarning, match=f"a pass has {items} (examples|batches) now, and had"):
        fresh = fresh_of(loader, 1)
    assert passes < loader.passes <= passes + 1
    assert len(loader) == new_length // 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh += fresh_of(loader, 2 * factor)
    assert sorted(fresh[:new_length]) == list(range(new_length))
    assert loader.state_dict()["layout"]["length"] == items
    loader.close()


def test_a_data_set_that_has_become_empty_is_an_error():
    data = Growing(24)
    loader = EchoLoader(shuffled(data), 2, insertion_point="after_augmentation", seed=0)
    list(loader)
    data.length = 0
    with pytest.raises(ValueError, match="loader is empty"):
        list(loader)


LENGTHS = [32, 40, 40, 28]  # by epoch


class Stages(pl.LightningDataModule):
    """A curriculum: its data set grows and shrinks in place."""

    def __init__(self, begins_with=LENGTHS[0]):
        super().__init__()
        self.data = Growing(begins_with)

    def train_dataloader(self):
        return shuffled(self.data)


class Indices(pl.LightningModule):
    """Remembers the indices of each epoch, sets the length of the data for the next one, and saves a checkpoint after one."""

    def __init__(self, path=None):
        super().__init__()
        self.automatic_optimization, self.epochs, self.path = False, [[] for _ in LENGTHS], path

    def training_step(self, batch, batch_idx):
        self.epochs[self.current_epoch] += batch[0].int().tolist()

    def configure_optimizers(self):
        return []

    def on_train_epoch_end(self):
        self.trainer.datamodule.data.length = [*LENGTHS, 1][self.current_epoch + 1]
        if self.path is not None and self.current_epoch == 0:
            self.trainer.save_checkpoint(self.path)


def run(factor, data, ckpt_path=None, saves_to=None):
    echo = EchoCallback(factor=factor, insertion_point="after_augmentation", seed=0)
    model = Indices(saves_to)
    trains = trainer(callbacks=[echo], reload_dataloaders_every_n_epochs=1, max_epochs=len(LENGTHS))
    trains.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model.epochs


def test_with_a_reload_in_each_epoch_every_epoch_has_all_examples_also_of_a_run_that_is_resumed(tmp_path):
    whole = run(1, Stages(), saves_to=tmp_path / "one.ckpt")
    assert [sorted(epoch) for epoch in whole] == [list(range(length)) for length in LENGTHS]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lightning_echo: a pass has")
        resumed = run(1, Stages(LENGTHS[1]), tmp_path / "one.ckpt")
    assert resumed[1:] == whole[1:]


def test_with_a_reload_within_a_pass_the_rest_of_it_is_left_out_and_that_is_said():
    with pytest.warns(UserWarning, match="the rest of that pass is left out"):
        _, second, third, _ = run(2, Stages())
    assert {*second, *third} == set(range(40))  # all of the grown data in one pass of its own


@pytest.mark.parametrize("in_pass", [False, True])
def test_a_state_that_is_saved_after_the_growth_goes_on_with_the_next_pass(in_pass):
    options = {"insertion_point": "after_augmentation", "seed": 0}
    data = Growing(24)
    first = EchoLoader(shuffled(data), 1, **options)
    iterator = iter(first)
    taken = [next(iterator) for _ in range(2 if in_pass else 6)]
    data.length = 36
    state = first.state_dict()
    assert (state["layout"]["length"], state["new_length"], len(taken)) == (24, 36, 2 if in_pass else 6)
    second = EchoLoader(shuffled(Growing(36)), 1, **options)
    second.load_state_dict(state)
    with pytest.warns(UserWarning, match="a pass has 36 examples now, and had 24"):
        found = fresh_of(second, 1)
    assert sorted(found) == list(range(36))
    for length in (24, 36):
        EchoLoader(shuffled(Growing(length)), 1, **options).load_state_dict(state)
    with pytest.raises(EchoStateError, match="the state is of a pass of 24 items"):
        EchoLoader(shuffled(Growing(28)), 1, **options).load_state_dict(state)


def test_workers_that_are_ended_within_an_epoch_begin_a_new_pass_over_a_data_set_that_has_grown():
    data = Growing(24)
    loader = EchoLoader(shuffled(data, workers=1), 1, insertion_point="after_augmentation", seed=0)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    data.length = 36
    with pytest.warns(UserWarning, match="a pass has 36 examples now, and had 24"):
        next(iterator)
    assert loader.state_dict()["plan"]["position"] == 36 + 4
    loader.close()
