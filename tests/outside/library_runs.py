"""What the tests of libraries that make the Trainer themselves share: callbacks alone come in, and all else is the library's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning
from project_runs import FACTOR, Run, See, Use, Watcher

from lightning_echo import EchoCallback

# What `Trainer` gets in each: nothing is written, and nothing is printed but what is said.
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


class Recorder(pytorch_lightning.Callback):
    """Remembers every example that the library's model is given, as `Watcher` does. Libraries copy the callbacks they get."""

    def __init__(self, see: See) -> None:
        self.see = see
        self.batches: list[list[Use]] = []
        self.epochs: list[int] = []
        self.trainer: Any = None
        self._fresh = 0

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.trainer = trainer
        before, self._fresh = self._fresh, trainer.train_dataloader.counts.fresh
        fresh = self._fresh - before
        self.batches.append([Use(int(index), value, place < fresh) for place, (index, value) in enumerate(self.see(batch))])
        self.epochs.append(trainer.current_epoch)


def train_with_library(see: See, fit: Callable[[Sequence[pytorch_lightning.Callback]], Any], **how: Any) -> Run:
    """Trains with what ``fit`` does with an `EchoCallback` among the callbacks that it is given; ``how`` are further options."""
    recorder, echo = Recorder(see), EchoCallback(**{"factor": FACTOR, "seed": 7, "summary": False, **how})
    fit([recorder, echo])
    assert isinstance(recorder.trainer, pytorch_lightning.Trainer)
    model: Watcher = recorder  # type: ignore[assignment]
    return Run(model, recorder.trainer.train_dataloader, recorder.trainer)
