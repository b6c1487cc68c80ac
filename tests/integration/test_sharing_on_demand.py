"""Trainings that share and echo on demand: what comes fresh, and what a faster one does meanwhile."""

import threading
import time
from itertools import islice

import pytest
import torch
from sharing_runs import (
    Numbers,
    end_readers,
    epochs_of,
    examples,
    kill_reader,
    loader_of,
    rows,
    sleeps,
    status,
    together,
    wait_until,
)
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_echo import EchoLoader
from lightning_echo.share.config import Gone, names
from lightning_echo.share.reading import MOST_END_SECONDS

pytestmark = pytest.mark.usefixtures("own_folder")
LENGTH, SIZE = 240, 4


def on_demand(seconds=0.0, size=SIZE, dataset=None, **options):
    return loader_of(dataset or Numbers(LENGTH, seconds), size, factor="demand", **options)


def in_order(passes):
    """The reader's examples, in order, as a training at factor 1 gets them that is alone."""
    loader = loader_of(Numbers(LENGTH), SIZE)
    found = [example for epoch in epochs_of(loader, passes) for example in examples(epoch)]
    loader.close()
    end_readers()
    return found


def fresh_of(batches):
    """The examples that were not there before, in order: the noise of two reads differs."""
    return list(dict.fromkeys(example for batch in batches for example in batch))


def check(batches, loader, expected):
    assert all(len({index for index, _ in batch}) == len(batch) == SIZE for batch in batches), "an index twice in a batch"
    fresh = fresh_of(batches)
    assert fresh == expected[: len(fresh)], "each example once in a pass, in the order of the reader"
    assert loader.counts.fresh == len(fresh)
    assert loader.counts.echoed == SIZE * len(batches) - len(fresh)


def batches_of(loader, count, before_batch=lambda: None):
    def epochs():
        while True:
            yield from loader

    found = []
    for batch in islice(epochs(), count):
        before_batch()
        found.append(rows(batch))
    return found


@pytest.mark.slow
def test_the_faster_training_echoes_while_the_reader_waits_for_the_slower_one():
    expected = in_order(4)
    fast, slow = on_demand(wait_for=2, window=2**15), on_demand(wait_for=2, window=2**15)
    of_fast, of_slow = together(lambda: batches_of(fast, 200, sleeps(0.005)), lambda: batches_of(slow, 100, sleeps(0.025)))
    check(of_fast, fast, expected)
    check(of_slow, slow, expected)
    assert fast.counts.echoed > slow.counts.echoed
    waited = fast.sharing.waited
    assert waited.for_reading + waited.for_peers < 200 * 0.005, "less than its own steps"
    fast.close()
    slow.close()


@pytest.mark.slow
def test_the_faster_training_waits_when_each_example_was_used_max_factor_times():
    """At each batch, so many uses have come for one fresh example, on average."""
    expected = in_order(4)
    fast, slow = on_demand(wait_for=2, window=2**13, options={"max_factor": 3}), on_demand(wait_for=2, window=2**13)
    of_fast, of_slow = together(lambda: batches_of(fast, 120), lambda: batches_of(slow, 60, sleeps(0.01)))
    check(of_fast, fast, expected)
    check(of_slow, slow, expected)
    for count in range(1, len(of_fast) + 1):
        assert SIZE * count <= 3 * len(fresh_of(of_fast[:count]))
    assert fast.counts.echoed > fast.counts.fresh, "it has echoed as much as it may, or nearly"
    fast.close()
    slow.close()


@pytest.mark.slow
def test_a_training_alone_that_the_reader_keeps_up_with_has_the_batches_of_factor_1():
    expected = in_order(2)
    loader = on_demand(options={"max_factor": 1})
    found = batches_of(loader, 2 * LENGTH // SIZE)
    assert [example for batch in found for example in batch] == expected
    loader.close()


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize("collate", [None, lambda examples: torch.utils.data.default_collate(examples)])
@pytest.mark.parametrize("batches", [1, 7, 61])
def test_a_resumed_run_continues_after_what_was_delivered(batches, collate):
    expected = in_order(4)

    def make():
        plain = DataLoader(Numbers(LENGTH, 0.001), SIZE, shuffle=True, num_workers=1, collate_fn=collate)
        return EchoLoader(plain, "demand", share={"name": "data", "linger_seconds": 0.5, "window": "1MiB"}, seed=0)

    loader = make()
    before = batches_of(loader, batches)
    state, fresh = loader.state_dict(), loader.counts.fresh
    loader.close()
    end_readers()
    again = make()
    again.load_state_dict(state)
    after = batches_of(again, 60)
    assert again.counts.fresh > fresh
    assert fresh_of(before) == expected[:fresh]
    assert fresh_of(after) == expected[fresh : again.counts.fresh]
    again.close()


def is_another_reader(than):
    """Whether a reader answers, and that is another one."""
    try:
        return status()["pid"] != than
    except (Gone, OSError):
        return False


@pytest.mark.filterwarnings("ignore:.*has waited")  # another reader takes long to start on a busy machine
def test_a_reader_that_is_killed_costs_nothing():
    expected = in_order(4)
    loader, found = on_demand(0.001), []
    for _ in range(3):
        fresh = loader.counts.fresh
        while loader.counts.fresh < fresh + 2 * SIZE:  # one that has read nothing would have died twice at the same item
            found += batches_of(loader, 25, sleeps(0.001))
        killed = status()["pid"]
        kill_reader()
        found += batches_of(loader, 5)  # from memory, or from the window of the dead reader
        wait_until(lambda killed=killed: is_another_reader(killed), "another reader")
    while loader.counts.fresh <= LENGTH:
        found += batches_of(loader, 10, sleeps(0.004))
    check(found, loader, expected)
    loader.close()


@pytest.mark.slow
def test_a_training_that_is_left_behind_continues_where_the_reader_is():
    """The window has room for 64 items."""
    expected = in_order(8)
    fast, slow = (on_demand(wait_for=2, behind=behind, window=2**15) for behind in ("wait", "skip"))
    is_ahead = threading.Event()

    def run_fast():
        found = batches_of(fast, 5)
        while fast.counts.fresh < 300:
            found += batches_of(fast, 1, sleeps(0.002))
        is_ahead.set()
        return found

    def run_slow():
        before = batches_of(slow, 3)
        assert is_ahead.wait(60)
        after = []
        while not slow.sharing.missed_examples or slow.counts.fresh < 100:
            after += batches_of(slow, 1, sleeps(0.002))
        return before, after

    of_fast, (before, after) = together(run_fast, run_slow)
    check(of_fast, fast, expected)
    fast.close()
    missed = slow.sharing.missed_examples
    assert missed >= 300 - 64 - 10 * SIZE
    fresh = fresh_of([*before, *after])
    assert all(len({index for index, _ in batch}) == len(batch) == SIZE for batch in [*before, *after])
    assert len(fresh) == slow.counts.fresh
    place_of = {example: place for place, example in enumerate(expected)}
    places = [place_of[example] for example in fresh]
    assert places[0] == 0
    assert places == sorted(places)
    assert places[-1] + 1 - len(places) == missed, "what it has not had is what was counted, once or after a second jump"
    slow.close()


def test_with_a_batch_nearly_as_large_as_the_data_nothing_is_echoed(caplog):
    loader = on_demand(dataset=Numbers(40), size=32, drop_last=True)
    found = batches_of(loader, 6)
    assert len(fresh_of(found)) == 6 * 32
    assert "nothing is echoed, since a batch of 32 examples is larger" in caplog.text
    loader.close()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(100))


@pytest.mark.parametrize(
    ("loader", "options", "said"),
    [
        (DataLoader(Stream(), 4, num_workers=1), {}, "share= gives a training whole passes or whole batches"),
        (DataLoader(range(100), 4, num_workers=1), {"insertion_point": "after_batching"}, "made while the training waits"),
        (DataLoader(Subset(Numbers(60), range(40)), 4, shuffle=True, num_workers=1), {}, "a part of what others read"),
    ],
)
def test_what_is_impossible_is_refused(loader, options, said):
    with pytest.raises(ValueError, match=f"factor='demand' is impossible .*{said}"):
        EchoLoader(loader, "demand", share="data", **options)


def test_a_state_of_another_name_is_refused():
    loader = on_demand()
    batches_of(loader, 3)
    state = loader.state_dict()
    loader.close()
    with pytest.raises(ValueError, match="the state is of a run with share='data', and this loader has share='other'"):
        on_demand(name="other").load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of a run with share='data', and this loader has share=None"):
        EchoLoader(DataLoader(Numbers(LENGTH), SIZE, shuffle=True, num_workers=1), "demand", seed=0).load_state_dict(state)


class SlowOnceMarked(Numbers):
    """A read takes a second as soon as a file is there: not those that compare the data."""

    def __init__(self, length, mark):
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index):
        self.seconds = float(self.mark.exists())
        return super().__getitem__(index)


@pytest.mark.slow
def test_a_loader_that_waits_for_an_item_can_be_closed_and_the_reader_ends_after_that_read(tmp_path):
    loader = on_demand(size=1, dataset=SlowOnceMarked(LENGTH, tmp_path / "mark"), window=2**13)
    batches_of(loader, 1)
    (tmp_path / "mark").touch()
    before = loader.sharing.waited.for_reading
    while loader.sharing.waited.for_reading == before:
        batches_of(loader, 10)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 1.0, "it has waited for the read"
    wait_until(lambda: names() == [], "the reader ends")
    assert time.monotonic() - began < MOST_END_SECONDS, "it has waited for a chunk"
