"""Tables of the study of reuse, from rows that were written down, not run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from learning.reuse import plots
from learning.reuse.due import ReuseProgress
from learning.reuse.report import again_table, cell_table, decision_table, reuse_table, write_reuse_report
from learning.reuse.rules import AGAIN_SEEDS, DECIDING_BATCHES, FULL_SEEDS, Seeds
from learning.reuse.runs import ReuseRuns
from learning.reuse.studies import NO_ECHO, ReuseArm
from reuse_cases import row, study, tuned

DECIDING = [ReuseArm(rule, factor, DECIDING_BATCHES) for rule in ("each", "memory", "falling") for factor in (4, 8, 16)]
UNBOUNDED = [ReuseArm("memory", factor, None) for factor in (4, 8, 16, 32)]


def runs_of(steps: dict[ReuseArm, float], task: str = "small", seeds: Seeds = FULL_SEEDS, **changes) -> ReuseRuns:
    """The runs of a task whose arms need so many steps, a hundredth more from seed to seed."""
    rows = []
    for arm, count in steps.items():
        rows += tuned(arm, seeds.tuning, count, task=task)
        rows += [
            row(arm, seed, math.inf if math.isinf(count) else round(count * (1 + place / 100)), task=task)
            for place, seed in enumerate(seeds.report)
        ]
    return ReuseRuns(ReuseProgress(study(task, **changes), seeds, rows))


def all_steps(memory: float, falling: float, unbounded: dict[int, float]) -> dict[ReuseArm, float]:
    """Of ``each`` 500 steps at all factors, of training without echoing 400."""
    steps = {"each": 500, "memory": memory, "falling": falling}
    return {
        NO_ECHO: 400,
        **{arm: steps[arm.reuse] for arm in DECIDING},
        **{arm: unbounded[arm.factor] for arm in UNBOUNDED},
    }


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def line_of(table: str, *begin: str) -> list[str]:
    (found,) = [line for line in table.splitlines() if cells_of(line)[: len(begin)] == list(begin)]
    return cells_of(found)


GOOD = {4: 400, 8: 400, 16: 480, 32: 600}


def again_of(memory: float, each: float, task: str = "one") -> ReuseRuns:
    """What rule 9 asks again: so many steps at both factors."""
    arms = {ReuseArm(rule, factor, DECIDING_BATCHES) for rule in ("memory", "each") for factor in (4, 8)}
    return runs_of({arm: memory if arm.reuse == "memory" else each for arm in arms} | {NO_ECHO: 400}, task, AGAIN_SEEDS)


FIRST, AGAIN = "rule of reuse, with e up to 16", "rule of reuse, as a training has it by default"


class TestDecisions:
    def test_follow_from_all_tasks(self) -> None:
        runs = [runs_of(all_steps(400, 400, GOOD), task) for task in ("one", "other")]
        table = decision_table(runs, [again_of(400, 500, task) for task in ("one", "other")])
        assert line_of(table, FIRST)[1] == "memory"
        assert line_of(table, AGAIN)[1] == "**memory**"
        assert line_of(table, "falling share")[1] == "goes"
        # 480 of 400 steps are within 1.25, 600 are not
        assert line_of(table, "max_factor, of memory")[1].startswith("**16**")
        # (8 + 399) steps behind R = 8 against 8 * 400
        said = line_of(table, "expected of the headline, of memory")[1]
        assert said.startswith("reached: time / no echo at R = e = 8, replayed: 0.13")

    def test_one_task_that_is_level_keeps_the_rule_of_the_paper(self) -> None:
        runs = [runs_of(all_steps(400, 500, GOOD), "one"), runs_of(all_steps(500, 500, GOOD), "other")]
        table = decision_table(runs, [again_of(400, 500, "one"), again_of(500, 500, "other")])
        assert line_of(table, FIRST)[1] == "each"
        assert line_of(table, AGAIN)[1] == "**each**"
        assert line_of(table, "max_factor, of each")[1] == "not run yet"  # of its 256 batches, nothing is there

    def test_what_is_asked_again_decides(self) -> None:
        runs = [runs_of(all_steps(500, 500, GOOD), task) for task in ("one", "other")]
        table = decision_table(runs, [again_of(400, 500, task) for task in ("one", "other")])
        assert line_of(table, FIRST)[1] == "each"
        assert line_of(table, AGAIN)[1] == "**memory**"
        assert line_of(table, "max_factor, of memory")[1].startswith("**16**")

    def test_the_falling_share_wins_where_it_beats_the_winner(self) -> None:
        table = decision_table([runs_of(all_steps(400, 300, GOOD), task) for task in ("one", "other")], [])
        assert line_of(table, FIRST)[1] == "falling"
        assert line_of(table, "falling share")[1] == "stays"

    def test_wait_for_all_runs_of_both_tasks(self) -> None:
        some = all_steps(400, 400, GOOD)
        del some[ReuseArm("each", 16, DECIDING_BATCHES)]
        runs = [runs_of(all_steps(400, 400, GOOD), "one"), runs_of(some, "other")]
        table = decision_table(runs, [again_of(400, 500), runs_of({}, "other", AGAIN_SEEDS)])
        assert line_of(table, "rule of reuse")[1] == "not run yet"
        assert line_of(table, AGAIN)[1] == "not run yet"
        assert line_of(table, "max_factor, of memory")[1].startswith("**16**")

    def test_a_task_of_many_passes_has_no_say(self) -> None:
        aside = runs_of(all_steps(900, 900, GOOD), "aside", decides=False)
        table = decision_table([runs_of(all_steps(400, 400, GOOD), "one"), aside], [])
        assert line_of(table, FIRST)[1] == "memory"

    def test_say_nothing_before_the_first_run(self) -> None:
        table = decision_table([runs_of({})], [runs_of({}, seeds=AGAIN_SEEDS)])
        assert {cells_of(line)[1] for line in table.splitlines()[2:]} == {"not run yet"}
        assert len(cell_table([runs_of({})]).splitlines()) == 2
        assert len(again_table([runs_of({}, seeds=AGAIN_SEEDS)]).splitlines()) == 2


def test_what_is_asked_again_has_at_most_a_factor_of_8() -> None:
    line = line_of(again_table([again_of(400, 500)]), "one", "64 batches", "memory / each")
    # at R = 16 with e = 8 each step takes two, but the first, which takes 16
    for cell, ratio, step in zip(line[3:], (4, 8, 16), (1, 1, 2), strict=True):
        expected = (ratio + step * 412) / (ratio + step * 516)
        assert float(cell.split()[0]) == pytest.approx(expected, abs=0.006)
        assert cell.endswith("confirmed")


def test_cells_are_ratios_of_times_at_equal_memory() -> None:
    line = line_of(cell_table([runs_of(all_steps(400, 500, GOOD))]), "small", "64 batches", "memory / each")
    # time at R = e is R + steps - 1, as nothing but the first batch is waited for
    for cell, ratio in zip(line[3:], (4, 8, 16), strict=True):
        expected = (ratio + 413 - 1) / (ratio + 517 - 1)  # of the seeds in the middle; the ratio hardly differs among them
        assert float(cell.split()[0]) == pytest.approx(expected, abs=0.006)
        assert cell.endswith("confirmed")


def test_an_arm_has_a_line_with_its_figures() -> None:
    runs = runs_of({NO_ECHO: 400, ReuseArm("memory", 8, 16): 800, ReuseArm("each", 8, 16): math.inf})
    table = reuse_table(runs)
    assert table.startswith("Image classification, a CNN on Python.\n")
    assert line_of(table, "no echo")[5:] == ["1"] * 4
    line = line_of(table, "memory, e=8, 16 batches")
    assert line[1:3] == ["0.2", "8 of 8"]
    assert line[5] == "2.00 [2.00, 2.00]"
    # behind R = 4 a step takes longer than reading an eighth of a batch: 800 + 3 of 4 * 400
    assert line[6].startswith("0.50")
    assert line_of(table, "each, e=8, 16 batches")[2] == "0 of 8"
    assert line_of(table, "each, e=8, 16 batches")[5] == "never [never, never]"


def test_a_cache_stands_beside_the_arms_of_a_task_of_many_passes() -> None:
    # 37 batches in a pass, as of the digits; of 370 steps, nine passes have hits where the first one has none
    runs = runs_of({NO_ECHO: 370}, decides=False, cached_batches=(0, 37))
    table = reuse_table(runs)
    assert line_of(table, "no echo, cache of 0 batches")[6:] == ["1.00 [1.00, 1.00]"] * 3
    whole = line_of(table, "no echo, cache of 37 batches")
    for cell, ratio in zip(whole[6:], (4, 8, 16), strict=True):
        # the first pass takes R steps a batch, each later batch one
        low, high = ((ratio * 37 + steps - 37) / (ratio * steps) for steps in (396, 370))
        assert low - 0.006 <= float(cell.split()[0]) <= high + 0.006


class TestPage:
    def test_is_made_with_its_plot_and_written_anew(self, tmp_path: Path) -> None:
        runs = [runs_of(all_steps(400, 400, GOOD), task) for task in ("one", "other")]
        page = tmp_path / "new" / "reuse.md"
        write_reuse_report([runs_of({})], [], page, is_quick=False)
        write_reuse_report(runs, [], page, is_quick=False)
        text = page.read_text()
        assert text.count("memory, e=8, unbounded") == 2
        assert (page.parent / "reuse.png").stat().st_size > 10_000

    def test_has_no_plot_before_the_first_run(self, tmp_path: Path) -> None:
        write_reuse_report([runs_of({})], [], tmp_path / "reuse.md", is_quick=True)
        assert [path.name for path in tmp_path.iterdir()] == ["reuse.md"]


def test_the_plot_has_a_line_for_each_rule_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = []
    save = plots.plt.Figure.savefig

    def kept(self, *given, **options):
        drawn.append(self)
        save(self, *given, **options)

    monkeypatch.setattr(plots.plt.Figure, "savefig", kept)
    plots.save_reuse_plot([runs_of({**all_steps(400, math.inf, GOOD)})], tmp_path / "plot.png")
    (axis,) = drawn[0].axes
    handles, labels = axis.get_legend_handles_labels()
    assert set(labels) == {"each, 64 batches", "memory, 64 batches", "memory, unbounded"}  # what never arrived is not drawn
    (data,) = [one for one, label in zip(handles, labels, strict=True) if label == "memory, unbounded"]
    assert data.lines[0].get_ydata().tolist() == pytest.approx([1, 1, 1.2, 1.5], abs=0.01)
