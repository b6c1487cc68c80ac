"""Which states of a checkpoint are kept, dropped and handed on, for each kind of run that was saved and that resumes."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_echo import EchoDataModule, EchoLoader
from lightning_echo.attachment import adapt_checkpoint


class Data(pl.LightningDataModule):
    """A data module with a state of its own."""

    def __init__(self):
        super().__init__()
        self.seen = None

    def train_dataloader(self):
        return DataLoader(torch.arange(24), 4)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict["seen"]


OURS = EchoLoader(DataLoader(torch.arange(24), 4), 2, insertion_point="after_augmentation").state_dict()
OTHERS = {"position": 3}  # of another stateful loader


def checkpoint_of(loader_states=None, **states):
    """As Lightning saves it: the loaders' states with the loop, and a data module's under the name of its class."""
    loop = {"epoch_loop": {}} if loader_states is None else {"epoch_loop": {}, "combined_loader": list(loader_states)}
    return {"epoch": 1, "loops": {"fit_loop": {"state_dict": loop}}, **states}


def adapted(checkpoint, datamodule=None, *, echoed_before, echoes):
    """The states of loaders that are left. Nothing else in the checkpoint changes."""
    before = copy.deepcopy(checkpoint)
    adapt_checkpoint(checkpoint, datamodule, echoed_before=echoed_before, echoes=echoes)
    loops = [each["loops"]["fit_loop"]["state_dict"] for each in (checkpoint, before)]
    kept, _ = (loop.pop("combined_loader", None) for loop in loops)
    assert checkpoint == before
    return kept


@pytest.mark.parametrize(
    ("saved", "echoed_before", "echoes", "kept"),
    [
        ([OURS], True, True, [OURS]),  # goes on
        ([OURS], True, False, None),  # echoing switched off: Lightning would refuse it
        ([OURS], False, False, [OURS]),  # the user's own EchoLoader, in both runs
        ([OURS], False, True, [OURS]),  # the user's own EchoLoader, now echoed by the callback: the same kind of state
        ([OTHERS], False, False, [OTHERS]),  # another stateful loader, in both runs
        ([OTHERS], False, True, None),  # which echoing has taken the place of
        ([OTHERS], True, False, [OTHERS]),  # of a validation loader that is not ours to drop
        ([OURS, OTHERS], False, True, None),
        ([OURS, OTHERS], True, False, [OTHERS]),  # of a collection, of which one loader was echoed
        ([OURS, OTHERS], True, True, [OURS, OTHERS]),
    ],
)
def test_loader_states_stay_where_the_run_that_resumes_can_take_them(saved, echoed_before, echoes, kept):
    assert adapted(checkpoint_of(saved), echoed_before=echoed_before, echoes=echoes) == kept


@pytest.mark.parametrize("echoes", [False, True])
def test_a_checkpoint_without_loader_states_is_left_as_it_is(echoes):
    for checkpoint in ({}, {"loops": {"fit_loop": {}}}, checkpoint_of()):
        before = copy.deepcopy(checkpoint)
        adapt_checkpoint(checkpoint, None, echoed_before=not echoes, echoes=echoes)
        assert checkpoint == before


OF_ECHOED = {"datamodule": {"seen": 8}, "loader": OURS}


@pytest.mark.parametrize(
    ("saved", "of_plain", "of_echoing"),
    [
        ({"Data": {"seen": 7}}, None, 7),
        ({"EchoDataModule": OF_ECHOED}, 8, None),
        ({"Data": {"seen": 7}, "EchoDataModule": OF_ECHOED}, None, None),
        ({"OtherData": {"seen": 9}}, None, None),
    ],
    ids=["of a plain run", "of an echoed run", "which Lightning itself restores", "of another module"],
)
def test_a_data_modules_state_reaches_it_where_lightning_does_not_restore_it(saved, of_plain, of_echoing):
    plain, echoing = Data(), EchoDataModule(Data(), 2)
    adapted(checkpoint_of([OURS], **saved), plain, echoed_before=True, echoes=False)
    adapted(checkpoint_of(**saved), echoing, echoed_before=False, echoes=True)
    assert (plain.seen, echoing.datamodule.seen) == (of_plain, of_echoing)
