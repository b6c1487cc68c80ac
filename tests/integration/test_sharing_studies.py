"""Studies of Optuna, and programs started in two terminals, whose trainings share one reader."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from sharing_runs import Numbers, wait_until
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback
from lightning_echo.share.config import log_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_sweep.py"
LENGTH = 60


pytestmark = pytest.mark.usefixtures("own_folder")


def trainings_served(name):
    """How many trainings have left the reader of a name; a second reader begins a log of its own."""
    return len(re.findall("has left$", Path(log_of(name)).read_text(), flags=re.MULTILINE))


@pytest.mark.program
def test_the_study_of_the_example_has_one_reader_in_processes_and_in_threads():
    pytest.importorskip("optuna")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"8 trials, best loss \S+", done.stdout.strip())
    wait_until(lambda: trainings_served("study") == 8, "the reader has seen the last one leave")


class Recording(LightningModule):
    """Notes the indices of each epoch."""

    def __init__(self):
        super().__init__()
        self.layer, self.epochs = torch.nn.Linear(1, 1), []

    def on_train_epoch_start(self):
        self.epochs.append([])

    def training_step(self, batch, batch_idx):
        self.epochs[-1] += batch["index"].tolist()
        return self.layer(batch["noise"][:, None]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_trials_in_threads_of_a_process_each_get_whole_passes():
    optuna = pytest.importorskip("optuna")
    found = []

    def objective(trial):
        model = Recording()
        echo = EchoCallback(share={"name": "threads", "join": "pass", "linger_seconds": 5}, summary=False)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[echo], **quiet)
        size = trial.suggest_categorical("batch_size", [5, 8])
        trainer.fit(model, DataLoader(Numbers(LENGTH), batch_size=size, shuffle=True, num_workers=1))
        found.append(model.epochs)
        return 0.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=4, n_jobs=2)
    assert [sorted(epoch) for epochs in found for epoch in epochs] == [list(range(LENGTH))] * 8
    wait_until(lambda: trainings_served("threads") == 4, "the reader has seen the last one leave")


PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from lightning.pytorch import LightningDataModule
from test_sharing_studies import Numbers, Recording, LENGTH
from torch.utils.data import DataLoader
from lightning_echo import EchoCLI

class Mine:
    "A data set of this program alone."
    def __init__(self):
        self.numbers, self.change = Numbers(LENGTH), lambda example: {{**example, "data": 255 - example["data"]}}

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.change(self.numbers[index])

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Mine(), self.batch_size, shuffle=True, num_workers=1)

cli = EchoCLI(Recording, Data, save_config_callback=None, seed_everything_default=False)
print(json.dumps(cli.model.epochs))
"""

CONFIGURATION = """
trainer: {{accelerator: cpu, max_epochs: 2, logger: false, enable_checkpointing: false, enable_progress_bar: false}}
data: {{batch_size: {}}}
echo: {{share: {{name: sweep, wait_for: 2}}, factor: {}}}
"""


@pytest.mark.program
def test_programs_in_two_terminals_share_one_reader(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    programs = []
    for name, size, factor in (("a", 8, 1), ("b", 5, 2)):
        (tmp_path / f"{name}.yaml").write_text(CONFIGURATION.format(size, factor))
        command = [sys.executable, str(program), "fit", "--config", str(tmp_path / f"{name}.yaml")]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        programs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment))
    ends = [each.communicate(timeout=240) for each in programs]
    assert [each.returncode for each in programs] == [0, 0], ends
    plain, echoing = (json.loads(printed.splitlines()[-1]) for printed, _ in ends)
    assert [sorted(epoch) for epoch in plain] == [list(range(LENGTH))] * 2
    assert [len(epoch) for epoch in echoing] == [LENGTH] * 2
    assert len(set(echoing[0])) < LENGTH, "half of an epoch are echoes"
    wait_until(lambda: trainings_served("sweep") == 2, "the reader has seen the last one leave")
