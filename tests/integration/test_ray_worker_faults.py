"""Workers on other nodes (Ray actors) that are killed, fail or hang, and so readers, trainings and drivers: nothing is lost."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

import ray_worker_runs  # noqa: E402
import torch  # noqa: E402
from ray_runs import cluster_of  # noqa: E402
from ray_worker_runs import (  # noqa: E402
    LENGTH,
    NAME,
    SECONDS,
    Noted,
    Run,
    actors,
    by_actors,
    count_of_actors,
    delivered,
    far_training,
    is_actor,
    is_comparing,
    kill,
    locally,
    reads,
)
from sharing_runs import Numbers, wait_until  # noqa: E402

from lightning_echo.share.ray import joined  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

KILLS = int(os.environ.get("RANDOM_KILLS", "10"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster_of(tmp_path_factory.mktemp("n"), {"a": 1, "b": 2}) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_readers_left_behind(nodes):
    yield
    nodes.end_readers()
    wait_until(lambda: not actors(nodes), "no actor outlives its reader")


@pytest.fixture(scope="module")
def expected(nodes):
    """The examples of six passes, as local workers make them."""
    return locally(nodes, Numbers(LENGTH), 8, 6).epochs


def more_reads(log: Path, more: int = 10) -> None:
    """Waits until actors have read more."""
    before = len(by_actors(log))
    wait_until(lambda: len(by_actors(log)) >= before + more, "actors have read more")


def are_ready(nodes: Any, count: int) -> bool:
    """Whether so many actors have begun, as the reader says."""
    status = nodes.status("a", NAME)
    return status is not None and sum(each["is_ready"] for each in status["cluster"]) == count


def test_actors_nodes_and_readers_that_are_killed_lose_nothing(nodes, tmp_path, expected):
    log, gate = tmp_path / "reads", tmp_path / "gate"
    training = far_training("a", Noted(log, 0.02), 8, Run(6, gate=gate), cluster_workers=2)

    def one() -> None:
        kill(actors(nodes)[:1])

    def all_of_them() -> None:
        kill(actors(nodes))

    def node_that_vanishes() -> None:
        nodes.leave("b")
        nodes.add("c", 2)

    def reader() -> None:
        nodes.kill_reader("a", NAME)

    for lose in (one, all_of_them, node_that_vanishes, reader):
        wait_until(lambda: are_ready(nodes, 2), "two actors have begun")
        gate.touch()
        more_reads(log)
        lose()
        wait_until(lambda: not are_ready(nodes, 2), "that is noticed")
        gate.unlink()  # the training stands still, until there are two again
    gate.touch()
    assert delivered(training).epochs == expected


@pytest.mark.timeout(200 + 20 * KILLS)
def test_random_kills_lose_nothing(nodes, tmp_path):
    log, stop = tmp_path / "reads", tmp_path / "stop"
    drawn, there = random.Random(0), ["n"]
    nodes.add("n", 2)
    training = far_training("a", Noted(log, 0.01), 16, Run(10**6, pause=0.05, stop=stop), cluster_workers=2)
    more_reads(log)
    for number in range(KILLS):
        what = drawn.choice(["actor", "actor", "actors", "worker", "reader", "node"])
        if what == "actor":
            kill(actors(nodes)[:1])
        elif what == "actors":
            kill(actors(nodes))
        elif what == "worker":
            kill({read.pid for read in reads(log)[-20:] if not read.is_actor})
        elif what == "reader":  # workers of the one that was killed before may have read meanwhile
            wait_until(lambda: nodes.status("a", NAME) is not None, "there is a reader")
            nodes.kill_reader("a", NAME)
        else:
            nodes.leave(there.pop())
            there.append(f"n{number}")
            nodes.add(there[-1], 2)
        before = len(reads(log))
        wait_until(lambda before=before: len(reads(log)) > before + 10, "reading goes on")
        time.sleep(drawn.uniform(0, 2))
    more_reads(log)
    stop.touch()
    found = delivered(training).epochs
    assert found == locally(nodes, Numbers(LENGTH), 16, len(found)).epochs


class FailsInActors(Noted):
    """Raises an error at each index that an actor reads."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if is_actor() and not is_comparing():
            raise LookupError(f"number {index} is broken")
        return super().__getitem__(index)


def test_an_error_of_the_data_set_in_an_actor_reaches_all_trainings_at_its_item(nodes, tmp_path, expected):
    log = tmp_path / "reads"
    started = [far_training("a", FailsInActors(log, 0.02), size, wait_for=2, cluster_workers=1) for size in (8, 5)]
    found = ray.get(started, timeout=SECONDS)
    said = [
        re.fullmatch(r"LookupError: number (\d+) is broken \(reading example (\d+) of .*, on (.*)\)", one.error) for one in found
    ]
    assert all(said), [one.error for one in found]
    assert len({one.groups() for one in said}) == 1, "all trainings get the same"
    index, same, where = said[0].groups()
    assert index == same
    assert re.fullmatch(r"[\d.]+ \(node [0-9a-f]{8}\)", where)
    order = [example for epoch in expected for example in epoch]
    at = [number for number, _ in order].index(int(index))
    for one, size in zip(found, (8, 5), strict=True):
        assert [example for epoch in one.epochs for example in epoch] == order[: at // size * size]


class HangsInActors(Noted):
    """Its first read in an actor never ends."""

    def __init__(self, log: Path, mark: Path) -> None:
        super().__init__(log, 0.01)
        self.mark = mark

    def __getitem__(self, index: int) -> dict[str, Any]:
        if is_actor() and not is_comparing() and not self.mark.exists():
            self.mark.touch()
            time.sleep(3600)
        return super().__getitem__(index)


def test_a_read_that_hangs_in_an_actor_is_done_elsewhere_after_a_while(nodes, tmp_path, expected):
    log = tmp_path / "reads"
    training = far_training("a", HangsInActors(log, tmp_path / "mark"), 8, cluster_workers=2)
    assert delivered(training).epochs == expected[:3]
    assert re.search(r"a worker on .* has not answered for 2\d s: what it had is read elsewhere", nodes.log("a", NAME))


def test_a_training_that_is_killed_leaves_no_actor_and_goes_on_where_it_was(nodes, tmp_path, expected):
    log, state = tmp_path / "reads", tmp_path / "state"
    data = Noted(log, 0.01)
    killed = far_training("a", data, 8, Run(6, pause=0.1, state=state, state_at=20), cluster_workers=2)
    wait_until(state.exists, "the state is there")
    kill([torch.load(state, weights_only=False)["pid"]])
    with pytest.raises(ray.exceptions.RayError):
        ray.get(killed, timeout=SECONDS)
    began = time.monotonic()
    wait_until(lambda: not actors(nodes) and not count_of_actors(), "no actor is left")
    assert time.monotonic() - began < 15, "seconds, of which the reader waits one for another training"
    resumed = delivered(far_training("a", data, 8, Run(2, state=state, resumes=True), cluster_workers=2))
    rest = [example for epoch in resumed.epochs for example in epoch]
    assert rest == [example for epoch in expected[:2] for example in epoch][20 * 8 :]


def drives(address: str, log: str) -> None:
    """A driver that trains itself, for ever."""
    ray.init(address=address, log_to_driver=False)
    loader = ray_worker_runs.far_loader(Noted(Path(log), 0.01), 8, share={"name": "driver", "cluster_workers": 2})
    ray_worker_runs.trained(loader, Run(10**6, pause=0.05))


def forks(address: str, node: str) -> None:
    """A reader that forks workers while it has actors. It says so when its calls are answered afterwards."""

    class Idle:  # it is sent by value, and so imports nothing
        def pid(self) -> int:
            return os.getpid()

    kind = ray.remote(Idle).options(num_cpus=0)
    with joined("forks", {"address": address, "node": node}, {"data set": "none"}):
        for _ in range(3):
            idle = [kind.remote() for _ in range(2)]
            asked = [each.pid.remote() for each in idle]
            pids = ray.get(asked)
            if not (child := os.fork()):
                del idle, asked
                gc.collect()
                os._exit(0)
            os.waitpid(child, 0)
            assert ray.available_resources()
            assert ray.get([each.pid.remote() for each in idle]) == pids
        print("answered")


def test_a_forked_worker_that_frees_copies_of_rays_objects_does_not_write_on_the_connections_of_its_reader(nodes):
    """It did, and then a call of the reader never came back: no actor was asked for any more."""
    context = ray.get_runtime_context()
    program = "import sys; from test_ray_worker_faults import forks; forks(*sys.argv[1:])"
    command = [sys.executable, "-c", program, context.gcs_address, context.get_node_id()]
    variables = {**os.environ, "LIGHTNING_ECHO_SHARED": str(nodes.folder("a"))}
    done = subprocess.run(command, env=variables, timeout=SECONDS, stdout=subprocess.PIPE, text=True, check=True)
    assert "answered" in done.stdout


@pytest.mark.parametrize("killed", ["reader", "driver"])
def test_no_actor_outlives_the_reader_also_if_it_is_killed(nodes, tmp_path, killed):
    log = tmp_path / "reads"
    if killed == "reader":
        training = far_training("a", Noted(log, 0.01), 8, Run(1000, pause=0.05), cluster_workers=2, restart=False)
        more_reads(log)
        nodes.kill_reader("a", NAME)
    else:
        nodes.folder("driver").mkdir(mode=0o700, exist_ok=True)
        program = "import sys; from test_ray_worker_faults import drives; drives(*sys.argv[1:])"
        variables = {**os.environ, "LIGHTNING_ECHO_SHARED": str(nodes.folder("driver"))}
        address = ray.get_runtime_context().gcs_address
        driver = subprocess.Popen([sys.executable, "-c", program, address, str(log)], env=variables)
        more_reads(log)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    began = time.monotonic()
    wait_until(lambda: not actors(nodes) and not count_of_actors(), "no actor is left")
    assert time.monotonic() - began < 15, "seconds"
    if killed == "reader":
        assert re.search(
            "the reader of share='far' has died.*restart is False", ray.get(training, timeout=SECONDS).error, re.DOTALL
        )


class OnlyOnNodeA(Noted):
    """Another node has no file for it, or another file."""

    def __init__(self, log: Path, there: str) -> None:
        super().__init__(log, 0.01)
        self.there = there

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        if Path(os.environ["LIGHTNING_ECHO_SHARED"]).name != "a":
            if self.there == "nothing":
                raise FileNotFoundError(2, "No such file or directory", f"/data/{index}")
            found["data"] += 1
        return found


MODULE = """
import os
from ray_worker_runs import Noted
if not os.environ["LIGHTNING_ECHO_SHARED"].endswith("/a"):
    raise ModuleNotFoundError("No module named 'only_on_a'")
class Imported(Noted):
    pass
"""


def imported(folder: str, log: Path) -> Any:
    sys.path.append(folder)
    return import_module("only_on_a").Imported(log)


def test_a_node_that_lacks_a_module_or_files_or_has_others_is_named_before_the_first_step(nodes, tmp_path):
    log = tmp_path / "reads"
    (tmp_path / "only_on_a.py").write_text(MODULE)
    cases = [
        (
            partial(imported, str(tmp_path), log),
            r"ModuleNotFoundError: No module named 'only_on_a'\. .* let Ray bring it: ray\.init\(runtime_env=",
        ),
        (OnlyOnNodeA(log, "nothing"), r"FileNotFoundError: .*'/data/\d+'.*All machines need the same files under the same paths"),
        (OnlyOnNodeA(log, "others"), r"example \d+ is another one there, read under the same seeds: there are other files"),
    ]
    for dataset, message in cases:
        found = ray.get(far_training("a", dataset, cluster_workers=1), timeout=SECONDS)
        assert re.search(rf"[\d.]+ \(node [0-9a-f]{{8}}\) cannot make examples for share='far': {message}", found.error), (
            found.error
        )
        assert found.epochs == [[]], "no batch has come"
        wait_until(lambda: nodes.status("a", NAME) is None, "the reader has ended")
