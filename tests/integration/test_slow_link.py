"""A partitioned cache on two nodes that are network namespaces, with a link of 50 Mbit/s each way between them.

Making namespaces takes root, ``ip`` and ``tc``: where the system does not allow it, the tests are skipped. The link has no delay
of its own: for that Linux would need a module, netem, that is often missing.
"""

import os
import shutil
import subprocess

import pytest
from partitioned_trainer_runs import BATCH_SIZE, EPOCHS, LARGE_BYTES, LARGE_LENGTH, start

pytestmark = [pytest.mark.program, pytest.mark.timeout(300)]

BITS_PER_SECOND = 50e6
LINK, ADDRESSES = "link0", ("10.77.0.1", "10.77.0.2")


def command(*parts):
    """Runs a command of the system; skips the test if that is not allowed."""
    ran = subprocess.run(parts, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"no network namespaces here: {' '.join(parts)}: {ran.stderr.strip()}")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """What each node has seen, and what it printed: in two namespaces, joined by a link of limited bandwidth."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces take root, and the programs ip and tc")
    names = [f"lightning-echo-{os.getpid()}-{node}" for node in range(2)]
    try:
        for name in names:
            command("ip", "netns", "add", name)
        command("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "-n", name, "link", "set", LINK, "up")
            limit = ["tbf", "rate", f"{BITS_PER_SECOND:.0f}bit", "burst", "64kb", "latency", "100ms"]
            command("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *limit)
        variables = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": LINK}
        inside = [["ip", "netns", "exec", name] for name in names]
        yield start(tmp_path_factory.mktemp("nodes"), "large", [variables] * 2, inside)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_slow_link_slows_the_training_changes_nothing_that_it_sees_and_is_named_as_the_limit(nodes):
    for node, _ in nodes:
        assert node["with"]["seen"] == node["without"]["seen"]
        assert len(node["with"]["seen"]) == EPOCHS * LARGE_LENGTH // 2
        # In the passes after the first, this node has received so much: no faster than the link carries it.
        received = node["with"]["received"] * LARGE_LENGTH // 2 * LARGE_BYTES
        assert received > BATCH_SIZE * LARGE_BYTES
        assert node["with"]["seconds"] > 8 * received / BITS_PER_SECOND
    assert nodes[0][0]["with"]["exchange"] > 0.5
    assert " ".join(nodes[0][1].split()).count("the exchange, not the storage, is the limit") == 1
