"""A pipeline that is started or at rest has a state either way; the pipelines here write down what they are told."""

import gc
import pickle

import pytest

from lightning_echo.pipeline.pipelines import RestartablePipeline, Start


class Fake:
    """A pipeline whose plan is the number of batches."""

    def __init__(self, log=None):
        self.log = [] if log is None else log

    def state(self, delivered):
        return {"plan": {"number": delivered, "pending": []}, "order": {"at": delivered}}

    def close(self):
        self.log.append("closed")


NOTHING = {"plan": None, "order": None}


def started():
    restartable = RestartablePipeline()
    return restartable, restartable.start(Fake(), 2)


def test_while_it_runs_the_state_is_the_pipelines_and_at_rest_that_of_when_it_was_stopped():
    restartable = RestartablePipeline()
    assert (restartable.started, restartable.state(7), restartable.begin_at) == (None, NOTHING, (0, 0))
    pipeline = restartable.start(Fake(), 2)
    assert restartable.started is pipeline
    assert restartable.state(3) == Fake().state(3)
    restartable.stop(5)
    assert restartable.started is None
    assert pipeline.log == ["closed"]
    assert restartable.state(99) == Fake().state(5)
    restartable.stop(6)  # a second time: nothing to do
    assert restartable.state(99) == Fake().state(5)


def test_the_state_one_batch_earlier_is_known_if_that_batch_came_from_this_pipeline():
    restartable, _ = started()
    assert [restartable.reaches(delivered) for delivered in (1, 2, 4)] == [False, True, True]
    restartable.stop(5)
    assert restartable.reaches(4)
    assert restartable.state(4) == Fake().state(4)
    restartable.start(Fake(), 5)
    restartable.stop(5)
    assert not restartable.reaches(4)
    assert restartable.state(4) == Fake().state(5)
    restartable.wait_with(Fake().state(6))
    assert not restartable.reaches(5)


def test_who_drops_it_without_a_word_leaves_no_pipeline_open():
    restartable, pipeline = started()
    del restartable
    gc.collect()
    assert pipeline.log == ["closed"]


@pytest.mark.parametrize(("state", "expected"), [(Fake().state(4), Fake().state(4)), (None, NOTHING)], ids=["a state", "none"])
def test_elsewhere_in_the_run_a_state_is_gone_on_from_and_without_one_nothing_is_live(state, expected):
    restartable, pipeline = started()
    restartable.go_to(Start(12, 3), state)
    assert pipeline.log == ["closed"]
    assert restartable.state(0) == expected
    assert (restartable.begin_at, restartable.started) == ((12, 3), None)


def test_at_rest_it_can_wait_with_another_state():
    restartable, _ = started()
    restartable.stop(3)
    restartable.wait_with(Fake().state(7))
    assert restartable.state(3) == Fake().state(7)
    assert restartable.start(Fake(), 3) is restartable.started
    restartable.stop(5)
    assert restartable.state(0) == Fake().state(5)


def test_for_another_process_it_is_at_rest_and_the_one_here_runs_on():
    restartable, pipeline = started()
    restartable.begin_at = Start(8, 2)
    sent = pickle.loads(pickle.dumps(restartable.resting(4)))
    assert sent.started is None
    assert sent.state(0) == Fake().state(4)
    assert sent.begin_at == (8, 2)
    assert restartable.started is pipeline
    assert pipeline.log == []
    sent.start(Fake(), 4)
    sent.stop(6)
    assert sent.state(0) == Fake().state(6)
