"""Several trainings, one reading process: what each of them gets."""

import random
import threading
import time

import pytest
import torch
from sharing_runs import (
    FORK,
    Numbers,
    closing,
    end_readers,
    epochs_of,
    examples,
    indices,
    loader_of,
    sleeps,
    status,
    together,
    wait_until,
)
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler

from lightning_echo import EchoLoader, StagedDataset
from lightning_echo.share.connecting import SharedDataDiffers

pytestmark = pytest.mark.usefixtures("own_folder")


def jitter(seed, most=0.003):
    """Returns what a training does before a batch: nothing, for a while."""
    generator = random.Random(seed)
    return lambda: time.sleep(generator.random() * most)


@pytest.mark.parametrize(("length", "batch_sizes", "window"), [(1, [1, 3], "1MiB"), (233, [8, 16, 5, 64], 2**15)])
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


def run_alone(batch_size, dataset=None, name="data", reads=None, **options):
    """Two epochs of a training that is alone with its reader."""
    plain = DataLoader(dataset or Numbers(60), batch_size, **options)
    loader = EchoLoader(plain, 1, share={"name": name, "linger_seconds": 0.5}, reads_in_flight=reads)
    try:
        return [examples(epoch) for epoch in epochs_of(loader, 2)]
    finally:
        loader.close()
        end_readers()


class Staged(StagedDataset):
    """Takes some time to read, and draws noise afterwards. Writes down which threads of the reader's workers read."""

    def __init__(self, path):
        self.path = path

    def read(self, index):
        with open(self.path, "a") as file:
            file.write(f"{threading.current_thread().name}\n")
        time.sleep(0.003)
        return index

    def decode(self, raw):
        return raw

    def augment(self, example):
        return {"index": example, "noise": torch.rand(()), "data": torch.full((64,), example % 251, dtype=torch.uint8)}

    def __len__(self):
        return 200


@pytest.mark.slow
def test_the_reader_has_many_reads_in_flight_and_its_examples_are_the_same(tmp_path):
    found, threads = [], []
    for reads in (1, 16):
        path = tmp_path / f"threads{reads}"
        found.append(run_alone(8, Staged(str(path)), reads=reads, shuffle=True, num_workers=2))
        threads.append({name for name in path.read_text().splitlines() if name.startswith("lightning_echo-read")})
    assert found[0] == found[1]
    assert threads[0] == set()
    assert len(threads[1]) == 8  # in each worker


def test_a_number_that_is_impossible_is_refused_by_the_reader_with_the_reason():
    with pytest.raises(RuntimeError, match="reads_in_flight=16 is impossible here: Together has a __getitems__ of its own"):
        run_alone(8, Together(60), reads=16, num_workers=1)


@pytest.mark.slow
def test_examples_order_and_noise_follow_from_the_name_and_not_from_who_starts_the_reader():
    found = run_alone(8, shuffle=True, num_workers=1)
    assert run_alone(7, shuffle=True, num_workers=3) == found
    other = run_alone(8, Together(60), shuffle=True, num_workers=1, name="other")
    assert [[index for index, _ in epoch] for epoch in other] != [[index for index, _ in epoch] for epoch in found]
    of_samplers = [run_alone(8, sampler=SubsetRandomSampler(range(60), torch.Generator().manual_seed(seed))) for seed in (1, 2)]
    assert of_samplers[0] == of_samplers[1], "a generator of one's own has no say in it"
    assert [sorted(index for index, _ in epoch) for epoch in (*other, *of_samplers[0])] == [list(range(60))] * 4


def test_a_training_that_comes_late_enters_where_the_others_are_and_then_gets_whole_passes():
    first, second = loader_of(Numbers(96), 8, window=2**13), loader_of(Numbers(96), 16, window=2**13)
    epoch = iter(first)
    assert len([next(epoch) for _ in range(5)]) == 5
    del epoch
    late = together(closing(second, 2), closing(first, 3))[0]
    assert [len(each) for each in late] == [6, 6]  # the length of its own epoch, whole or not
    assert len(set(examples(late[0]))) == 96  # over the end of the pass


@pytest.mark.slow
def test_skip_waits_for_nobody_and_counts_what_it_missed():
    share = {"behind": "skip", "window": 2**13, "wait_for": 2}
    slow, fast = loader_of(Numbers(400), 8, **share), loader_of(Numbers(400), 8, **{**share, "behind": "wait"})
    few, every = together(closing(slow, 1, sleeps(0.05)), closing(fast, 3, sleeps(0.002)))
    for epoch in every:
        assert sorted(indices(epoch)) == list(range(400))
    assert slow.sharing.missed_examples > 100
    assert len(few[0]) == 50
    assert len(set(examples(few[0]))) == 400  # none twice: noise tells two uses of an index apart


def test_a_reader_that_all_have_left_begins_again():
    one, other = (loader_of(Numbers(64), size, linger_seconds=20) for size in (8, 16))
    first = [examples(epoch) for epoch in closing(one, 1)()]
    wait_until(lambda: status()["count"] == 0, "the training has left")
    pid = status()["pid"]
    second = [examples(epoch) for epoch in epochs_of(other, 1)]
    assert status()["pid"] == pid
    other.close()
    assert second == first


def test_each_training_echoes_as_much_as_it_wants():
    options = {"insertion_point": "after_batching"}
    plain, echoing = (loader_of(Numbers(200), 8, factor=factor, wait_for=2, options=options) for factor in (1, 2))
    whole, echoed = together(closing(plain, 4), closing(echoing, 4))
    assert echoing.counts.delivered == 800
    assert abs(echoing.counts.fresh - 400) <= 16
    stream = [example for epoch in whole for example in examples(epoch)]
    fresh = list(dict.fromkeys(example for epoch in echoed for example in examples(epoch)))
    assert set(fresh) <= set(stream[: len(fresh) + 8])


def test_no_example_is_twice_in_a_batch_at_any_boundary_of_passes():
    for epoch in closing(loader_of(Numbers(25), 4, factor=1.5), 12)():
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


def test_a_sampler_that_divides_among_ranks_and_points_before_what_is_shared_are_refused():
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))
    with pytest.raises(ValueError, match="share='data' is impossible here: its sampler divides the data among ranks itself"):
        EchoLoader(loader, 1, share="data")
    for point in ("before_augmentation", "after_read"):
        with pytest.raises(ValueError, match=r"impossible with share.*a cache under a name"):
            loader_of(Numbers(40), 8, options={"insertion_point": point})


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


# Several loaders of one name in one process: none of them waits for one that is idle.


def in_thread(run):
    """What a function returns that runs in a thread, which has ended then."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits"
    return found[0]


def test_a_loader_whose_loop_has_ended_holds_up_no_other_one_and_all_get_whole_passes():
    first, second = [loader_of(Numbers(240), size, window=2**13, linger_seconds=5) for size in (8, 16)]
    passes = [in_thread(lambda: epochs_of(first, 1)[0])]  # in a thread, so that a test that hangs fails

    def rest():
        return [epochs_of(each, 1)[0] for each in (second, first, second)]

    passes += in_thread(rest)
    for loader in (first, second):
        loader.close()
    ordered = [indices(epoch) for epoch in passes]
    for order in ordered:
        assert sorted(order) == list(range(240))
    assert ordered[0] == ordered[1] != ordered[2] == ordered[3], "each loader goes from pass to pass"


def test_two_loaders_that_are_iterated_together_stay_together():
    """The second one comes a few batches later than the first, and loses nothing from then on."""

    def run():
        both = [loader_of(Numbers(240), 8, window=2**13, linger_seconds=5) for _ in range(2)]
        batches = [pair for _ in range(3) for pair in zip(*both, strict=True)]
        for loader in both:
            loader.close()
        return [[index for batch in of_one for index in batch["index"].tolist()] for of_one in zip(*batches, strict=True)]

    first, second = in_thread(run)
    for number in range(3):
        assert sorted(first[number * 240 : (number + 1) * 240]) == list(range(240))
    late = next(place for place in range(240) if first[place : place + 240] == second[:240])
    assert first[late:] == second[: len(first) - late]
