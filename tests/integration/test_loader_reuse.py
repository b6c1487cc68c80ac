"""``reuse="memory"``: an `EchoLoader` draws echoes from all that its buffer holds, exactly and resumably.

The model beside it is a list: of each worker the examples that it has read last, as many as it may hold. At ``after_batching``
one process holds whole batches.
"""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from loader_cases import POINTS, LoggedDataset, Noisy, ReadLog, case_id, pairwise, same, take
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, get_worker_info

from lightning_echo import EchoLoader

BATCH = 4
CASES = pairwise(point=POINTS, workers=(0, 1, 3), factor=(1.5, 2.37, 4, 16), shuffle=(True, False))


def echo(dataset, factor, workers=0, point="before_augmentation", reuse="memory", buffer_size=None, seed=3, **options):
    plain = DataLoader(dataset, BATCH, num_workers=workers, **{"shuffle": True, **options})
    size = buffer_size or (6 if point == "after_batching" else 8 * BATCH * max(workers, 1))
    return EchoLoader(plain, factor, insertion_point=point, buffer_size=size, reuse=reuse, seed=seed)


def items_of(batch, point):
    """What is reused: (index, number of its read) of each example, or all of these of a batch."""
    examples = [tuple(row) for row in batch[:, :2].tolist()]
    return [tuple(examples)] if point == "after_batching" else examples


def check_share(sizes, fresh, factor):
    """Of all items that one process delivers, ``1 / factor`` are fresh. The first batch is all fresh, and counts for none."""
    exact, delivered, read = Fraction(str(factor)), 0, 0
    assert fresh[0] == sizes[0]
    for size, new in zip(sizes[1:], fresh[1:], strict=True):
        delivered, read = delivered + size, read + new
        assert abs(read - delivered / exact) < 1


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_echoes_are_among_what_was_read_last_and_the_share_of_fresh_examples_is_exact(case, tmp_path):
    dataset, point, factor = LoggedDataset(1000, ReadLog(tmp_path / "reads")), case["point"], case["factor"]
    loader = echo(dataset, factor, case["workers"], point, shuffle=case["shuffle"])
    holders = 1 if point == "after_batching" else max(case["workers"], 1)
    most = loader.buffer_size // holders
    held, sizes, fresh = ([[] for _ in range(holders)] for _ in range(3))
    for number, batch in enumerate(take(loader, 120)):
        holder, items = number % holders, items_of(batch, point)
        assert len(set(items)) == len(items), "nothing is in a batch twice"
        new = [item for item in items if not any(item in others for others in held)]
        assert set(items) - set(new) <= set(held[holder][-most:]), "echoes are what this worker has read last"
        assert loader.last_batch_counts is not None
        held[holder] += new
        sizes[holder].append(len(items))
        fresh[holder].append(len(new))
    loader.close()
    for of_holder in zip(sizes, fresh, strict=True):
        check_share(*of_holder, factor)
    counts = loader.counts
    assert counts.fresh == sum(map(sum, fresh)) * (BATCH if point == "after_batching" else 1)
    assert counts.refetched == 0


def uses(reuse):
    loader = echo(Noisy(1000), 4, buffer_size=16, reuse=reuse)
    counted = Counter(index for batch in take(loader, 200) for index in batch[:, 0].tolist())
    loader.close()
    return Counter(counted.values())


def test_uses_follow_chance_and_not_the_factor_while_the_mean_is_the_factor():
    each, memory = uses("each"), uses("memory")
    assert max(each) == 4
    assert max(memory) > 4
    assert 1 in memory, "an example may leave the buffer without an echo"
    assert sum(count * times for times, count in memory.items()) == sum(count * times for times, count in each.items()) == 800
    assert 800 / sum(memory.values()) == pytest.approx(4, rel=0.05)


class Doubled(Noisy):
    """Reads whole batches: an example depends on with which others it was read."""

    def __getitems__(self, indices):
        noise = torch.rand(1)
        return [torch.cat([torch.tensor([float(index)]), noise, torch.rand(1)]) for index in indices]


def assert_goes_on_from_any_batch(make, steps, count=24, change_at=None):
    """One uninterrupted run, and one from its state after each of some batches; the factor is set once, if that is wanted."""

    def play(loader, done):
        if done == change_at:  # its state was saved just before the factor was set
            loader.factor = 4
        while done < count:
            for batch in loader:
                done += 1
                state = loader.state_dict()
                yield (batch, loader.last_batch_counts.fresh), state
                if done == change_at:
                    loader.factor = 4
        loader.close()

    running = make()
    states, batches = [running.state_dict()], []
    for batch, state in play(running, 0):
        batches.append(batch)
        states.append(state)
    for step in steps:
        resumed = make()
        resumed.load_state_dict(states[step])
        rest = [batch for batch, _ in play(resumed, step)]
        assert same(rest, batches[step:]), f"resumed after {step} batches"


@pytest.mark.grid
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_run_resumed_after_any_batch_goes_on_bit_equally(point, workers):
    size = 4 if point == "after_batching" else 8
    steps = range(0, 24, 1 if workers == 0 else 5)
    assert_goes_on_from_any_batch(lambda: echo(Noisy(23), 2.37, workers, point, buffer_size=size), steps, change_at=10)


@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_what_a_users_sampler_gave_in_an_earlier_pass_is_found_again(point):
    """The buffer holds examples of the pass before."""

    def make():
        sampler = SubsetRandomSampler(range(23), torch.Generator().manual_seed(3))
        return echo(Noisy(23), 1.5, 0, point, buffer_size=4 if point == "after_batching" else 8, shuffle=None, sampler=sampler)

    assert_goes_on_from_any_batch(make, range(0, 36, 2), count=36)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_reads_whole_batches_is_read_again_by_whole_calls(workers):
    def make():
        return echo(Doubled(23), 2.37, workers, "after_augmentation", buffer_size=8)

    assert_goes_on_from_any_batch(make, range(0, 24, 1 if workers == 0 else 5))


class Stateful(IterableDataset):
    """Numbers without end, dealt out to the workers."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        worker = get_worker_info()
        number, of = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while True:
            self.at += 1
            yield torch.tensor([of * (self.at - 1) + number])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_echoed_from_memory_and_resumed_bit_equally(workers):
    def make():
        plain = DataLoader(Stateful(), BATCH, num_workers=workers)
        return EchoLoader(plain, 4, buffer_size=8 * max(workers, 1), reuse="memory", seed=1)

    running, batches, states = make(), [], []
    for batch in running:
        batches.append(batch)
        states.append(running.state_dict())
        if len(batches) == 60:
            break
    running.close()
    holders, counted = max(workers, 1), Counter(number for batch in batches for number in batch[:, 0].tolist())
    assert max(counted.values()) > 4
    for holder in range(holders):
        own = [set(batch[:, 0].tolist()) for batch in batches[holder::holders]]
        assert not any(own[0] & set(other[:, 0].tolist()) for other in batches[holder + 1 :: holders]) or holders == 1
        fresh = [len(batch - set().union(*own[:number])) for number, batch in enumerate(own)]
        check_share([BATCH] * len(own), fresh, 4)
    for at in (4, 25, 58):
        resumed = make()
        resumed.load_state_dict(states[at])
        rest = [batch for batch, _ in zip(resumed, range(59 - at), strict=False)]
        resumed.close()
        assert same(rest, batches[at + 1 :])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("buffer_size", [36, 64, 1000])
def test_no_example_is_twice_in_a_batch_though_the_buffer_could_hold_a_pass(buffer_size, workers):
    loader = echo(Noisy(40), 4, workers, buffer_size=buffer_size)
    for batch in take(loader, 150):
        assert len(set(batch[:, 0].tolist())) == BATCH
    loader.close()


def test_ranks_read_disjoint_shares_and_draw_alike():
    plain = DataLoader(Noisy(200), BATCH, shuffle=True)
    ranks = [
        EchoLoader(
            plain, 4, insertion_point="before_augmentation", buffer_size=16, reuse="memory", seed=5, num_replicas=2, rank=rank
        )
        for rank in range(2)
    ]
    seen, fresh = [], []
    for loader in ranks:
        counts, read = [], set()
        for batch in take(loader, 50):
            counts.append(loader.last_batch_counts)
            read |= set(batch[:, 0].tolist())
        fresh.append(counts)
        seen.append(read)
        loader.close()
    assert not seen[0] & seen[1]
    assert fresh[0] == fresh[1], "the plan is the same on all ranks"


@pytest.mark.parametrize(("saved", "now"), [("each", "memory"), ("memory", "each")])
def test_a_state_of_the_other_rule_goes_on_at_its_place_and_says_so(saved, now):
    before = echo(Noisy(64), 2, reuse=saved, buffer_size=8)
    read = {index for batch in take(before, 8) for index in batch[:, 0].tolist()}
    state = before.state_dict()
    before.close()
    after = echo(Noisy(64), 2, reuse=now, buffer_size=8)
    after.load_state_dict(state)
    with pytest.warns(UserWarning, match=rf"was saved with reuse='{saved}' \(now '{now}'\)"):
        first = next(iter(after))
    again = len(read & set(first[:, 0].tolist()))
    assert again == len(read) % BATCH, "the run goes on at a whole batch of the pass, and leaves nothing out"
    after.close()


def test_a_state_that_says_no_rule_is_one_of_the_papers_rule():
    before = echo(Noisy(64), 2, reuse="each", buffer_size=8)
    batches = take(before, 12)
    before.close()
    again = echo(Noisy(64), 2, reuse="each", buffer_size=8)
    take(again, 5)
    state = again.state_dict()
    again.close()
    assert "reuse" not in state, "older versions know no such field"
    resumed = echo(Noisy(64), 2, reuse="each", buffer_size=8)
    resumed.load_state_dict(state)
    assert same(take(resumed, 7), batches[5:])
    resumed.close()


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"reuse must be 'each' .* or 'memory' .*, got 'all'"):
        EchoLoader(DataLoader(range(64), 4), 2, reuse="all")


@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_its_fresh_share_is_level_after_the_first_batch_of_each_worker(point, caplog):
    loader = echo(Noisy(400), 4, 3, point)
    assert loader.settled_at == (1 if point == "after_batching" else 3)
    fresh = [loader.last_batch_counts.fresh for _ in take_one_by_one(loader, 20)]
    loader.close()
    assert fresh[: loader.settled_at] == [BATCH] * loader.settled_at
    assert sum(fresh[loader.settled_at :][:16]) == 16
    with caplog.at_level("INFO", "lightning_echo"):
        take(again := echo(Noisy(64), 4, 0, point), 1)
    again.close()
    assert f"{again.buffer_size} live {'batches' if point == 'after_batching' else 'examples'}" in caplog.text


def take_one_by_one(loader, count):
    """The next batches, each before the next one is asked for."""
    while count:
        for batch in loader:
            yield batch
            count -= 1
            if not count:
                return
