"""Learning experiments with a real Trainer, cut short."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from learning.arms import Arm
from learning.digits import DIGITS
from learning.reuse.run import train as train_reuse
from learning.reuse.studies import NO_ECHO, STUDIES, ReuseArm
from learning.run import echoed, train

from lightning_echo import StagedDataset

SHORT = dataclasses.replace(DIGITS, budget_examples=1280, spacing_examples=160, target=101.0)
pytestmark = pytest.mark.usefixtures("one_thread")


class Images:
    """A split whose examples are their indices."""

    train = StagedDataset.of(range(1197), augment=int)
    collate = staticmethod(torch.tensor)


@pytest.mark.parametrize("arm", [Arm(4, "after_batching", buffer="large"), Arm(cached_share=0.25)], ids=lambda arm: arm.name)
def test_every_arm_is_evaluated_at_the_same_spacing_of_fresh_examples(arm: Arm) -> None:
    fresh = [one.fresh for one in train(SHORT, arm, 0.005, 1, ends_at_target=False).evaluations]
    assert len(fresh) == 8
    assert all(160 * (i + 1) <= count < 160 * (i + 1) + 32 for i, count in enumerate(fresh))


def test_runs_repeat() -> None:
    first, second = (train(SHORT, Arm(2, "before_augmentation"), 0.005, 1, ends_at_target=False) for _ in range(2))
    assert first.evaluations == second.evaluations
    other = train(SHORT, Arm(2, "before_augmentation"), 0.005, 2, ends_at_target=False)
    assert other.evaluations != first.evaluations


def test_a_share_of_the_data_is_fixed() -> None:
    """A quarter of 1,197 examples, the same in each pass."""
    loader = echoed(DIGITS, Arm(cached_share=0.25), Images(), 1).train_dataloader()
    assert len(loader) == 299 // 32
    passes = [torch.cat(list(loader)).tolist() for _ in range(30)]
    assert passes[0] != passes[1]
    assert len({index for one in passes for index in one}) == 299


SHORT_STUDY = dataclasses.replace(
    STUDIES["digits"], task=dataclasses.replace(DIGITS, target=101.0, rates=(0.005,)), spacing_steps=20, most_steps=100
)


@pytest.mark.parametrize(
    ("arm", "first", "last"),
    [
        (NO_ECHO, [32] * 3, [32] * 40),
        (ReuseArm("memory", 4, 9), [32, 8, 8], [8] * 40),
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
