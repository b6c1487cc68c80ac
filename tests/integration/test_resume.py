"""Exact resume: killed right after a checkpoint, a run goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from trainer_runs import POINTS, Data, Killed, Recorder, Run, SaveAt, Scans, echoed, first_uses, fit, fresh_stream

from lightning_echo import EchoDataModule, EchoLoader, EchoStateError

STEPS = 18  # three epochs of six


def resumed_and_whole(make: Any, tmp_path: Path, step: int, **options: Any) -> tuple[Run, Run]:
    """A run killed after ``step`` and resumed, and the same one uninterrupted. ``make(callbacks, ckpt_path)`` trains."""
    whole = make()
    save = SaveAt(tmp_path, [step], dies=True)
    with pytest.raises(Killed):
        make(callbacks=[save], **options)
    return make(ckpt_path=save.path(step)), whole


def assert_goes_on(resumed: Run, whole: Run, step: int) -> None:
    assert resumed.model.batches == whole.model.batches[step:]
    assert len(resumed.model.batches) > 0
    assert resumed.model.epochs == whole.model.epochs[step:]
    assert resumed.trainer.global_step == whole.trainer.global_step
    assert (resumed.loader.counts.fresh, resumed.loader.counts.echoed) == (
        whole.loader.counts.fresh,
        whole.loader.counts.echoed,
    )
    assert resumed.model.weights == whole.model.weights


@pytest.mark.grid
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("reads_stepping", [False, True])
def test_a_run_resumes_exactly_after_any_step(point: str, reads_stepping: bool, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(point=point), model=Recorder(reads_stepping), **options)

    whole, save = make(), SaveAt(tmp_path, range(1, STEPS))
    saving = make(callbacks=[save])
    assert saving.model.batches == whole.model.batches  # that states are taken changes nothing
    assert len(whole.model.batches) == STEPS
    for step in range(1, STEPS):
        assert_goes_on(make(ckpt_path=save.path(step)), whole, step)


@pytest.mark.parametrize(
    ("point", "step", "limit", "reads_stepping", "bare"),
    [
        ("after_read", 7, 1.0, True, False),
        ("after_read", 8, 5, False, True),
        ("before_augmentation", 8, 1.0, True, False),
        ("before_augmentation", 12, 1.0, False, True),
        ("before_augmentation", 10, 5, False, False),
        ("before_augmentation", 7, 5, False, True),
        ("after_augmentation", 8, 1.0, False, True),
        ("after_augmentation", 12, 1.0, True, False),
        ("after_augmentation", 10, 5, True, False),
        ("after_augmentation", 6, 0.5, False, False),
        ("after_batching", 8, 1.0, True, False),
        ("after_batching", 12, 1.0, False, True),
        ("after_batching", 10, 5, False, False),
        ("after_batching", 7, 0.5, True, False),
    ],
)
def test_a_killed_run_with_workers_resumes_exactly(
    point: str, step: int, limit: float, reads_stepping: bool, bare: bool, tmp_path: Path
) -> None:
    def make(**options: Any) -> Run:
        data: Any = echoed(point=point, workers=2)
        if bare:
            data = EchoLoader(Data(2).train_dataloader(), 2.5, insertion_point=point, seed=7)
        return fit(data, model=Recorder(reads_stepping), limit_train_batches=limit, max_epochs=4, **options)

    assert_goes_on(*resumed_and_whole(make, tmp_path, step), step)


def test_a_bare_loader_that_is_told_the_limit_resumes_at_a_limited_epochs_end(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        loader = EchoLoader(Data(2).train_dataloader(), 2.5, seed=7)
        loader.limit_train_batches = 4
        return fit(loader, limit_train_batches=4, **options)

    assert_goes_on(*resumed_and_whole(make, tmp_path, 8), 8)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("epoch_length", ["fixed", "full_pass"])
def test_a_checkpoint_that_model_checkpoint_wrote_after_validation_resumes_exactly(epoch_length: str, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(workers=2, epoch_length=epoch_length), enable_checkpointing=True, **options)

    def save() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{epoch}")

    whole = make(callbacks=[save()])
    resumed = make(callbacks=[save()], ckpt_path=str(tmp_path / "epoch=0.ckpt"))
    assert_goes_on(resumed, whole, len(whole.model.by_epoch[0]))
    assert resumed.model.validated_at == whole.model.validated_at[1:]


@pytest.mark.parametrize("step", [8, 15])
def test_a_full_pass_run_that_reads_the_stepping_batches_resumes_exactly(step: int, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(workers=2, epoch_length="full_pass"), model=Recorder(reads_stepping=True), **options)

    assert_goes_on(*resumed_and_whole(make, tmp_path, step), step)


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_again_and_again_ends_where_the_uninterrupted_one_does(point: str, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(3, point=point, workers=2), **options)

    whole, path = make(), None
    batches = []
    for step in (2, 3, 9):
        save, model = SaveAt(tmp_path, [step], dies=True), Recorder()
        with pytest.raises(Killed):
            make(callbacks=[save], ckpt_path=path, model=model)
        batches += model.batches
        path = save.path(step)
    last = make(ckpt_path=path)
    assert batches + last.model.batches == whole.model.batches
    assert last.model.weights == whole.model.weights


@pytest.mark.parametrize(("bare", "reads_stepping"), [(False, False), (False, True), (True, False)])
def test_the_same_object_goes_back_to_a_checkpoint(bare: bool, reads_stepping: bool, tmp_path: Path) -> None:
    data: Any = echoed(workers=2)
    if bare:
        data = EchoLoader(Data(2).train_dataloader(), 2.5, insertion_point="after_augmentation", seed=7)
    save = SaveAt(tmp_path, [8, 12])
    whole = fit(data, model=Recorder(reads_stepping), callbacks=[save])
    expected = whole.loader.counts
    for step in (8, 12):
        again = fit(data, model=Recorder(reads_stepping), ckpt_path=save.path(step))
        assert again.model.batches == whole.model.batches[step:]
        assert (again.loader.counts.fresh, again.loader.counts.echoed) == (expected.fresh, expected.echoed)
        assert again.model.weights == whole.model.weights


def test_validation_within_an_epoch_is_repeated_exactly_after_resuming(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(workers=2), val_check_interval=2, **options)

    resumed, whole = resumed_and_whole(make, tmp_path, 9)
    assert_goes_on(resumed, whole, 9)
    assert resumed.model.validated_at == [step for step in whole.model.validated_at if step > 9]


def test_accumulated_gradients_resume_exactly_between_optimizer_steps(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(workers=2), accumulate_grad_batches=2, **options)

    assert_goes_on(*resumed_and_whole(make, tmp_path, 8), 8)


def test_a_state_holds_plain_types_only_and_no_example(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    run = fit(echoed(workers=2), callbacks=[save])
    checkpoint = torch.load(save.path(8), weights_only=True)
    (loader_state,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert loader_state == checkpoint["EchoDataModule"]["loader"]

    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for key, part in value.items() for leaf in (key, *leaves(part))]
        if isinstance(value, list | tuple):
            return [leaf for part in value for leaf in leaves(part)]
        return [value]

    found = leaves(loader_state)
    assert {type(leaf) for leaf in found} <= {str, int, float, bool, type(None)}
    noises = {number for _, drawn in run.model.batches for noise in drawn for number in noise}
    assert not noises & {leaf for leaf in found if isinstance(leaf, float)}


def test_a_state_is_right_before_during_and_after_training_and_taken_twice(tmp_path: Path) -> None:
    data = echoed(workers=2)
    before = data.state_dict()
    run = fit(data, callbacks=[SaveAt(tmp_path, [STEPS])])
    after = data.state_dict()
    assert after == data.state_dict()
    saved = torch.load(tmp_path / f"step-{STEPS}.ckpt", weights_only=True)["EchoDataModule"]
    trainers = [state["loader"].pop("trainer") for state in (saved, after)]
    assert [trainer["is_over"] for trainer in trainers] == [False, True]  # saved within the last step, and after the training
    assert saved == after
    data.load_state_dict(before)
    again = fit(data)
    assert again.model.batches == run.model.batches


def test_the_seed_that_was_drawn_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    save = SaveAt(tmp_path, [8])
    whole = fit(echoed(seed=None, workers=2), callbacks=[save])
    resumed = fit(echoed(seed=None, workers=2), ckpt_path=save.path(8))
    assert_goes_on(resumed, whole, 8)
    assert resumed.loader.seed == whole.loader.seed
    assert fit(echoed(seed=None, workers=2)).loader.seed != whole.loader.seed


class Stateful(Sampler[int]):
    """A sampler whose order depends on how often it was iterated, and which can save that."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Any:
        self.passes += 1
        return iter([(index * 3 + self.passes) % 22 for index in range(22)])

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Forgetful(Stateful):
    state_dict = load_state_dict = None  # type: ignore[assignment]


class TwoSided:
    """A batch sampler of the user's own: what makes up a batch is its decision."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.order = RandomSampler(range(11), generator=self.generator)

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Any:
        return ([index, 21 - index] for index in self.order)


def weighted(generator: bool) -> Any:
    own = torch.Generator().manual_seed(5) if generator else None
    return WeightedRandomSampler([1.0 + (index % 3) for index in range(22)], 22, generator=own)


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: weighted(True),
        lambda: weighted(False),
        lambda: SubsetRandomSampler(range(0, 22, 2), generator=torch.Generator().manual_seed(5)),
        Stateful,
    ],
    ids=["weighted with a generator", "weighted without", "subset", "stateful"],
)
def test_a_users_sampler_that_can_be_set_back_resumes_exactly(sampler: Any, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(1.5, workers=2, loader_options={"sampler": sampler()}), max_epochs=4, **options)

    for step in (4, 9):
        assert_goes_on(*resumed_and_whole(make, tmp_path, step), step)


def test_a_users_batch_sampler_with_a_generator_resumes_exactly(tmp_path: Path) -> None:
    class Paired(Data):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Scans(), batch_sampler=TwoSided(), num_workers=2)

    def make(**options: Any) -> Run:
        return fit(EchoDataModule(Paired(), 2, seed=7), **options)

    resumed, whole = resumed_and_whole(make, tmp_path, 15)
    assert_goes_on(resumed, whole, 15)
    assert all(sum(indices) == 21 for indices, _ in whole.model.batches)


class Drawing:
    """A sized iterable of batches that draws its order and its noise from the global random states as it goes."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        dataset = Scans(24)
        for indices in torch.randperm(24).reshape(6, 4).tolist():
            yield torch.utils.data.default_collate([dataset[index] for index in indices])


@pytest.mark.parametrize("step", [4, 9])
def test_an_iterable_of_batches_that_draws_from_the_global_states_resumes_exactly(step: int, tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(EchoDataModule.from_dataloaders(Drawing(), Data().val_dataloader(), factor=2, seed=7), **options)

    resumed, whole = resumed_and_whole(make, tmp_path, step)
    assert_goes_on(resumed, whole, step)
    assert len({noise for _, noises in whole.model.batches for noise in noises}) == sum(map(len, first_uses(whole.model.batches)))


def test_a_users_sampler_that_cannot_be_set_back_resumes_with_one_warning(tmp_path: Path) -> None:
    def make(**options: Any) -> Run:
        return fit(echoed(1.5, loader_options={"sampler": Forgetful()}), **options)

    save = SaveAt(tmp_path, [8])
    make(callbacks=[save])
    with pytest.warns(UserWarning, match="Forgetful has neither state_dict") as said:
        make(ckpt_path=save.path(8))
    assert len([each for each in said if "Forgetful" in str(each.message)]) == 1


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (2, 1), (1, 3)])
def test_another_number_of_workers_resumes_with_a_warning_and_leaves_nothing_out(before: int, after: int, tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8], dies=True)
    killed = Recorder()
    with pytest.raises(Killed):
        fit(echoed(2, length=66, workers=before, buffer_size=16), model=killed, callbacks=[save])
    with pytest.warns(UserWarning, match=f"saved with workers={before} .now {after}."):
        resumed = fit(echoed(2, length=66, workers=after, buffer_size=16), ckpt_path=save.path(8), max_epochs=3)
    batches = killed.batches + resumed.model.batches
    assert [len(epoch) for epoch in resumed.model.by_epoch][1:] == [17, 17]
    fresh = fresh_stream(batches)
    seen_by_then: set[int] = set()
    needed = next(i for i, index in enumerate(fresh) if len(seen_by_then | {index}) == 66 or seen_by_then.add(index))
    assert needed < 66 + 16  # one pass, and at most what was live is read again


@pytest.mark.parametrize("change", [{"batch_size": 6}, {"buffer_size": 24}])
def test_another_batch_or_buffer_size_resumes_with_a_warning_and_leaves_nothing_out(change: Any, tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [4], dies=True)
    killed = Recorder()
    with pytest.raises(Killed):
        fit(echoed(2, length=60, workers=2), model=killed, callbacks=[save])
    with pytest.warns(UserWarning, match="the run continues at the same place of the pass"):
        resumed = fit(echoed(2, length=60, workers=2, **change), ckpt_path=save.path(4), max_epochs=3)
    seen = {index for indices, _ in killed.batches + resumed.model.batches for index in indices}
    assert seen == set(range(60))


def test_another_insertion_point_resumes_with_a_warning_and_leaves_nothing_out(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8], dies=True)
    killed = Recorder()
    with pytest.raises(Killed):
        fit(echoed(2, length=60, workers=2), model=killed, callbacks=[save])
    with pytest.warns(UserWarning, match="the run continues at the same place of the pass"):
        resumed = fit(echoed(2, length=60, workers=2, point="before_augmentation"), ckpt_path=save.path(8), max_epochs=3)
    seen = {index for indices, _ in killed.batches + resumed.model.batches for index in indices}
    assert seen == set(range(60))


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    fit(echoed(workers=2), callbacks=[save])
    with pytest.raises(EchoStateError, match=r"22 items.*has 23"):
        fit(echoed(workers=2, length=23), ckpt_path=save.path(8))


def test_another_factor_than_the_saved_one_is_said_and_not_used(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8])
    whole = fit(echoed(2.5, workers=2), callbacks=[save])
    with pytest.warns(UserWarning, match="factor=4 is not used"):
        resumed = fit(echoed(4, workers=2), ckpt_path=save.path(8))
    assert_goes_on(resumed, whole, 8)
    assert resumed.data.factor == 2.5


def test_a_checkpoint_of_a_plain_run_starts_echoing_at_the_epoch_it_ended(tmp_path: Path) -> None:
    plain = fit(Data(2), callbacks=[SaveAt(tmp_path, [12])], max_epochs=2)
    resumed = fit(echoed(workers=2), ckpt_path=str(tmp_path / "step-12.ckpt"), max_epochs=3)
    assert plain.trainer.global_step == 12
    assert resumed.model.epochs == [2] * 6
    assert resumed.loader.counts.delivered == 22


def test_a_resumed_run_reads_what_was_live_again_and_says_how_much(tmp_path: Path) -> None:
    save = SaveAt(tmp_path, [8], dies=True)
    with pytest.raises(Killed):
        fit(echoed(4, workers=2), callbacks=[save])
    resumed = fit(echoed(4, workers=2), ckpt_path=save.path(8))
    assert 0 < resumed.loader.counts.refetched <= resumed.loader.buffer_size


class Die(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            raise Killed


def test_a_run_killed_between_epochs_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    whole = fit(echoed(workers=2))
    save = SaveAt(tmp_path, [3, 6])
    with pytest.raises(Killed):
        fit(echoed(workers=2), callbacks=[save, Die()])
    assert_goes_on(fit(echoed(workers=2), ckpt_path=save.path(6)), whole, 6)
    assert_goes_on(fit(echoed(workers=2), ckpt_path=save.path(3)), whole, 3)
