"""A partitioned cache in a Trainer on two simulated nodes (partitioned_trainer_runs.py)."""

import pytest
from partitioned_trainer_runs import LENGTH, free_port, start

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """What each node has seen, and what it printed."""
    return start(tmp_path_factory.mktemp("nodes"), "usual", [{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}] * 2)


def test_a_training_sees_the_same_and_learns_the_same_as_without_a_cache(nodes):
    for node, _ in nodes:
        assert node["with"]["seen"] == node["without"]["seen"]
        assert node["with"]["weights"] == node["without"]["weights"]
        assert node["with"]["seen"]


def test_the_two_nodes_read_the_data_once(nodes):
    assert sum(node["with"]["examples"] for node, _ in nodes) == LENGTH
    reads = sum(node["with"]["reads"] for node, _ in nodes)
    repeated = 3 * len(nodes)  # the audits of a worker: the 1st, 10th and 100th hit
    assert LENGTH <= reads <= LENGTH + repeated
    assert reads < sum(node["without"]["reads"] for node, _ in nodes)


def test_what_came_from_other_nodes_is_in_the_reports_and_in_the_summary(nodes):
    (first, printed), (second, _) = nodes
    assert first["with"]["received"] == second["with"]["received"], "it is that of the job"
    assert 0 < first["with"]["received"] < 1
    assert first["with"]["exchange"] > 0
    assert first["without"]["received"] is first["without"]["exchange"] is None
    said = f"100% of the last epoch's fresh examples came from it, {first['with']['received'] * 100:.0f}% from other nodes"
    assert said in " ".join(printed.split())
