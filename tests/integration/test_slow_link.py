"""A partitioned cache on two nodes that are network namespaces, with a link of 50 Mbit/s each way between them.

Making namespaces takes root, ``ip`` and ``tc``: where the system does not allow it, the tests are skipped. The link has no delay
of its own: for that Linux would need a module, netem, that is often missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slow_link_runs
from partitioned_trainer_runs import results_of
from slow_link_runs import BATCH_SIZE, EPOCHS, EXAMPLE_BYTES, LENGTH

pytestmark = [pytest.mark.program, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
BITS_PER_SECOND = 50e6
LINK, ADDRESSES = "link0", ("10.77.0.1", "10.77.0.2")


def command(*parts: str) -> None:
    """Runs a command of the system; skips the test if that is not allowed."""
    ran = subprocess.run(parts, capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"no network namespaces here: {' '.join(parts)}: {ran.stderr.strip()}")


@pytest.fixture(scope="module")
def namespaces() -> Iterator[list[str]]:
    """Two namespaces, joined by a link of limited bandwidth."""
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
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture(scope="module")
def nodes(namespaces: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], str]]:
    """What each node has seen, and what it printed."""
    folder, started = tmp_path_factory.mktemp("nodes"), []
    for rank, name in enumerate(namespaces):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": "29500",  # nothing else is in the namespace
            "GLOO_SOCKET_IFNAME": LINK,
            "NODE_RANK": str(rank),
            "GROUP_RANK": str(rank),
            "LOCAL_RANK": "0",
        }
        program = ["ip", "netns", "exec", name, sys.executable, slow_link_runs.__file__, str(folder), str(rank)]
        started.append(subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
    return results_of(started, folder)


def test_a_slow_link_slows_the_training_and_changes_nothing_that_it_sees(nodes: list[tuple[dict[str, Any], str]]) -> None:
    for node, _ in nodes:
        assert node["with"]["seen"] == node["without"]["seen"]
        assert len(node["with"]["seen"]) == EPOCHS * LENGTH // 2
        # In the passes after the first, this node has received so much: no faster than the link carries it.
        received = node["with"]["received"] * LENGTH // 2 * EXAMPLE_BYTES
        assert received > BATCH_SIZE * EXAMPLE_BYTES
        assert node["with"]["seconds"] > 8 * received / BITS_PER_SECOND


def test_the_summary_says_that_the_exchange_is_the_limit(nodes: list[tuple[dict[str, Any], str]]) -> None:
    text = " ".join(nodes[0][1].split())
    assert nodes[0][0]["with"]["exchange"] > 0.5
    assert text.count("the exchange, not the storage, is the limit") == 1
