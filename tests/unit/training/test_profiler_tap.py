"""What the tap hears of what Lightning tells its profiler, and that the profiler hears it all and is left as it was."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch.utils.data import DataLoader

from lightning_echo import EchoCallback
from lightning_echo.training.meters import ProfilerTap

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
COPY = "[Strategy]SingleDeviceStrategy.batch_to_device"
VALIDATION = "[LightningModule]Model.on_validation_model_zero_grad"


class Heard:
    """In the place of a `StepTimer`: notes in one list what it is told."""

    def __init__(self, notes):
        self.notes = notes

    def __getattr__(self, name):
        return lambda: self.notes.append(name)


class Profiler:
    """Notes in the same list what it is told, and can refuse it."""

    def __init__(self, notes, refuses=()):
        self.notes, self.refuses = notes, refuses

    def start(self, action_name):
        self.notes.append(("start", action_name))
        if action_name in self.refuses:
            raise ValueError(action_name)

    def stop(self, action_name):
        self.notes.append(("stop", action_name))


def test_fetching_copying_and_validation_are_told_to_the_timer_and_everything_to_the_profiler():
    notes = []
    profiler = Profiler(notes)
    ProfilerTap(profiler, Heard(notes))
    for action in (FETCH, COPY, VALIDATION, "run_training_batch", "[_EvaluationLoop].val_next"):
        profiler.start(action)
        profiler.stop(action)
    # The profiler's own time lies outside of what is measured.
    assert notes == [
        *(("start", FETCH), "begin_fetch", "end_fetch", ("stop", FETCH)),
        *(("start", COPY), "begin_copy", "end_copy", ("stop", COPY)),
        *(("start", VALIDATION), "pause", ("stop", VALIDATION)),
        *(("start", "run_training_batch"), ("stop", "run_training_batch")),
        *(("start", "[_EvaluationLoop].val_next"), ("stop", "[_EvaluationLoop].val_next")),
    ]


@pytest.mark.parametrize("make", [lambda: Profiler([]), PassThroughProfiler])
def test_what_somebody_else_has_put_on_the_instance_is_told_and_put_back(make):
    profiler, notes = make(), []

    def start(action_name):
        notes.append(action_name)

    profiler.start = start
    tap = ProfilerTap(profiler, Heard([]))
    profiler.start(FETCH)
    tap.close()
    assert notes == [FETCH]
    assert vars(profiler)["start"] is start
    assert "stop" not in vars(profiler)


def test_a_profiler_that_does_nothing_is_asked_only_for_what_the_timer_wants_to_hear():
    notes, profiler = [], PassThroughProfiler()
    before = dict(vars(profiler))
    tap = ProfilerTap(profiler, Heard(notes))
    first, second, third = [profiler.profile("run_training_batch") for _ in range(3)]
    assert first is not second
    assert second is third, "nothing is made for each of twenty contexts in a step"
    for action in (COPY, VALIDATION, "run_training_batch") * 2:
        with profiler.profile(action):
            notes.append(action)
    once = ["begin_copy", COPY, "end_copy", "pause", VALIDATION, "run_training_batch"]
    assert notes == once * 2
    tap.close()
    assert vars(profiler) == before


class Model(pl.LightningModule):
    def __init__(self, notes):
        super().__init__()
        self.layer, self.notes = torch.nn.Linear(1, 1), notes

    def training_step(self, batch):
        self.notes.append("step")
        return self.layer(batch).sum()

    def validation_step(self, batch):
        self.notes.append("validation step")

    def train_dataloader(self):
        return DataLoader(torch.rand(3, 1), 1)

    def val_dataloader(self):
        self.notes.append("validation loader")
        return DataLoader(torch.rand(1, 1), 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Tapping(pl.Callback):
    """Taps the profiler as long as a training lasts; notes steps and validation too."""

    def __init__(self, notes):
        self.notes = notes

    def on_train_start(self, trainer, pl_module):
        self.tap = ProfilerTap(trainer.profiler, Heard(self.notes))

    def on_fit_end(self, trainer, pl_module):
        self.tap.close()


def fit(model, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**quiet, accelerator="cpu", devices=1, max_epochs=2, num_sanity_val_steps=0, **options)
    trainer.fit(model)
    return trainer


@pytest.fixture(params=["none", "simple"])
def profiler(request, tmp_path):
    return PassThroughProfiler() if request.param == "none" else SimpleProfiler(tmp_path, "simple")


BATCH = ["begin_fetch", "end_fetch", "begin_copy", "end_copy", "step"]


def test_lightning_tells_of_each_fetch_each_copy_and_each_validation_before_it_begins(profiler):
    notes = []
    trainer = fit(Model(notes), profiler=profiler, callbacks=[Tapping(notes)], reload_dataloaders_every_n_epochs=1)
    copy = ["begin_copy", "end_copy"]
    assert notes == [
        "validation loader",  # for the first time before the training starts
        *BATCH * 3,
        *["pause", *copy, "validation step"],
        *BATCH * 3,
        *["pause", "validation loader", *copy, "validation step"],  # making a loader and its workers belongs to validation
    ]
    assert trainer.profiler is profiler


@pytest.mark.parametrize("fails", [False, True])
def test_a_training_with_echo_callback_leaves_the_profiler_as_it_was(profiler, fails):
    class Failing(Model):
        def training_step(self, batch):
            if fails:
                raise LookupError("in the step")
            return super().training_step(batch)

    names, start = set(vars(profiler)), profiler.start
    callback = EchoCallback(summary=False)
    if fails:
        with pytest.raises(LookupError):
            fit(Failing([]), profiler=profiler, callbacks=[callback])
    else:
        fit(Failing([]), profiler=profiler, callbacks=[callback])
        assert callback.reports[-1].steps == 3
    assert profiler.start == start
    assert not {"start", "stop"} & (set(vars(profiler)) - names)
