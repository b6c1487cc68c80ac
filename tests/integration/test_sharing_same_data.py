"""Programs that share under one name, as a user starts them: which of them are joined, and what is said of the others."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from lightning_echo.share.config import names
from lightning_echo.share.sharing import status_of

pytestmark = pytest.mark.program

SETTINGS = "SCALE = 64\n"
PROGRAM = """
import functools, logging, sys
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from lightning_echo import EchoLoader, ShareConfig
import settings

logging.basicConfig(level=logging.INFO, format="%(message)s")
KINDS = {"odd", "even", "prime", "none"}

@functools.lru_cache
def squared(value):
    return value * value

class Stream(IterableDataset):
    def __init__(self, log_dir):
        self.log_dir = log_dir
    def __iter__(self):
        return (value * FACTOR for value in range(12))

class Data(Dataset):
    def __init__(self):
        self.kinds = KINDS
        self.seen = torch.Generator()
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return squared(index) * settings.SCALE if "odd" in KINDS else 0

def deliver(dataset, name, **options):
    loader = EchoLoader(DataLoader(dataset, 4, num_workers=1), 1, share=ShareConfig(name, linger_seconds=60, **options))
    try:
        print(sorted(value for batch in loader for value in batch.tolist()))
    except Exception as error:
        print(type(error).__name__, error)
    loader.close()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a program, whose readers end with the test; returns what it has printed, and its log."""
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "shared").mkdir(mode=0o700)
    monkeypatch.setenv("LIGHTNING_ECHO_SHARED", str(tmp_path / "shared"))

    def run(rest, **replaced):
        text = PROGRAM
        for name, value in replaced.items():
            text = text.replace(name, value)
        (tmp_path / "train.py").write_text(text + textwrap.dedent(rest))
        environment = {**os.environ, "PYTHONHASHSEED": "random", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    yield run
    for name in names():
        if (said := status_of(name)) is not None:
            os.kill(said["pid"], signal.SIGKILL)


def test_a_reader_has_the_configuration_and_the_cached_functions_of_its_script_or_is_refused(start):
    printed, _ = start(
        """
        deliver(Data(), "imported")
        settings.SCALE = 640
        deliver(Data(), "changed")
        """
    )
    first, second, *_ = printed.splitlines()
    assert first == str([64 * value * value for value in range(12)])
    assert second.startswith("ReaderError")
    assert "settings.SCALE: 640 and 64 (the training's, and this one)" in printed


def test_a_program_joins_its_own_reader_and_the_edited_one_does_not_join_the_old_code(start):
    stream = """
        deliver(Stream({0!r}), "stream", ignore=("log_dir",))
        deliver(Data(), "data")
    """
    printed, _ = start(stream.format("logs/1"), FACTOR="1")
    assert printed.splitlines()[0] == str(list(range(12)))
    again, log = start(stream.format("logs/2"), FACTOR="1")
    assert again == printed
    for name in ("stream", "data"):
        assert f"share='{name}': takes examples from the reader that is there: process " in log
    assert "s ago by train.py (process " in log
    edited, log = start(stream.format("logs/3"), FACTOR="10")
    assert edited.splitlines() == [str(list(range(0, 120, 10))), printed.splitlines()[1]]
    assert "share='stream': takes examples from the reader that is there" not in log


def test_folds_of_a_cross_validation_are_not_shared(start):
    printed, _ = start(
        """
        folds = [Subset(Data(), [index for index in range(12) if index % 3 != fold]) for fold in range(2)]
        first = iter(EchoLoader(DataLoader(folds[0], 2, num_workers=1), 1, share="folds"))
        next(first)
        deliver(folds[1], "folds")
        """
    )
    assert printed.startswith("SharedDataDiffers share='folds' is the name of other data: dataset.indices: list [0, 2, 3")
