"""A training whose reader has workers on other nodes (Ray actors): what it gets is what local workers alone make, to the bit."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray")

from ray_runs import cluster_of  # noqa: E402
from ray_worker_runs import (  # noqa: E402
    LENGTH,
    NAME,
    Noted,
    NotedShots,
    NotedTogether,
    Run,
    by_actors,
    count_of_actors,
    delivered,
    far_training,
    locally,
    reads,
)
from sharing_cache_runs import CACHE, IGNORED  # noqa: E402
from sharing_runs import Numbers, wait_until  # noqa: E402
from torch.utils.data import Subset  # noqa: E402

from lightning_echo import CacheConfig  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster_of(tmp_path_factory.mktemp("n"), {"a": 1, "b": 2}) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_readers_left_behind(nodes):
    yield
    nodes.end_readers()


@pytest.fixture(scope="module")
def expected(nodes):
    """The examples of six passes, as local workers make them."""
    return locally(nodes, Numbers(LENGTH), 8, 6).epochs


def test_trainings_of_the_whole_and_of_a_part_get_what_local_workers_make(nodes, tmp_path, expected):
    log, starts, gate = tmp_path / "reads", tmp_path / "starts", tmp_path / "gate"
    data, part = Noted(log, 0.01), [index for index in range(LENGTH) if index % 3]
    options = {"starts": starts}
    started = [
        far_training("a", data, 8, Run(gate=gate), options, wait_for=2, cluster_workers=1),
        far_training("a", Subset(data, part), 5, Run(gate=gate), options, wait_for=2, cluster_workers=2),
    ]
    wait_until(lambda: reads(log) and nodes.log("a", NAME).count("has begun") == 2, "the larger number of actors has begun")
    gate.touch()
    whole, of_part = map(delivered, started)
    assert whole.epochs == expected[:3]
    assert of_part.epochs == [[example for example in epoch if example[0] in part] for epoch in expected[:3]]
    assert nodes.log("a", NAME).count("has begun") == 2, "the larger number counts"
    # What a worker knows of itself holds in an actor.
    of_actors = by_actors(log)
    processes = {read.pid: read for read in of_actors}
    assert len(processes) == 2
    assert {read.node for read in of_actors} == {"b"}, "the trainings' own node comes last"
    assert {read.threads for read in reads(log)} == {1}
    assert all(read.is_own and 0 <= read.number < read.workers for read in of_actors)
    assert len({(read.pid, read.number, read.seed) for read in of_actors}) == len({read.seed for read in of_actors}) == 2
    assert len({read.pid for read in reads(log)}) == len({read.number for read in reads(log)}), "none has the number of another"
    begun = [tuple(map(int, line.split())) for line in starts.read_text().splitlines()]
    assert len({pid for pid, _ in begun}) == len(begun), "worker_init_fn is called once in each process"
    assert {(read.pid, read.number) for read in reads(log)} <= set(begun)


HELD, LONG = 127, 960  # examples of 8 KiB in a cache of 1 MiB, and of the data set: what comes again is there by then


@pytest.mark.parametrize(
    ("data", "options"),
    [(NotedShots, {"reads_in_flight": 4}), (NotedTogether, {})],
    ids=["many reads in flight", "many examples in one call"],
)
def test_with_a_cache_examples_and_counts_are_the_same_and_what_is_held_is_not_read_again(nodes, tmp_path, data, options):
    log, epochs = tmp_path / "reads", 4
    options, share = {"cache": CacheConfig(CACHE, hold="loaded"), **options}, {"ignore": (*IGNORED, "noted", "seconds")}
    expected = locally(nodes, data(LONG), 8, epochs, share=share, **options)
    found = delivered(far_training("a", data(LONG, log, 0.002), 8, Run(epochs), options, cluster_workers=2, **share))
    assert found.epochs == expected.epochs
    counts = found.cache_counts
    assert (counts.examples, counts.hits, counts.misses) == (HELD, HELD * (epochs - 1), LONG * epochs - HELD * (epochs - 1))
    assert counts == expected.cache_counts
    read, of_actors = reads(log), by_actors(log)
    times = Counter(one.index for one in read)
    seldom = {index for index, count in times.items() if count < epochs}
    assert len(seldom) >= HELD - 5, "some hits are read once more, and compared"
    assert sum(times[index] for index in seldom) <= HELD + 6 * len({one.pid for one in read})
    assert {one.index for one in of_actors} & seldom, "what actors have read is held"
    assert len({one.pid for one in of_actors}) == 2


def test_on_demand_each_fresh_example_comes_once_in_the_order_of_local_workers(nodes, tmp_path, expected):
    log = tmp_path / "reads"
    run = Run(100, batches=240, pause=0.004)
    found = delivered(far_training("a", Noted(log, 0.01), 4, run, {"factor": "demand"}, cluster_workers=2))
    fresh = list(dict.fromkeys(example for epoch in found.epochs for example in epoch))  # the noise of two reads differs
    assert fresh == [example for epoch in expected for example in epoch][: len(fresh)]
    assert LENGTH // 2 < len(fresh) == found.counts.fresh
    assert found.counts.echoed == 4 * 240 - len(fresh)
    assert by_actors(log)


def test_without_a_free_cpu_nothing_waits_and_a_node_that_joins_is_asked(nodes, tmp_path, expected):
    log, gate = tmp_path / "reads", tmp_path / "gate"
    training = far_training("a", Noted(log, 0.02), 8, Run(gate=gate), cluster_workers=2, cluster_resources={"d": 1})
    wait_until(lambda: len(reads(log)) > 8, "the worker here reads")
    assert count_of_actors() == 0
    nodes.add("d", 2)
    began = time.monotonic()
    wait_until(lambda: count_of_actors() == 2, "actors were asked for")
    assert time.monotonic() - began < 5, "seconds"
    wait_until(lambda: nodes.log("a", NAME).count("has begun") == 2, "they have begun")
    gate.touch()
    wait_until(lambda: len(by_actors(log)) > 20, "they read")
    nodes.leave("d", is_told=True)
    found = delivered(training)
    assert found.epochs == expected[:3]
    assert {read.node for read in by_actors(log)} == {"d"}
    assert len(re.findall("has no free CPU", nodes.log("a", NAME))) == 1
    wait_until(lambda: count_of_actors() == 0, "none is left")


def test_a_full_node_is_not_asked_and_a_training_does_not_wait_for_it(nodes, tmp_path, expected):
    """Its own node has a free CPU, and the others have none: an actor there would wait, and buy machines."""
    log, gate = tmp_path / "reads", tmp_path / "gate"
    nodes.add("e", 2)
    blocks = ray.remote(wait_until)
    blocked = [
        blocks.options(num_cpus=cpus, resources={node: 1}).remote(gate.exists, "the gate is open")
        for node, cpus in (("a", 1), ("b", 2))
    ]
    wait_until(lambda: ray.available_resources()["CPU"] == 2, "they are full")
    found = delivered(far_training("e", Noted(log, 0.01), 8, Run(2), cluster_workers=1))
    gate.touch()
    ray.get(blocked)
    assert found.epochs == expected[:2]
    assert {read.node for read in by_actors(log)} == {"e"}
    assert "withdrawn" not in nodes.log("e", NAME)
    nodes.leave("e", is_told=True)


class SlowFor(Noted):
    """Its reads are slow as long as a file is there."""

    def __init__(self, log: Path, slow: Path) -> None:
        super().__init__(log)
        self.slow = slow

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.1 * self.slow.exists())
        return super().__getitem__(index)


def test_between_two_numbers_there_are_more_while_the_training_waits_and_fewer_while_it_does_not(nodes, tmp_path, expected):
    log, slow = tmp_path / "reads", tmp_path / "slow"
    slow.touch()
    training = far_training("a", SlowFor(log, slow), 4, Run(6, pause=0.05), cluster_workers=(0, 2), window=2**15)
    wait_until(lambda: count_of_actors() == 2, "there are more")
    slow.unlink()  # from now on the training takes less than is read
    wait_until(lambda: count_of_actors() == 0, "there are fewer")
    assert delivered(training).epochs == expected
    numbers = re.findall(r"number of workers on other machines: (\d) in place of (\d)", nodes.log("a", NAME))
    assert numbers[:4] == [("1", "0"), ("2", "1"), ("1", "2"), ("0", "1")]
