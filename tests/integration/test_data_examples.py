"""The examples for kinds of data that people have run as a user would start them, and echo what their texts say.

The numbers follow from the meaning of the echo factor alone. The first batch of each worker is all fresh. Of what the worker
delivers afterwards, one example in ``factor`` is fresh.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lightning_echo import EchoLoader

FOLDER = Path(__file__).parents[2] / "examples" / "data"
MOST_LINES, FACTOR = 60, 3
MAP_STYLE_EXAMPLES, MAP_STYLE_EPOCHS = 192, 4
STREAM_EXAMPLES, STREAM_EPOCHS = 128, 2


class Echoed(NamedTuple):
    """What an example says of a loader at its end.

    Attributes:
        point: Where it is echoed.
        reused: What an echo does not run again.
        redone: What runs for each use.
        fresh: Number of fresh examples.
        echoed: Number of echoed examples.
    """

    point: str
    reused: str
    redone: str
    fresh: int
    echoed: int


def map_style(point: str, reused: str, redone: str, workers: int = 2, first: int = 16, ranks: int = 1) -> Echoed:
    """An epoch delivers as many examples as without echoing. Each worker makes the same number of them."""
    delivered = MAP_STYLE_EPOCHS * MAP_STYLE_EXAMPLES // ranks
    fresh = workers * int(first + (delivered / workers - first) / FACTOR)
    return Echoed(point, reused, redone, fresh, delivered - fresh)


def stream(point: str, reused: str, redone: str, workers: int = 2, first: int = 16) -> Echoed:
    """An epoch delivers each example of the stream as a fresh one."""
    fresh = STREAM_EPOCHS * STREAM_EXAMPLES
    return Echoed(point, reused, redone, fresh, (fresh - workers * first) * (FACTOR - 1))


AFTER_AUGMENTATION = ("after_augmentation", "load, augment", "collate, transfer")
BEFORE_AUGMENTATION = ("before_augmentation", "load", "augment")
EXAMPLES = {
    "hugging_face.py": [map_style(*AFTER_AUGMENTATION), map_style(*BEFORE_AUGMENTATION)],
    "hugging_face_stream.py": [stream(*AFTER_AUGMENTATION)],
    "tar_shards.py": [stream(*AFTER_AUGMENTATION)],
    "tensors.py": [map_style(*AFTER_AUGMENTATION)],
    "h5_file.py": [map_style(*BEFORE_AUGMENTATION)],
    "fabric_ranks.py": [map_style(*AFTER_AUGMENTATION, workers=1, first=8, ranks=2)],
}
NEEDS = {"hugging_face.py": "datasets", "hugging_face_stream.py": "datasets", "tar_shards.py": "webdataset", "h5_file.py": "h5py"}

SAID = re.compile(
    rf"""^(\w+), factor {FACTOR}: reuse \[(.*)\], redo \[(.*)\];.*
EchoCounts\(fresh=(\d+), echoed=(\d+), refetched=0\)$""",
    re.MULTILINE,
)


def run(program: str, folder: Path) -> str:
    """Runs an example in an empty folder, and returns what it prints."""
    if program in NEEDS:
        pytest.importorskip(NEEDS[program], reason=f"{NEEDS[program]} is not installed: `make install` installs it")
    working = folder / "working"
    working.mkdir()
    # One thread: on cores that others use, too, several wait for each other in loops, which takes many times as long.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hugging_face"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / program)]
    done = subprocess.run(command, cwd=working, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(working.iterdir())  # its files are gone, and no logs are left
    return done.stdout


def said(output: str) -> list[Echoed]:
    return [Echoed(*words, int(fresh), int(echoed)) for *words, fresh, echoed in SAID.findall(output)]


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES)


@pytest.mark.program
@pytest.mark.parametrize("program", ["hugging_face.py", "hugging_face_stream.py", "tar_shards.py", "tensors.py"])
def test_an_example_of_a_kind_of_data_echoes_as_it_says(program: str, tmp_path: Path) -> None:
    assert said(run(program, tmp_path)) == EXAMPLES[program]


@pytest.mark.program
def test_an_h5_file_is_opened_by_the_workers_alone(tmp_path: Path) -> None:
    output = run("h5_file.py", tmp_path)
    assert said(output) == EXAMPLES["h5_file.py"]
    assert output.endswith("opened by this process: False\n")


@pytest.mark.program
def test_each_rank_of_fabric_echoes_its_part_of_the_data(tmp_path: Path) -> None:
    output = run("fabric_ranks.py", tmp_path)
    (of_a_rank,) = EXAMPLES["fabric_ranks.py"]
    assert said(output) == [of_a_rank]  # the first rank prints, for itself
    steps = MAP_STYLE_EPOCHS * MAP_STYLE_EXAMPLES // 2 // 8
    assert f"{steps} steps on each of 2 ranks, {2 * of_a_rank.fresh} fresh, {2 * of_a_rank.echoed} echoed\n" in output


def test_fabric_sets_up_nothing_but_a_data_loader_as_its_example_says() -> None:
    fabric, plain = Fabric(accelerator="cpu", devices=1), DataLoader(list(range(64)), batch_size=8)
    with pytest.raises(TypeError, match="DataLoader"):
        fabric.setup_dataloaders(EchoLoader(plain, FACTOR))


def test_what_fabric_has_set_up_is_echoed_by_whole_batches() -> None:
    fabric, plain = Fabric(accelerator="cpu", devices=1), DataLoader(list(range(64)), batch_size=8)
    loader = EchoLoader(fabric.setup_dataloaders(plain), FACTOR, seed=0)
    batches = torch.cat([torch.stack(list(loader)) for _ in range(3)])
    assert loader.insertion_point == "after_batching"
    assert batches.shape == (24, 8)
    assert {tuple(batch.tolist()) for batch in batches} == {tuple(range(start, start + 8)) for start in range(0, 64, 8)}


@pytest.mark.parametrize("program", EXAMPLES)
def test_an_example_of_a_kind_of_data_is_short_and_says_at_its_top_where_it_is_echoed(program: str) -> None:
    text = (FOLDER / program).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    description = text.split('"""')[1]
    chosen, *_ = EXAMPLES[program]
    assert f"`auto` takes {chosen.point}" in description.splitlines()[0]
    assert all(each.point in description for each in EXAMPLES[program])
    assert "<- the line that changes" in text
