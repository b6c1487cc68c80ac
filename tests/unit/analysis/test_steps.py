"""The number of steps of a phase: what the user asks for is kept or refused, the default follows the loader."""

from __future__ import annotations

import pytest

from lightning_echo.analysis.phases import StepNumber


@pytest.mark.parametrize(("asked", "batches", "steps"), [(None, 100, 100), (None, 2000, 100), (20, 20, 20), (200, 800, 200)])
def test_where_the_loader_is_long_enough_nothing_is_said(asked: int | None, batches: int, steps: int) -> None:
    said: list[str] = []
    assert StepNumber(asked, said.append).within(batches) == steps
    assert said == []


@pytest.mark.parametrize("batches", [4, 99])
def test_the_default_is_what_a_short_loader_has_and_that_is_said(batches: int) -> None:
    said: list[str] = []
    assert StepNumber(None, said.append).within(batches) == batches
    assert said == [f"{batches} steps in each phase: the training loader has no more batches"]


def test_a_number_that_the_user_gives_and_that_is_too_large_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"steps must be at most 8, the batches of the training loader, got 9: give fewer steps"):
        StepNumber(9, str).within(8)


def test_a_loader_that_is_too_short_for_any_number_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"must have at least 4 batches for an analysis, got 3: make batches smaller"):
        StepNumber(None, str).within(3)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps must be >= 4, got 3"):
        StepNumber(3, str)
