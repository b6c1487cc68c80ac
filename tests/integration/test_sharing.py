"""Several trainings, one reading process: what each of them gets."""

import random
import time

import pytest
import torch
from sharing_runs import FORK, Numbers, end_readers, epochs_of, examples, indices, loader_of, status, together, wait_until
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from lightning_echo import EchoLoader
from lightning_echo.share.attachment import SharedDataDiffers

pytestmark = pytest.mark.usefixtures("own_folder")


# ---------------------------------------------------------------------- exact


def jitter(seed, most=0.003):
    """Returns what a training does before a batch: nothing, for a while."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.random() * most)


@pytest.mark.parametrize(
    ("length", "batch_sizes", "window"),
    [
        (1, [1, 3], "1MiB"),
        (5, [8], "1MiB"),
        (7, [2, 16], 4096),
        (100, [8, 7], "1MiB"),
        (100, [32], 4096),
        (233, [8, 16, 5, 64], 2**15),
        pytest.param(10_000, [64, 50], "1MiB", marks=pytest.mark.slow),
    ],
)
def test_each_training_gets_every_example_once_in_one_order(length, batch_sizes, window):
    def training(number):
        def run():
            share = {"wait_for": len(batch_sizes), "window": window}
            loader = loader_of(Numbers(length), batch_sizes[number], workers=2, **share)
            try:
                return epochs_of(loader, 3, jitter(number)), len(loader)
            finally:
                loader.close()

        return run

    found = together(*[training(number) for number in range(len(batch_sizes))])
    for (epochs, told_length), batch_size in zip(found, batch_sizes, strict=True):
        assert told_length == -(-length // batch_size)
        for epoch in epochs:
            assert sorted(indices(epoch)) == list(range(length))
            assert [len(batch) for batch in epoch[:-1]] == [batch_size] * (told_length - 1)
    first, *others = [[examples(epoch) for epoch in epochs] for epochs, _ in found]
    assert all(other == first for other in others)  # indices, order and noise
    if length > 10:
        assert indices(found[0][0][0]) != indices(found[0][0][1])


def test_drop_last_drops_only_the_last_part_batch_of_the_training_that_wants_it():
    def run(drop_last):
        loader = loader_of(Numbers(50), 8, drop_last=drop_last, wait_for=2)
        try:
            return epochs_of(loader, 2)
        finally:
            loader.close()

    dropping, keeping = together(lambda: run(True), lambda: run(False))
    for few, every in zip(dropping, keeping, strict=True):
        assert few == every[:6]
        assert sorted(indices(every)) == list(range(50))


def run_alone(workers, batch_size, **options):
    loader = loader_of(Numbers(60), batch_size, workers=workers, **options)
    try:
        return [examples(epoch) for epoch in epochs_of(loader, 2)]
    finally:
        loader.close()
        end_readers()


def test_examples_and_their_noise_do_not_depend_on_who_starts_the_reader():
    assert run_alone(1, 8) == run_alone(3, 7)


def test_another_name_is_another_order():
    assert run_alone(1, 8) != run_alone(1, 8, name="other")


def test_a_sequential_loader_shares_its_own_order():
    assert [indices([epoch]) for epoch in run_alone(2, 8, shuffle=False)] == [list(range(60))] * 2


class Together(Numbers):
    """Reads many examples in one call."""

    def __getitems__(self, wanted):
        return [self[index] for index in wanted]


def test_a_data_set_that_reads_many_at_once_is_exact_too():
    loader = loader_of(Together(70), 8, workers=2)
    try:
        for epoch in epochs_of(loader, 2):
            assert sorted(indices(epoch)) == list(range(70))
    finally:
        loader.close()


# ---------------------------------------------------------------------- late, early, own pace


def closing(loader, count, seconds=0.0):
    """Returns a training of so many epochs, which sleeps before each batch, and leaves at its end."""

    def run():
        try:
            return epochs_of(loader, count, lambda: time.sleep(seconds))
        finally:
            loader.close()

    return run


def test_a_training_that_comes_late_enters_where_the_others_are_and_then_gets_whole_passes():
    first, second = loader_of(Numbers(96), 8, window=2**13), loader_of(Numbers(96), 16, window=2**13)
    epoch = iter(first)
    had = [next(epoch) for _ in range(5)]
    del epoch
    late = together(closing(second, 2), closing(first, 3))[0]
    assert len(had) == 5
    assert [len(each) for each in late] == [6, 6]  # the length of its own epoch, whole or not
    entered = examples(late[0])
    assert len(set(entered)) == 96  # over the end of the pass


def test_leaving_lets_the_others_go_on_at_once():
    slow, fast = loader_of(Numbers(200), 8, window=2**13, wait_for=2), loader_of(Numbers(200), 8, window=2**13, wait_for=2)

    def leave():
        next(iter(slow))
        slow.close()

    try:
        _, epochs = together(leave, lambda: epochs_of(fast, 1))
    finally:
        fast.close()
    assert sorted(indices(epochs[0])) == list(range(200))


def test_skip_waits_for_nobody_and_counts_what_it_missed():
    share = {"behind": "skip", "window": 2**13, "wait_for": 2}
    slow, fast = loader_of(Numbers(400), 8, **share), loader_of(Numbers(400), 8, **{**share, "behind": "wait"})
    few, every = together(closing(slow, 1, 0.05), closing(fast, 3, 0.002))
    missed = slow.sharing.missed_examples
    for epoch in every:
        assert sorted(indices(epoch)) == list(range(400))
    assert len(few[0]) == 50
    assert missed > 100
    assert len(set(examples(few[0]))) == 400  # none twice: noise tells two uses of an index apart


def test_waiting_for_a_slower_training_is_measured_apart():
    share = {"window": 2**13, "wait_for": 2}
    slow, fast = loader_of(Numbers(200), 8, **share), loader_of(Numbers(200), 8, **share)
    together(closing(slow, 1, 0.08), closing(fast, 1))
    waited = fast.sharing.waited
    assert waited.for_peers > 0.5
    assert waited.for_peers > 3 * waited.for_reading


def test_a_training_tells_how_long_it_is_busy_with_an_example():
    loader = loader_of(Numbers(160), 8)
    epochs_of(loader, 1, lambda: time.sleep(0.02))
    told = loader.sharing._attachment._link.window.slowest_need_nanoseconds
    loader.close()
    assert told >= 0.02 * 1e9 / 8  # sleeping never takes less


def test_a_reader_that_all_have_left_begins_anew():
    one = loader_of(Numbers(64), 8, linger_seconds=20)
    first = [examples(epoch) for epoch in epochs_of(one, 1)]
    one.close()
    wait_until(lambda: status()["count"] == 0, "the training has left")
    pid = status()["pid"]
    other = loader_of(Numbers(64), 16, linger_seconds=20)
    second = [examples(epoch) for epoch in epochs_of(other, 1)]
    assert status()["pid"] == pid
    other.close()
    assert second == first


# ---------------------------------------------------------------------- echoing on top


@pytest.mark.parametrize("point", ["auto", "after_batching"])
def test_each_training_echoes_as_much_as_it_wants(point):
    def run(factor):
        loader = loader_of(Numbers(400), 8, factor=factor, wait_for=2, options={"insertion_point": point})
        try:
            return epochs_of(loader, 4), loader.counts
        finally:
            loader.close()

    (plain, _), (echoed, counts) = together(lambda: run(1), lambda: run(2))
    assert counts.delivered == 1600
    assert abs(counts.fresh - 800) <= 16
    for epoch in echoed:
        for batch in epoch:
            assert len({index for index, _ in batch}) == len(batch)
    stream = [example for epoch in plain for example in examples(epoch)]
    fresh = list(dict.fromkeys(example for epoch in echoed for example in examples(epoch)))
    assert set(fresh) <= set(stream[: len(fresh) + 8])


@pytest.mark.parametrize(("length", "batch_size", "factor"), [(24, 4, 2), (25, 4, 1.5), (36, 6, 3), (60, 8, 2.5), (61, 8, 4)])
def test_no_example_is_twice_in_a_batch_at_any_boundary_of_passes(length, batch_size, factor):
    loader = loader_of(Numbers(length), batch_size, factor=factor)
    try:
        for epoch in epochs_of(loader, 12):
            for batch in epoch:
                assert len({index for index, _ in batch}) == len(batch)
    finally:
        loader.close()


@pytest.mark.parametrize("point", ["before_augmentation", "after_read"])
def test_points_before_what_is_shared_are_refused_with_the_way_out(point):
    with pytest.raises(ValueError, match=r"impossible with share.*a cache under a name"):
        loader_of(Numbers(40), 8, options={"insertion_point": point})


# ---------------------------------------------------------------------- what leaves the loader


def test_what_was_handed_out_is_never_written_again():
    loader = loader_of(Numbers(300), 10, window=2**13)
    try:
        kept = [batch for _ in range(2) for batch in loader]
    finally:
        loader.close()
    for batch in kept:
        assert torch.equal(batch["data"], (batch["index"] % 251).to(torch.uint8)[:, None].expand(-1, 64))


def test_an_edit_in_place_reaches_no_other_training():
    def run(edits):
        loader = loader_of(Numbers(100), 10, wait_for=2, window=2**13)
        try:
            epochs = []
            for _ in range(2):
                for batch in loader:
                    epochs.append(batch["data"].clone())
                    if edits:
                        batch["data"].fill_(255)
            return torch.cat(epochs)
        finally:
            loader.close()

    edited, other = together(lambda: run(True), lambda: run(False))
    assert torch.equal(edited, other)


# ---------------------------------------------------------------------- resuming


@pytest.mark.grid
@pytest.mark.parametrize(("factor", "point"), [(1, "auto"), (2.5, "auto"), (2, "after_batching")])
@pytest.mark.parametrize("batches", [3, 17, 26])
def test_alone_with_its_reader_a_training_resumes_exactly(factor, point, batches):
    def make():
        return loader_of(Numbers(104), 8, factor=factor, options={"insertion_point": point})

    loader = make()
    found, state = [], None
    for _ in range(4):
        for batch in loader:
            found.append(rows_of(batch))
            if len(found) == batches:
                state = loader.state_dict()
    loader.close()
    end_readers()
    resumed = make()
    resumed.load_state_dict(state)
    rest = []
    while len(rest) < len(found) - batches:
        rest += [rows_of(batch) for batch in resumed]
    resumed.close()
    assert rest == found[batches:]


def rows_of(batch):
    return list(zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True))


def test_a_state_of_a_run_is_refused_under_another_name_or_none():
    loader = loader_of(Numbers(64), 8)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    alone = EchoLoader(DataLoader(Numbers(64), batch_size=8, shuffle=True, num_workers=1), 1, seed=0)
    with pytest.raises(ValueError, match=r"of a run with share='data', and this loader has share=None.*Resume with share='data'"):
        alone.load_state_dict(state)
    with pytest.raises(ValueError, match=r"of a run with share='data', and this loader has share='other'"):
        loader_of(Numbers(64), 8, name="other").load_state_dict(state)
    next(iter(alone))
    with pytest.raises(ValueError, match=r"of a run with share=None, and this loader has share='data'"):
        loader_of(Numbers(64), 8).load_state_dict(alone.state_dict())
    alone.close()


# ---------------------------------------------------------------------- other data, other loaders


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"length": 65}, "dataset.length: 65 and 64"),
        ({"shuffle": False}, r"sampler: \S*SequentialSampler and \S*RandomSampler"),
        ({"offset": 1}, r"dataset.offset: 1 and 0 .*process \d+, started \d+ s ago by .* \(process \d+\)"),
    ],
)
def test_other_data_under_the_same_name_is_refused_with_what_differs(options, what):
    first = loader_of(Shifted(64), 8)
    epoch = iter(first)
    next(epoch)
    dataset = Shifted(options.get("length", 64), options.get("offset", 0))
    second = loader_of(dataset, 8, shuffle=options.get("shuffle", True))
    try:
        with pytest.raises(SharedDataDiffers, match=what):
            next(iter(second))
    finally:
        second.close()
        first.close()


class Shifted(Numbers):
    """Has other examples with another offset."""

    def __init__(self, length, offset=0):
        super().__init__(length)
        self.offset = offset

    def __getitem__(self, index):
        return super().__getitem__((index + self.offset) % self.length)


def test_batch_size_workers_seed_and_collate_function_are_not_compared():
    def run(batch_size, workers, seed):
        loader = loader_of(Numbers(64), batch_size, workers=workers, wait_for=2, options={"seed": seed})
        try:
            return [examples(epoch) for epoch in epochs_of(loader, 1)]
        finally:
            loader.close()

    one, other = together(lambda: run(8, 1, 0), lambda: run(16, 2, 5))
    assert one == other


def test_a_sampler_that_divides_among_ranks_is_refused_with_the_way_out():
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
    with pytest.raises(ValueError, match="share='data' is impossible here: its sampler divides the data among ranks itself"):
        EchoLoader(loader, 1, share="data")


def test_a_sampler_with_a_generator_has_an_order_that_follows_from_the_name():
    def order(seed):
        sampler = SubsetRandomSampler(range(16), torch.Generator().manual_seed(seed))
        loader = EchoLoader(DataLoader(Numbers(16), batch_size=4, sampler=sampler), 1, share="data")
        try:
            return [indices(epoch) for epoch in epochs_of(loader, 2)]
        finally:
            loader.close()
            end_readers()

    assert order(1) == order(2)
    assert [sorted(each) for each in order(1)] == [list(range(16))] * 2


def test_on_another_system_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(ValueError, match="share='data' is impossible on this system: it needs Linux"):
        EchoLoader(DataLoader(range(8), batch_size=2), 1, share="data")


def test_share_and_cache_are_refused_together():
    with pytest.raises(ValueError, match="share and cache are impossible together"):
        EchoLoader(DataLoader(range(8), batch_size=2), 1, share="data", cache="1MiB")


# ---------------------------------------------------------------------- the loader's own options, and forks


def test_a_timeout_of_the_loader_does_not_end_a_reader_whose_window_is_full():
    plain = DataLoader(Numbers(200), batch_size=8, num_workers=1, timeout=1)
    loader = EchoLoader(plain, 1, share={"name": "data", "window": 2**13}, seed=0)
    epoch = iter(loader)
    first = [next(epoch)]
    pid = status()["pid"]
    time.sleep(2.5)  # longer than the timeout
    rest = list(epoch)
    assert status()["pid"] == pid
    loader.close()
    assert sorted(index for batch in first + rest for index in batch["index"].tolist()) == list(range(200))


def test_a_forked_child_that_closes_the_loader_does_not_leave_for_its_parent():
    loader = loader_of(Numbers(200), 8, window=2**13)
    epoch = iter(loader)
    first = [next(epoch)]
    pid = status()["pid"]
    child = FORK.Process(target=_close_sharing, args=(loader,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    rest = list(epoch)
    assert (status()["pid"], status()["count"]) == (pid, 1)
    loader.close()
    assert sorted(index for batch in first + rest for index in batch["index"].tolist()) == list(range(200))


def _close_sharing(loader):
    loader.sharing._attachment.close()
