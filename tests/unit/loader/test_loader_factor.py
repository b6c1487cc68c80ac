"""The factor of an `EchoLoader` is set while it runs: from which batch on it counts, and what is refused."""

from contextlib import closing

import pytest
from echo_cases import LENGTH, STEPS, delivered_indices, echo, plain_loader, played
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader
from lightning_echo.insertion import InsertionPoint
from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.pipeline.prefetch import DEPTH


class TestSettingTheFactor:
    def test_it_may_count_from_a_later_batch(self):
        late, later = (echo(1, loader=plain_loader(num_workers=2)) for _ in range(2))
        with closing(late), closing(later):
            played(late, 1)
            played(later, 1)
            at = late.planned_ahead + STEPS
            assert at > STEPS
            with pytest.raises(ValueError, match=rf"not planned yet, here {at} or more, got {at - 1}.*smaller prefetch_factor"):
                late.set_factor(3, since=at - 1)
            assert late.factor == 1
            late.set_factor(3, since=at + 4)
            assert (late.factor, late.factor_since, late.factor_in_force) == (3, at + 4, 1)
            epoch = iter(later)
            first = [next(epoch) for _ in range(4)]
            later.factor = 3
            assert later.factor_since == at + 4
            assert [batch.tolist() for batch in [*first, *epoch]] == [batch.tolist() for batch in late]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_before_the_first_batch_it_counts_from_the_first_one(self, workers):
        loader = echo(2, loader=plain_loader(num_workers=workers))
        with pytest.raises(ValueError, match=r"since must be 0 or None before the first batch, got 3.* after the first batch"):
            loader.set_factor(4, since=3)
        assert (loader.factor, loader.factor_since) == (2, 0)
        loader.set_factor(4, since=0)
        assert (loader.factor_since, loader.factor_in_force) == (0, 4)

    @pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
    def test_without_workers_it_counts_from_the_next_batch(self, point):
        loader = echo(4, point)
        played(loader, 3)
        loader.factor = 1
        fresh = loader.counts.fresh
        list(loader)
        assert loader.last_batch_counts.echoed == 0
        assert loader.counts.fresh - fresh == sum(map(len, plain_loader()))
        loader.factor = 2
        played(loader, 20)
        share = (loader.counts.delivered - loader.counts.fresh) / loader.counts.delivered
        assert 0.35 < share < 0.6

    @pytest.mark.parametrize(("workers", "prefetch", "batches"), [(0, None, 0), (1, 2, 2 + DEPTH), (3, 4, 12 + DEPTH)])
    def test_with_workers_it_counts_from_the_first_batch_that_cannot_be_in_flight(self, workers, prefetch, batches):
        loader = plain_loader(num_workers=workers, **({"prefetch_factor": prefetch} if workers else {}))
        assert kind_of(loader).lookahead(8) == batches

    @pytest.mark.parametrize("begun", [False, True])
    def test_to_one_that_the_buffer_cannot_hold_is_refused_with_the_least_that_can(self, begun):
        loader = echo(1.5, buffer_size=3)
        if begun:
            played(loader, 1)
        with pytest.raises(ValueError, match=r"buffer_size=3 is too small for factor=8: .* Use at least 6"):
            loader.factor = 8
        assert loader.factor == 1.5
        assert len(played(loader, 1)) == STEPS


class TestTakingThePlaceOfAnother:
    @pytest.mark.parametrize("before", ["after_batching", "before_augmentation"])
    def test_of_another_point_goes_on_with_the_next_pass(self, before):
        point = "after_augmentation" if before == "before_augmentation" else "before_augmentation"
        first, second = echo(1, before), echo(1, point)
        played(first, 1)
        next(iter(first))  # of the second pass
        second.follow(first)
        assert second.state_dict()["begin_at"] == [2 * LENGTH, 2 * STEPS]
        assert second.counts == first.counts
        assert sorted(delivered_indices(second)) == list(range(LENGTH))

    def test_goes_on_with_its_factor_and_looks_ahead_by_that_alone(self):
        first, second = echo(8, "after_batching"), echo(4, "before_augmentation")
        next(iter(first))
        first.factor = 2
        second.follow(first)
        assert second.factor == 2
        assert second.state_dict()["largest_factor"] == 2


def test_by_batches_a_change_counts_from_what_can_be_in_flight_by_the_largest_factor_so_far():
    """Batches that are in flight were planned with it."""
    with closing(echo(1, "after_batching", plain_loader(num_workers=1))) as loader:
        next(iter(loader))
        loader.factor = 8
        assert loader.factor_since == 1 + (2 + 3) + DEPTH
        loader.factor = 2
        number, factor = loader.state_dict()["plan"]["pending"][-1]
        assert (number, factor) == (1 + kind_of(loader.loader).at(InsertionPoint.after_batching).lookahead(8.0), 2)


def test_a_resumed_epoch_keeps_the_length_that_it_began_with_and_says_so():
    def full_pass():
        return EchoLoader(DataLoader(range(24), 4), 2, epoch_length="full_pass", insertion_point="after_augmentation", seed=0)

    loader = full_pass()
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    loader.factor = 3
    resumed = full_pass()
    assert not resumed.has_kept_length
    resumed.load_state_dict(loader.state_dict())
    assert (len(resumed), resumed.has_kept_length) == (12, True)
    assert sum(1 for _ in resumed) == 12 - 5
    assert (len(resumed), resumed.has_kept_length) == (18, False)
