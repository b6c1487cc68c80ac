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
from lightning_echo.plan.plan import PlanShape, Reuse


class Stream(IterableDataset):
    def __init__(self, *lengths):
        self.lengths, self.epochs, self.begun = lengths, [], 0

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        number, self.begun = self.begun, self.begun + 1
        for i in range(self.lengths[number % len(self.lengths)]):
            yield torch.tensor([1000 * number + i])


class Noise:
    def item(self):
        return torch.tensor([1000 * self.number + self.at, float(torch.rand(()))])


class Noisy(Noise, Ends, IterableDataset):
    pass


class NoisyRollsOver(Noise, RollsOver, IterableDataset):
    pass


def echo_of(dataset, batch_size=4, buffer_size=8, drop_last=False, collate_fn=list, turn=None, key=1, reuse=Reuse.each):
    sizes = {"batch_size": batch_size, "last_batch_size": batch_size, "batches_per_pass": 1, "buffer_size": buffer_size}
    shape = PlanShape(**sizes, workers=1, seed=0, distinct=False, reuse=reuse)
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


@pytest.mark.parametrize("kind", [Stream, Noisy])
def test_a_pass_whose_first_batch_needs_no_fresh_example_is_not_over_with_it(kind):
    """A larger factor that counts from there on: the stream is still at the end of the pass before."""
    echo = echo_of(kind(12), batch_size=2, reuse=Reuse.memory)
    fetch_pass(echo, 0, 2.0)
    examples, report, note = echo.fetch(StreamRequest(1, 16.0))
    assert (len(examples), report.fresh, note.ended) == (2, 0, False)
    _, reports = fetch_pass(echo, 1, 16.0)
    assert sum(each.fresh for each in reports) == 12
