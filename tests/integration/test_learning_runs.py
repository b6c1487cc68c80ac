"""Learning experiments with a real Trainer, cut short."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from learning.__main__ import main
from learning.arms import Arm, first_arms
from learning.digits import DIGITS
from learning.experiments import run_all, run_reuse
from learning.language_model import LANGUAGE_MODEL
from learning.residual import RESIDUAL
from learning.reuse.rows import ReuseRow
from learning.reuse.run import train as train_reuse
from learning.reuse.studies import NO_ECHO, STUDIES, ReuseArm
from learning.rules import Seeds
from learning.run import Evaluator, Module, echoed, train
from learning.store import Store

from lightning_echo import StagedDataset

SHORT = dataclasses.replace(DIGITS, budget_examples=1280, spacing_examples=160, target=101.0)


pytestmark = pytest.mark.usefixtures("one_thread")


class Images:
    """A split whose examples are their indices."""

    train = StagedDataset.of(range(1197), augment=int)
    collate = staticmethod(torch.tensor)


def fresh_of(arm: Arm, task=SHORT) -> list[int]:
    return [one.fresh for one in train(task, arm, 0.005, 1, ends_at_target=False).evaluations]


@pytest.mark.parametrize(
    "arm",
    [Arm(), *(Arm(4, point) for point in DIGITS.points), Arm(4, "after_batching", buffer="large"), Arm(cached_share=0.25)],
    ids=lambda arm: arm.name,
)
def test_every_arm_is_evaluated_at_the_same_spacing_of_fresh_examples(arm: Arm) -> None:
    fresh = fresh_of(arm)
    assert len(fresh) == 8
    most = (
        32 if arm.point == "after_batching" or arm.factor == 1 else 24
    )  # in one step; the buffer fills with more than its share
    assert all(160 * (i + 1) <= count < 160 * (i + 1) + most for i, count in enumerate(fresh))


def test_at_factor_four_there_are_four_times_as_many_steps() -> None:
    def steps(arm: Arm) -> int:
        return train(SHORT, arm, 0.005, 1, ends_at_target=False).evaluations[-1].steps

    assert steps(Arm()) == 40
    assert steps(Arm(cached_share=0.25)) == 160
    assert 150 <= steps(Arm(4, "before_augmentation")) <= 160  # the examples that are live have uses left


def test_a_run_ends_at_the_target_unless_it_is_to_go_on() -> None:
    task = dataclasses.replace(SHORT, target=0.0)  # there from the first window on
    assert len(train(task, Arm(), 0.005, 1, ends_at_target=True).evaluations) == task.window_evaluations
    assert len(train(task, Arm(), 0.005, 1, ends_at_target=False).evaluations) == 8


def test_runs_repeat() -> None:
    first, second = (train(SHORT, Arm(2, "before_augmentation"), 0.005, 1, ends_at_target=False) for _ in range(2))
    assert first.evaluations == second.evaluations
    other = train(SHORT, Arm(2, "before_augmentation"), 0.005, 2, ends_at_target=False)
    assert other.evaluations != first.evaluations


def test_arms_are_paired_by_their_initial_weights(monkeypatch) -> None:
    seen = []
    begun = Evaluator.on_train_start
    monkeypatch.setattr(
        Evaluator,
        "on_train_start",
        lambda self, trainer, module: (seen.append([p.clone() for p in module.parameters()]), begun(self, trainer, module)),
    )
    task = dataclasses.replace(SHORT, budget_examples=160)
    for arm in (Arm(), Arm(4, "after_batching"), Arm(cached_share=0.5)):
        train(task, arm, 0.005, 1, ends_at_target=False)
    for weights in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], weights, strict=True))


def test_the_rate_is_constant_after_the_warm_up() -> None:
    module = Module(SHORT, 0.4)
    (optimizer,), (schedule,) = module.configure_optimizers()
    rates = []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule["scheduler"].step()
    assert rates[0] == pytest.approx(0.4 / 20)
    assert rates[9] == pytest.approx(0.2)
    assert rates[19:] == pytest.approx([0.4] * 11)


@pytest.mark.parametrize(
    ("arm", "live", "batch_size"),
    [
        (Arm(4, "before_augmentation"), 64, 32),
        (Arm(4, "after_augmentation", buffer="large"), 512, 32),
        (Arm(4, "after_augmentation", buffer="default"), 37 * 32 // 4, 32),  # a quarter of a pass
        (Arm(8, "after_batching", buffer="small"), 1, 32),
        (Arm(8, "before_augmentation", batch_multiple=4), 256, 128),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_an_arm_is_echoed_as_its_name_says(arm: Arm, live: int, batch_size: int) -> None:
    loader = echoed(DIGITS, arm, DIGITS.make_split(1), 1).train_dataloader()
    assert (loader.factor, loader.insertion_point.value, loader.buffer_size) == (arm.factor, arm.point, live)
    assert loader.reuse == "each"
    images, _ = next(iter(loader))
    loader.close()
    assert len(images) == batch_size


def test_the_program_goes_through_and_says_what_is_missing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(
        "sys.argv", ["learning", "--quick", "--tables-only", "--tasks", "detection", "--out", str(tmp_path / "new")]
    )
    main()
    assert "Not run yet." in (tmp_path / "new" / "evidence.md").read_text()
    assert "say nothing about echoing" in capsys.readouterr().out


def test_the_seed_decides_the_order() -> None:
    def order(seed: int) -> list[int]:
        return torch.cat(list(echoed(DIGITS, Arm(2, "before_augmentation"), Images(), seed).train_dataloader())).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_share_of_the_data_is_fixed() -> None:
    """A quarter of 1,197 examples, the same in each pass."""
    loader = echoed(DIGITS, Arm(cached_share=0.25), Images(), 1).train_dataloader()
    assert len(loader) == 299 // 32
    passes = [torch.cat(list(loader)).tolist() for _ in range(30)]
    assert passes[0] != passes[1]
    assert len({index for one in passes for index in one}) == 299


@pytest.mark.slow
@pytest.mark.parametrize("task", [LANGUAGE_MODEL, RESIDUAL], ids=lambda task: task.name)
def test_the_other_tasks_learn(task) -> None:
    """Forty steps: the metric is better than after two."""
    short = dataclasses.replace(task, budget_examples=20 * task.batch_size, spacing_examples=task.batch_size, target=math.nan)
    values = [one.value for one in train(short, Arm(2, "after_batching"), task.rates[0], 1, ends_at_target=False).evaluations]
    assert len(values) == 20
    assert values[-1] > values[0] if task.is_higher_better else values[-1] < values[0] < 8.5


@pytest.mark.slow
def test_experiments_go_on_where_they_stopped(tmp_path) -> None:
    task = dataclasses.replace(SHORT, budget_examples=320, rates=(0.005,), full=False)
    seeds = Seeds((101,), (1,))
    store = Store(tmp_path, task.name)
    run_all(task, seeds, store, 2, "cpu")
    arms = first_arms(task)
    assert sorted((row.arm, row.seed) for row in store.rows) == sorted((arm.name, seed) for arm in arms for seed in (101, 1))
    path = tmp_path / f"{task.name}.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))  # two rows are lost
    again = Store(tmp_path, task.name)
    run_all(task, seeds, again, 1, "cpu")
    assert len(again.rows) == len(store.rows)
    assert {(row.arm, row.seed, row.values) for row in again.rows} == {(row.arm, row.seed, row.values) for row in store.rows}


SHORT_STUDY = dataclasses.replace(
    STUDIES["digits"], task=dataclasses.replace(DIGITS, target=101.0, rates=(0.005,)), spacing_steps=20, most_steps=100
)


@pytest.mark.parametrize(
    ("arm", "first", "last"),
    [
        (NO_ECHO, [32] * 3, [32] * 40),
        (ReuseArm("memory", 4, 9), [32, 8, 8], [8] * 40),
        (ReuseArm("memory", 32, None), [32, 1, 1], [1] * 40),
        (ReuseArm("each", 4, 9), [32] * 3, [8] * 40),  # the buffer fills first
        (ReuseArm("falling", 4, 9), [32, 31, 30], None),  # 32 / 1.03 = 31.1, 32 / 1.06 = 30.2
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_an_arm_of_the_study_of_reuse_says_what_was_fresh_in_each_batch(arm: ReuseArm, first: list[int], last) -> None:
    run = train_reuse(SHORT_STUDY, arm, 0.005, 1)
    assert [one.steps for one in run.evaluations] == [20, 40, 60, 80, 100]
    assert len(run.fresh) == 100
    assert run.fresh[:3] == first
    assert last is None or run.fresh[-40:] == last
    assert [one.fresh for one in run.evaluations] == [sum(run.fresh[: one.steps]) for one in run.evaluations]


def test_a_run_of_the_study_of_reuse_ends_at_the_target_and_repeats() -> None:
    study = dataclasses.replace(SHORT_STUDY, task=dataclasses.replace(SHORT_STUDY.task, target=0.0))
    first, second = (train_reuse(study, ReuseArm("memory", 4, 9), 0.005, 1) for _ in range(2))
    assert len(first.evaluations) == study.task.window_evaluations
    assert (first.evaluations, first.fresh) == (second.evaluations, second.fresh)


@pytest.mark.slow
def test_the_study_of_reuse_goes_on_where_it_stopped(tmp_path) -> None:
    study = dataclasses.replace(SHORT_STUDY, most_steps=20, factors=(4,), rounds=((("memory", 9),),))
    memory, seeds = ReuseArm("memory", 4, 9), Seeds((201,), (301,))
    done = ReuseRow("digits", NO_ECHO.name, 0.005, 201, math.inf, math.inf, 20, 50.0, 1.0, "32*20", "50")
    Store(tmp_path, "digits_reuse", ReuseRow).add(done)
    run_reuse([study], seeds, {"digits": Store(tmp_path, "digits_reuse", ReuseRow)}, 1, "cpu")
    rows = Store(tmp_path, "digits_reuse", ReuseRow).rows
    assert rows[0] == done
    assert [(row.arm, row.seed) for row in rows[1:]] == [(NO_ECHO.name, 301), (memory.name, 201), (memory.name, 301)]
    run = train_reuse(study, memory, 0.005, 301)
    assert rows[-1].fresh_counts == run.fresh
    assert rows[-1].values == " ".join(f"{one.value:.4g}" for one in run.evaluations)


def test_the_program_of_the_study_of_reuse_writes_its_tables(tmp_path, monkeypatch, capsys) -> None:
    options = ["--study", "reuse", "--quick", "--tables-only", "--out", str(tmp_path / "new")]
    monkeypatch.setattr("sys.argv", ["learning", *options])
    main()
    assert "not run yet" in (tmp_path / "new" / "reuse.md").read_text()
    assert "say nothing about echoing" in capsys.readouterr().out


@pytest.mark.parametrize(("study", "task"), [("reuse", "residual"), ("findings", "glyphs")])
def test_the_program_names_the_tasks_of_a_study(study: str, task: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["learning", "--study", study, "--tasks", task])
    with pytest.raises(SystemExit, match=f"--study {study} has the tasks .+; got {task}"):
        main()
