"""The examples for kinds of data and for domains run as a user would start them, and echo what their texts say.

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
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader

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
    """An example: its loaders, in the order in which they are printed.

    Attributes:
        result: Between what its accuracy or loss lies if it learns: beyond what guessing would have. None: it prints none.
        needs: A package that it needs.
    """

    loaders: list[Echoed]
    result: tuple[float, float] | None = None
    needs: str = "torch"


def augmented(first: list[int], delivered: int | None, fresh: int | None = None) -> Echoed:
    return Echoed("after_augmentation", 3, first, delivered, fresh, "load, augment", "collate, transfer")


TWO, MAPPED, STREAM = [16, 16], 4 * 192, 2 * 128
KEPT = 128 + 2 * (4 * 16 // 3)  # a stream with a state: a pass, then an epoch of eight steps, four of each worker
CROP_AND_FLIP = "RandomCrop, RandomHorizontalFlip, RandomErasing"
FOR_IMAGES = "RandomResizedCrop, RandomHorizontalFlip, ToImage, ToDtype, Normalize"
FOR_BOXES = "RandomIoUCrop, RandomHorizontalFlip, SanitizeBoundingBoxes, ToDtype"
TEXT = "Each block of the stream is used several times. "
SHARES = [TEXT.count(letter) / len(TEXT) for letter in set(TEXT)]
# The least cross-entropy of who knows no more than how frequent the answers are.
ONE_OF_TWO, LETTERS = math.log(2), -sum(share * math.log(share) for share in SHARES)
# The generalised IoU loss of boxes that do not overlap is 1 or more, and the third part of the loss says yes or no.
BOXES_ELSEWHERE = 1 + ONE_OF_TWO
ON_DEVICE = "load, augment, collate, transfer"
BEFORE = "before_augmentation"

EXAMPLES = {
    "data/hugging_face.py": Example(
        [augmented(TWO, MAPPED), Echoed(BEFORE, 3, TWO, MAPPED, None, "load", "augment")], needs="datasets"
    ),
    "data/hugging_face_stream.py": Example([augmented(TWO, None, KEPT)], needs="datasets"),
    "data/tar_shards.py": Example([augmented(TWO, None, STREAM)], needs="webdataset"),
    "data/tensors.py": Example([augmented(TWO, MAPPED)]),
    "data/h5_file.py": Example([Echoed(BEFORE, 3, TWO, MAPPED, None, "load", "augment")], needs="h5py"),
    "data/fabric_ranks.py": Example([augmented([8], MAPPED // 2)]),  # the first rank prints, for itself
    "image_folder.py": Example([Echoed(BEFORE, 4, [32, 32], 4 * 256, None, "load, Resize", FOR_IMAGES)], (0.75, 1)),
    "detection.py": Example([Echoed(BEFORE, 4, [8, 8], 4 * 64, None, "load", FOR_BOXES)], (0, BOXES_ELSEWHERE)),
    "audio.py": Example([Echoed("after_batching", 3, [16], 4 * 192, None, "load, augment, collate", "transfer")]),
    "language_model.py": Example([augmented(TWO, None, 3 * 4 * 64)], (0, LETTERS)),
    "device_augmentation.py": Example(
        [Echoed("after_transfer", 4, [32], 4 * 256, None, ON_DEVICE, "on_after_batch_transfer")], (0, ONE_OF_TWO)
    ),
    "several_loaders.py": Example(
        [  # an epoch is as long as the longer one, of 512 examples in batches of 64
            Echoed(BEFORE, 2, [16], 4 * 8 * 16, None, "load", CROP_AND_FLIP),
            Echoed(BEFORE, 4, [64, 64], 4 * 8 * 64, None, "load", CROP_AND_FLIP),
        ],
        (0, 2 * ONE_OF_TWO),
    ),
}

SAID = re.compile(
    r"""(\w+), factor (\S+): reuse \[(.*)\], redo \[(.*)\];.*
EchoCounts\(fresh=(\d+), echoed=(\d+), refetched=0\)(?:.* (\S+))?$""",
    re.MULTILINE,
)


def run(program: str, folder: Path) -> str:
    """Runs an example in an empty folder, and returns what it prints."""
    needed = EXAMPLES[program].needs
    pytest.importorskip(needed, reason=f"{needed} is not installed: `make install` installs it")
    working = folder / "working"
    working.mkdir()
    # One thread: on cores that others use, too, several wait for each other in loops, which takes many times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hugging_face"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / program)]
    done = subprocess.run(command, cwd=working, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(working.iterdir()), "its files are gone, and no logs are left"
    return done.stdout


def processor_seconds() -> float:
    """Of all processes that were started from this one and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def assert_echoes_as_it_says(program: str, output: str) -> None:
    loaders, result, _ = EXAMPLES[program]
    for found, of in zip(SAID.findall(output), loaders, strict=True):
        *said, fresh, echoed, printed = found
        assert said == [of.point, str(of.factor), of.reused, of.redone]
        fresh, delivered = int(fresh), int(fresh) + int(echoed)
        assert of.delivered in (None, delivered)
        assert of.fresh in (None, fresh)
        # Error diffusion leaves less than an example to each worker, or less than a batch: fewer than `factor` uses of it.
        left = max(of.first) if of.point in ("after_batching", "after_transfer") else len(of.first)
        assert -left * of.factor < fresh * of.factor - delivered <= sum(of.first) * (of.factor - 1)
        assert printed == "" if result is None else (result[0] <= float(printed) <= result[1])


@pytest.mark.program
@pytest.mark.parametrize("program", [program for program in EXAMPLES if program != "data/fabric_ranks.py"])
def test_an_example_echoes_as_it_says(program: str, tmp_path: Path) -> None:
    before = processor_seconds()
    output = run(program, tmp_path)
    assert processor_seconds() - before < MOST_SECONDS  # it sleeps nowhere, so that this is more than it takes on idle cores
    assert_echoes_as_it_says(program, output)
    assert program != "data/h5_file.py" or output.endswith("opened by this process: False\n")


@pytest.mark.program
def test_each_rank_of_fabric_echoes_its_part_of_the_data(tmp_path: Path) -> None:
    output = run("data/fabric_ranks.py", tmp_path)
    assert_echoes_as_it_says("data/fabric_ranks.py", output)
    fresh, echoed = map(int, SAID.findall(output)[0][4:6])
    assert f"{MAPPED // 2 // 8} steps on each of 2 ranks, {2 * fresh} fresh, {2 * echoed} echoed\n" in output


def test_fabric_sets_up_nothing_but_a_data_loader_which_is_echoed_by_whole_batches() -> None:
    fabric, plain = Fabric(accelerator="cpu", devices=1), DataLoader(list(range(64)), batch_size=8)
    with pytest.raises(TypeError, match="DataLoader"):
        fabric.setup_dataloaders(EchoLoader(plain, 3))
    loader = EchoLoader(fabric.setup_dataloaders(plain), 3, seed=0)
    batches = torch.cat([torch.stack(list(loader)) for _ in range(3)])
    assert loader.insertion_point == "after_batching"
    assert batches.shape == (24, 8)
    assert {tuple(batch.tolist()) for batch in batches} == {tuple(range(start, start + 8)) for start in range(0, 64, 8)}


@pytest.mark.parametrize("program", EXAMPLES)
def test_an_example_is_short_and_names_its_point_at_its_top(program: str) -> None:
    assert {f"data/{path.name}" for path in (FOLDER / "data").glob("*.py")} <= set(EXAMPLES), "every example is run"
    text = (FOLDER / program).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    top = ast.get_docstring(ast.parse(text)) or ""
    assert all(of.point in top for of in EXAMPLES[program].loaders)
    if program.startswith("data/"):
        assert f"`auto` takes {EXAMPLES[program].loaders[0].point}" in top.splitlines()[0]
        assert "<- the line that changes" in text
