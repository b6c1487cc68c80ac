"""A run meter says who had the cores: it looks after 4, 8, 16 ... steps and at an epoch's end, and joins ranks by their nodes."""

import math
from typing import ClassVar

import pytest
import torch
from meters import Loader, Run

from lightning_echo.data.machine import NOT_SEEN, CoreUse, Load
from lightning_echo.training import meters as module

BUSY, QUIET = CoreUse(2.0, 0.25, 2.0, 0.75, 0.0), CoreUse(2.0, 1.5, 2.0, 0.0, 0.0)


class Watch:
    made: ClassVar = []

    def __init__(self, apart=()):
        self.apart, self.looks, self.use = list(apart), 0, BUSY
        Watch.made.append(self)

    def look(self):
        self.looks += 1


@pytest.fixture(autouse=True)
def watches(monkeypatch):
    monkeypatch.setattr(module, "CoreWatch", Watch)
    Watch.made = []
    return Watch.made


def test_each_epoch_is_looked_at_by_itself_after_few_steps_and_at_its_end(watches):
    run = Run(Loader())
    looks = []
    run.meter.begin_epoch(run.loader)
    for _ in range(40):
        run.step()
        looks.append(watches[-1].looks)
    assert [step for step in range(2, 41) if looks[step - 1] > looks[step - 2]] == [4, 8, 16, 32]
    assert run.meter.end_epoch(run.loader).load == Load(2.0, 0.25, 1.75, 0.75)
    assert watches[-1].looks == 5
    run.meter.begin_epoch(run.loader)
    assert watches[-1].looks == 0


@pytest.mark.parametrize("loader", [None, Loader(), Loader(workers=0)])
def test_it_is_known_of_every_loader_but_not_with_a_reader_in_other_processes(loader, watches):
    assert Run(loader).epoch(8).load.sentence.startswith("Other programs took 1.8 of 2 cores: this one had 0.25")
    shared = Loader()
    shared.sharing = object()
    del watches[:]
    run = Run(shared)
    run.meter.begin_epoch(shared)
    for _ in range(8):
        run.step()
    assert run.meter._gather_seconds(shared)[1].load is None
    assert watches == []


@pytest.mark.parametrize(
    ("nodes", "others", "expected"),
    [
        ([0, 0], [CoreUse(2.0, 0.25, 2.0, 0.75, 0.0)], Load(2.0, 0.5, 1.5, 0.75)),  # two ranks of a machine are one program
        ([0, 1], [QUIET], Load(2.0, 0.25, 1.75, 0.75)),  # the other node is quiet
        ([0, 1], [CoreUse(4.0, 0.25, 4.0, 0.9375, 0.0)], Load(4.0, 0.25, 3.75, 0.9375)),  # the other one is busier
        ([0, 0], [NOT_SEEN], None),  # what others took is what the ranks did not
        ([0, 1], [NOT_SEEN], Load(2.0, 0.25, 1.75, 0.75)),
        ([0, 1], [CoreUse(2.0, 2.0, 2.0, 0.0, 0.5)], Load(2.0, 0.25, 1.75, 0.75)),
    ],
)
def test_of_several_ranks_it_is_that_of_the_node_on_which_others_took_most(nodes, others, expected, watches):
    run = Run(others=[(math.nan,) * 6 + tuple(each) for each in others])
    run.meter.nodes = nodes
    assert run.epoch(8).load == expected


def test_other_ranks_that_this_one_has_started_are_no_part_of_it(watches, monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 70)
    run = Run(Loader(), others=[(math.nan,) * 11])
    gather = run.module.all_gather
    run.module.all_gather = lambda values: (  # of the same node, with another process id
        torch.stack([values, torch.where(values == 70, 71, values)]) if values.dtype == torch.int64 else gather(values)
    )
    run.meter.stop()
    run.meter.start(run.trainer, run.module, run.loader)
    assert watches[-1].apart == [71]
    alone = Run(Loader())
    alone.meter.begin_epoch(alone.loader)
    assert watches[-1].apart == []
