"""One example per domain: each runs as a user would start it, and what it prints is right.

What is expected follows from the meaning of the echo factor alone: of ``fresh`` examples with ``factor`` uses each, all is
delivered but the uses that are left of the live ones, which are at most ``live``, each used at least once.
"""

from __future__ import annotations

import ast
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_LINES, MOST_SECONDS = 60, 20


class Case(NamedTuple):
    """What is known of an example from its text.

    Attributes:
        point: Where it echoes.
        factor: Uses per fresh example.
        live: Most live examples, by the README: two batches per worker, or four batches in the main process.
        delivered: Examples of all epochs, which have as many as without echoing. None for a stream: its epochs end with it.
        fresh: Those of all epochs of a stream.
        reused: Stages that an echo must not run again.
        redone: Stages that run for each use.
        result: Where its accuracy or loss lies if it learns: beyond what guessing would have. None: it prints none.
    """

    point: str
    factor: int
    live: int
    delivered: int | None
    fresh: int | None
    reused: set[str]
    redone: set[str]
    result: tuple[float, float] | None


GUESSING_ONE_OF_TWO = math.log(2)  # the least cross-entropy
TEXT = "Each block of the stream is used several times. "
GUESSING_LETTERS = sum(-TEXT.count(letter) / len(TEXT) * math.log(TEXT.count(letter) / len(TEXT)) for letter in set(TEXT))
CASES = {
    "image_folder.py": Case(
        *("before_augmentation", 4, 2 * 2 * 32, 4 * 256, None),
        reused={"load", "Resize"},
        redone={"RandomResizedCrop", "RandomHorizontalFlip", "ToImage", "ToDtype", "Normalize"},
        result=(0.75, 1),
    ),
    "detection.py": Case(
        *("before_augmentation", 4, 2 * 2 * 8, 4 * 64, None),
        reused={"load"},
        redone={"RandomIoUCrop", "RandomHorizontalFlip", "SanitizeBoundingBoxes", "ToDtype"},
        result=(0, 1 + GUESSING_ONE_OF_TWO),  # the generalised IoU loss of boxes that do not overlap, and centerness
    ),
    "audio.py": Case(
        *("after_batching", 3, 4 * 16, 4 * 192, None),
        reused={"load", "augment", "collate"},
        redone={"transfer"},
        result=None,
    ),
    "language_model.py": Case(
        *("after_augmentation", 3, 2 * 2 * 16, None, 3 * 4 * 64),
        reused={"load", "augment"},
        redone={"collate", "transfer"},
        result=(0, GUESSING_LETTERS),
    ),
}
SAID = r"""(?mx)
    (\w+),\ factor\ (\S+):\ reuse\ \[(.*)\],\ redo\ \[(.*)\]; .* \n
    EchoCounts\(fresh=(\d+),\ echoed=(\d+),\ refetched=0\) (?:.*\ (\S+))?$"""


class Outcome(NamedTuple):
    """What an example prints at its end."""

    point: str
    factor: float
    reused: set[str]
    redone: set[str]
    fresh: int
    echoed: int
    result: float | None


def run(program: str, cwd: Path) -> Outcome:
    # One thread: on cores that others use, too, several wait for each other in loops, which takes many times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / program)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(SAID, done.stdout)
    assert found is not None, done.stdout[-3000:]
    point, factor, reused, redone, fresh, echoed, result = found.groups()
    stages = [set(names.split(", ")) for names in (reused, redone)]
    return Outcome(point, float(factor), *stages, int(fresh), int(echoed), None if result is None else float(result))


def processor_seconds() -> float:
    """Of all processes that were started from this one and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("program", CASES)
def test_an_example_echoes_as_it_says(program: str, tmp_path: Path) -> None:
    case = CASES[program]
    before = processor_seconds()
    found = run(program, tmp_path)
    assert processor_seconds() - before < MOST_SECONDS  # it waits for nothing, so that this is more than it takes on idle cores
    assert (found.point, found.factor, found.reused, found.redone) == (case.point, case.factor, case.reused, case.redone)
    delivered = found.fresh + found.echoed
    assert case.delivered in (None, delivered)
    assert case.fresh in (None, found.fresh)
    assert 0 <= found.fresh * case.factor - delivered <= case.live * (case.factor - 1)
    if case.result is None:
        assert found.result is None
    else:
        assert case.result[0] <= found.result <= case.result[1]
    assert not list(tmp_path.iterdir())  # its files are gone, and no logs are left


@pytest.mark.parametrize("program", CASES)
def test_an_example_is_short_and_names_its_point_at_its_top(program: str) -> None:
    text = (EXAMPLES / program).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert CASES[program].point in (ast.get_docstring(ast.parse(text)) or "")
