"""`EchoLoader` in one process: what it says, how long its epochs are, what it counts, and that its state is exact.

Without workers, so that hundreds of small runs take seconds; tests/integration runs the same with real workers.
"""

import logging
from itertools import islice

import pytest
import torch
from echo_cases import BATCH_SIZE, LENGTH, POINTS, STEPS, echo, plain_loader, played, values
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.loader.run import EchoRun
from lightning_echo.loader.state import EchoCounts
from lightning_echo.plan.each import EachPlan
from lightning_echo.plan.memory import MemoryPlan


class TestEpochs:
    @pytest.mark.parametrize(("factor", "steps"), [(1, 8), (1.5, 12), (2.37, 19), (4, 32)])
    def test_a_full_pass_has_factor_times_as_many_steps(self, factor, steps):
        loader = echo(factor, epoch_length="full_pass")
        assert len(loader) == steps
        assert [len(list(loader)) for _ in range(2)] == [steps] * 2

    def test_a_full_pass_follows_the_factor_from_epoch_to_epoch(self):
        loader = echo(2, epoch_length="full_pass", buffer_size=30)
        lengths = []
        for factor in (4, 1, 2.5):
            lengths.append(len(list(loader)))
            loader.factor = factor
        assert [*lengths, len(list(loader))] == [16, 32, 8, 20]

    @pytest.mark.parametrize("cut", [1, 3, 7])
    def test_an_epoch_cut_short_goes_on_where_it_stopped(self, cut):
        stream, loader = played(echo(), 6), echo()
        batches = []
        for _ in range(4):
            batches += values(islice(loader, cut))
        assert batches == stream[: 4 * cut]
        assert len(played(loader, 1)) == STEPS


class TestASecondIteration:
    def test_while_the_first_is_under_way_is_refused_with_a_hint_and_does_no_harm(self):
        stream, loader = played(echo(), 2), echo()
        first = iter(loader)
        batches = values(islice(first, 3))
        counts, state, second = loader.counts, loader.state_dict(), iter(loader)
        with pytest.raises(RuntimeError, match=r"is being iterated already.*iterate the loader inside, EchoLoader\.loader"):
            next(second)
        assert list(second) == [], "it stays over"
        assert (loader.counts, loader.state_dict()) == (counts, state)
        batches += values(first)
        assert batches == stream[:STEPS]

    def test_after_the_first_was_dropped_is_the_next_epoch(self):
        stream, loader = played(echo(), 2), echo()
        first = iter(loader)
        batches = values(islice(first, 3))
        del first
        assert batches + values(loader) == stream[: 3 + STEPS]

    def test_is_refused_too_while_the_first_is_only_made(self):
        """Lightning makes its iterator before ``on_train_start``, where a callback may look at data."""
        loader = echo()
        first, second = iter(loader), iter(loader)
        with pytest.raises(RuntimeError, match=r"is over, drop its iterator"):
            next(second)
        assert values(first) == played(echo(), 1)


class TestPassesAndSeconds:
    @pytest.mark.parametrize("point", POINTS)
    def test_passes_are_counted_by_what_was_read(self, point):
        loader = echo(2.5, point)
        assert loader.passes == 0
        loader.loader.dataset.reads.clear()  # of the proof
        for epoch in range(1, 12):
            played(loader, 1)
            whole, rest = divmod(sum(loader.loader.dataset.reads.values()), LENGTH)
            share = rest / BATCH_SIZE / STEPS if point == "after_batching" else rest / LENGTH
            assert loader.passes == pytest.approx(whole + share, abs=1e-9), epoch
        assert echo(1, point).passes == 0

    @pytest.mark.parametrize("point", POINTS)
    @pytest.mark.parametrize("workers", [0, 1])
    def test_passes_are_those_of_the_batch_in_use_also_where_later_ones_are_planned_at_rest_and_resumed(self, point, workers):
        loader = echo(2.5, point, plain_loader(num_workers=workers), num_replicas=2, rank=1)
        here, size = -(-LENGTH // 2), BATCH_SIZE
        length = -(-here // size) if point == "after_batching" else here

        def by_state(of):
            state = of.state_dict()
            return (0 if state["plan"] is None else state["plan"]["position"]) / length

        for epoch in range(3):
            for _ in loader:
                assert loader.passes == by_state(loader)
            loader.factor = 1 + epoch
        loader.close()
        resumed = echo(2, point, plain_loader(num_workers=workers), num_replicas=2, rank=1)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.passes == loader.passes == by_state(resumed) > 0

    @pytest.mark.parametrize("reuse", ["memory", "each"])
    @pytest.mark.parametrize("point", POINTS)
    def test_passes_are_counted_without_a_state_and_without_planning_again(self, monkeypatch, point, reuse):
        """With 500,000 live examples a state takes tens of milliseconds, and passes are asked for at each end of an epoch."""
        loader, plan = echo(2.5, point, reuse=reuse), MemoryPlan if reuse == "memory" else EachPlan
        played(loader, 3)
        expected, calls = loader.passes, []
        with monkeypatch.context() as patched:
            for owner, name in ((EchoRun, "state"), (plan, "state"), (plan, "from_state"), (plan, "next_batch"), (plan, "live")):
                patched.setattr(owner, name, lambda *args, name=name: calls.append(name))
            counted = loader.passes
        assert (counted, calls) == (expected, [])
        assert expected > 1

    @pytest.mark.parametrize("point", POINTS)
    def test_seconds_are_measured_for_every_example_and_batch_that_was_read(self, point):
        loader = echo(2.5, point)
        loader.loader.dataset.reads.clear()  # of the proof
        played(loader, 5)
        seconds, read = loader.seconds, sum(loader.loader.dataset.reads.values())
        assert seconds.examples == loader.counts.fresh == read
        assert seconds.batches == (round(loader.passes * STEPS) if point == "after_batching" else 5 * STEPS)
        assert min(seconds.source, seconds.rest, seconds.collate) > 0
        seconds.source = -1
        assert loader.seconds.source > 0, "what was asked for is a copy"


class TestSeedAndRandomness:
    def test_it_is_that_of_seed_everything_if_there_was_one(self, monkeypatch):
        monkeypatch.setenv("PL_GLOBAL_SEED", "5")
        assert played(echo(seed=None), 2) == played(echo(seed=5), 2)
        assert played(echo(seed=6), 2) != played(echo(seed=None), 2)

    def test_else_it_is_that_of_the_loaders_generator(self, monkeypatch):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        loader = echo(seed=None, loader=plain_loader(generator=torch.Generator().manual_seed(5)))
        assert played(loader, 2) == played(echo(seed=5), 2)

    def test_else_it_is_drawn_once_and_kept_in_the_state(self, monkeypatch):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        loader, other = echo(seed=None), echo(seed=None)
        assert loader.seed is None
        first = played(loader, 1)
        assert isinstance(loader.seed, int)
        assert played(other, 1) != first
        resumed = echo(seed=None)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.seed == loader.seed
        assert played(resumed, 2) == played(loader, 2)


class TestWhatItSays:
    def test_what_was_chosen_is_logged_once_with_the_reason(self, caplog):
        loader = EchoLoader(DataLoader(TensorDataset(torch.arange(20)), batch_size=4), 2, seed=0)
        with caplog.at_level(logging.INFO, logger="lightning_echo"):
            for _ in range(3):
                list(loader)
            loader.close()
            list(loader)
        first, second = (record.getMessage() for record in caplog.records)
        assert first == repr(loader)
        assert second.startswith("insertion_point='auto' chose after_augmentation: ")
        assert "TensorDataset" in second

    def test_only_the_first_rank_says_it(self, caplog):
        with caplog.at_level(logging.INFO, logger="lightning_echo"):
            list(echo(num_replicas=2, rank=1))
            assert not caplog.records
            list(echo(num_replicas=2, rank=0))
            assert len(caplog.records) == 1


def test_starting_over_is_the_run_from_its_start():
    loader = echo(2, buffer_size=20)
    first = played(loader, 2)
    loader.factor = 4
    played(loader, 1)
    loader.restart()
    assert loader.factor == 2
    assert loader.counts == EchoCounts()
    assert played(loader, 2) == first


def test_it_runs_from_its_first_batch_until_it_is_closed_or_goes_elsewhere():
    loader = echo()
    assert not loader.is_running
    batches = iter(loader)
    assert not loader.is_running, "nothing happens before the first batch"
    next(batches)
    state = loader.state_dict()
    assert loader.is_running
    list(batches)
    assert loader.is_running, "workers live on from epoch to epoch"
    loader.close()
    assert not loader.is_running
    list(loader)
    assert loader.is_running
    loader.load_state_dict(state)
    assert not loader.is_running
    list(loader)
    loader.restart()
    assert not loader.is_running
