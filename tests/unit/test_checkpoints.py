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


class OtherData(Data):
    pass


OURS = EchoLoader(DataLoader(torch.arange(24), 4), 2, insertion_point="after_augmentation").state_dict()
OTHERS = {"position": 3}  # of another stateful loader


def checkpoint_of(loader_states=None, **states):
    """As Lightning saves it: the loaders' states with the loop, and a data module's under the name of its class."""
    loop = {"epoch_loop": {}} if loader_states is None else {"epoch_loop": {}, "combined_loader": list(loader_states)}
    return {"epoch": 1, "loops": {"fit_loop": {"state_dict": loop}}, **states}


def adapted(checkpoint, datamodule=None, *, echoed_before, echoes):
    before = copy.deepcopy(checkpoint)
    adapt_checkpoint(checkpoint, datamodule, echoed_before=echoed_before, echoes=echoes)
    loop, loop_before = (each["loops"]["fit_loop"]["state_dict"] for each in (checkpoint, before))
    assert {name: each for name, each in loop.items() if name != "combined_loader"} == {"epoch_loop": {}}
    assert {name: each for name, each in checkpoint.items() if name != "loops"} == {
        name: each for name, each in before.items() if name != "loops"
    }, "nothing else changes"
    assert loop.get("combined_loader") in (None, [OTHERS], loop_before.get("combined_loader")), (
        "all, nothing, or what is not ours"
    )
    return loop.get("combined_loader")


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


@pytest.mark.parametrize("lacking", sorted(OURS))
def test_a_state_of_ours_that_lacks_a_field_is_kept_so_that_the_loader_refuses_it(lacking):
    damaged = {name: value for name, value in OURS.items() if name != lacking}
    assert adapted(checkpoint_of([damaged]), echoed_before=True, echoes=True) == [damaged]


@pytest.mark.parametrize("echoes", [False, True])
@pytest.mark.parametrize("checkpoint", [{}, {"loops": {}}, {"loops": {"fit_loop": {}}}, checkpoint_of()])
def test_a_checkpoint_without_loader_states_is_left_as_it_is(checkpoint, echoes):
    before = copy.deepcopy(checkpoint)
    adapt_checkpoint(checkpoint, None, echoed_before=not echoes, echoes=echoes)
    assert checkpoint == before


# ---------------------------------------------------------------------- the data module's own state


def test_a_plain_run_s_data_module_state_reaches_the_module_inside_an_echo_data_module():
    module = EchoDataModule(Data(), 2)
    adapted(checkpoint_of(Data={"seen": 5}), module, echoed_before=False, echoes=True)
    assert module.datamodule.seen == 5


def test_an_echo_data_module_s_state_reaches_the_user_s_module_without_it():
    module, state = Data(), {"datamodule": {"seen": 6}, "loader": OURS}
    assert not adapted(checkpoint_of([OURS], EchoDataModule=state), module, echoed_before=True, echoes=False)
    assert module.seen == 6


def test_where_lightning_restores_the_state_by_itself_nothing_is_loaded_twice():
    plain, echoing = Data(), EchoDataModule(Data(), 2)
    both = {"Data": {"seen": 7}, "EchoDataModule": {"datamodule": {"seen": 8}, "loader": None}}
    adapted(checkpoint_of(**both), plain, echoed_before=True, echoes=False)
    adapted(checkpoint_of(**both), echoing, echoed_before=True, echoes=True)
    assert (plain.seen, echoing.datamodule.seen) == (None, None)


def test_the_state_of_another_data_module_is_left_alone():
    plain, echoing = OtherData(), EchoDataModule(OtherData(), 2)
    for module, echoes in ((plain, False), (echoing, True)):
        adapted(checkpoint_of(Data={"seen": 9}), module, echoed_before=False, echoes=echoes)
    assert (plain.seen, echoing.datamodule.seen) == (None, None)
