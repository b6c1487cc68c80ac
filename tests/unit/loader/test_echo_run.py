"""A run without the loader around it: started, stopped and gone on with. What it delivers does not depend on how often."""

import copy
import pickle
import warnings
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_echo.insertion import InsertionPoint
from lightning_echo.loader.run import EchoRun
from lightning_echo.loader.setting import Setting
from lightning_echo.loader.state import EchoCounts

LENGTH, BATCH_SIZE = 22, 4
STEPS = 6


class Numbers(Dataset):
    """Its own number for each example; raises where it is told to."""

    def __init__(self, length=LENGTH, fails_at=None):
        self.length, self.fails_at, self.reads = length, fails_at, Counter()

    def __getitem__(self, index):
        if index == self.fails_at:
            self.fails_at = None
            raise OSError("the disk is away for a moment")
        self.reads[index] += 1
        return float(index)

    def __len__(self):
        return self.length


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def run_over(dataset=None, factor=2.0, point="after_augmentation", seed=5, epoch_length="fixed", **options):
    plain = DataLoader(Numbers() if dataset is None else dataset, BATCH_SIZE, **options)
    setting = Setting(plain, InsertionPoint(point), None, factor, None, epoch_length)
    return EchoRun(setting, factor, seed)


def epoch_of(run, batches=None):
    """Returns the batches of the next epoch, or of the rest of a resumed one; only the first ones where a number is given."""
    run.begin_epoch(keeps_length=False, is_alone=False)
    left = run.delivery.progress.epoch_batches - run.delivery.progress.in_epoch
    return rest_of(run, left if batches is None else batches)


def rest_of(run, batches):
    return [run.fetch().tolist() for _ in range(batches)]


def test_nothing_is_started_before_the_first_batch_and_nothing_is_left_after_the_last_close():
    run = run_over()
    assert (run.is_at_start, run.is_running, run.length()) == (True, False, STEPS)
    run.begin_epoch(keeps_length=False, is_alone=False)
    assert not run.is_running
    run.fetch()
    assert (run.is_at_start, run.is_running) == (False, True)
    run.close()
    assert not run.is_running


@pytest.mark.parametrize("point", ["after_augmentation", "after_batching"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 2.37])
def test_a_run_that_is_stopped_after_every_batch_delivers_what_an_uninterrupted_one_does(factor, point):
    whole, stopped = (run_over(factor=factor, point=point, shuffle=True) for _ in range(2))
    expected = [epoch_of(whole) for _ in range(3)]
    found = []
    for _ in range(3):
        stopped.begin_epoch(keeps_length=False, is_alone=False)
        found.append([])
        for _ in range(STEPS):
            found[-1].append(stopped.fetch().tolist())
            stopped.close()
    assert found == expected
    fresh = whole.delivery.counts.fresh
    assert stopped.delivery.counts == EchoCounts(fresh, whole.delivery.counts.echoed, stopped.delivery.counts.refetched)


def test_passes_are_what_was_read_over_what_a_pass_has():
    data = Numbers()
    run = run_over(data, factor=2.0)
    assert run.passes == 0
    epoch_of(run)
    assert run.passes == sum(data.reads.values()) / LENGTH


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_state_goes_on_in_another_run(kept):
    whole = run_over(shuffle=True)
    expected = epoch_of(whole) + epoch_of(whole)
    saved = run_over(shuffle=True)
    epoch_of(saved, kept)
    state = copy.deepcopy(saved.state().to_dict())
    resumed = run_over(shuffle=True, seed=None)
    resumed.load_state_dict(state, None)
    assert resumed.seed == 5
    assert resumed.state().to_dict() == state, "a state that was loaded is the state"
    found = epoch_of(resumed) if kept < STEPS else []
    found += epoch_of(resumed)
    assert found == expected[kept:]


def test_asking_for_the_state_changes_nothing():
    one, other = run_over(shuffle=True), run_over(shuffle=True)
    epoch_of(one, 3)
    epoch_of(other, 3)
    assert one.state().to_dict() == one.state().to_dict() == other.state().to_dict()
    assert rest_of(one, 3) == rest_of(other, 3)


def test_a_restart_is_the_start():
    run = run_over(shuffle=True)
    first = epoch_of(run)
    run.change_factor(4.0)
    epoch_of(run)
    run.restart()
    assert (run.is_at_start, run.factor.value, run.delivery.counts) == (True, 2.0, EchoCounts())
    assert epoch_of(run) == first


def test_after_an_error_of_the_data_set_the_batch_that_nobody_got_comes_again():
    expected = epoch_of(run_over(shuffle=True))
    run = run_over(Numbers(fails_at=int(expected[2][0])), shuffle=True)
    run.begin_epoch(keeps_length=False, is_alone=False)
    found = []
    while len(found) < STEPS:
        try:
            found.append(run.fetch().tolist())
        except OSError:
            assert not run.is_running, "workers are ended"
    assert found == expected


def test_a_pipeline_that_raises_stop_iteration_does_not_end_the_epoch():
    def collate(examples):
        raise StopIteration

    run = run_over(collate_fn=collate)
    run.begin_epoch(keeps_length=False, is_alone=False)
    with pytest.raises(RuntimeError, match="by collate_fn or a transform"):
        run.fetch()


def test_without_a_length_an_epoch_is_a_pass():
    run = run_over(Endless(), factor=1.0)
    assert run.length() == -1
    run.begin_epoch(keeps_length=False, is_alone=False)
    assert sorted(value for batch in rest_of(run, 2) for value in batch) == list(range(8))
    with pytest.raises(StopIteration):
        run.fetch()
    assert run.passes == 1


@pytest.mark.parametrize(("workers", "in_flight"), [(0, 0), (2, 2 * 2 + 2)])
def test_a_new_factor_counts_from_the_first_batch_that_is_not_in_flight(workers, in_flight):
    """In flight: ``prefetch_factor`` batches for each worker, and the two that the thread has ready."""
    run = run_over(shuffle=True, num_workers=workers)
    epoch_of(run, 3)
    run.change_factor(8.0)
    assert run.factor.since == 3 + in_flight
    assert run.factor.in_force(2 + in_flight) == 2.0
    assert run.length() == STEPS, "a fixed epoch has its length whatever the factor"
    run.close()


def test_with_full_passes_the_length_follows_the_factor():
    run = run_over(epoch_length="full_pass")
    assert run.length() == 2 * STEPS
    run.change_factor(3.0)
    assert run.length() == 3 * STEPS


def test_another_run_follows_it_where_it_stands():
    before, alone = run_over(shuffle=True), run_over(shuffle=True)
    epoch_of(before)
    expected = [*epoch_of(alone), *epoch_of(alone)][STEPS:]
    after = run_over(shuffle=True, seed=99)
    after.follow(before)
    assert (after.seed, after.delivery.counts) == (5, before.delivery.counts)
    assert epoch_of(after) == expected


def test_one_of_another_point_follows_with_the_next_pass():
    before, after = run_over(factor=1.0), run_over(factor=1.0, point="after_batching")
    epoch_of(before)
    after.follow(before)
    assert after.state().to_dict()["begin_at"] == [STEPS, STEPS], "batches are its items"
    assert [value for batch in epoch_of(after) for value in batch] == list(range(LENGTH))
    assert after.delivery.counts.fresh == 2 * LENGTH


def test_a_data_set_that_has_grown_begins_the_next_pass_and_says_so():
    data = Numbers(8)
    run = run_over(data, factor=1.0)
    assert epoch_of(run) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    data.length = 10
    with pytest.warns(UserWarning, match="a pass has 10 examples now, and had 8 when it began"):
        run.begin_epoch(keeps_length=False, is_alone=False)
    assert rest_of(run, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_in_a_spawned_process_it_goes_on_without_workers():
    run = run_over(shuffle=True)
    epoch_of(run, 2)
    sent = pickle.loads(pickle.dumps(run))
    assert (sent.is_running, run.is_running) == (False, True)
    assert sent.predecessor is None
    assert rest_of(sent, 4) == rest_of(run, 4)


class TestAmongSeveral:
    """Runs that are made one after the other over the same data."""

    def told(self, data, epoch, **options):
        run = run_over(data, shuffle=True, **options)
        run.heard_epoch = epoch
        return run

    def begin(self, run):
        run.begin_epoch(keeps_length=False, is_alone=True)
        return rest_of(run, STEPS)

    def test_the_later_one_goes_on_where_the_trainer_is_in_the_next_epoch(self):
        data, alone = Numbers(), run_over(shuffle=True)
        expected = [*epoch_of(alone), *epoch_of(alone)]
        first = self.told(data, 0)
        found = self.begin(first)
        assert found + self.begin(self.told(data, 1)) == expected
        assert not first.is_running

    def test_with_another_seed_it_cannot_and_says_so(self):
        data = Numbers()
        first = self.told(data, 0)
        self.begin(first)
        second = self.told(data, 1, seed=6)
        with pytest.warns(UserWarning, match="the Trainer is in epoch 1, but this EchoLoader is at the start of its run"):
            self.begin(second)

    def test_with_a_factor_of_its_own_it_goes_on_with_that(self):
        data = Numbers()
        first = self.told(data, 0)
        self.begin(first)
        second = self.told(data, 1, factor=4.0)
        self.begin(second)
        assert second.factor.value == 4.0
        assert second.delivery.progress.delivered == 2 * STEPS

    def test_two_that_begin_alike_are_warned_about_and_two_that_do_not_are_not(self):
        data = Numbers()
        self.begin(self.told(data, 0))
        with pytest.warns(UserWarning, match="begins where the one before it over the same data set began"):
            self.begin(self.told(data, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = self.begin(self.told(data, 0, seed=6))
        assert len(other) == STEPS


def test_the_name_of_one_of_several_begins_what_it_says_and_gives_it_a_seed_of_its_own():
    runs = []
    for name in ("scans", "text"):
        torch.manual_seed(1)
        run = run_over(seed=None, shuffle=True, generator=torch.Generator().manual_seed(3))
        run.says.name = name
        epoch_of(run, 1)
        runs.append(run)
    assert runs[0].seed != runs[1].seed
    with pytest.warns(UserWarning, match="^lightning_echo: scans: watch out$"):
        runs[0].warn("watch out")
