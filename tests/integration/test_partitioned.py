"""A partitioned cache: nodes hold different examples and hand them to each other; no batch changes (partitioned_runs.py)."""

import re
from typing import NamedTuple

import node_launch
import partitioned_runs
import pytest
from partitioned_runs import EPOCHS, LARGE_BYTES, LENGTH, SEEN

pytestmark = pytest.mark.program

AUDITED = 3  # reads of a worker that are repeated among so few hits: the 1st, the 10th, the 100th


class Job(NamedTuple):
    """What the ranks of a job have seen."""

    ranks: list
    nodes: int

    def of(self, scenario, name):
        """A value of a scenario, by rank."""
        return [rank[f"scenario_{scenario}"][name] for rank in self.ranks]

    def leaders(self, values):
        """The values of the first rank of each node."""
        return values[:: len(values) // self.nodes]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """One rank on each node: test_partitioned_trainer.py."""
    ranks, nodes = 4, 2
    program = (partitioned_runs.__file__, ranks, nodes)
    return Job(node_launch.once(tmp_path_factory, "job", lambda folder: node_launch.side_by_side(ranks, folder, *program)), nodes)


@pytest.mark.parametrize("scenario", [*SEEN, "one_node", "little_room", "resumed"])
def test_every_rank_sees_what_it_sees_without_a_cache(job, scenario):
    for seen, expected in zip(job.of(scenario, "seen"), job.of(scenario, "expected"), strict=True):
        assert seen == expected
        assert all(seen)


def test_a_state_that_is_loaded_into_a_running_loader_is_gone_on_from_too(job):
    assert job.of("resumed", "again") == job.of("resumed", "rest")


@pytest.mark.parametrize("scenario", SEEN)
def test_each_example_is_held_once_in_the_job_and_all_where_they_fit(job, scenario):
    held = [key for node in job.leaders(job.of(scenario, "held")) for key in node]
    assert len(held) == len(set(held))
    assert scenario != "plain" or sorted(held) == list(range(LENGTH))
    assert scenario != "plain" or all(job.leaders(job.of(scenario, "held")))


def test_from_the_second_pass_on_no_node_reads_what_another_holds(job):
    reads = [sum(by_epoch) for by_epoch in zip(*job.of("plain", "reads"), strict=True)]
    first, last = reads[1], reads[-1]  # by the end of the first epoch, workers have read ahead
    ranks = len(job.ranks)
    filled_up = -LENGTH % ranks  # examples that stand twice in a pass, which two nodes may read at once
    assert LENGTH <= first <= LENGTH + filled_up + AUDITED * ranks
    assert last - first <= AUDITED * ranks
    assert EPOCHS > 3
    received = job.leaders(job.of("plain", "received"))
    assert all(number > 0 for number in received)
    # Of what is delivered after the first pass, a node holds one in so many, by chance.
    assert sum(received) < (EPOCHS - 1) * (LENGTH + filled_up)


def test_nodes_of_different_size_together_hold_as_much_as_they_have_room_for(job):
    held, sizes = job.leaders(job.of("little_room", "held")), job.leaders(job.of("little_room", "size"))
    for keys, size, taken in zip(held, sizes, job.leaders(job.of("little_room", "bytes")), strict=True):
        assert len(keys) <= size // LARGE_BYTES
        assert taken <= size
        assert len(keys) >= 0.9 * size // LARGE_BYTES - 1  # a tenth may stay empty
    everything = [key for keys in held for key in keys]
    assert len(everything) == len(set(everything))


def test_what_no_node_has_room_for_is_read_in_each_pass_and_nothing_else(job):
    """Counted over two passes of 200 examples, while nothing more was added."""
    before, after = job.leaders(job.of("little_room", "held_before")), job.leaders(job.of("little_room", "held"))
    assert before == after
    everything = {key for keys in after for key in keys}
    reads = [sum(by_rank) for by_rank in zip(*job.of("little_room", "reads"), strict=True)]
    assert sum(reads[key] for key in everything) <= AUDITED * len(job.ranks)
    assert all(reads[key] >= 1 for key in range(200) if key not in everything)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("data", r"ValueError: cache\.partitioned=True is impossible here: rank \d has another data set than rank 0 "),
        ("length", r"ValueError: .* rank \d has another data set than rank 0 \(Numbers of 6[6-9] examples, and Numbers of 66;"),
        ("workers", r"ValueError: .*=True is impossible here: rank \d has 2 workers, .* rank 0 1 workers"),
        ("deals", r"ValueError: .* the sampler Dealing divides its indices among the ranks by itself"),
        (
            "seed",
            r"ValueError: .* rank \d has .* DistributedSampler with seed \d, .*, and rank 0 .* with seed 0, .* the same on all",
        ),
        ("generator", r"ValueError: .* rank \d has .* the order of RandomSampler with random states \w+, and rank 0 .*"),
    ],
)
def test_what_nodes_cannot_do_together_is_refused_on_all_ranks_with_the_same_words(job, case, message):
    said = job.of("refused", case)
    assert len(set(said)) == 1
    assert re.match(message, said[0]), said[0]


def test_an_order_that_turns_out_to_be_another_one_on_other_nodes_is_an_error_of_all_leaders(job):
    for said in job.leaders(job.of("refused", "private")):
        assert said.startswith("OrdersDifferError: cache.partitioned=True needs an order that every rank can compute")


def test_on_one_node_it_is_said_once_and_nothing_is_exchanged(job):
    said = [message for messages in job.of("one_node", "said") for message in messages]
    assert said == [
        "lightning_echo: cache.partitioned=True changes nothing here, "
        "since the job has one node: each node has a cache of its own"
    ]
    assert set(job.of("one_node", "received")) == {0}
