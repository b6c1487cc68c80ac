"""One example per domain: each runs as a user would start it, and what it prints is right.

What is expected follows from the meaning of the echo factor alone: of the examples, or the batches, that a loader delivers, one
in ``factor`` is fresh, but for the first batch of each worker, or the first batch at all, which is all fresh.
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

FOLDER = Path(__file__).parents[2] / "examples"
MOST_LINES, MOST_SECONDS = 60, 20


class Echoed(NamedTuple):
    """A loader of an example, as the example's text says it.

    Attributes:
        point: Where it is echoed.
        factor: Uses per fresh example.
        first: Numbers of examples in the first batches, one for each worker that has a part of the buffer.
        delivered: Examples of all epochs, as many as without echoing. None for a stream, whose epochs end with it.
        fresh: Those of all epochs of a stream; None for others.
        reused: What an echo does not run again.
        redone: What runs for each use.
    """

    point: str
    factor: int
    first: list[int]
    delivered: int | None
    fresh: int | None
    reused: str
    redone: str


class Example(NamedTuple):
    """An example.

    Attributes:
        loaders: In the order in which they are printed.
        result: Between what its accuracy or loss lies if it learns: beyond what guessing would have. None: it prints none.
    """

    loaders: list[Echoed]
    result: tuple[float, float] | None


CROP_AND_FLIP = "RandomCrop, RandomHorizontalFlip, RandomErasing"
TEXT = "Each block of the stream is used several times. "
SHARES = [TEXT.count(letter) / len(TEXT) for letter in set(TEXT)]
# The least cross-entropy of who knows no more than how frequent the answers are.
ONE_OF_TWO, LETTERS = math.log(2), -sum(share * math.log(share) for share in SHARES)
# The generalised IoU loss of boxes that do not overlap is 1 or more, and the third part of the loss says yes or no.
BOXES_ELSEWHERE = 1 + ONE_OF_TWO

EXAMPLES = {
    "image_folder.py": Example(
        [
            Echoed(
                *("before_augmentation", 4, [32, 32], 4 * 256, None),
                *("load, Resize", "RandomResizedCrop, RandomHorizontalFlip, ToImage, ToDtype, Normalize"),
            )
        ],
        result=(0.75, 1),
    ),
    "detection.py": Example(
        [
            Echoed(
                *("before_augmentation", 4, [8, 8], 4 * 64, None),
                *("load", "RandomIoUCrop, RandomHorizontalFlip, SanitizeBoundingBoxes, ToDtype"),
            )
        ],
        result=(0, BOXES_ELSEWHERE),
    ),
    "audio.py": Example(
        [Echoed("after_batching", 3, [16], 4 * 192, None, "load, augment, collate", "transfer")],
        result=None,
    ),
    "language_model.py": Example(
        [Echoed("after_augmentation", 3, [16, 16], None, 3 * 4 * 64, "load, augment", "collate, transfer")],
        result=(0, LETTERS),
    ),
    "device_augmentation.py": Example(
        [
            Echoed(
                *("after_transfer", 4, [32], 4 * 256, None),
                *("load, augment, collate, transfer", "on_after_batch_transfer"),
            )
        ],
        result=(0, ONE_OF_TWO),
    ),
    "several_loaders.py": Example(
        [  # an epoch is as long as the longer one, of 512 examples in batches of 64
            Echoed("before_augmentation", 2, [16], 4 * 8 * 16, None, "load", CROP_AND_FLIP),
            Echoed("before_augmentation", 4, [64, 64], 4 * 8 * 64, None, "load", CROP_AND_FLIP),
        ],
        result=(0, 2 * ONE_OF_TWO),
    ),
}


class Said(NamedTuple):
    """What an example prints of a loader at its end."""

    point: str
    factor: str
    reused: str
    redone: str
    fresh: str
    echoed: str
    result: str


SAID = re.compile(
    r"""(\w+), factor (\S+): reuse \[(.*)\], redo \[(.*)\];.*
EchoCounts\(fresh=(\d+), echoed=(\d+), refetched=0\)(?:.* (\S+))?$""",
    re.MULTILINE,
)


def run(program: str, cwd: Path) -> list[Said]:
    # One thread: on cores that others use, too, several wait for each other in loops, which takes many times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / program)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return [Said(*found) for found in SAID.findall(done.stdout)]


def processor_seconds() -> float:
    """Of all processes that were started from this one and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.program
@pytest.mark.parametrize("program", EXAMPLES)
def test_an_example_echoes_as_it_says(program: str, tmp_path: Path) -> None:
    loaders, result = EXAMPLES[program]
    before = processor_seconds()
    outcome = run(program, tmp_path)
    assert processor_seconds() - before < MOST_SECONDS  # it sleeps nowhere, so that this is more than it takes on idle cores
    for said, of in zip(outcome, loaders, strict=True):
        assert (said.point, said.factor, said.reused, said.redone) == (of.point, str(of.factor), of.reused, of.redone)
        fresh, delivered = int(said.fresh), int(said.fresh) + int(said.echoed)
        assert of.delivered in (None, delivered)
        assert of.fresh in (None, fresh)
        # Error diffusion leaves less than an example to each worker, or less than a batch: fewer than `factor` uses of it.
        left = max(of.first) if of.point in ("after_batching", "after_transfer") else len(of.first)
        assert -left * of.factor < fresh * of.factor - delivered <= sum(of.first) * (of.factor - 1)
        assert said.result == "" if result is None else (result[0] <= float(said.result) <= result[1])
    assert not list(tmp_path.iterdir())  # its files are gone, and no logs are left


@pytest.mark.parametrize("program", EXAMPLES)
def test_an_example_is_short_and_names_its_point_at_its_top(program: str) -> None:
    text = (FOLDER / program).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    top = ast.get_docstring(ast.parse(text)) or ""
    assert all(of.point in top for of in EXAMPLES[program].loaders)
