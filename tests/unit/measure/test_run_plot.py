"""The picture of a run: each quantity stands at the place that was worked out by hand, and nothing is clipped."""

import math
from dataclasses import replace

import pytest
from runs import FIRST, RUN, SECOND, SHARED, USES

pytest.importorskip("matplotlib", reason="figures need matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_echo.measure.run_report import draw
from lightning_echo.measure.summary import FactorUse, RunSummary

FACTOR, IDLE, EXAMPLES, HITS, MISSED = "echo factor", "idle", "examples", "cache hits", "missed"


def panel(summary, title):
    return next(axes for axes in draw(summary).axes if axes.get_title(loc="left").startswith(title))


def points(axes, line=0):
    return [tuple(point) for point in axes.lines[line].get_xydata().tolist()]


def labels(axes):
    return [text.get_text() for text in axes.texts]


def long_run(epochs, decisions=()):
    reports = [replace(FIRST, epoch=epoch, fresh_examples=200 * (epoch + 1)) for epoch in range(epochs)]
    return RunSummary(reports, (USES[0], *decisions))


def test_what_was_not_measured_has_no_panel():
    titles = [axes.get_title(loc="left").split(":")[0] for axes in draw(RUN).axes]
    assert titles == ["echo factor", "idle", "examples in the run so far"]
    titles = [axes.get_title(loc="left").split(":")[0] for axes in draw(SHARED).axes]
    assert titles[3:] == ["cache hits", "missed examples in the run so far"]


def test_a_factor_begins_with_its_first_batch():
    # batch 25 is in the middle of epoch 0, batch 60 in a fifth of epoch 1
    assert points(panel(RUN, FACTOR)) == [(0, 1), (0.5, 2), (1.2, 4), (2, 4)]
    assert panel(RUN, FACTOR).lines[0].get_drawstyle() == "steps-post"


def test_epochs_of_different_lengths_are_equally_wide():
    uses = (USES[0], FactorUse(50, 54, 2.0), FactorUse(75, 100, 3.0))  # of 100 batches after the first 50
    summary = replace(RUN, reports=(FIRST, replace(SECOND, steps=100)), decisions=uses)
    assert points(panel(summary, FACTOR)) == [(0, 1), (1 + 4 / 100, 2), (1.5, 3), (2, 3)]


def test_only_a_factor_that_was_decided_on_within_an_epoch_is_marked():
    axes = panel(RUN, FACTOR)
    assert points(axes, 1) == [(0.5, 2)]
    assert labels(axes) == ["batch 25"]


def test_a_factor_that_came_too_late_to_be_trained_with_is_not_drawn():
    late = FactorUse(100, 106, 8.0)
    assert points(panel(replace(RUN, decisions=(*USES, late)), FACTOR))[-1] == (2, 4)
    interrupted = FactorUse(120, 125, 8.0)  # in the middle of a third epoch, which has no report
    assert points(panel(replace(RUN, decisions=(*USES, interrupted)), FACTOR))[-1] == (2.5, 8)


def test_of_labels_that_would_overlap_the_first_is_written_and_each_has_a_mark():
    near = [FactorUse(step, step + 1, 2.0 + step / 100) for step in (10, 12, 14, 99)]
    axes = panel(replace(RUN, decisions=(USES[0], *near)), FACTOR)
    assert len(points(axes, 1)) == 3  # the last one is the batch after the end
    assert labels(axes) == ["batch 11"]


def test_several_loaders_stand_where_the_first_of_them_changes():
    several = FactorUse(20, {"a": 30, "b": 25}, 2.0)
    assert points(panel(replace(RUN, decisions=(USES[0], several)), FACTOR)) == [(0, 1), (0.5, 2), (2, 2)]


@pytest.mark.parametrize(
    "reports",
    [
        (replace(FIRST, steps=0), SECOND),  # not measured
        (replace(FIRST, epoch=3), replace(SECOND, epoch=4)),  # a run that went on without its past
    ],
)
def test_where_batches_cannot_be_placed_the_factor_is_that_of_each_epoch(reports):
    begin = reports[0].epoch
    expected = [(begin, 2), (begin + 1, 2), (begin + 1, 4), (begin + 2, 4)]
    assert points(panel(replace(RUN, reports=reports), FACTOR)) == expected


def test_a_run_that_ended_in_its_first_epoch_has_batches_in_the_place_of_epochs():
    figure = draw(RunSummary((), USES[:2]))
    (axes,) = figure.axes
    assert points(axes) == [(0, 1), (25, 2)]
    assert axes.get_xlabel() == "batches"


def test_shares_are_level_over_their_epoch():
    assert points(panel(RUN, IDLE)) == [(0, 50), (1, 50), (1, 10), (2, 10)]
    assert points(panel(SHARED, HITS)) == [(0, 0), (1, 0), (1, 75), (2, 75)]


def test_an_epoch_without_a_value_and_one_without_a_report_leave_a_gap():
    later = replace(SECOND, epoch=4, idle_fraction=0.25)
    for reports in ((FIRST, later), (FIRST, replace(SECOND, idle_fraction=None), replace(later, epoch=2))):
        found = points(panel(replace(RUN, reports=reports), IDLE))
        begin = reports[-1].epoch
        assert [math.isnan(value) for _, value in found][:2] == [False, False]
        assert math.isnan(found[2][1])  # between them nothing is drawn
        assert found[:2] + found[-2:] == [(0, 50), (1, 50), (begin, 25), (begin + 1, 25)]


def test_examples_rise_to_their_count_at_the_end_of_an_epoch():
    fresh, echoed = panel(RUN, EXAMPLES).collections
    above_fresh = {tuple(point) for point in fresh.get_paths()[0].vertices.tolist()}
    above_echoed = {tuple(point) for point in echoed.get_paths()[0].vertices.tolist()}
    assert {(0, 0), (1, 160), (2, 210)} <= above_fresh
    assert {(1, 160 + 40), (2, 210 + 190)} <= above_echoed
    assert points(panel(SHARED, MISSED)) == [(0, 0), (1, 3), (2, 8)]


def test_a_run_whose_past_is_not_known_does_not_begin_at_nothing():
    later = replace(SHARED, reports=tuple(replace(report, epoch=report.epoch + 5) for report in SHARED.reports))
    assert points(panel(later, MISSED)) == [(6, 3), (7, 8)]


def test_many_epochs_have_thin_lines_and_no_marks():
    within = FactorUse(20, 25, 2.0)
    assert labels(panel(long_run(100, [within]), FACTOR)) == ["batch 25"]
    axes = panel(long_run(1000, [within]), FACTOR)
    assert labels(axes) == []
    assert axes.lines[0].get_linewidth() < panel(RUN, FACTOR).lines[0].get_linewidth()


@pytest.mark.parametrize("summary", [RUN, SHARED, long_run(1), long_run(1000), RunSummary((), USES[:2])])
def test_no_text_is_outside_and_no_two_texts_overlap(summary):
    figure = draw(summary, "A verdict of many words. " * 8)
    FigureCanvasAgg(figure).draw()
    panels = figure.axes
    texts = [axes._left_title for axes in panels] + [text for axes in panels for text in axes.texts]
    texts += [legend for axes in panels if (legend := axes.get_legend()) is not None]
    texts += [panels[-1].xaxis.label, *(label for axes in panels for label in axes.get_yticklabels()), figure.texts[0]]
    width, height = figure.bbox.width, figure.bbox.height
    boxes = [text.get_window_extent() for text in texts]
    for box in boxes:
        assert -1 <= box.x0 <= box.x1 <= width + 1
        assert -1 <= box.y0 <= box.y1 <= height + 1
    overlaps = [(i, j) for i, one in enumerate(boxes) for j, two in enumerate(boxes[:i]) if one.overlaps(two)]
    assert overlaps == []


def test_a_title_makes_the_figure_higher_by_its_lines():
    plain, one, two = (draw(RUN, title).get_figheight() for title in ("", "A verdict.", "word " * 30))
    assert 0 < one - plain == pytest.approx(two - one)
