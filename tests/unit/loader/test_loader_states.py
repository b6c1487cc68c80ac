"""`EchoLoader` goes on from its state, exactly where nothing has changed, at the same place where something has."""

import io
import json
import pickle
from itertools import islice

import pytest
import torch
from echo_cases import LENGTH, POINTS, STEPS, Noisy, echo, plain_loader, played, values
from torch.utils.data import RandomSampler

from lightning_echo.loader.loader import EchoLoader
from lightning_echo.schema import EchoStateError


def through_a_checkpoint(state):
    """As Lightning saves and loads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class TestGoingOn:
    EPOCHS = 5

    def make(self, kind, factor=2.37, **options):
        if kind in POINTS:
            return echo(factor, kind, **options)
        if kind == "sampler":
            sampler = RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(3))
            return echo(factor, loader=plain_loader(shuffle=False, sampler=sampler), **options)
        if kind == "full_pass":
            return echo(factor, epoch_length="full_pass", **options)
        if kind == "factor 1, sampler":
            return self.make("sampler", 1, **options)
        return EchoLoader([torch.tensor([[i, 0.0]]) for i in range(7)], factor, seed=3, **options)

    @pytest.mark.parametrize("reuse", ["each", "memory"])
    @pytest.mark.parametrize("kind", [*POINTS, "sampler", "factor 1, sampler", "full_pass", "iterable"])
    def test_from_any_batch_of_any_epoch_in_a_new_process(self, kind, reuse):
        loader, epochs, states = self.make(kind, reuse=reuse), [], []
        for _ in range(3):
            epochs.append([])
            for batch in loader:
                epochs[-1].append((batch.tolist(), loader.counts.fresh, loader.counts.delivered))
                states.append((len(epochs) - 1, len(epochs[-1]), through_a_checkpoint(loader.state_dict())))
        after = [[batch.tolist() for batch in loader] for _ in range(2)]
        for epoch, in_epoch, state in states:
            resumed = self.make(kind, reuse=reuse)
            resumed.load_state_dict(state)
            rest = epochs[epoch][in_epoch:]  # an epoch that was at its end is not gone on with
            for expected in [rest, *epochs[epoch + 1 :]] if rest else epochs[epoch + 1 :]:
                assert [(batch.tolist(), resumed.counts.fresh, resumed.counts.delivered) for batch in resumed] == expected
            assert [[batch.tolist() for batch in resumed] for _ in range(2)] == after

    @pytest.mark.parametrize("point", POINTS)
    def test_on_a_loader_that_is_running(self, point):
        loader = echo(3, point)
        played(loader, 1)
        state = through_a_checkpoint(loader.state_dict())
        expected = played(loader, 3)
        loader.load_state_dict(state)
        assert played(loader, 3) == expected

    def test_the_state_is_the_same_when_asked_twice_and_asking_changes_nothing(self):
        quiet, asked = echo(3), echo(3)
        for expected, batch in zip(quiet, asked, strict=True):
            assert asked.state_dict() == asked.state_dict()
            assert torch.equal(batch, expected)

    def test_a_state_before_the_first_batch_is_one_too(self):
        state = through_a_checkpoint(echo().state_dict())
        assert state
        loader, fresh = echo(), echo()
        loader.load_state_dict(state)
        assert played(loader, 2) == played(fresh, 2)

    def test_a_state_has_the_same_keys_at_any_time(self):
        loader = echo()
        keys = set(loader.state_dict())
        for _ in range(2):
            for _ in loader:
                assert set(loader.state_dict()) == keys

    def test_a_state_is_made_of_plain_types_and_does_not_grow(self):
        loader = echo(4)
        played(loader, 3)
        short = len(json.dumps(loader.state_dict()))
        played(loader, 60)
        assert len(json.dumps(loader.state_dict())) < 1.5 * short

    def test_between_a_new_factor_and_its_first_batch(self):
        def make():
            loader = echo(2, buffer_size=20)
            played(loader, 2)
            loader.factor = 4
            return loader

        loader = make()
        state = through_a_checkpoint(loader.state_dict())
        resumed = echo(2, buffer_size=20)
        resumed.load_state_dict(state)
        assert resumed.factor == 4
        assert played(resumed, 3) == played(loader, 3)

    @pytest.mark.parametrize("sampler", ["shuffled", "with a generator", "without one"])
    @pytest.mark.parametrize("before", [1, 2])
    def test_a_new_factor_may_be_set_between_loading_and_the_first_batch(self, before, sampler):
        """Also where echoing begins just with a pass."""

        def make():
            options = {}
            if sampler != "shuffled":
                generator = torch.Generator().manual_seed(3) if sampler == "with a generator" else None
                draws = RandomSampler(range(LENGTH), replacement=True, generator=generator)
                options = {"shuffle": False, "sampler": draws}
            return echo(before, loader=plain_loader(drop_last=True, **options), buffer_size=20)

        loader = make()
        played(loader, 2)
        state = through_a_checkpoint(loader.state_dict())
        loader.factor = 4
        resumed = make()
        resumed.load_state_dict(state)
        resumed.factor = 4
        assert played(resumed, 12) == played(loader, 12)

    @pytest.mark.parametrize("limit", [3, 0.5])
    def test_the_end_of_a_limited_epoch_is_an_end(self, limit):
        batches = 3 if limit == 3 else 4
        loader = echo()
        loader.limit_train_batches = limit
        epochs = [values(islice(loader, batches)) for _ in range(2)]
        state = through_a_checkpoint(loader.state_dict())
        expected = [values(islice(loader, batches)) for _ in range(2)]
        resumed = echo()
        resumed.limit_train_batches = limit
        resumed.load_state_dict(state)
        assert len(resumed) == STEPS
        assert [values(islice(resumed, batches)) for _ in range(2)] == expected
        assert epochs[0] != expected[0]
        resumed.load_state_dict(state)
        assert len(list(resumed)) == STEPS, "a whole epoch, and not the rest of the limited one"

    @pytest.mark.parametrize("limit", [None, 5, 1.0])
    def test_before_its_end_an_epoch_has_the_batches_that_are_left(self, limit):
        loader = echo()
        loader.limit_train_batches = limit
        list(islice(loader, 3))
        resumed = echo()
        resumed.limit_train_batches = limit
        resumed.load_state_dict(loader.state_dict())
        assert [len(list(resumed)) for _ in range(2)] == [STEPS - 3, STEPS]

    def test_closing_in_between_changes_nothing(self):
        loader, expected = echo(3), played(echo(3), 3)
        batches = []
        for _ in range(3):
            batches += played(loader, 1)
            loader.close()
        assert batches == expected
        assert loader.counts.refetched > 0, "live examples were read again"

    def test_a_pickled_loader_goes_on_too(self):
        loader = echo(3)
        played(loader, 2)
        copied = pickle.loads(pickle.dumps(loader))
        assert copied.counts == loader.counts
        assert played(copied, 2) == played(loader, 2)

    def test_after_an_exception_in_the_data_set_the_batch_is_asked_for_again(self):
        class Failing(Noisy):
            broken = False

            def load(self, index):
                if self.broken:
                    raise OSError("disk is gone")
                return super().load(index)

        dataset, expected = Failing(), played(echo(3), 3)
        loader = echo(3, loader=plain_loader(dataset))
        epoch = iter(loader)
        batches = values(islice(epoch, 3))
        dataset.broken = True
        with pytest.raises(OSError, match="disk is gone"):
            next(epoch)
        assert list(epoch) == [], "an iteration is over after an exception"
        dataset.broken = False
        assert batches + played(loader, 2) == expected[: 3 + 2 * STEPS]


class TestAChangedRun:
    """A state of other workers, buffers or batches: a warning, and nothing of the pass is left out."""

    @staticmethod
    def fresh_of(loader, batches):
        fresh, left = [], batches
        while left:
            for batch in islice(loader, left):
                left -= 1
                fresh += [int(index) for index, _ in batch.tolist()][: loader.last_batch_counts.fresh]
        return fresh

    def check(self, first, second, match):
        """Loads the state of a run that was ended inside a pass; the fresh examples of both make up that pass."""
        fresh = self.fresh_of(first, 11)
        second.load_state_dict(through_a_checkpoint(first.state_dict()))
        with pytest.warns(UserWarning, match=match):
            again = self.fresh_of(second, 60)
        assert LENGTH > len(fresh) > 0
        batch_size = second.loader.batch_size
        taken = len(fresh) // batch_size * batch_size  # in whole batches
        passes = [*fresh[:taken], *again][: 2 * LENGTH]
        assert len(passes) == 2 * LENGTH
        assert set(fresh) | set(again[: LENGTH - taken]) == set(range(LENGTH))
        assert sorted(passes[LENGTH:]) == list(range(LENGTH)), "the next pass is whole"

    # Two batches of 6, more than a quarter of the pass of 43; and half of what a pass allows: (43 - 6) / 2.
    @pytest.mark.parametrize(("reuse", "default"), [("each", 12), ("memory", 18)])
    def test_with_another_buffer(self, reuse, default):
        self.check(echo(reuse=reuse), echo(reuse=reuse, buffer_size=25), rf"saved with buffer_size={default} \(now 25\)")

    @pytest.mark.parametrize("rules", [("each", "memory"), ("memory", "each")])
    def test_with_another_rule_of_reuse(self, rules):
        first, second = (echo(reuse=reuse, buffer_size=18) for reuse in rules)
        self.check(first, second, f"saved with reuse='{rules[0]}' .now '{rules[1]}'.")

    def test_with_another_batch_size(self):
        self.check(echo(), echo(loader=plain_loader(batch_size=4)), r"batch_size=6 \(now 4\)")

    def test_with_another_point(self):
        self.check(echo(), echo(point="before_augmentation"), "insertion_point='after_augmentation'")

    @pytest.mark.parametrize("other", [{"num_workers": 2}, {"batch_size": 4}])
    def test_also_when_the_state_was_saved_again_before_the_first_batch(self, other):
        """A run that is resumed and ends at once, or whose loader is made anew, hands on a state that it never started from."""
        loader = echo()
        self.fresh_of(loader, 11)
        state = loader.state_dict()
        between = echo(loader=plain_loader(**other))
        between.load_state_dict(state)
        saved = through_a_checkpoint(between.state_dict())
        assert {name: saved[name] for name in ("layout", "workers", "buffer_size", "insertion_point")} == {
            name: state[name] for name in ("layout", "workers", "buffer_size", "insertion_point")
        }
        last, before = (echo(loader=plain_loader(**other)) for _ in range(2))
        before.load_state_dict(saved)
        last.follow(before)
        with pytest.warns(UserWarning, match=r"the state was saved with .* leaves nothing out"):
            next(iter(last))

    def test_the_next_epoch_is_a_whole_one(self):
        loader = echo()
        self.fresh_of(loader, 11)
        other = echo(loader=plain_loader(batch_size=4))
        other.load_state_dict(loader.state_dict())
        with pytest.warns(UserWarning, match=r"batch_size=6 \(now 4\)"):
            assert len(list(other)) == len(other) == 11

    def test_with_another_factor_the_states_counts(self):
        loader = echo(3)
        played(loader, 1)
        state, other = loader.state_dict(), echo(2)
        with pytest.warns(UserWarning, match=r"factor=2 is not used: .* factor 3\. Set \.factor after resuming"):
            other.load_state_dict(state)
        assert other.factor == 3
        assert played(other, 2) == played(loader, 2)

    def test_from_its_first_batch_on_the_state_is_one_of_the_changed_run(self):
        loader = echo()
        self.fresh_of(loader, 11)
        changed, again = (echo(loader=plain_loader(batch_size=4)) for _ in range(2))
        changed.load_state_dict(loader.state_dict())
        with pytest.warns(UserWarning, match=r"batch_size=6 \(now 4\)"):
            self.fresh_of(changed, 3)
        state = through_a_checkpoint(changed.state_dict())
        assert state["layout"]["batch_size"] == 4
        again.load_state_dict(state)  # a warning would be an error
        assert [batch.tolist() for batch in islice(again, 5)] == [batch.tolist() for batch in islice(changed, 5)]

    def test_a_loader_with_a_state_is_not_at_its_start_even_of_a_run_without_a_batch(self):
        loader = echo()
        assert loader.is_at_start
        loader.load_state_dict(echo().state_dict())
        assert not loader.is_at_start
        loader.restart()
        assert loader.is_at_start


class TestStatesThatCannotBeGoneOnWith:
    @pytest.mark.parametrize("state", [None, {}, [], {"epoch": 3}, "state"])
    def test_something_else_is_refused(self, state):
        with pytest.raises(EchoStateError, match=r"state must be what EchoLoader\.state_dict\(\) returned, got"):
            echo().load_state_dict(state)

    def test_a_later_version_is_refused(self):
        state = {**echo().state_dict(), "version": 1000}
        with pytest.raises(EchoStateError, match=r"the state has version 1000.*upgrade lightning_echo"):
            echo().load_state_dict(state)

    @pytest.mark.parametrize("key", ["plan", "order", "seed", "layout", "counts", "delivered"])
    def test_a_damaged_one_is_refused_by_what_it_lacks(self, key):
        state = echo().state_dict()
        del state[key]
        with pytest.raises(EchoStateError, match=f"the state is damaged: it lacks {key}"):
            echo().load_state_dict(state)

    def test_that_of_another_data_set_is_refused_and_nothing_changes(self):
        other = echo(loader=plain_loader(Noisy(50)))
        played(other, 1)
        loader, expected = echo(), played(echo(), 2)
        batches = played(loader, 1)
        with pytest.raises(EchoStateError, match=r"of a pass of 50 items, but a pass of this loader has 43.* restart"):
            loader.load_state_dict(other.state_dict())
        assert batches + played(loader, 1) == expected

    def test_a_state_from_before_the_first_batch_fits_any_data_set(self):
        loader = echo()
        loader.load_state_dict(echo(loader=plain_loader(Noisy(50)), seed=None).state_dict())
        assert loader.seed == 5, "a state without a seed leaves the loader's"
        assert played(loader, 2) == played(echo(), 2)

    def test_the_error_is_a_value_error(self):
        assert issubclass(EchoStateError, ValueError)
