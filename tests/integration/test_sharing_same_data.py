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
    def __init__(self, log_dir):
        self.log_dir = log_dir
        self.kinds = KINDS
        self.seen = torch.Generator()
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return squared(index) * settings.SCALE if "odd" in KINDS else 0

def deliver(dataset, name, beside=None, **options):
    loader = EchoLoader(DataLoader(dataset, 4, num_workers=1), 1, share=ShareConfig(name, linger_seconds=60, **options))
    try:
        found = []
        for batch in loader:
            found += batch.tolist()
            if beside is not None:
                deliver(beside, name, **options)
                beside = None
        print(sorted(found))
    except Exception as error:
        print(type(error).__name__, *str(error).split())
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


PROGRAM_RUN = """
    deliver(Stream("logs/{0}"), "stream", ignore=("log_dir",))
    folds = [Subset(Data("logs/{0}"), [index for index in range(12) if index % 3 != fold]) for fold in range(2)]
    deliver(folds[0], "data", beside=folds[1], ignore=("log_dir",))
"""
PROGRAM_CHANGES_SETTINGS = """
    settings.SCALE = 640
    deliver(Data("logs"), "changed")
"""


def test_only_the_same_data_code_and_configuration_are_joined_whatever_the_ignored_attribute_is(start):
    printed, _ = start(PROGRAM_RUN.format(1) + PROGRAM_CHANGES_SETTINGS, FACTOR="1")
    stream, fold, data, changed = printed.splitlines()
    assert stream == str(list(range(12)))
    assert data == str([64 * value * value for value in range(12) if value % 3])
    assert fold.startswith("SharedDataDiffers share='data' is the name of other data: ")
    assert "dataset.indices: list [0, 2, 3" in fold
    assert changed.startswith("ReaderError")
    assert "settings.SCALE: 640 and 64 (the training's, and this one)" in changed

    printed, log = start(PROGRAM_RUN.format(2), FACTOR="10")
    assert printed.splitlines()[::2] == [str(list(range(0, 120, 10))), data]
    assert "share='data': takes examples from the reader that is there: process " in log
    assert "s ago by train.py (process " in log
    assert "share='stream': takes examples from the reader that is there" not in log
