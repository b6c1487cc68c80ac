"""Passes begin and factors change at the same request in every run, also in a resumed one; nobody's turn is lost."""

import pickle
from types import SimpleNamespace

import pytest

from lightning_echo.pipeline.pipelines import RestartablePipeline, StreamAnswers, StreamPlace, StreamRequests
from lightning_echo.pipeline.streams import StreamNote
from lightning_echo.pipeline.worker import Report

REPORT, NOTHING_MADE = Report(fresh=4), Report()


class Workers:
    """Stands in for the rebuilt ``DataLoader``: asks ``ahead`` requests ahead, and hands request k to worker k % workers.

    Worker ``w`` makes ``lengths[w]`` batches in each pass, each named (pass, worker, number in it, factor), the last one with the
    word that it was the last; if ``late``, that is said only when one more is asked for. Its state is what it has made.
    """

    def __init__(self, requests, lengths, ahead, late=False):
        self.requests, self.lengths, self.late = requests, lengths, late
        self.asked = [next(requests) for _ in range(ahead)]
        self.at = 0
        self.made = [{} for _ in lengths]
        self.ended = [-1] * len(lengths)

    def __iter__(self):
        return self

    def __next__(self):
        self.asked.append(next(self.requests))
        request, worker, self.at = self.asked.pop(0), self.at % len(self.lengths), self.at + 1
        if request.resume is not None:
            self.made[worker], self.ended[worker] = resumed(request.resume)
        if request.pass_number <= self.ended[worker]:
            return None, NOTHING_MADE, StreamNote(worker, True, self.state(worker))
        made, length = self.made[worker].get(request.pass_number, 0), self.lengths[worker]
        is_made = made < length
        if made + (not self.late) >= length:
            self.ended[worker] = request.pass_number
        self.made[worker][request.pass_number] = made + is_made
        batch = (request.pass_number, worker, made, request.factor) if is_made else None
        return (
            batch,
            REPORT if is_made else NOTHING_MADE,
            StreamNote(worker, self.ended[worker] >= request.pass_number, self.state(worker)),
        )

    def state(self, worker):
        return pickle.dumps((self.made[worker], self.ended[worker]))


def resumed(state):
    return ({}, -1) if isinstance(state, int) else pickle.loads(state)


class Run:
    def __init__(self, lengths, ahead, late=False, state=None, delivered=0):
        workers = len(lengths)
        first = StreamPlace(0, 0, False, frozenset(), (0,) * workers, (None,) * workers)
        place = first if state is None else state["place"]
        factors = [(0, 1.0)] if state is None else [tuple(change) for change in state["factors"]]
        pending = [] if state is None else [tuple(change) for change in state["pending"]]
        self.requests = StreamRequests(place, factors, pending, ahead)
        self.answers = StreamAnswers(Workers(self.requests, lengths, ahead, late), self.requests, place, delivered)
        self.place = place

    def next(self):
        batch, _, self.place = next(self.answers)
        return batch

    def state(self):
        return {"place": self.place, **self.requests.state(self.place.request)}


CASES = [([3], 0), ([3], 2), ([2, 5, 1], 6), ([1, 1, 1], 3), ([4, 0, 3], 6)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("lengths", "ahead"), CASES)
def test_each_pass_has_the_batches_of_a_plain_loader_in_its_order(lengths, ahead, late):
    run = Run(lengths, ahead, late)
    expected = [(worker, number) for number in range(max(lengths)) for worker, length in enumerate(lengths) if number < length]
    for number in range(4):
        batches = [run.next() for _ in range(len(expected) + 1)]
        assert batches[-1] is None
        assert [batch[:3] for batch in batches[:-1]] == [(number, *each) for each in expected]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("lengths", "ahead"), CASES)
def test_a_run_goes_on_from_every_place_with_the_factors_that_were_to_come(lengths, ahead, late):
    """Factors are changed at batches 5 and 9, from the first batch on that cannot have been asked for."""

    def play(run, items, done):
        found, batches = [], done
        for _ in range(items):
            if batches in changes:
                run.requests.change_factor(batches + ahead, changes[batches])
            found.append(run.next())
            batches += found[-1] is not None
            states.append((run.state(), batches))
        return found

    changes, states = {5: 2.0, 9: 3.0}, []
    items = play(Run(lengths, ahead, late), 40, 0)
    assert {batch[3] for batch in items if batch} == {1.0, 2.0, 3.0}
    taken = list(states)
    for at, (state, batches) in enumerate(taken):
        if batches in changes:
            continue  # the factor is about to be set again
        resumed = Run(lengths, ahead, late, state, batches)
        assert play(resumed, 39 - at, batches) == items[at + 1 :]


@pytest.mark.parametrize(("lengths", "ahead"), CASES)
def test_a_factor_counts_from_the_first_batch_that_cannot_be_asked_for(lengths, ahead):
    run = Run([10**6] * len(lengths), ahead)
    for _ in range(7):
        run.next()
    run.requests.change_factor(7 + ahead, 4.0)
    run.requests.change_factor(9 + ahead, 9.0)
    run.requests.change_factor(8 + ahead, 2.0)  # replaces what would count after it
    assert [run.next()[3] for _ in range(ahead + 4)] == [1.0] * ahead + [4.0] + [2.0] * 3


def test_at_rest_the_state_one_batch_earlier_is_known_if_that_batch_came_from_this_pipeline():
    pipeline, restartable = SimpleNamespace(state=lambda delivered: {"at": delivered}, close=lambda: None), RestartablePipeline()
    restartable.start(pipeline, 2)
    assert [restartable.reaches(delivered) for delivered in (1, 2, 4)] == [False, True, True]
    restartable.stop(5)
    assert restartable.reaches(4)
    assert [restartable.state(delivered) for delivered in (4, 99)] == [{"at": 4}, {"at": 5}]
    restartable.start(pipeline, 5)
    restartable.stop(5)
    assert not restartable.reaches(4)
    assert restartable.state(4) == {"at": 5}
    restartable.wait_with({"at": 6})
    assert not restartable.reaches(5)
