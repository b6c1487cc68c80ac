"""`EchoLoader` goes on from its state, exactly where nothing has changed, at the same place where something has."""

import io
from itertools import islice

import pytest
import torch
from echo_cases import LENGTH, STEPS, Noisy, echo, plain_loader, played, values
from torch.utils.data import RandomSampler


def through_a_checkpoint(state):
    """As Lightning saves and loads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class TestGoingOn:
    @pytest.mark.parametrize(("before", "has_sampler"), [(1, True), (2, False)])
    def test_a_new_factor_may_be_set_between_loading_and_the_first_batch(self, before, has_sampler):
        """Also where echoing begins just with a pass."""

        def make():
            sampler = RandomSampler(range(LENGTH), replacement=True, generator=torch.Generator().manual_seed(3))
            options = {"shuffle": False, "sampler": sampler} if has_sampler else {}
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

    def test_closing_after_every_batch_changes_nothing(self):
        loader, expected = echo(2.37), played(echo(2.37), 3)
        batches = []
        for _ in range(3):
            for batch in loader:
                batches.append(batch.tolist())
                loader.close()
        assert batches == expected
        assert loader.counts.refetched > 0, "live examples were read again"


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
    @pytest.mark.parametrize(
        ("before", "now", "said"),
        [
            ({"reuse": "each"}, {"reuse": "each", "buffer_size": 25}, r"saved with buffer_size=12 \(now 25\)"),
            ({}, {"buffer_size": 25}, r"saved with buffer_size=18 \(now 25\)"),
            ({"reuse": "each", "buffer_size": 18}, {}, r"saved with reuse='each' \(now 'memory'\)"),
            ({}, {"reuse": "each", "buffer_size": 18}, r"saved with reuse='memory' \(now 'each'\)"),
            ({}, {"batch_size": 4}, r"batch_size=6 \(now 4\)"),
            ({}, {"point": "before_augmentation"}, "insertion_point='after_augmentation'"),
        ],
    )
    def test_what_has_changed_is_said_and_the_pass_gone_through_whole(self, before, now, said):
        first, second = (
            echo(loader=plain_loader(batch_size=options.pop("batch_size", 6)), **options) for options in (dict(before), dict(now))
        )
        self.check(first, second, said)

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


class TestStatesThatCannotBeGoneOnWith:
    def test_a_state_from_before_the_first_batch_fits_any_data_set(self):
        loader = echo()
        loader.load_state_dict(echo(loader=plain_loader(Noisy(50)), seed=None).state_dict())
        assert not loader.is_at_start
        assert loader.seed == 5, "a state without a seed leaves the loader's"
        assert played(loader, 2) == played(echo(), 2)
