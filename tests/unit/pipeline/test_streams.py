"""A worker that echoes a stream: exact counts, a clean end of each pass, and a state that brings all back."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_states import Ends, RollsOver
from torch.utils.data import IterableDataset, default_collate

from lightning_echo.pipeline.streams import StreamEcho, StreamRequest
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.plan import PlanShape


class Stream(IterableDataset):
    """Numbers, other ones in each pass; every example can be told from every other. Told the pass."""

    def __init__(self, *lengths):
        self.lengths, self.epochs, self.begun = lengths, [], 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        number, self.begun = self.begun, self.begun + 1
        for i in range(self.lengths[number % len(self.lengths)]):
            yield torch.tensor([1000 * number + i])


class Noise:
    """Numbers with noise."""

    def item(self):
        return torch.tensor([1000 * self.number + self.at, float(torch.rand(()))])


class Noisy(Noise, Ends, IterableDataset):
    pass


class NoisyRollsOver(Noise, RollsOver, IterableDataset):
    pass


def echo_of(dataset, batch_size=4, buffer_size=8, drop_last=False, collate_fn=list, turn=None, key=1):
    sizes = {"batch_size": batch_size, "last_batch_size": batch_size, "batches_per_pass": 1, "buffer_size": buffer_size}
    shape = PlanShape(**sizes, workers=1, seed=0, distinct=False)
    return StreamEcho(dataset, shape, key=key, collate_fn=collate_fn, drop_last=drop_last, turn=turn)


def fetch_pass(echo, number, factor, **request):
    """The batches of one pass as lists of numbers, and their reports."""
    batches, reports = [], []
    while True:
        examples, report, note = echo.fetch(StreamRequest(number, factor, **request))
        request = {}
        if examples is not None:
            batches.append([int(example[0]) for example in examples])
            reports.append(report)
        if note.ended:
            return batches, reports


class Chunks(IterableDataset):
    """Yields views of one buffer, which is filled again after each chunk."""

    def __iter__(self):
        buffer = torch.zeros(4, 1)
        for chunk in range(12):
            buffer[:, 0] = torch.arange(4) + chunk * 4
            yield from buffer


@pytest.mark.parametrize("collate_fn", [list, default_collate])
def test_a_stream_may_use_its_memory_again(collate_fn):
    """A batch of 4 is a chunk, so that each batch of the plain loader is right; echoing pulls 1 to 3 for a batch."""
    echo = echo_of(Chunks(), collate_fn=collate_fn)
    uses = Counter(number for batch in fetch_pass(echo, 0, 4.0)[0] for number in batch)
    assert uses.keys() == set(range(48))  # each is what it was when it was yielded
    assert all(count <= 5 for count in uses.values())
    assert {int(example) for example in echo._held.values()} == set(echo._held)


class ItsOwnIterator(IterableDataset):
    """Numbers from a stream that is its own iterator and begins anew whenever it is asked for one, as litdata's does."""

    def __iter__(self):
        self.at = -1
        return self

    def __next__(self):
        self.at += 1
        if self.at == 22:
            raise StopIteration
        return torch.tensor([self.at])


def test_a_stream_is_asked_for_an_iterator_once_in_a_pass():
    echo = echo_of(ItsOwnIterator())
    for number in range(3):
        assert sorted(value for batch in fetch_pass(echo, number, 1.0)[0] for value in batch) == list(range(22))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    factor=st.sampled_from([1.0, 1.5, 2.37, 4.0, 9.0]),
    batch_size=st.integers(1, 7),
    buffer=st.integers(1, 4),
    drop_last=st.booleans(),
)
@settings(max_examples=30)
def test_every_example_is_fresh_once_and_used_by_the_factor(lengths, factor, batch_size, buffer, drop_last):
    buffer_size = buffer * batch_size
    echo = echo_of(Stream(*lengths), batch_size, buffer_size, drop_last)
    uses, seen, fresh_total = Counter(), set(), 0
    for number in range(len(lengths)):
        batches, reports = fetch_pass(echo, number, factor)
        first_uses = []
        for batch, (fresh, echoed, refetched, *_) in zip(batches, reports, strict=True):
            assert len(set(batch)) == len(batch) == fresh + echoed <= batch_size
            assert refetched == 0
            new = [value for value in batch if value not in seen]
            assert len(new) == fresh
            first_uses += new
            seen.update(batch)
            uses.update(batch)
        # In order and none left out, but for a last batch that is not full.
        assert first_uses == [1000 * number + i for i in range(len(first_uses))]
        assert len(first_uses) == lengths[number] or (drop_last and len(first_uses) > lengths[number] - batch_size)
        assert not drop_last or all(len(batch) == batch_size for batch in batches)
        fresh_total += len(first_uses)
    assert len(echo._held) <= buffer_size
    # What is live has uses left, and the start fills the buffer with few uses: apart from that the factor is met.
    assert factor * (fresh_total - 2 * buffer_size) - batch_size <= sum(uses.values()) <= factor * fresh_total + 1


@pytest.mark.parametrize(("length", "batch_size", "factor"), [(1, 4, 2), (5, 4, 2), (50, 8, 1.5)])
def test_passes_that_end_within_a_batch_add_up_to_the_factor(length, batch_size, factor):
    """What each pass had too much, or too little, would be 40 times that."""
    echo, buffer_size = echo_of(Stream(length), batch_size, 2 * batch_size), 2 * batch_size
    reports = [report for number in range(40) for report in fetch_pass(echo, number, float(factor))[1]]
    fresh, echoed = (sum(report[i] for report in reports) for i in (0, 1))
    assert fresh == 40 * length
    assert factor * fresh - buffer_size * (factor - 1) <= fresh + echoed <= factor * fresh + 1


def test_a_worker_whose_stream_has_ended_waits_for_the_others_and_one_that_is_not_wanted_does_nothing():
    echo = echo_of(Stream(4))
    assert echo.fetch(StreamRequest(-1, 2.0))[0] is None
    assert echo.dataset.begun == 0
    fetch_pass(echo, 0, 2.0)
    live = dict(echo._held)
    for _ in range(3):
        examples, report, note = echo.fetch(StreamRequest(0, 2.0))
        assert (examples, report, note[:2]) == (None, Report(), (0, True))
    assert echo._held == live
    assert echo.dataset.begun == 1


def test_an_error_of_the_stream_says_where_it_came():
    class Broken(IterableDataset):
        def __iter__(self):
            yield torch.zeros(1)
            raise OSError("no such shard")

    with pytest.raises(OSError, match="no such shard") as raised:
        fetch_pass(echo_of(Broken(), batch_size=1), 0, 1.0)
    told = [str(raised.value), *getattr(raised.value, "__notes__", [])]  # Python 3.10 has no notes: it stands in the message
    assert " ".join(told) == "no such shard (reading the stream in pass 0, worker 0)"


def test_edits_of_what_is_handed_out_do_not_reach_the_next_use_and_where_collating_copies_nothing_else_does():
    echo = echo_of(Stream(200))
    for _ in range(60):
        examples, _, _ = echo.fetch(StreamRequest(0, 4.0))
        for example in examples:
            assert 0 <= int(example) < 200
            example.fill_(-1)
    echo = echo_of(Stream(200), collate_fn=default_collate)
    examples, _, _ = echo.fetch(StreamRequest(0, 4.0))
    assert any(example is held for example in examples for held in echo._held.values())


@pytest.mark.parametrize("kind", [Noisy, NoisyRollsOver])
@pytest.mark.parametrize("factor", [1.0, 2.37])
def test_from_the_state_after_any_batch_a_run_goes_on_as_if_it_had_not_stopped(kind, factor):
    requests = [number for number in range(4) for _ in range(30)]
    echo = echo_of(kind(21, 5, 34))
    answers, states = [], []
    for number in requests:
        examples, report, note = echo.fetch(StreamRequest(number, factor))
        answers.append((examples and [example.tolist() for example in examples], report[:2], note.ended))
        states.append(note.state)
    assert {number for number, answer in zip(requests, answers, strict=True) if answer[2]} == {0, 1, 2, 3}
    for at in range(0, len(requests), 3):
        resumed, found, refetched = echo_of(kind(21, 5, 34)), [], 0
        for number in requests[at + 1 :]:
            examples, report, note = resumed.fetch(StreamRequest(number, factor, None if found else states[at]))
            found.append((examples and [example.tolist() for example in examples], report[:2], note.ended))
            refetched += report[2]
        assert found == answers[at + 1 :]
        assert refetched <= 40
        assert at < 3 or factor > 1 or refetched == 0


def test_only_what_live_examples_need_is_pulled_again():
    echo = echo_of(Noisy(10_000))
    for _ in range(300):
        note = echo.fetch(StreamRequest(0, 2.0))[2]
    stream = Noisy(10_000)
    report = echo_of(stream).fetch(StreamRequest(0, 2.0, note.state))[1]
    assert report[2] <= echo._plan.position - min(echo._held) + 2
    assert stream.read == report[2] + report[0]
    echo = echo_of(Noisy(50))
    note = [echo.fetch(StreamRequest(0, 1.0))[2] for _ in range(3)][-1]
    stream = Noisy(50)
    examples, report, _ = echo_of(stream).fetch(StreamRequest(0, 1.0, note.state))
    assert [int(example[0]) for example in examples] == [12, 13, 14, 15]
    assert (report[:3], stream.read) == ((4, 0, 0), 4)


def test_without_a_state_of_the_stream_seeds_and_draws_go_on_by_the_number_of_batches():
    echo = echo_of(Stream(8, 40))
    first = len(fetch_pass(echo, 0, 1.0)[0])
    batches = fetch_pass(echo, 1, 1.0)[0]
    stream = Stream(8, 40)
    stream.begun = 1
    resumed = echo_of(stream)
    assert fetch_pass(resumed, 1, 1.0, resume=first)[0] == batches
    assert resumed._plan.number == echo._plan.number


@pytest.fixture
def as_worker(monkeypatch):
    def run_as(number):
        info = SimpleNamespace(id=number, num_workers=2, dataset=None)
        monkeypatch.setattr("lightning_echo.pipeline.streams.get_worker_info", lambda: info)

    return run_as


def test_two_runs_draw_the_same_numbers_and_other_ranks_and_workers_others(as_worker):
    def noise(key, worker):
        as_worker(worker)
        echo = echo_of(Noisy(30), key=key)
        return {float(example[1]) for _ in range(9) for example in echo.fetch(StreamRequest(0, 2.0))[0]}

    assert noise(1, 0) == noise(1, 0)
    assert not noise(1, 0) & noise(2, 0)
    assert not noise(1, 0) & noise(1, 1)


def test_what_collating_draws_is_a_function_of_the_batch_whatever_was_drawn_before():
    def drawn(before):
        echo, values = echo_of(Noisy(90)), []
        for _ in range(40):
            echo.fetch(StreamRequest(0, 9.0))
            values.append(float(torch.rand(())))
            torch.rand(before)
        return values

    assert drawn(0) == drawn(5)
    assert len(set(drawn(0))) == 40
