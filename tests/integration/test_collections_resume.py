"""Exact resume of a run on several loaders, in every mode: whatever each loader's own epochs do meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from collection_runs import SEED, Several, SeveralRecorder, echoed, plain_loader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from trainer_runs import Run, SaveAt, Scans, SetFactor, assert_resumes, counts, fit

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoStateError

pytestmark = pytest.mark.usefixtures("read_here")
MODES = ("min_size", "max_size", "max_size_cycle")
CHANGED = ("min_size", "max_size_cycle")  # by the other one, the shorter loader just ends earlier


# Not after last steps of epochs at whose end the run is changed: Lightning drops an epoch's end, and takes the epoch for one of
# the new length, where a checkpoint was saved right after its last step (the same with a single loader).


@pytest.mark.grid
@pytest.mark.parametrize("limit", [1.0, 5, 0.7])
@pytest.mark.parametrize("reads_stepping", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_exactly_after_any_step(mode: str, reads_stepping: bool, limit: Any, tmp_path: Path) -> None:
    """With 22 and 10 examples, epochs of 6 and 3 batches; in ``max_size_cycle`` the short loader goes through two in each."""

    def make(*callbacks: Any, **options: Any) -> Run:
        model = SeveralRecorder(reads_stepping)
        options = {"limit_train_batches": limit, "max_epochs": 2, **options}
        return fit(echoed(mode), model=model, callbacks=list(callbacks), **options)

    epoch = {1.0: {"min_size": 3}, 5: {"min_size": 3}, 0.7: {"min_size": 2}}[limit].get(mode, {1.0: 6, 5: 5, 0.7: 4}[limit])
    whole = assert_resumes(make, tmp_path, (epoch - 1, epoch, epoch + 1))
    assert whole.model.steps == [epoch] * 2


@pytest.mark.parametrize("mode", CHANGED)
def test_a_run_whose_factor_changes_the_lengths_resumes_exactly(mode: str, tmp_path: Path) -> None:
    """The short loader becomes the long one and back, between epochs and within one."""

    def make(*callbacks: Any, **options: Any) -> Run:
        configs = {"long": EchoConfig(1, epoch_length="full_pass", seed=1), "short": EchoConfig(3, seed=2)}
        data = echoed(mode, loaders=configs)
        its = [SetFactor(data, {0: 2, 1: 1.5}), *callbacks]
        return fit(data, model=SeveralRecorder(), max_epochs=4, callbacks=its, **options)

    whole = assert_resumes(make, tmp_path, (4, 8) if mode == "min_size" else (7, 17))
    assert whole.model.steps == {"min_size": [3] * 4}.get(mode, [6, 12, 9, 9])


class InTheMiddle(SetFactor):
    """Sets a factor after a step of the run."""

    def __init__(self, data: EchoDataModule, step: int, factor: float) -> None:
        super().__init__(data, {})
        self.data, self.step, self.factor = data, step, factor

    def on_train_batch_end(self, runner: Any, *args: Any) -> None:
        if runner.global_step == self.step:
            self.data.factor = self.factor


@pytest.mark.parametrize("mode", CHANGED)
def test_a_factor_set_within_an_epoch_leaves_its_length_also_after_a_resume(mode: str, tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        data = echoed(mode, factor=1, epoch_length="full_pass")
        return fit(data, model=SeveralRecorder(), callbacks=[InTheMiddle(data, 2, 3), *callbacks], max_epochs=2, **options)

    whole = assert_resumes(make, tmp_path, (1, 4))
    assert whole.model.steps == {"min_size": [3, 9]}.get(mode, [6, 18])


class Uneven(Several):
    """The other loader has so many examples in place of 10."""

    def __init__(self, length: int, mode: str = "max_size_cycle") -> None:
        super().__init__()
        self.length, self.mode = length, mode

    def train_dataloader(self) -> Any:
        loaders = {"long": plain_loader("long"), "short": DataLoader(Scans(self.length), 4, shuffle=True)}
        return CombinedLoader(loaders, self.mode)  # type: ignore[arg-type]


def test_a_run_that_the_callback_echoes_resumes_exactly(tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        echo = EchoCallback(echo=EchoConfig(2.5, "after_augmentation", seed=SEED))
        return fit(Several("nested"), model=SeveralRecorder(True), callbacks=[echo, *callbacks], max_epochs=2, **options)

    whole = assert_resumes(make, tmp_path, (5, 6))
    assert whole.model.batches == fit(echoed("nested"), model=SeveralRecorder(), max_epochs=2).model.batches


def test_a_checkpoint_that_is_saved_when_fit_is_over_begins_a_new_epoch(tmp_path: Path) -> None:
    """The long loader has two batches left then, and the next epoch takes four."""

    def make(**options: Any) -> Run:
        echo = EchoCallback(echo=EchoConfig(2.5, "after_augmentation", seed=SEED))
        return fit(Uneven(16, "min_size"), model=SeveralRecorder(), callbacks=[echo], **options)

    make(max_epochs=2).trainer.save_checkpoint(tmp_path / "over.ckpt")
    whole, resumed = make(max_epochs=3), make(max_epochs=3, ckpt_path=tmp_path / "over.ckpt")
    assert resumed.model.batches == whole.model.batches[8:]
    assert counts(resumed) == counts(whole)


class Counting:
    """A stateful loader of the user's own: numbered batches, five in an epoch."""

    def __init__(self) -> None:
        self.number = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        for _ in range(self.number % 5, 5):
            self.number += 1
            yield {"index": torch.tensor([self.number]), "noise": torch.zeros(1, 3)}

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class BesideCounting(Several):
    def train_dataloader(self) -> Any:
        return CombinedLoader({"counting": Counting(), "long": plain_loader("long")}, "max_size")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")  # without echoing
@pytest.mark.parametrize("step", [4, 5])
def test_a_stateful_loader_beside_those_that_are_echoed_keeps_its_own_state(step: int, tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        echo = EchoCallback(echo={"long": EchoConfig(2.5, "after_augmentation", seed=SEED)})
        return fit(BesideCounting(), model=SeveralRecorder(), callbacks=[echo, *callbacks], max_epochs=2, **options)

    save = SaveAt(tmp_path, [step])
    whole = make(save)
    resumed = make(ckpt_path=save.path(step))
    if step != 5:  # at its own end the user's loader cannot know that the epoch goes on
        assert resumed.model.batches == whole.model.batches[step:]
    assert [batch[1] for batch in resumed.model.batches] == [batch[1] for batch in whole.model.batches[step:]]
    without = fit(BesideCounting(), model=SeveralRecorder(), callbacks=[EchoCallback()], ckpt_path=save.path(step), max_epochs=2)
    assert without.model.batches[0][0] == resumed.model.batches[0][0]


def test_states_are_plain_and_named_and_those_that_lightning_saves(tmp_path: Path) -> None:
    fit(echoed("nested"), model=SeveralRecorder(), callbacks=[SaveAt(tmp_path, [3])], max_epochs=1)
    checkpoint = torch.load(tmp_path / "step-3.ckpt", weights_only=True)
    states = checkpoint["EchoDataModule"]["loader"]["loaders"]
    assert list(states) == ["a/0", "b/c/0"]
    assert list(states.values()) == checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]


def test_a_state_of_other_loaders_is_refused_with_their_names(tmp_path: Path) -> None:
    made: dict[str, Any] = {
        "loaders named 'long', 'short'": lambda: echoed("dict"),
        "loaders named '0', '1'": lambda: echoed("list"),
        "a single loader": lambda: EchoDataModule.from_dataloaders(plain_loader("long"), Several().val_dataloader(), factor=2),
    }
    names = list(made)
    for saved, other in ((names[0], names[1]), (names[2], names[0])):
        save, data = SaveAt(tmp_path, [2]), made[saved]()
        fit(data, model=None if saved == names[2] else SeveralRecorder(), callbacks=[save], max_epochs=1)
        assert ("loaders" in data.state_dict()["loader"]) == (saved != names[2]), "a single one's state is what it was"
        with pytest.raises(EchoStateError, match=f"the state belongs to {saved}, but this run has {other}"):
            fit(made[other](), model=SeveralRecorder(), ckpt_path=save.path(2))


def test_a_state_taken_before_the_first_step_of_another_fit_begins_a_new_epoch(tmp_path: Path) -> None:
    class AtStart(SaveAt):
        def on_train_start(self, runner: Any, pl_module: Any) -> None:
            runner.save_checkpoint(self.path(0))

    data = echoed("max_size")
    fit(data, model=SeveralRecorder(), max_epochs=1)
    save = AtStart(tmp_path, [])
    whole = fit(data, model=SeveralRecorder(), max_epochs=1, callbacks=[save])
    resumed = fit(echoed("max_size"), model=SeveralRecorder(), max_epochs=1, ckpt_path=save.path(0))
    assert resumed.model.batches == whole.model.batches
