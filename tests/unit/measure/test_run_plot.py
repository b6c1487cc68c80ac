"""The picture of a run: each quantity stands at the place that was worked out by hand, and nothing is clipped."""

from dataclasses import replace

import pytest
from saved_runs import FIRST, RUN, SECOND, SHARED, USES

pytest.importorskip("matplotlib", reason="figures need matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg

from lightning_echo.measure.report import draw
from lightning_echo.measure.summary import FactorUse, RunSummary

FACTOR, IDLE, EXAMPLES, HITS, MISSED = "echo factor", "idle", "examples", "cache hits", "missed"


def panel(summary, title):
    return next(axes for axes in draw(summary).axes if axes.get_title(loc="left").startswith(title))


def points(summary, title, line=0):
    return [tuple(point) for point in panel(summary, title).lines[line].get_xydata().tolist()]


def labels(axes):
    return [text.get_text() for text in axes.texts]


def long_run(epochs, *decisions):
    reports = [replace(FIRST, epoch=epoch, fresh_examples=200 * (epoch + 1)) for epoch in range(epochs)]
    return RunSummary(reports, (USES[0], *decisions))


def decided(*uses):
    return replace(RUN, decisions=uses)


BY_EPOCH = [(0, 2), (1, 2), (1, 4), (2, 4)]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        # Batch 25 is in the middle of epoch 0, batch 60 in a fifth of epoch 1.
        pytest.param(RUN, [(0, 1), (0.5, 2), (1.2, 4), (2, 4)], id="begins with its first batch"),
        pytest.param(
            replace(
                decided(USES[0], FactorUse(50, 54, 2.0), FactorUse(75, 100, 3.0)), reports=(FIRST, replace(SECOND, steps=100))
            ),
            [(0, 1), (1 + 4 / 100, 2), (1.5, 3), (2, 3)],  # of 100 batches after the first 50
            id="epochs of other lengths are equally wide",
        ),
        pytest.param(
            decided(*USES, FactorUse(120, 125, 8.0)),
            [(0, 1), (0.5, 2), (1.2, 4), (2.5, 8), (2.5, 8)],  # its line ends where it begins: no report says how long it is
            id="in an epoch without a report",
        ),
        pytest.param(decided(USES[0], FactorUse(20, {"a": 30, "b": 25}, 2.0)), [(0, 1), (0.5, 2), (2, 2)], id="several loaders"),
        pytest.param(replace(RUN, reports=(replace(FIRST, steps=0), SECOND)), BY_EPOCH, id="an epoch that was not measured"),
        pytest.param(
            replace(RUN, reports=(replace(FIRST, epoch=3), replace(SECOND, epoch=4))),
            [(epoch + 3, factor) for epoch, factor in BY_EPOCH],
            id="a run that went on without its past",
        ),
        pytest.param(RunSummary((), USES[:2]), [(0, 1), (25, 2)], id="batches where no epoch has ended"),
    ],
)
def test_a_factor_is_drawn_from_where_it_counts(summary, expected):
    assert points(summary, FACTOR) == expected


def test_a_factor_that_was_decided_on_within_an_epoch_is_marked_where_there_is_room():
    axes = panel(RUN, FACTOR)
    assert (points(RUN, FACTOR, 1), labels(axes), axes.lines[0].get_drawstyle()) == ([(0.5, 2)], ["batch 25"], "steps-post")
    near = decided(USES[0], *[FactorUse(step, step + 1, 2.0 + step / 100) for step in (10, 12, 14, 99)])
    assert len(points(near, FACTOR, 1)) == 3  # the last one is the batch after the end
    assert labels(panel(near, FACTOR)) == ["batch 11"]
    many = panel(long_run(1000, FactorUse(20, 25, 2.0)), FACTOR)
    assert labels(many) == []
    assert many.lines[0].get_linewidth() < axes.lines[0].get_linewidth()
    assert draw(RunSummary((), USES[:2])).axes[0].get_xlabel() == "batches"


def test_each_quantity_that_was_measured_has_a_panel_with_its_values():
    titles = [axes.get_title(loc="left").split(":")[0] for axes in draw(SHARED).axes]
    first = ["the time of the steps", "echo factor", "idle", "examples in the run so far"]
    assert titles == [*first, "cache hits", "missed examples in the run so far"]
    assert len(draw(RUN).axes) == len(first)
    assert points(RUN, IDLE) == [(0, 50), (1, 50), (1, 10), (2, 10)]
    assert points(SHARED, HITS) == [(0, 0), (1, 0), (1, 75), (2, 75)]
    fresh, echoed = panel(RUN, EXAMPLES).collections
    assert {(0, 0), (1, 160), (2, 210)} <= {tuple(point) for point in fresh.get_paths()[0].vertices.tolist()}
    assert {(1, 160 + 40), (2, 210 + 190)} <= {tuple(point) for point in echoed.get_paths()[0].vertices.tolist()}
    assert points(SHARED, MISSED) == [(0, 0), (1, 3), (2, 8)]
    later = replace(SHARED, reports=tuple(replace(report, epoch=report.epoch + 5) for report in SHARED.reports))
    assert points(later, MISSED) == [(6, 3), (7, 8)], "a run whose past is not known does not begin at nothing"
    values = {"reads_in_flight": 7.5, "shared_trainings": 3, "cache_received_fraction": 0.25, "peer_wait_fraction": 0.5}
    more = replace(RUN, reports=(FIRST, replace(SECOND, **values)))
    assert [title.split(":")[0] for title in (axes.get_title(loc="left") for axes in draw(more).axes)][len(first) :] == [
        "reads in flight",
        "of another node",
        "shared by",
        "peer wait",
    ]
    for title, value in (("reads", 7.5), ("shared by", 3), ("of another node", 25), ("peer wait", 50)):
        assert points(more, title)[2:] == [(1, value), (2, value)], "and a gap before"


@pytest.mark.parametrize("summary", [SHARED, long_run(1000)])
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
