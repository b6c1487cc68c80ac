"""A run is offered to share where another run of its program is on this machine. Its own ranks and workers are no other runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import node_launch
import pytest
import same_program_runs

pytestmark = [pytest.mark.own_interpreter, pytest.mark.program]
OFFER = "if the other run of train.py here trains on the same data"
LAUNCHES: dict[str, tuple[bool, Callable[[Path, Path], str]]] = {
    "one rank beside another run": (True, lambda program, folder: node_launch.alone(program, folder, 1)),
    "ranks of Lightning beside another run": (True, lambda program, folder: node_launch.alone(program, folder, 2)),
    "ranks of torchrun": (False, lambda program, folder: node_launch.torchrun(1, 2, program, folder, 2)),
}


@contextmanager
def other_ranks(program: Path) -> Iterator[None]:
    """Another run of the program, of two ranks that a launcher has started."""
    with ExitStack() as running:
        for rank in range(2):
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, program, "wait"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "RANK": str(rank), "MASTER_PORT": "1"},
                )
            )
            assert process.stdout is not None
            assert process.stdout.readline() == b"runs\n"
        yield


@pytest.mark.parametrize("launch", LAUNCHES)
def test_sharing_is_offered_where_another_run_of_the_program_is_there_and_ranks_are_none(launch: str, tmp_path: Path) -> None:
    is_beside, start = LAUNCHES[launch]
    program = tmp_path / "train.py"  # no other test runs this file
    shutil.copy(same_program_runs.__file__, program)
    with other_ranks(program) if is_beside else nullcontext():
        start(program, tmp_path)
    ranks = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.json"))]
    assert [each["world"] for each in ranks] == [len(ranks)] * (1 if launch.startswith("one") else 2)
    for rank, each in enumerate(ranks):
        offers = is_beside and rank == 0
        assert any(OFFER in text for text in each["said"]) is offers, each
        assert any('share="train"' in text for text in each["said"]) is offers
