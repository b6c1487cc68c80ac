"""All tests of this folder need a CUDA device, or ask for the processor in its stead: see gpu_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_runs import ON_GPU, is_possible, warm_up

HERE = Path(__file__).parent
FEW_WORKERS = "ignore:lightning_echo. The '.+_dataloader' does not have many workers"
NO_DEVICE = "needs a CUDA device (LIGHTNING_ECHO_GPU_STAND_IN=cpu runs it on the processor, as far as that can)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder. The versions on a machine with a GPU differ: only our own warnings are errors, but for
    the one that depends on the machine's cores.
    """
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            item.add_marker(pytest.mark.skipif(not is_possible(), reason=NO_DEVICE))
            item.add_marker(pytest.mark.filterwarnings("default", "error:lightning_echo", FEW_WORKERS))
            item.add_marker(pytest.mark.timeout(40 if ON_GPU else 200))


@pytest.fixture(scope="session", autouse=True)
def _warm_device() -> None:
    """Starts CUDA, its libraries and the profiler once, and not within what a test measures."""
    if is_possible():
        warm_up()
