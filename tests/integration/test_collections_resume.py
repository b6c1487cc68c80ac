"""Exact resume of a run on several loaders, in every mode: whatever each loader's own epochs do meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from collection_runs import SEED, Several, SeveralRecorder, echoed, plain_loader
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from trainer_runs import At, Killed, Run, SaveAt, Scans, SetFactor, fit, trainer

from lightning_echo import EchoCallback, EchoConfig, EchoDataModule, EchoLoader, EchoStateError
from lightning_echo.training.loaders import leaves_of

MODES = ("min_size", "max_size", "max_size_cycle")


def echo_loaders(run: Run) -> dict[str, EchoLoader]:
    return {name: leaf for name, leaf in leaves_of(run.trainer.train_dataloader).items() if isinstance(leaf, EchoLoader)}


def counts(run: Run) -> dict[str, tuple[int, int]]:
    return {name: (loader.counts.fresh, loader.counts.echoed) for name, loader in echo_loaders(run).items()}


def assert_goes_on(resumed: Run, whole: Run, step: int) -> None:
    assert resumed.model.batches == whole.model.batches[step:]
    assert len(resumed.model.batches) > 0
    assert resumed.model.epochs == whole.model.epochs[step:]
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert resumed.model.weights == whole.model.weights
    assert counts(resumed) == counts(whole)
    assert counts(whole)


def resume_everywhere(make: Any, folder: Path, steps: Any = None, *, without: Any = ()) -> Run:
    """Resumes a run from a checkpoint after each step but the last; returns the uninterrupted run.

    ``without`` are last steps of epochs at whose end the run is changed: Lightning drops an epoch's end, and takes the epoch for
    one of the new length, where a checkpoint was saved right after its last step (the same with a single loader).
    """
    whole = make()
    steps = [step for step in steps or range(1, len(whole.model.batches)) if step not in without]
    save = SaveAt(folder, steps)
    assert make(callbacks=[save]).model.batches == whole.model.batches  # that states are taken changes nothing
    for step in steps:
        assert_goes_on(make(ckpt_path=save.path(step)), whole, step)
    return whole


@pytest.mark.grid
@pytest.mark.parametrize("limit", [1.0, 5, 0.7])
@pytest.mark.parametrize("reads_stepping", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_exactly_after_any_step(mode: str, reads_stepping: bool, limit: Any, tmp_path: Path) -> None:
    """With 22 and 10 examples, epochs of 6 and 3 batches; in ``max_size_cycle`` the short loader goes through two in each."""

    def make(**options: Any) -> Run:
        return fit(echoed(mode), model=SeveralRecorder(reads_stepping), limit_train_batches=limit, max_epochs=3, **options)

    epoch = {1.0: {"min_size": 3}, 5: {"min_size": 3}, 0.7: {"min_size": 2}}[limit].get(mode, {1.0: 6, 5: 5, 0.7: 4}[limit])
    whole = resume_everywhere(make, tmp_path, None if limit == 1.0 and not reads_stepping else range(2, 3 * epoch, 2))
    assert whole.model.steps == [epoch] * 3


@pytest.mark.parametrize("mode", MODES)
def test_a_run_whose_factor_changes_the_lengths_resumes_exactly_after_any_step(mode: str, tmp_path: Path) -> None:
    """The short loader becomes the long one and back, between epochs and within one."""

    def make(callbacks: Any = (), **options: Any) -> Run:
        configs = {"long": EchoConfig(1, epoch_length="full_pass", seed=1), "short": EchoConfig(3, seed=2)}
        data = echoed(mode, loaders=configs)
        return fit(
            data, model=SeveralRecorder(), max_epochs=4, callbacks=[SetFactor(data, {0: 2, 1: 1.5}), *callbacks], **options
        )

    whole = resume_everywhere(make, tmp_path, without=(3, 6) if mode == "min_size" else (6, 18))
    assert whole.model.steps == {"min_size": [3] * 4}.get(mode, [6, 12, 9, 9])


class InTheMiddle(At):
    """Sets a factor after a step of the run."""

    def __init__(self, data: EchoDataModule, step: int, factor: float) -> None:
        super().__init__({})
        self.data, self.step, self.factor = data, step, factor

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.data.factor = self.factor


@pytest.mark.parametrize("mode", MODES)
def test_a_factor_set_within_an_epoch_leaves_its_length_also_after_a_resume(mode: str, tmp_path: Path) -> None:
    def make(callbacks: Any = (), **options: Any) -> Run:
        data = echoed(mode, factor=1, epoch_length="full_pass")
        return fit(data, model=SeveralRecorder(), callbacks=[InTheMiddle(data, 2, 3), *callbacks], **options)

    whole = resume_everywhere(make, tmp_path, without=(3,) if mode == "min_size" else (6,))
    assert whole.model.steps == {"min_size": [3, 9, 9]}.get(mode, [6, 18, 18])


def test_within_an_epoch_a_loader_that_is_through_keeps_the_length_that_the_epoch_began_with(tmp_path: Path) -> None:
    """The very short loader's third cycle begins after the factor has changed: its new length is that of the next epoch."""

    class VeryShort(Several):
        def train_dataloader(self) -> Any:
            return {"long": plain_loader("long"), "short": DataLoader(Scans(8), 4, shuffle=True)}

    def make(callbacks: Any = (), **options: Any) -> Run:
        configs = {"long": EchoConfig(1, seed=1), "short": EchoConfig(1, epoch_length="full_pass", seed=2)}
        data = EchoDataModule(VeryShort(), loaders=configs)
        return fit(data, model=SeveralRecorder(), callbacks=[InTheMiddle(data, 1, 5), *callbacks], max_epochs=2, **options)

    whole = resume_everywhere(make, tmp_path, without=(6,))
    assert whole.model.steps == [6, 10]


@pytest.mark.grid
@pytest.mark.parametrize(("mode", "step"), [("min_size", 4), ("max_size", 5), ("max_size", 10), ("max_size_cycle", 11)])
@pytest.mark.parametrize("point", ["before_augmentation", "after_batching"])
def test_a_killed_run_with_workers_resumes_exactly(mode: str, step: int, point: str, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(mode, workers=1, point=point), model=SeveralRecorder(), **options)

    save = SaveAt(tmp_path, [step], dies=True)
    with pytest.raises(Killed):
        make(callbacks=[save])
    assert_goes_on(make(ckpt_path=save.path(step)), make(), step)


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["list", "nested", "max_size"])
@pytest.mark.parametrize("reads_stepping", [False, True])
def test_a_run_that_the_callback_echoes_resumes_exactly(kind: str, reads_stepping: bool, tmp_path: Path) -> None:
    def make(callbacks: Any = (), **options: Any) -> Run:
        echo = EchoCallback(echo=EchoConfig(2.5, "after_augmentation", seed=SEED))
        return fit(Several(kind), model=SeveralRecorder(reads_stepping), callbacks=[echo, *callbacks], **options)

    whole = resume_everywhere(make, tmp_path, (1, 4, 5, 6, 8, 12, 17))
    assert whole.model.batches == fit(echoed(kind), model=SeveralRecorder()).model.batches


@pytest.mark.parametrize("through_callback", [True, False])
def test_a_checkpoint_that_is_saved_when_fit_is_over_begins_a_new_epoch(through_callback: bool, tmp_path: Path) -> None:
    """The long loader has two batches left then, and the next epoch takes four."""

    class Uneven(Several):
        def train_dataloader(self) -> Any:
            loaders = {"long": plain_loader("long"), "short": DataLoader(Scans(16), 4, shuffle=True)}
            return CombinedLoader(loaders, "min_size")

    def make(**options: Any) -> Run:
        config = EchoConfig(2.5, "after_augmentation", seed=SEED)
        if through_callback:
            return fit(Uneven(), model=SeveralRecorder(), callbacks=[EchoCallback(echo=config)], **options)
        return fit(EchoDataModule(Uneven(), **config.as_options()), model=SeveralRecorder(), **options)

    make(max_epochs=2).trainer.save_checkpoint(tmp_path / "over.ckpt")
    assert_goes_on(make(max_epochs=4, ckpt_path=tmp_path / "over.ckpt"), make(max_epochs=4), 8)


def test_where_only_one_loader_is_echoed_that_one_resumes_exactly(tmp_path: Path) -> None:
    """A plain loader begins anew, as Lightning says, where a run is resumed within an epoch."""

    def make(**options: Any) -> Run:
        configs = {"short": EchoConfig(2.5, "after_augmentation", seed=SEED)}
        return fit(echoed("max_size", loaders=configs), model=SeveralRecorder(), **options)

    whole, save = make(), SaveAt(tmp_path, range(1, 18))
    make(callbacks=[save])
    for step in (2, 4, 6, 9, 11, 12):
        if step % 6:
            with pytest.warns(UserWarning, match="your dataloader is not resumable"):
                resumed = make(ckpt_path=save.path(step))
        else:
            resumed = make(ckpt_path=save.path(step))
        assert [batch[1] for batch in resumed.model.batches] == [batch[1] for batch in whole.model.batches[step:]]


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
@pytest.mark.parametrize("step", [4, 5, 6, 9])
def test_a_stateful_loader_beside_those_that_are_echoed_keeps_its_own_state(step: int, tmp_path: Path) -> None:
    def make(callbacks: Any = (), **options: Any) -> Run:
        echo = EchoCallback(echo={"long": EchoConfig(2.5, "after_augmentation", seed=SEED)})
        return fit(BesideCounting(), model=SeveralRecorder(), callbacks=[echo, *callbacks], **options)

    save = SaveAt(tmp_path, [step])
    whole = make(callbacks=[save])
    resumed = make(ckpt_path=save.path(step))
    if step != 5:  # at its own end the user's loader cannot know that the epoch goes on
        assert resumed.model.batches == whole.model.batches[step:]
    assert [batch[1] for batch in resumed.model.batches] == [batch[1] for batch in whole.model.batches[step:]]
    without = fit(BesideCounting(), model=SeveralRecorder(), callbacks=[EchoCallback()], ckpt_path=save.path(step))
    assert without.model.batches[0][0] == resumed.model.batches[0][0]


# ---------------------------------------------------------------------- states


def test_states_are_plain_and_named_and_those_that_lightning_saves(tmp_path: Path) -> None:
    fit(echoed("nested"), model=SeveralRecorder(), callbacks=[SaveAt(tmp_path, [8])])
    checkpoint = torch.load(tmp_path / "step-8.ckpt", weights_only=True)
    states = checkpoint["EchoDataModule"]["loader"]["loaders"]
    assert list(states) == ["a/0", "b/c/0"]
    assert list(states.values()) == checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]


def test_a_state_of_other_loaders_is_refused_with_their_names(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    fit(echoed("dict"), model=SeveralRecorder(), callbacks=[save])
    with pytest.raises(
        EchoStateError, match="the state belongs to loaders named 'long', 'short', but this run has loaders named '0', '1'"
    ):
        fit(echoed("list"), model=SeveralRecorder(), ckpt_path=save.path(8))
    single = EchoDataModule.from_dataloaders(plain_loader("long"), Several().val_dataloader(), factor=2)
    with pytest.raises(
        EchoStateError, match="the state belongs to loaders named 'long', 'short', but this run has a single loader"
    ):
        fit(single, ckpt_path=save.path(8))


def test_a_state_of_a_single_loader_is_what_it_was_and_is_refused_for_several(tmp_path: Path) -> None:
    single = EchoDataModule.from_dataloaders(plain_loader("long"), Several().val_dataloader(), factor=2)
    save = SaveAt(tmp_path, [8])
    fit(single, callbacks=[save])
    state = single.state_dict()["loader"]
    assert "loaders" not in state
    assert "epoch_goes_on" not in state
    assert state.keys() == {*EchoLoader(plain_loader("long"), 2).state_dict(), "trainer"}
    with pytest.raises(
        EchoStateError, match="the state belongs to a single loader, but this run has loaders named 'long', 'short'"
    ):
        fit(echoed("dict"), model=SeveralRecorder(), ckpt_path=save.path(8))


def test_the_same_data_module_goes_back_to_a_checkpoint_and_to_its_beginning(tmp_path: Path) -> None:
    data, save = echoed("max_size"), SaveAt(tmp_path, [4, 6, 9])
    beginning = data.state_dict()
    whole = fit(data, model=SeveralRecorder(), callbacks=[save])
    for step in (9, 4, 6):
        assert fit(data, model=SeveralRecorder(), ckpt_path=save.path(step)).model.batches == whole.model.batches[step:]
    data.load_state_dict(beginning)
    assert fit(data, model=SeveralRecorder()).model.batches == whole.model.batches


def test_a_state_taken_before_the_first_step_of_another_fit_begins_a_new_epoch(tmp_path: Path) -> None:
    class AtStart(SaveAt):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(self.path(0))

    data = echoed("max_size")
    fit(data, model=SeveralRecorder(), max_epochs=1)
    save = AtStart(tmp_path, [])
    whole = fit(data, model=SeveralRecorder(), max_epochs=1, callbacks=[save])
    resumed = fit(echoed("max_size"), model=SeveralRecorder(), max_epochs=1, ckpt_path=save.path(0))
    assert resumed.model.batches == whole.model.batches


def test_echo_loaders_passed_to_fit_resume_exactly_where_they_are_through_together(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        loaders = {name: EchoLoader(plain_loader("long"), 2.5, seed=seed) for seed, name in enumerate("ab")}
        run = Run(SeveralRecorder(), loaders, fit_trainer(**options))
        run.trainer.fit(run.model, loaders, Several().val_dataloader(), ckpt_path=options.get("ckpt_path"))
        return run

    resume_everywhere(make, tmp_path, (2, 6, 8))


def fit_trainer(**options: Any) -> Any:
    return trainer(**{name: value for name, value in options.items() if name != "ckpt_path"})
