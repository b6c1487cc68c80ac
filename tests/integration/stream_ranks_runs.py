"""Two processes on gloo that train on streams of their own: ``python stream_ranks_runs.py FOLDER``, see ddp_runs.py.

The first passes of the ranks are equally long, the later ones are not: a training whose epochs end where passes end would hang.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ddp_runs import fit
from kept_steps_cases import Stateful, Streaming
from trainer_runs import SaveAt

from lightning_echo import EchoDataModule

LENGTHS = ((46, 9, 31), (46, 40, 25))  # of the passes of each rank
RANK = int(os.environ.get("LOCAL_RANK", "0"))
EPOCHS, SAVED_AT = 4, 40


def data(lengths: tuple[int, ...]) -> EchoDataModule:
    return EchoDataModule(Streaming(partial(Stateful, lengths), 2), 2.5, buffer_size=16, seed=7)


def seen(run: Any) -> dict[str, Any]:
    return {"batches": run.model.batches, "steps": run.model.steps, "epochs": run.model.epochs}


def scenario_own(folder: Path) -> Any:
    del folder
    return seen(fit(data(LENGTHS[RANK]), max_epochs=EPOCHS))


def scenario_whole(folder: Path) -> Any:
    return seen(fit(data((46,)), SaveAt(folder, [SAVED_AT]), max_epochs=EPOCHS))


def scenario_resumed(folder: Path) -> Any:
    return seen(fit(data((46,)), ckpt_path=SaveAt(folder, []).path(SAVED_AT), max_epochs=EPOCHS))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    if sys.version_info < (3, 12):  # see ddp_runs.py
        multiprocessing.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_echo", "trainer_runs"])
        multiprocessing.set_start_method("forkserver")
    results = {"own": scenario_own(folder), "whole": scenario_whole(folder), "resumed": scenario_resumed(folder)}
    torch.save(results, folder / f"rank-{RANK}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
