"""A worker that echoes a stream on demand: each example fresh once, batches as large as the plain loader's, a state to resume."""

import os
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from own_states import Ends, RollsOver
from torch.utils.data import IterableDataset, default_collate

from lightning_echo.pipeline.demand_streams import DemandStreamPipeline, StreamOnDemand, StreamWaiting, StreamWords
from lightning_echo.pipeline.pipelines import StreamPlace, StreamRequests
from lightning_echo.pipeline.prefetch import WorkerProcesses
from lightning_echo.pipeline.streams import Pulls, StreamRequest
from lightning_echo.pipeline.worker import Report
from lightning_echo.plan.plan import PlanShape, Reuse

LOADER = SimpleNamespace(num_workers=0, multiprocessing_context=None)


class Words(StreamWords):
    """Says by a schedule whether a request is due, each time that it is asked; then it is not due any more."""

    def __init__(self, due=(), closes_at=None):
        super().__init__(LOADER, 0)
        self.due, self.looks, self.closes_at = iter(due), 0, closes_at

    def is_due(self, number):
        self.looks += 1
        if self.looks == self.closes_at:
            self.close()
        return next(self.due, False)


class Stream(IterableDataset):
    """Passes of these lengths, over and over. An example is its pass and its place there."""

    def __init__(self, *lengths):
        self.lengths, self.begun = lengths, 0

    def __iter__(self):
        number, self.begun = self.begun, self.begun + 1
        for place in range(self.lengths[number % len(self.lengths)]):
            yield torch.tensor([1000 * number + place])


class Noisy(Ends, IterableDataset):
    def item(self):
        return torch.tensor([1000 * self.number + self.at, float(torch.rand(()))])


class NoisyRollsOver(Noisy, RollsOver):
    pass


def worker_of(dataset, words, batch_size=4, buffer_size=16, drop_last=False, collate_fn=list):
    sizes = {"batch_size": batch_size, "last_batch_size": batch_size, "batches_per_pass": 1, "buffer_size": buffer_size}
    shape = PlanShape(**sizes, workers=1, seed=0, distinct=False, reuse=Reuse.memory)
    return StreamOnDemand(dataset, shape, 1, collate_fn, drop_last=drop_last, words=words)


def batches_of(worker, number, max_factor, **first):
    """The batches of a pass, each with its fresh numbers, its echoes and the note that came with it."""
    found = []
    while True:
        examples, report, note = worker.fetch(StreamRequest(number, max_factor, **first))
        first = {}
        if examples is not None:
            numbers = [int(example[0]) for example in examples]
            found.append((numbers[: report.fresh], numbers[report.fresh :], note))
        if note.ended:
            return found


CASES = {
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=4),
    "max_factor": st.sampled_from([1.0, 1.5, 4.0, 16.0]),
    "batch_size": st.integers(1, 7),
    "buffer": st.integers(1, 20),
    "drop_last": st.booleans(),
    "due": st.lists(st.booleans(), max_size=200),
}


@given(**CASES)
@settings(max_examples=200)
def test_whenever_a_batch_is_due_every_example_is_fresh_once_and_each_batch_has_a_size_of_the_plain_loaders(
    lengths, max_factor, batch_size, buffer, drop_last, due
):
    worker = worker_of(Stream(*lengths), Words(due), batch_size, buffer, drop_last)
    read, delivered, echoed = [], 0, 0
    for number, length in enumerate(lengths):
        rest, batches = length % batch_size, batches_of(worker, number, max_factor)
        for fresh, echoes, _ in batches:
            assert len({*fresh, *echoes}) == len(fresh) + len(echoes)
            assert set(echoes) <= set(read[-buffer:]), "an echo is of a batch before, and among the newest"
            read += fresh
            delivered, echoed = delivered + len(fresh), echoed + len(echoes)
            assert echoed <= (max_factor - 1) * delivered + batch_size - 1 + 1e-6
        came = [one for fresh, _, _ in batches for one in fresh]
        assert came == [1000 * number + place for place in range(len(came))]
        left_out, held = length - len(came), min(len(read), buffer) if max_factor > 1 else 0
        if drop_last:  # what the plain loader leaves out, or a batch that memory cannot fill
            assert left_out <= rest or left_out + held < batch_size
        else:
            assert left_out == 0
        sizes = [len(fresh) + len(echoes) for fresh, echoes, _ in batches]
        assert set(sizes[:-1]) <= {batch_size}
        if drop_last:
            assert set(sizes) <= {batch_size}
        elif sizes[-1] not in (batch_size, rest):
            assert len(set(batches[-1][1])) == min(len(read) - len(batches[-1][0]), buffer), "memory held no more"


class Counted(Stream):
    """Draws a number for each example, and counts what was asked of it."""

    def __init__(self, *lengths):
        super().__init__(*lengths)
        self.asked = 0

    def __iter__(self):
        for example in super().__iter__():
            self.asked += 1
            yield torch.cat([example, torch.rand(1)])
        self.asked += 1


@given(**CASES)
@settings(max_examples=200)
def test_a_worker_that_is_told_what_to_pull_makes_the_same_batches_and_pulls_no_more(
    lengths, max_factor, batch_size, buffer, drop_last, due
):
    run = worker_of(Counted(*lengths), Words(due), batch_size, buffer, drop_last)
    again = worker_of(Counted(*lengths), Words(), batch_size, buffer, drop_last)
    for number in range(len(lengths)):
        has_ended = False
        while not has_ended:
            examples, report, note = run.fetch(StreamRequest(number, max_factor))
            has_ended = note.ended
            pulls = Pulls(None if examples is None else report.fresh, has_ended)
            same, as_before, _ = again.fetch(StreamRequest(number, max_factor, pulls=pulls))
            assert again.dataset.asked == run.dataset.asked
            assert list(map(torch.Tensor.tolist, same or ())) == list(map(torch.Tensor.tolist, examples or ()))
            assert (same is None) is (examples is None)
            assert (as_before.fresh, as_before.echoed) == (report.fresh, report.echoed)


@pytest.mark.parametrize(
    ("length", "looks", "fresh"),
    [
        (12, 99, [4, 4, 4]),
        (12, 5, [4, 1, 4, 3]),
        (14, 5, [4, 1, 4, 4, 1]),  # is filled up to the plain loader's rest of two
        (14, 7, [4, 3, 4, 3]),  # three are more than that
        (13, 5, [4, 1, 4, 4]),
        (13, 7, [4, 3, 4, 2]),
    ],
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_last_batch_of_a_pass_is_as_large_as_the_plain_loaders_last_one_if_what_is_left_fits(length, looks, fresh, drop_last):
    """One request becomes due, when the worker has looked ``looks`` times whether one is."""
    rest = length % 4
    sizes = [4] * len(fresh)
    if fresh[-1] <= rest:
        fresh, sizes = (fresh[:-1], sizes[:-1]) if drop_last else (fresh, [*sizes[:-1], rest])
    batches = batches_of(worker_of(Stream(length), Words([False] * looks + [True]), drop_last=drop_last), 0, 4.0)
    assert [len(fresh) for fresh, _, _ in batches] == fresh
    assert [len(fresh) + len(echoes) for fresh, echoes, _ in batches] == sizes


def test_what_the_account_lends_at_the_end_of_a_pass_is_paid_back_before_the_next_echo():
    """With a bound of 1.5, four fresh examples earn two echoes."""
    worker = worker_of(Stream(8), Words([False] * 6 + [True] + [False] * 3 + [True] * 99), buffer_size=4)
    counts = [[(len(fresh), len(echoes)) for fresh, echoes, _ in batches_of(worker, number, 1.5)] for number in range(2)]
    assert counts[0] == [(4, 0), (2, 2), (2, 2)]  # the last one has earned one of its two
    assert counts[1][0] == (4, 0)  # and not (3, 1)


class Chunks(IterableDataset):
    """Yields views of one buffer, which is filled again after each chunk."""

    def __iter__(self):
        buffer = torch.zeros(4, 1)
        for chunk in range(12):
            buffer[:, 0] = torch.arange(4) + chunk * 4
            yield from buffer


@pytest.mark.parametrize("collate_fn", [list, default_collate])
def test_on_demand_a_stream_may_use_its_memory_again_and_the_training_may_edit_its_batch(collate_fn):
    """A batch of 4 is a chunk, and the first request that is due moves all later ones by a place."""
    worker = worker_of(Chunks(), Words([False] * 5 + [True] + [False] * 6 + [True]), collate_fn=collate_fn)
    seen, echoed, ended = 0, 0, False
    while not ended:
        examples, report, note = worker.fetch(StreamRequest(0, 8.0))
        ended = note.ended
        fresh, echoes = [], []
        for number, example in enumerate(examples or ()):
            (fresh if number < report.fresh else echoes).append(int(example))
            if collate_fn is list:  # it copies nothing, and the training edits its batch
                example.fill_(-1)
        assert fresh == list(range(seen, seen + len(fresh)))
        assert len(set(echoes)) == len(echoes)
        assert set(echoes) <= set(range(seen)), "an echo is what it was when it was yielded"
        seen, echoed = seen + len(fresh), echoed + len(echoes)
    assert (seen, echoed) == (48, 8)


@pytest.mark.parametrize("kind", [Noisy, NoisyRollsOver])
@given(due=st.lists(st.booleans(), min_size=30, max_size=200), at=st.integers(0, 40), max_factor=st.sampled_from([1.0, 8.0]))
@settings(max_examples=40)
def test_from_the_state_after_any_batch_the_stream_resumes_with_the_first_example_that_was_not_delivered(
    kind, due, at, max_factor
):
    """A stream that rolls over may have rolled when its last example was in a batch, and is then in its next pass already."""
    lengths = 21, 5, 34
    whole, resumed = worker_of(kind(*lengths), Words(due)), worker_of(kind(*lengths), Words(due))
    batches = [(number, *batch) for number in range(3) for batch in batches_of(whole, number, max_factor)]
    at = min(at, len(batches) - 1)
    number, *_, note = batches[at]
    found, request = [one for _, fresh, _, _ in batches[: at + 1] for one in fresh], {"resume": note.state}
    for each in range(number, 3):
        found += [one for fresh, _, _ in batches_of(resumed, each, max_factor, **request) for one in fresh]
        request = {}
    expected = [1000 * each + place for each, length in enumerate((*lengths, lengths[0])) for place in range(length)]
    assert found in ([expected[:60], expected] if kind is NoisyRollsOver else [expected[:60]])


def test_a_resumed_worker_knows_how_many_examples_of_the_pass_came_before():
    """Of 14 examples, five came in two batches. The plain loader's last batch has two, and one is left for that."""
    worker = worker_of(Noisy(14), Words([False] * 5 + [True]))
    notes = [worker.fetch(StreamRequest(0, 4.0))[2] for _ in range(2)]
    batches = batches_of(worker_of(Noisy(14), Words()), 0, 4.0, resume=notes[1].state)
    assert [(len(fresh), len(echoes)) for fresh, echoes, _ in batches] == [(4, 0), (4, 0), (1, 1)]


def test_with_a_bound_of_1_a_resumed_stream_has_the_batches_of_the_run_that_was_not_stopped():
    requests = [number for number in range(4) for _ in range(12)]

    def answers(worker, some, state=None):
        for number in some:
            examples, report, note = worker.fetch(StreamRequest(number, 1.0, state))
            state = None
            yield examples and [example.tolist() for example in examples], report[:2], note

    whole = list(answers(worker_of(Noisy(21, 5, 34), Words()), requests))
    for at in range(0, len(requests), 3):
        rest = answers(worker_of(Noisy(21, 5, 34), Words()), requests[at + 1 :], whole[at][2].state)
        assert [each[:2] for each in rest] == [each[:2] for each in whole[at + 1 :]]


def test_a_request_that_is_due_when_a_pass_begins_is_filled_from_memory_and_the_pass_has_not_ended():
    worker = worker_of(Noisy(8, 8), Words([False] * 9 + [True]))
    batches_of(worker, 0, 4.0)
    examples, report, note = worker.fetch(StreamRequest(1, 4.0))
    assert (len(examples), report.fresh, report.echoed, note.ended) == (4, 0, 4, False)
    resumed = worker_of(Noisy(8, 8), Words())
    assert [fresh for fresh, _, _ in batches_of(resumed, 1, 4.0, resume=note.state)] == [
        [1000, 1001, 1002, 1003],
        [1004, 1005, 1006, 1007],
    ]


def test_a_worker_that_pulls_ends_its_request_when_the_loader_is_closed_and_when_the_training_is_dead(monkeypatch):
    class Endless(IterableDataset):
        pulls = 0

        def __iter__(self):
            while True:
                self.pulls += 1
                yield torch.zeros(1)

    stream = Endless()
    worker = worker_of(stream, Words(closes_at=3), batch_size=10**6)
    assert worker.fetch(StreamRequest(0, 8.0))[0] is None
    assert stream.pulls == 3
    orphan = worker_of(stream, Words(), batch_size=10**6)
    orphan.fetch(StreamRequest(-1, 8.0))
    monkeypatch.setattr(orphan, "_parent", os.getppid() + 1)
    with pytest.raises(RuntimeError, match=r"the process of the training has ended.*"):
        orphan.fetch(StreamRequest(0, 8.0))


def test_what_is_drawn_in_collating_follows_from_the_number_of_the_batch_also_if_nothing_was_pulled_for_it():
    def draws(seed):
        worker = worker_of(Stream(99), Words([False] * 4 + [True] * 9))
        worker.fetch(StreamRequest(0, 8.0))
        torch.manual_seed(seed)
        for _ in range(2):
            assert worker.fetch(StreamRequest(0, 8.0))[1].fresh == 0
            yield float(torch.rand(()))

    first, other = list(draws(1)), list(draws(2))
    assert first == other
    assert first[0] != first[1]


@pytest.mark.parametrize(("ended", "lead"), [((), 1), ((0,), 2), ((0, 2, 3), 4), ((0, 1, 2, 3), 4)])
def test_where_workers_have_ended_a_batch_is_due_by_as_many_requests_earlier_as_its_worker_gets_rarer(ended, lead):
    """Before the first step is over, the lead is one batch."""
    place = StreamPlace(9, 0, True, frozenset(ended), (2,) * 4, (None,) * 4)
    requests = StreamRequests(place, [(9, 8.0)], [], 8)
    words = StreamWords(LOADER, 0)
    waiting = StreamWaiting(requests, WorkerProcesses(), None, 0, str)
    answers = iter([("batch", Report(fresh=4), place)])
    pipeline = DemandStreamPipeline(
        requests, answers, WorkerProcesses(), place, 8, words=words, waiting=waiting, workers=4, most_lead=8
    )
    assert pipeline.next_batch(8) == ("batch", Report(fresh=4))
    assert [words.is_due(number) for number in (8 + lead, 9 + lead)] == [True, False]


def test_of_a_stream_that_delivers_nothing_the_user_is_told_once():
    said = []
    waiting = StreamWaiting(None, WorkerProcesses(), None, 0, said.append)
    waiting.since = perf_counter() - 11
    assert waiting.lost(0.0) is None
    assert not said  # the first batch waits for the workers to start
    waiting.has_begun = True
    assert [waiting.lost(0.0) for _ in range(2)] == [None, None]
    assert said == [
        "the training has waited 11 s for fresh examples: the next example of the stream is not there yet. A worker does not "
        "echo while the stream lets it wait for an example, or once what memory holds has been used as often as max_factor allows"
    ]


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), late=st.booleans(), lead=st.integers(0, 3))
@settings(max_examples=60)
def test_the_request_that_the_training_waits_for_is_due_whichever_workers_have_ended(lengths, late, lead):
    """Workers make so many batches in a pass; answers without a batch are counted as they are received."""
    words, received, at = StreamWords(LOADER, 0), 0, 0
    words.hand(lead, reads_are_cheap=False)
    for _ in range(2):
        made, ended = [0] * len(lengths), set()
        while len(ended) < len(lengths):
            worker = at % len(lengths)
            words.ask(received)
            assert words.is_due(at)
            assert not words.is_due(at + lead + 1), "nobody waits for a batch that comes later than the lead"
            makes = made[worker] < lengths[worker]
            made[worker] += makes
            if made[worker] == lengths[worker] and (not late or not makes):
                ended.add(worker)
            at += 1
            if makes:
                received += 1
            else:
                words.pass_over()
