"""A run resumed from any step delivers the rest of the uninterrupted one, bit by bit."""

import copy
import io
import json
import random

import numpy as np
import pytest
import torch
from loader_cases import POINTS, LoggedDataset, Noisy, ReadLog, Values, epochs, same, take
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler, SubsetRandomSampler

from lightning_echo import EchoLoader

BATCHES, EPOCHS = 5, 4


class BatchedNoise(Dataset):
    """Reads whole batches: an example depends on with which others it was read."""

    def __getitems__(self, indices):
        noise = torch.rand(())
        return [torch.stack([torch.tensor(float(index)), noise, torch.rand(())]) for index in indices]

    def __len__(self):
        return 19


BY_EACH_RULE = pytest.mark.parametrize("reuse", ["memory", "each"])


def loader(point="after_augmentation", workers=0, factor=2.37, dataset=None, reuse="memory", **options):
    options = {"shuffle": "sampler" not in options, **options}
    plain = DataLoader(dataset or Noisy(19), batch_size=4, num_workers=workers, **options)
    return EchoLoader(plain, factor, insertion_point=point, reuse=reuse, seed=1)


def states_and_rest(make):
    """One uninterrupted run: the state after every batch, taken while it runs, and the batches with their counts."""
    running = make()
    states, batches = [running.state_dict()], []
    for _ in range(EPOCHS):
        for batch in running:
            batches.append((batch, running.last_batch_counts.fresh))
            states.append(running.state_dict())
    assert len(batches) == BATCHES * EPOCHS
    running.close()
    return states, batches


def through_a_file(state):
    """Plain types only: Lightning's checkpoints are loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_goes_on(make, states, batches, steps):
    for step in steps:
        resumed = make()
        resumed.load_state_dict(through_a_file(states[step]))
        rest, left = [], [BATCHES] * (EPOCHS - step // BATCHES)
        left[0] -= step % BATCHES
        for expected_length in left:
            epoch = [(batch, resumed.last_batch_counts.fresh) for batch in resumed]
            assert len(epoch) == expected_length, "the epoch under way is finished first"
            rest += epoch
        assert same(rest, batches[step:]), f"resumed after {step} batches"
        resumed.close()


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", POINTS)
@BY_EACH_RULE
def test_a_run_resumed_after_any_batch_goes_on_as_the_uninterrupted_one(point, workers, reuse):
    def make():
        return loader(point, workers, reuse=reuse)

    states, batches = states_and_rest(make)
    assert_goes_on(make, states, batches, range(BATCHES * EPOCHS))


@pytest.mark.parametrize("workers", [0, 2])
@BY_EACH_RULE
def test_a_data_set_that_reads_whole_batches_is_resumed_by_whole_calls(workers, reuse):
    def make():
        return loader("after_augmentation", workers, dataset=BatchedNoise(), reuse=reuse)

    states, batches = states_and_rest(make)
    assert_goes_on(make, states, batches, range(0, BATCHES * EPOCHS, 1 if workers == 0 else 3))


class Stateful(Sampler):
    """Goes through an order that its state alone decides."""

    def __init__(self):
        self.passes = 0

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]

    def __len__(self):
        return 19

    def __iter__(self):
        self.passes += 1
        return iter([(7 * self.passes + 3 * i) % 19 for i in range(19)])


class GlobalSampler(Sampler):
    """Draws from the global random state, or rather from states of its own that are put in that place."""

    def __len__(self):
        return 19

    def __iter__(self):
        return iter(torch.randperm(19).tolist())


class PartlyByGenerator(GlobalSampler):
    """Has a ``generator``, and draws from it only in part."""

    generator = None

    def __iter__(self):
        for index in super().__iter__():
            yield (index + int(torch.randint(19, (), generator=self.generator))) % 19


SAMPLERS = {
    "subset": lambda: {"sampler": SubsetRandomSampler(range(19))},
    "own_generator": lambda: {"sampler": SubsetRandomSampler(range(19), torch.Generator().manual_seed(3))},
    "stateful": lambda: {"sampler": Stateful()},
    "set_epoch": lambda: {"sampler": DistributedSampler(range(19), num_replicas=1, rank=0)},
    "global": lambda: {"sampler": GlobalSampler()},
    "partly by a generator": lambda: {"sampler": PartlyByGenerator()},
    "sequential": lambda: {"shuffle": False},
}


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:lightning_echo. (GlobalSampler|PartlyByGenerator) has neither state_dict")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_a_users_sampler_with_a_state_or_a_generator_is_resumed_exactly(sampler, point):
    def make():
        return loader(point, **SAMPLERS[sampler]())

    states, batches = states_and_rest(make)
    assert_goes_on(make, states, batches, range(0, BATCHES * EPOCHS, 3))


def test_a_users_own_batch_sampler_with_a_generator_is_resumed_exactly():
    def make():
        sampler = RandomSampler(range(19), generator=torch.Generator().manual_seed(3))
        return EchoLoader(DataLoader(Noisy(19), batch_sampler=BatchSampler(sampler, 4, False)), 2, seed=1)

    states, batches = states_and_rest(make)
    assert_goes_on(make, states, batches, range(BATCHES * EPOCHS))


class Batches:
    """A plain iterable of batches, in the order of its epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for i in range(BATCHES):
            yield torch.tensor([self.epoch, (i * 3 + self.epoch) % BATCHES])


class RandomBatches:
    """Another one, that draws from all three global random states."""

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for i in torch.randperm(BATCHES).tolist():
            yield torch.tensor([i, random.random(), np.random.rand()], dtype=torch.float64)


class EagerBatches:
    """One with a state, that draws where it begins, and more where it begins from a state, as torchdata's loader does."""

    def __init__(self):
        self.at, self.loaded = 0, None

    def __len__(self):
        return BATCHES

    def __iter__(self):
        (self.at, is_loaded), self.loaded = (0, False) if self.loaded is None else (self.loaded, True), None
        torch.rand(3 if is_loaded else 1)
        return self._rest()

    def _rest(self):
        while self.at < BATCHES:
            self.at += 1
            yield torch.tensor([self.at, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.loaded = state["at"]


@pytest.mark.grid
@pytest.mark.parametrize("batches", [Batches, RandomBatches, EagerBatches, lambda: list(torch.arange(10).view(5, 2))])
@pytest.mark.parametrize("factor", [1, 2.5])
@BY_EACH_RULE
def test_plain_iterables_of_batches_are_resumed_exactly(batches, factor, reuse):
    def make():
        return EchoLoader(batches(), factor, reuse=reuse, seed=1)

    states, delivered = states_and_rest(make)
    assert_goes_on(make, states, delivered, range(BATCHES * EPOCHS))


def test_a_sampler_without_state_or_generator_says_once_that_resuming_is_not_exact():
    first = loader(sampler=GlobalSampler())
    take(first, 3)
    resumed = loader(sampler=GlobalSampler())
    resumed.load_state_dict(first.state_dict())
    with pytest.warns(
        UserWarning, match="GlobalSampler has neither state_dict and load_state_dict, nor a torch generator"
    ) as said:
        take(resumed, 12)
    assert len(said) == 1


@pytest.mark.parametrize("workers", [0, 2])
@BY_EACH_RULE
def test_what_was_live_is_read_again_once_and_counted(tmp_path, workers, reuse):
    def make(name):
        return loader("after_augmentation", workers, 4, LoggedDataset(19, ReadLog(tmp_path / name)), reuse=reuse)

    first = make("first")
    take(first, 8)
    counts = first.counts
    resumed = make("resumed")
    resumed.load_state_dict(first.state_dict())
    at_construction = len((log := resumed.loader.dataset.log).entries())
    assert resumed.counts == counts
    take(resumed, 12)
    resumed.close()
    assert 0 < resumed.counts.refetched <= resumed.buffer_size
    reads = len(log.entries()) - at_construction
    in_flight = 6 * 4 if workers else 0
    assert 0 <= reads - (resumed.counts.fresh - counts.fresh) - resumed.counts.refetched <= in_flight
    assert resumed.counts.delivered == 20 * 4 - 4  # each pass of 19 ends with a batch of 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_can_be_loaded_on_a_loader_that_is_running(workers):
    running = loader(workers=workers)
    take(running, 3)
    state = running.state_dict()
    expected = take(running, 7)
    running.load_state_dict(state)
    assert same(take(running, 7), expected)


def test_a_state_is_plain_positions_and_never_grows_with_the_data():
    def state(length):
        running = EchoLoader(
            DataLoader(Values(length), batch_size=4, shuffle=True), 4, insertion_point="after_augmentation", seed=1
        )
        take(running, 20)
        return running.state_dict()

    small, large = state(1000), state(100_000)
    assert json.loads(json.dumps(small)) == small
    assert abs(len(json.dumps(small)) - len(json.dumps(large))) < 50


def test_asking_for_the_state_changes_nothing_and_says_the_same_twice():
    running, undisturbed = loader(workers=2), loader(workers=2)
    iterator, other = iter(running), iter(undisturbed)
    for _ in range(5):
        batch = next(iterator)
        state = running.state_dict()
        kept = copy.deepcopy(state)
        assert running.state_dict() == state == kept
        assert same(batch, next(other))


@pytest.mark.parametrize(("saved", "now"), [({"workers": 2}, {"workers": 0}), ({"workers": 0}, {"workers": 3})])
def test_resuming_with_other_workers_warns_and_leaves_nothing_of_the_pass_out(saved, now):
    def make(workers):
        plain = DataLoader(Values(40), batch_size=4, shuffle=True, num_workers=workers)
        return EchoLoader(plain, 1, insertion_point="after_augmentation", seed=1)

    first = make(**saved)
    delivered = take(first, 6)
    resumed = make(**now)
    resumed.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="workers=.*the run continues at the same place of the pass and leaves nothing out"):
        rest = take(resumed, 4)
    assert sorted(int(index) for batch in delivered + rest for index in batch["index"]) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
@BY_EACH_RULE
def test_a_pending_change_of_the_factor_survives_resuming(workers, reuse):
    def run(cut):
        running = loader(workers=workers, factor=4, dataset=Noisy(39), reuse=reuse)
        delivered = []
        for epoch in range(4):
            for batch in running:
                delivered.append(batch)
                if len(delivered) == cut:
                    state = through_a_file(running.state_dict())
                    running = loader(workers=workers, factor=4, dataset=Noisy(39), reuse=reuse)
                    running.load_state_dict(state)
                    break
            if len(delivered) == cut:
                delivered += list(running)
            running.factor = (1.5, 3, 1, 2)[epoch]
        return delivered

    expected = run(None)
    for cut in (11, 12, 14, 21, 23, 32):
        assert same(run(cut), expected)


@pytest.mark.parametrize("point", POINTS)
def test_a_state_taken_before_the_first_batch_is_the_beginning(point):
    fresh = loader(point)
    expected = epochs(loader(point), 2)
    fresh.load_state_dict(through_a_file(loader(point).state_dict()))
    assert same(epochs(fresh, 2), expected)
