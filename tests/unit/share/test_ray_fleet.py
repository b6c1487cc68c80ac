"""Which actors a reader asks for, compares, leaves out and gives back. Ray and the actors are played by the test."""

import socket
import sys
import time
from types import SimpleNamespace

import pytest
from torch.utils.data import DataLoader

from lightning_echo.pipeline.kinds import kind_of
from lightning_echo.share.config import ShareConfig, send
from lightning_echo.share.connecting import Connector, Group
from lightning_echo.share.process import payload_of
from lightning_echo.share.ray import environment_of_actor
from lightning_echo.share.ray_workers import Actor, RayWorkers, _Node
from lightning_echo.share.server import CannotBegin

OWN, OTHER, THIRD = "own", "other", "third"


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class RuntimeEnvSetupError(RayError):
    pass


class Answer:
    def __init__(self, error=None, is_ready=True):
        self.error, self.is_ready = error, is_ready


class Handle:
    """An actor that answers each call at once, or raises what stands for it in ``errors``."""

    def __init__(self, **errors):
        self.asked, self.is_killed = [], False
        for name in ("begin", "compare"):
            setattr(self, name, SimpleNamespace(remote=lambda *_, name=name: self._answer(name, errors.get(name))))

    def _answer(self, name, error):
        self.asked.append(name)
        return Answer(error)


@pytest.fixture
def ray(monkeypatch):
    def get(answer, timeout):
        if answer.error is not None:
            raise answer.error

    def wait(answers, timeout):
        return [each for each in answers if each.is_ready], [each for each in answers if not each.is_ready]

    def kill(handle):
        handle.is_killed = True

    errors = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError, RuntimeEnvSetupError=RuntimeEnvSetupError)
    played = SimpleNamespace(get=get, wait=wait, kill=kill, put=lambda value: value, exceptions=errors)
    state = SimpleNamespace(free={}, available_resources_per_node=lambda: state.free)
    for name, module in (("ray", played), ("ray.exceptions", errors), ("ray._private", object()), ("ray._private.state", state)):
        monkeypatch.setitem(sys.modules, name, module)
    return state


def fleet(low=8, high=8, **options):
    config = ShareConfig("fleet", cluster="ray", cluster_workers=8, **options)
    workers = RayWorkers("fleet", {"node": OWN}, payload_of(config, kind_of(DataLoader(range(8))), {}), 3)
    workers._low, workers._high, workers._target = low, high, high
    workers._nodes = {name: _Node(name) for name in (OWN, OTHER, THIRD)}
    workers._began_at = time.monotonic()
    return workers


def actor(workers, node, handle=None, **options):
    number = len(workers._actors)
    workers._actors.append(Actor(handle or Handle(), node, number, time.monotonic(), node, answer=Answer(), **options))
    return workers._actors[-1]


def hear(workers, *actors, times=3):
    for _ in range(times):
        for each in actors:
            workers._hear(each, time.monotonic())


def test_the_first_actor_of_a_node_compares_before_it_works_and_the_next_ones_need_not(ray):
    workers = fleet()
    first = actor(workers, OTHER)
    hear(workers, first, times=2)
    assert (first.handle.asked, first.is_ready) == (["begin", "compare"], False)
    hear(workers, first, times=1)
    second, elsewhere = actor(workers, OTHER), actor(workers, THIRD)
    hear(workers, second, elsewhere)
    assert (second.handle.asked, elsewhere.handle.asked) == (["begin"], ["begin", "compare"])
    assert all(each.is_ready for each in (first, second, elsewhere))


@pytest.mark.parametrize("answers", [1, 2])
def test_an_actor_whose_node_has_left_is_not_trusted(ray, answers):
    workers = fleet()
    lost = actor(workers, OTHER)
    hear(workers, lost, times=answers)
    del workers._nodes[OTHER]
    hear(workers, lost, times=1)
    assert (lost.is_ready, lost.handle.is_killed, workers._actors) == (False, True, [])


def test_a_node_that_differs_is_an_error_before_the_first_step_and_a_warning_later(ray, caplog):
    workers, error = fleet(), RayTaskError(ModuleNotFoundError("No module named 'mine'"))
    hear(workers, actor(workers, OTHER, Handle(begin=error)))
    with pytest.raises(CannotBegin, match=r"^other cannot make examples for share='fleet': ModuleNotFoundError: .*runtime_env"):
        _ = workers.has_settled
    workers = fleet()
    workers._has_settled = True
    for _ in range(2):
        hear(workers, actor(workers, OTHER, Handle(compare=RayTaskError(ValueError("example 3 is another one")))))
    assert workers.has_settled
    assert caplog.text.count("other cannot make examples for share='fleet': ValueError: example 3 is another one") == 1
    ray.free = {OTHER: {"CPU": 4.0}}
    assert not workers._room(time.monotonic()), "nothing is asked of it any more"


def test_a_runtime_env_that_cannot_be_set_up_is_named(ray):
    workers = fleet()
    waiting = actor(workers, OTHER)
    waiting.answer = Answer(RuntimeEnvSetupError("no such package"))
    hear(workers, waiting, times=1)
    with pytest.raises(CannotBegin, match="its runtime_env cannot be set up: no such package"):
        _ = workers.has_settled


def test_an_actor_that_is_not_placed_is_withdrawn_after_seconds_and_asked_for_later(ray):
    workers, now = fleet(), time.monotonic()
    waiting = actor(workers, OTHER)
    waiting.answer = Answer(is_ready=False)
    workers._hear(waiting, now + 5)
    assert workers._actors == [waiting]
    workers._hear(waiting, now + 12)
    assert (workers._actors, waiting.handle.is_killed) == ([], True)
    ray.free = {OTHER: {"CPU": 1.0}}
    assert not workers._room(now + 13)
    assert workers._room(now + 18)[OTHER] == 1


def test_actors_are_asked_of_nodes_with_free_cpus_the_readers_own_last(ray, monkeypatch):
    workers, asked = fleet(cluster_resources={"fast": 0.5}), []
    monkeypatch.setattr(workers, "_ask", lambda node, now: asked.append(node))
    ray.free = {OWN: {"CPU": 4.0, "fast": 9.0}, OTHER: {"CPU": 3.0, "fast": 1.0}, THIRD: {"CPU": 0.5, "fast": 9.0}}
    workers._ask_for_more(time.monotonic())
    assert asked == [OTHER] * 2 + [OWN] * 4, "half a resource each: two of them; half a CPU: none"
    asked.clear()
    actor(workers, OTHER)  # waits to be placed there
    workers._ask_for_more(time.monotonic())
    assert asked == [OTHER] + [OWN] * 4


def test_those_on_the_readers_own_node_are_given_back_first_and_end_when_their_lane_has(ray):
    workers = fleet()
    here, there = actor(workers, OWN, is_ready=True, lane=4), actor(workers, OTHER, is_ready=True, lane=5)
    begins = actor(workers, OTHER)
    workers._target = 1
    workers._give_back()
    assert ([each.is_leaving for each in (begins, here, there)], workers._actors) == ([True, True, False], [here, there])
    here.lane = None
    workers._give_back()
    assert (workers._actors, here.handle.is_killed) == ([there], True)


def test_an_actor_gets_the_runtime_env_of_the_trainings_job(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", "", "/b"])
    own = '{"working_dir": "gcs://job.zip", "env_vars": {"MINE": "1", "PYTHONPATH": "/x"}}'
    found = environment_of_actor(own, MORE="2")
    assert found == {"working_dir": "gcs://job.zip", "env_vars": {"MINE": "1", "PYTHONPATH": "/a:/b", "MORE": "2"}}
    assert environment_of_actor(None) == {"env_vars": {"PYTHONPATH": "/a:/b"}}


@pytest.mark.parametrize(
    ("has_cluster", "about", "said"),
    [
        (False, "", ["there are no workers on other machines (share.cluster_workers): the reader that is there was started"]),
        (True, "the cluster has no free CPU", ["the cluster has no free CPU"]),
        (True, "", []),
    ],
)
@pytest.mark.parametrize("asks", [True, False])
def test_a_training_hears_that_its_reader_has_no_workers_on_other_machines(caplog, has_cluster, about, said, asks):
    config = ShareConfig("a", cluster="ray", cluster_workers=4 if asks else None)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    place = {"place": 0, "there": 0, "others": 0, "is_late": False, "batch_size": None}
    welcome = {**place, "whose": "played", "count": 1, "cache": "", "has_cluster": has_cluster, "about_cluster": about}
    with here, there:
        send(there, {"welcome": welcome})
        Connector(config, pytest.fail, {}, Group.of_one())._introduced(here, None, False, 0, None)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == len(said if asks else [])
    for each, text in zip(warned, said, strict=False):
        assert text in each
