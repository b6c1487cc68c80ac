"""A run without the loader around it: it follows another one, and what is made later over the same data goes on with it."""

import gc
import weakref

import pytest
import torch
from own_states import Ends
from torch.utils.data import DataLoader, IterableDataset

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader import run as run_module
from lightning_echo.loader.resuming import Beginning, predecessor_of
from lightning_echo.loader.run import EchoRun
from lightning_echo.loader.setting import Setting

STEPS = 6


class Numbers(list):
    """Can be referred to weakly."""


def numbers():
    return Numbers(map(float, range(22)))


def run_over(data, factor=2.0, seed=5, **options):
    plain = DataLoader(data, 4, shuffle=True, **options)
    return EchoRun(Setting(plain, InsertionPoint.after_augmentation, None, factor, None, "fixed"), factor, seed)


def epoch_of(run, batches=STEPS, is_alone=False):
    run.begin_epoch(keeps_length=False, is_alone=is_alone)
    return [run.fetch().tolist() for _ in range(batches)]


def told(data, epoch, **options):
    """A run that Lightning has told the epoch."""
    run = run_over(data, **options)
    run.heard_epoch = epoch
    return run


def test_a_later_one_over_the_same_data_goes_on_in_the_next_epoch_with_its_own_factor():
    data, alone = numbers(), run_over(numbers())
    expected = [epoch_of(alone), epoch_of(alone)]
    first = told(data, 0)
    found = [epoch_of(first, is_alone=True)]
    second = told(data, 1)
    found.append(epoch_of(second, is_alone=True))
    assert found == expected
    assert not first.is_running
    third = told(data, 2, factor=4.0)
    epoch_of(third, is_alone=True)
    assert (third.factor.value, third.delivery.progress.delivered) == (4.0, 3 * STEPS)


def test_with_another_seed_it_cannot_and_says_so():
    data = numbers()
    first = told(data, 0)
    epoch_of(first, is_alone=True)
    second = told(data, 1, seed=6)
    with pytest.warns(UserWarning, match="the Trainer is in epoch 1, but this EchoLoader is at the start of its run"):
        epoch_of(second, is_alone=True)


def test_two_that_begin_with_the_same_part_of_the_data_are_warned_about():
    data = numbers()
    epoch_of(told(data, 0), is_alone=True)
    with pytest.warns(UserWarning, match="begins where the one before it over the same data set began.* the same part of a pass"):
        epoch_of(told(data, 0), is_alone=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("first", "second", "epochs"),
    [({}, {"seed": 6}, 1), ({"factor": 1.0}, {}, 1), ({}, {}, 4), ({"seed": None}, {"seed": None}, 1)],
    ids=["another seed", "a whole pass", "several epochs", "a seed that is drawn"],
)
def test_two_that_do_not_are_not(first, second, epochs):
    data = numbers()
    for options in (first, second):
        run = told(data, 0, **options)
        for _ in range(epochs):
            epoch_of(run, is_alone=True)
        del run
    assert data


def test_the_name_of_one_of_several_begins_what_it_says_and_gives_it_a_seed_of_its_own():
    runs = []
    for name in ("scans", "text"):
        torch.manual_seed(1)
        run = run_over(numbers(), seed=None, generator=torch.Generator().manual_seed(3))
        run.says.name = name
        epoch_of(run, 1)
        runs.append(run)
    assert runs[0].seed != runs[1].seed
    with pytest.warns(UserWarning, match="^lightning_echo: scans: watch out$"):
        runs[0].warn("watch out")


class Loader:
    def __init__(self, dataset):
        self.dataset = dataset


class Data:
    """Equals all of its class, as a data set that compares by its options does."""

    def __eq__(self, other):
        return isinstance(other, Data)

    __hash__ = None


class Run:
    """As little of a run as is asked for."""

    def __init__(self, loader, epochs=1):
        self.beginning = Beginning(epochs=epochs)
        self.predecessor = predecessor_of(self, loader)


@pytest.fixture
def data():
    return Data()


@pytest.mark.parametrize("make", [Data, lambda: torch.arange(3)], ids=["equal", "tensor"])
def test_data_that_is_equal_is_not_the_same_data(make):
    data, others = make(), make()
    first = Run(Loader(data))
    assert Run(Loader(others)).predecessor is None
    second = Run(data)  # an iterable without a data set is the data itself
    assert second.predecessor is first


def test_data_is_not_kept_alive_and_neither_is_a_run():
    gone, data = [], Data()
    run = Run(Loader(data))
    weakref.finalize(data, gone.append, "data")
    weakref.finalize(run, gone.append, "run")
    del run
    gc.collect()
    assert gone == ["run"]
    del data
    gc.collect()
    assert gone == ["run", "data"]


@pytest.mark.parametrize("data", [[1, 2], {"a": 1}, 7], ids=repr)
def test_over_data_that_cannot_be_referred_to_weakly_nothing_is_found(data):
    assert [Run(Loader(data)).predecessor for _ in range(2)] == [None, None]


class Stateful(Ends, IterableDataset):
    def __init__(self, length=22):
        super().__init__(length)


def steps_of_epochs(run, epochs, **options):
    """The steps of epochs of a run over a stream."""
    found = []
    for _ in range(epochs):
        run.begin_epoch(keeps_length=False, is_alone=False, **options)
        steps = 0
        while not run.delivery.progress.over:
            try:
                run.fetch()
            except StopIteration:
                break
            steps += 1
        found.append(steps)
    return found


def over_a_stream(factor=2.0, epoch_length="fixed", **options):
    plain = DataLoader(Stateful(), 4, **options)
    return EchoRun(Setting(plain, InsertionPoint.after_augmentation, 8, factor, None, epoch_length), factor, 5)


class TestSteps:
    """22 examples in batches of four: six, the last of them with two."""

    def test_over_a_stream_with_a_state_are_kept_from_the_second_epoch_on(self):
        first, *others = steps_of_epochs(over_a_stream(), 4)
        assert (first > 8, others) == (True, [6, 6, 6])
        assert steps_of_epochs(over_a_stream(drop_last=True), 3)[1:] == [5, 5]

    def test_are_those_of_passes_where_nothing_is_echoed_or_the_user_asks_or_an_epoch_is_not_this_loaders(self):
        assert steps_of_epochs(over_a_stream(1.0), 3) == [6, 6, 6]
        of_passes = steps_of_epochs(over_a_stream(epoch_length="full_pass"), 4)
        assert min(of_passes) > 8
        assert steps_of_epochs(over_a_stream(), 4, is_epoch=False) == of_passes
        assert steps_of_epochs(over_a_stream(), 4, is_limited=True)[0] == of_passes[0]

    @pytest.mark.parametrize(("of_ranks", "steps"), [([None, None], 6), ([4], 4), ([9], 6)])
    def test_are_the_least_of_all_ranks_which_are_asked_once_each_has_ended_a_pass(self, monkeypatch, of_ranks, steps):
        asked = []

        def gathered(value):
            if isinstance(value, bool):  # of the sizes that ranks settle on
                return [value]
            asked.append(value)
            return [value, of_ranks[0]]

        run = over_a_stream()
        monkeypatch.setattr(run_module, "gathered", gathered)
        found = steps_of_epochs(run, 3)
        if of_ranks[0] is None:
            assert (min(found) > 8, asked) == (True, [6, 6]), "a rank does not know yet: all keep passes"
        else:
            assert (found[1:], asked) == ([steps, steps], [6])

    def test_are_in_a_state_also_where_a_pass_is_cut(self):
        run = over_a_stream()
        steps_of_epochs(run, 2)
        resumed = over_a_stream()
        resumed.load_state_dict(run.state_dict(None, None), None)
        assert run.state().kept_steps == resumed.state().kept_steps == 6
        assert steps_of_epochs(resumed, 2) == [6, 6]

    def test_of_a_state_that_does_not_know_how_much_of_its_pass_was_read_are_those_of_the_next_pass(self):
        """As checkpoints that were saved before epochs kept their steps."""
        run = over_a_stream()
        run.begin_epoch(keeps_length=False, is_alone=False)
        for _ in range(3):
            run.fetch()
        state = run.state_dict(None, None)
        del state["stream"]["workers"][0]["in_pass"]
        resumed = over_a_stream()
        resumed.load_state_dict(state, None)
        rest, second, *others = steps_of_epochs(resumed, 4)
        assert rest + 3 == steps_of_epochs(over_a_stream(), 1)[0]
        assert (second > 8, others) == (True, [6, 6])
