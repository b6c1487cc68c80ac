"""Exact resume: killed right after a checkpoint, a run resumes as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_runs import POINTS, Data, Killed, Recorder, Run, SaveAt, assert_resumes, echoed, first_uses, fit

from lightning_echo import EchoLoader, EchoStateError

pytestmark = pytest.mark.usefixtures("read_here")
STEPS = 18  # three epochs of six


@pytest.mark.grid
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("reads_stepping", [False, True])
def test_a_run_resumes_exactly_after_any_step(point: str, reads_stepping: bool, tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        return fit(echoed(point=point), model=Recorder(reads_stepping), callbacks=list(callbacks), max_epochs=2, **options)

    assert_resumes(make, tmp_path, (5, 7) if point == "after_transfer" else (5,))


@pytest.mark.parametrize(
    ("point", "step", "bare", "options"),
    [
        ("after_read", 7, True, {"limit_train_batches": 5}),
        ("before_augmentation", 7, False, {"val_check_interval": 2}),
        ("after_augmentation", 8, True, {"accumulate_grad_batches": 2}),
        ("after_augmentation", 4, False, {"limit_train_batches": 0.5}),
        ("after_batching", 8, False, {"epoch_length": "full_pass"}),
    ],
    ids=str,
)
def test_a_run_with_workers_resumes_exactly(point: str, step: int, bare: bool, options: Any, tmp_path: Path) -> None:
    of_fit = {name: value for name, value in options.items() if name != "epoch_length"}

    def make(*callbacks: Any, **others: Any) -> Run:
        data: Any = echoed(point=point, workers=1, epoch_length=options.get("epoch_length", "fixed"))
        if bare:
            data = EchoLoader(Data(1).train_dataloader(), 2.5, insertion_point=point, seed=7)
        given = {**of_fit, **others, "max_epochs": 2}
        return fit(data, model=Recorder(reads_stepping=not bare), callbacks=list(callbacks), **given)

    assert_resumes(make, tmp_path, [step])


def test_a_bare_loader_that_is_told_the_limit_resumes_at_a_limited_epochs_end(tmp_path: Path) -> None:
    def make(*callbacks: Any, **options: Any) -> Run:
        loader = EchoLoader(Data().train_dataloader(), 2.5, seed=7)
        loader.limit_train_batches = 4
        return fit(loader, limit_train_batches=4, callbacks=list(callbacks), **options)

    assert_resumes(make, tmp_path, [8])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_checkpoint_that_model_checkpoint_wrote_after_validation_resumes_exactly(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        save = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{epoch}")
        data = echoed(epoch_length="full_pass")
        return fit(data, enable_checkpointing=True, callbacks=[save], max_epochs=2, **options)

    whole = make()
    resumed = make(ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    step = len(whole.model.by_epoch[0])
    assert resumed.model.batches == whole.model.batches[step:]
    assert resumed.model.validated_at == whole.model.validated_at[1:]
    assert resumed.model.weights == whole.model.weights


def test_a_run_killed_again_and_again_ends_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(3, point="before_augmentation", workers=1), max_epochs=2, **options)

    whole, path, batches = make(), None, []
    for step in (2, 9):
        save, model = SaveAt(tmp_path, [step], dies=True), Recorder()
        with pytest.raises(Killed):
            make(callbacks=[save], ckpt_path=path, model=model)
        batches += model.batches
        path = save.path(step)
    last = make(ckpt_path=path)
    assert batches + last.model.batches == whole.model.batches
    assert last.model.weights == whole.model.weights


@pytest.mark.parametrize(("bare", "reads_stepping"), [(False, True), (True, False)])
def test_the_same_object_goes_back_to_a_checkpoint(bare: bool, reads_stepping: bool, tmp_path: Path) -> None:
    data: Any = echoed(workers=1)
    if bare:
        data = EchoLoader(Data(1).train_dataloader(), 2.5, insertion_point="after_augmentation", seed=7)
    save = SaveAt(tmp_path, [8])
    whole = fit(data, model=Recorder(reads_stepping), callbacks=[save], max_epochs=2)
    expected = whole.loader.counts
    again = fit(data, model=Recorder(reads_stepping), ckpt_path=save.path(8), max_epochs=2)
    assert again.model.batches == whole.model.batches[8:]
    assert (again.loader.counts.fresh, again.loader.counts.echoed) == (expected.fresh, expected.echoed)
    assert again.model.weights == whole.model.weights


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in (key, *leaves(part))]
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_a_state_is_right_before_during_and_after_training_and_holds_plain_types_and_no_example(tmp_path: Path) -> None:
    data = echoed(workers=1)
    before = data.state_dict()
    run = fit(data, callbacks=[SaveAt(tmp_path, [STEPS])])
    after = data.state_dict()
    assert after == data.state_dict()
    checkpoint = torch.load(tmp_path / f"step-{STEPS}.ckpt", weights_only=True)
    saved = checkpoint["EchoDataModule"]
    assert checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [saved["loader"]]
    found = leaves(saved["loader"])
    assert {type(leaf) for leaf in found} <= {str, int, float, bool, type(None)}
    noises = {number for _, drawn in run.model.batches for noise in drawn for number in noise}
    assert not noises & {leaf for leaf in found if isinstance(leaf, float)}
    trainers = [state["loader"].pop("trainer") for state in (saved, after)]
    assert [trainer["is_over"] for trainer in trainers] == [False, True]  # saved within the last step, and after the training
    assert saved == after
    data.load_state_dict(before)
    assert fit(data).model.batches == run.model.batches


def test_the_seed_that_was_drawn_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

    def make(*callbacks: Any, **options: Any) -> Run:
        return fit(echoed(seed=None), callbacks=list(callbacks), **{"max_epochs": 2, **options})

    whole = assert_resumes(make, tmp_path, [8])
    assert make(max_epochs=1).loader.seed != whole.loader.seed


@pytest.mark.parametrize(
    ("after", "message"),
    [
        ({"workers": 0}, "saved with workers=1 .now 0."),
        ({"batch_size": 6}, "the run continues at the same place of the pass"),
        ({"point": "before_augmentation", "buffer_size": 24}, "the run continues at the same place of the pass"),
    ],
    ids=str,
)
def test_other_options_than_the_saved_ones_resume_with_a_warning_and_leave_nothing_out(
    after: Any, message: str, tmp_path: Path
) -> None:
    options = {"length": 66, "buffer_size": 16, "workers": 1}
    save, killed = SaveAt(tmp_path, [8], dies=True), Recorder()
    with pytest.raises(Killed):
        fit(echoed(2, **options), model=killed, callbacks=[save])
    with pytest.warns(UserWarning, match=message):
        resumed = fit(echoed(2, **{**options, **after}), ckpt_path=save.path(8))
    came = [index for indices, _ in killed.batches + resumed.model.batches for index in indices]
    assert set(came) == set(range(66))
    if "workers" in after:
        fresh = [index for new in first_uses(killed.batches + resumed.model.batches) for index in new]
        needed = next(i for i in range(len(fresh)) if len(set(fresh[: i + 1])) == 66)
        assert needed < 66 + 16  # one pass, and at most what was live is read again
        assert resumed.model.steps[1:] == [17, 17]


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [4])
    fit(echoed(), callbacks=[save], max_epochs=1)
    with pytest.raises(EchoStateError, match=r"22 items.*has 23"):
        fit(echoed(length=23), ckpt_path=save.path(4))


def test_another_factor_than_the_saved_one_is_said_and_not_used_and_what_was_live_is_read_again(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    whole = fit(echoed(2.5, workers=1), callbacks=[save], max_epochs=2)
    with pytest.warns(UserWarning, match="factor=4 is not used"):
        resumed = fit(echoed(4, workers=1), ckpt_path=save.path(8), max_epochs=2)
    assert resumed.model.batches == whole.model.batches[8:]
    assert resumed.data.factor == 2.5
    assert 0 < resumed.loader.counts.refetched <= resumed.loader.buffer_size
