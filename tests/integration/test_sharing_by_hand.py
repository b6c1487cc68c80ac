"""A reader in the foreground, and the command that shows what readers do."""

import os
import signal
import time
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.demos.boring_classes import BoringModel
from sharing_runs import Numbers, epochs_of, in_process, indices, loader_of, status, wait_until
from torch.utils.data import DataLoader

from lightning_echo import EchoCLI, ShareConfig, serve
from lightning_echo.__main__ import main
from lightning_echo.share.sharing import status_of

pytestmark = pytest.mark.usefixtures("own_folder")


def serving(connection, seconds=0.0):
    """A reader in a process of its own, which says how it ended."""
    serve(DataLoader(Numbers(48, seconds), shuffle=True, num_workers=2), ShareConfig("data", window="1MiB"))
    connection.send("over")


def test_a_reader_by_hand_serves_until_it_is_interrupted():
    with in_process(serving) as (process, other):
        wait_until(lambda: status_of("data") is not None, "the reader is there")
        for batch_size in (8, 5):  # one training after the other: it does not end in between
            loader = loader_of(Numbers(48), batch_size)
            epochs = epochs_of(loader, 2)
            loader.close()
            assert [sorted(indices(epoch)) for epoch in epochs] == [list(range(48))] * 2
        assert status()["pid"] == process.pid
        with pytest.raises(ValueError, match="there is a reader of share='data' already"):
            serve(DataLoader(Numbers(48), shuffle=True), "data")
        os.kill(process.pid, signal.SIGINT)
        assert other.poll(60)
        assert other.recv() == "over"
        process.join(30)
        assert process.exitcode == 0
    assert status_of("data") is None


def test_the_command_shows_readers_and_their_trainings(capsys):
    assert main(["shared"]) == 0
    assert capsys.readouterr().out == "No shared readers are running.\n"
    loader = loader_of(Numbers(48), 8)
    next(iter(loader))
    assert main(["shared"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    loader.close()
    assert first.startswith(f"data: process {status()['pid']} reads ")
    assert "Numbers of 48 for 1 training with 1 worker, " in first
    assert "pass 0, " in second
    assert second.endswith('behind="wait"')


QUIET = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Model(BoringModel):
    """Its data is that of the data module."""

    def training_step(self, batch, batch_idx):
        return self.layer(batch["noise"].float()[:, None].expand(-1, 32)).sum()

    validation_step = None


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size, self.numbers = batch_size, None

    def setup(self, stage):
        self.numbers = Numbers(48)

    def train_dataloader(self):
        return DataLoader(self.numbers, self.batch_size, shuffle=True, num_workers=1)


def run(*arguments):
    """`EchoCLI` as a program of the user's calls it."""
    with patch("sys.argv", ["train.py"]):
        return EchoCLI(
            Model, Data, args=list(arguments), trainer_defaults=QUIET, save_config_callback=None, seed_everything_default=False
        )


def sharing_command(connection):
    with redirect_stdout(StringIO()) as printed:
        run("share", "--name=data", "--window=1MiB", "--data.batch_size=4")
    connection.send(printed.getvalue())


@pytest.mark.slow
def test_the_command_of_the_training_program_reads_for_fits_of_the_same_configuration():
    with in_process(sharing_command) as (process, other):
        wait_until(lambda: status_of("data") is not None, "the reader is there")
        cli = run("fit", "--echo.share=data", "--data.batch_size=16", "--trainer.max_epochs=2")
        assert cli.trainer.global_step == 6
        assert status()["pid"] == process.pid
        loader = loader_of(Numbers(48), 8)
        next(iter(loader))
        time.sleep(3)  # it shows its trainings every two seconds
        loader.close()
        os.kill(process.pid, signal.SIGINT)
        assert other.poll(60)
        assert "Numbers of 48 for 1 training" in other.recv()


def test_a_command_without_a_name_is_refused():
    with pytest.raises(ValueError, match=r"name is missing: train\.py share --name sweep"):
        run("share")
