"""Several trainings, one reading process: what each of them gets."""

import random
import time

import pytest
import torch
from sharing_runs import (
    FORK,
    Numbers,
    end_readers,
    epochs_of,
    examples,
    indices,
    loader_of,
    resumed,
    status,
    together,
    wait_until,
)
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from lightning_echo import EchoLoader
from lightning_echo.share.attachment import SharedDataDiffers

pytestmark = pytest.mark.usefixtures("own_folder")


def jitter(seed, most=0.003):
    """Returns what a training does before a batch: nothing, for a while."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.random() * most)


def closing(loader, count, before_batch=lambda: None):
    """Returns a training of so many epochs, which leaves at its end."""

    def run():
        try:
            return epochs_of(loader, count, before_batch)
        finally:
            loader.close()

    return run


def sleeps(seconds):
    return lambda: time.sleep(seconds)


@pytest.mark.parametrize(
    ("length", "batch_sizes", "window"),
    [
        (1, [1, 3], "1MiB"),
        (7, [2, 16], 4096),
        (233, [8, 16, 5, 64], 2**15),
        pytest.param(10_000, [64, 50], "1MiB", marks=pytest.mark.slow),
    ],
)
def test_each_training_gets_every_example_once_in_one_order(length, batch_sizes, window):
    """Whatever its batch size, its workers, its seed and its ``drop_last``."""
    loaders = []
    for number, size in enumerate(batch_sizes):
        own = {"workers": 1 + number % 2, "drop_last": number == 3, "options": {"seed": number}}
        loaders.append(loader_of(Numbers(length), size, wait_for=len(batch_sizes), window=window, **own))
    found = together(*(closing(loader, 3, jitter(number)) for number, loader in enumerate(loaders)))
    first = [examples(epoch) for epoch in found[0]]
    for number, (epochs, loader, size) in enumerate(zip(found, loaders, batch_sizes, strict=True)):
        assert len(loader) == (length // size if number == 3 else -(-length // size))
        for epoch, of_first in zip(epochs, first, strict=True):
            assert [len(batch) for batch in epoch[:-1]] == [size] * (len(loader) - 1)
            assert sorted(index for index, _ in of_first) == list(range(length))
            assert examples(epoch) == of_first[: len(loader) * size]  # indices, order and noise
    if length > 10:
        assert indices(found[0][0]) != indices(found[0][1])


class Together(Numbers):
    """Reads many examples in one call."""

    def __getitems__(self, wanted):
        return [self[index] for index in wanted]


def run_alone(workers, batch_size, dataset=None, **options):
    loader = loader_of(dataset or Numbers(60), batch_size, workers=workers, **options)
    try:
        return [examples(epoch) for epoch in epochs_of(loader, 2)]
    finally:
        loader.close()
        end_readers()


def test_examples_and_their_noise_follow_from_the_name_and_not_from_who_starts_the_reader():
    found = run_alone(1, 8)
    assert run_alone(3, 7) == found
    assert run_alone(1, 8, name="other") != found
    sequential = run_alone(2, 8, Together(60), shuffle=False)  # which shares its own order
    assert [[index for index, _ in epoch] for epoch in sequential] == [list(range(60))] * 2


def test_a_training_that_comes_late_enters_where_the_others_are_and_then_gets_whole_passes():
    first, second = loader_of(Numbers(96), 8, window=2**13), loader_of(Numbers(96), 16, window=2**13)
    epoch = iter(first)
    assert len([next(epoch) for _ in range(5)]) == 5
    del epoch
    late = together(closing(second, 2), closing(first, 3))[0]
    assert [len(each) for each in late] == [6, 6]  # the length of its own epoch, whole or not
    assert len(set(examples(late[0]))) == 96  # over the end of the pass


def test_skip_waits_for_nobody_and_counts_what_it_missed():
    share = {"behind": "skip", "window": 2**13, "wait_for": 2}
    slow, fast = loader_of(Numbers(400), 8, **share), loader_of(Numbers(400), 8, **{**share, "behind": "wait"})
    few, every = together(closing(slow, 1, sleeps(0.05)), closing(fast, 3, sleeps(0.002)))
    for epoch in every:
        assert sorted(indices(epoch)) == list(range(400))
    assert slow.sharing.missed_examples > 100
    assert len(few[0]) == 50
    assert len(set(examples(few[0]))) == 400  # none twice: noise tells two uses of an index apart


def test_waiting_for_a_slower_training_is_measured_apart():
    slow, fast = (loader_of(Numbers(100), 8, window=2**13, wait_for=2) for _ in range(2))

    def is_slow():
        epochs_of(slow, 1, sleeps(0.08))
        told = slow.sharing._attachment._link.window.slowest_need_nanoseconds
        slow.close()
        return told

    told, _ = together(is_slow, closing(fast, 1))
    assert told >= 0.08 * 1e9 / 8  # how long it is busy with an example: sleeping never takes less
    assert fast.sharing.waited.for_peers > 3 * fast.sharing.waited.for_reading


def test_a_reader_that_all_have_left_begins_anew():
    one, other = (loader_of(Numbers(64), size, linger_seconds=20) for size in (8, 16))
    first = [examples(epoch) for epoch in closing(one, 1)()]
    wait_until(lambda: status()["count"] == 0, "the training has left")
    pid = status()["pid"]
    second = [examples(epoch) for epoch in epochs_of(other, 1)]
    assert status()["pid"] == pid
    other.close()
    assert second == first


@pytest.mark.parametrize("point", ["auto", "after_batching"])
def test_each_training_echoes_as_much_as_it_wants(point):
    plain, echoing = (loader_of(Numbers(200), 8, factor=n, wait_for=2, options={"insertion_point": point}) for n in (1, 2))
    whole, echoed = together(closing(plain, 4), closing(echoing, 4))
    assert echoing.counts.delivered == 800
    assert abs(echoing.counts.fresh - 400) <= 16
    assert all(len({index for index, _ in batch}) == len(batch) for epoch in echoed for batch in epoch)
    stream = [example for epoch in whole for example in examples(epoch)]
    fresh = list(dict.fromkeys(example for epoch in echoed for example in examples(epoch)))
    assert set(fresh) <= set(stream[: len(fresh) + 8])


@pytest.mark.parametrize(("length", "batch_size", "factor"), [(25, 4, 1.5), (36, 6, 3), (61, 8, 4)])
def test_no_example_is_twice_in_a_batch_at_any_boundary_of_passes(length, batch_size, factor):
    for epoch in closing(loader_of(Numbers(length), batch_size, factor=factor), 12)():
        assert all(len({index for index, _ in batch}) == len(batch) for batch in epoch)


def test_what_was_handed_out_is_never_written_again_and_an_edit_in_place_reaches_no_other_training():
    def run(edits):
        loader, kept, copies = loader_of(Numbers(100), 10, wait_for=2, window=2**13), [], []
        for _ in range(2):
            for batch in loader:
                kept.append(batch["data"])
                copies.append(batch["data"].clone())
                if edits:
                    batch["data"].fill_(255)
        loader.close()
        return torch.cat(kept), torch.cat(copies)

    (_, edited), (kept, other) = together(lambda: run(True), lambda: run(False))
    assert torch.equal(edited, other)
    assert torch.equal(kept, other)


@pytest.mark.grid
@pytest.mark.parametrize(("factor", "point"), [(1, "auto"), (2.5, "auto"), (2, "after_batching")])
@pytest.mark.parametrize("batches", [3, 17, 26])
def test_alone_with_its_reader_a_training_resumes_exactly(factor, point, batches):
    found, rest = resumed(lambda: loader_of(Numbers(104), 8, factor=factor, options={"insertion_point": point}), batches, 4)
    assert rest == found[batches:]


def test_a_state_of_a_run_is_refused_under_another_name_or_none():
    loader = loader_of(Numbers(64), 8)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    alone = EchoLoader(DataLoader(Numbers(64), batch_size=8, shuffle=True, num_workers=0), 1, seed=0)
    with pytest.raises(ValueError, match=r"of a run with share='data', and this loader has share=None.*Resume with share='data'"):
        alone.load_state_dict(state)
    with pytest.raises(ValueError, match=r"of a run with share='data', and this loader has share='other'"):
        loader_of(Numbers(64), 8, name="other").load_state_dict(state)
    next(iter(alone))
    with pytest.raises(ValueError, match=r"of a run with share=None, and this loader has share='data'"):
        loader_of(Numbers(64), 8).load_state_dict(alone.state_dict())
    alone.close()


class Shifted(Numbers):
    """Has other examples with another offset."""

    def __init__(self, length, offset=0):
        super().__init__(length)
        self.offset = offset

    def __getitem__(self, index):
        return super().__getitem__((index + self.offset) % self.length)


def test_other_data_under_the_same_name_is_refused_with_what_differs():
    first = loader_of(Shifted(64), 8)
    epoch = iter(first)
    next(epoch)
    whose = r" .*process \d+, started \d+ s ago by .* \(process \d+\)"
    for dataset, shuffle, what in (
        (Shifted(64), False, r"sampler: \S*SequentialSampler and \S*RandomSampler"),
        (Shifted(64, offset=1), True, rf"dataset.offset: 1 and 0{whose}"),
    ):
        second = loader_of(dataset, 8, shuffle=shuffle)
        with pytest.raises(SharedDataDiffers, match=what):
            next(iter(second))
        second.close()
    first.close()


def test_a_sampler_with_a_generator_has_an_order_that_follows_from_the_name():
    def order(seed):
        sampler = SubsetRandomSampler(range(16), torch.Generator().manual_seed(seed))
        loader = EchoLoader(DataLoader(Numbers(16), batch_size=4, sampler=sampler), 1, share="data")
        found = [indices(epoch) for epoch in closing(loader, 2)()]
        end_readers()
        return found

    found = order(1)
    assert order(2) == found
    assert [sorted(each) for each in found] == [list(range(16))] * 2


def test_a_sampler_that_divides_among_ranks_and_points_before_what_is_shared_are_refused():
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
    with pytest.raises(ValueError, match="share='data' is impossible here: its sampler divides the data among ranks itself"):
        EchoLoader(loader, 1, share="data")
    for point in ("before_augmentation", "after_read"):
        with pytest.raises(ValueError, match=r"impossible with share.*a cache under a name"):
            loader_of(Numbers(40), 8, options={"insertion_point": point})


def test_share_and_cache_are_refused_together():
    with pytest.raises(ValueError, match="share and cache are impossible together"):
        EchoLoader(DataLoader(range(8), batch_size=2), 1, share="data", cache="1MiB")


def test_on_another_system_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    with pytest.raises(ValueError, match="share='data' is impossible on this system: it needs Linux"):
        EchoLoader(DataLoader(range(8), batch_size=2), 1, share="data")


def _close_sharing(loader):
    loader.sharing._attachment.close()


def test_neither_a_timeout_of_the_loader_nor_a_forked_child_that_closes_it_ends_a_reader():
    plain = DataLoader(Numbers(200), batch_size=8, num_workers=1, timeout=1)
    loader = EchoLoader(plain, 1, share={"name": "data", "window": 2**13}, seed=0)
    epoch = iter(loader)
    first = [next(epoch)]
    pid = status()["pid"]
    time.sleep(2.5)  # longer than the timeout, while the window is full
    child = FORK.Process(target=_close_sharing, args=(loader,))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    rest = list(epoch)
    assert (status()["pid"], status()["count"]) == (pid, 1)
    loader.close()
    assert sorted(index for batch in first + rest for index in batch["index"].tolist()) == list(range(200))
