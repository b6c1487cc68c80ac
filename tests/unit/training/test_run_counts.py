"""Counts of a run over all ranks, through reloads and resumes."""

from __future__ import annotations

from lightning_echo.training.counts import Examples, RunCounts


def test_a_loader_made_anew_counts_on_from_what_it_says() -> None:
    counts = RunCounts()
    counts.update(Examples(8, 8))
    counts.counted = Examples(0, 0)
    counts.update(Examples(2, 3))
    assert counts.add_up() == (10, 11)


def test_a_resumed_run_goes_on_from_the_jobs_totals() -> None:
    before = RunCounts()
    before.update(Examples(8, 8))
    before.add_up()
    before.update(Examples(10, 9))
    state = before.state(world_size=3)
    assert state == [8 + 3 * 2, 8 + 3 * 1]
    after = RunCounts()
    after.load(state)
    after.go_on_from(Examples(10, 9))  # the loader's own state says what it had delivered
    after.update(Examples(11, 11))
    assert after.state(world_size=3) == [14 + 3 * 1, 11 + 3 * 2]
    assert after.add_up() == (15, 13)
