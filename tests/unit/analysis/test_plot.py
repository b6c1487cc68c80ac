"""The figures: what is drawn is what was worked out by hand, and what is written is what it is said to be."""

import struct
import sys
from dataclasses import replace

import matplotlib
import pytest
from analyses import ANALYSIS, STREAM
from measured_stages import MS

from lightning_echo.analysis.predict import Spread, TrainingSetting
from lightning_echo.analysis.report import _POINT_COLORS, as_svg, draw, save_png
from lightning_echo.analysis.result import CheckedSetting
from lightning_echo.insertion import POINTS


def lines_of(figure):
    """Those of the second axes, by their label: factor and speed-up."""
    return {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in figure.axes[1].lines}


def points_of(figure):
    """Single points of the second axes."""
    return [line.get_xydata().tolist()[0] for line in figure.axes[1].lines if line.get_marker() == "o"]


def bars_of(figure):
    return [(bar.get_x(), bar.get_width()) for bar in figure.axes[0].patches]


def test_each_point_has_a_colour_of_its_own():
    assert list(_POINT_COLORS) == list(POINTS)
    assert len(set(_POINT_COLORS.values())) == len(POINTS)


def test_the_bar_is_made_of_the_parts_of_the_step_time():
    figure = draw(ANALYSIS)
    assert bars_of(figure) == [
        pytest.approx(bar, abs=1e-9) for bar in ((0, 20), (20, 1), (21, 29), (50, 30))
    ]  # ms: step, copy, prep stall, fetch stall
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "step: 20 ms (25%)",
        "copy to the device: 1 ms (1%)",
        "prep stall: 29 ms (36%)",
        "fetch stall: 30 ms (38%)",
    ]
    assert figure.axes[0].get_xlabel() == "step time of the real run (ms)"


def test_what_cannot_be_told_apart_is_one_piece():
    assert bars_of(draw(STREAM)) == [pytest.approx(bar, abs=1e-9) for bar in ((0, 20), (20, 1), (21, 59))]


@pytest.mark.parametrize(
    ("point", "factor", "milliseconds"),  # as in test_predict
    [
        ("after_read", 1, 68),
        ("after_read", 4, 38),
        ("before_augmentation", 4, 26),
        ("after_augmentation", 2, 36),
        ("after_augmentation", 4, 21),  # the step and the copy
        ("after_batching", 2, 34),
        ("after_transfer", 4, 20.25),
        ("after_transfer", 8, 20.125),
    ],
)
def test_each_line_goes_through_what_is_predicted(point, factor, milliseconds):
    assert lines_of(draw(ANALYSIS))[point][factor] == pytest.approx(68 / milliseconds)


def test_there_is_a_line_for_each_possible_point():
    assert [name for name in lines_of(draw(STREAM)) if name.startswith("after")] == ["after_batching", "after_transfer"]
    assert draw(ANALYSIS).axes[1].get_xlim()[1] == pytest.approx(8, abs=0.5)


def test_measured_points_are_relative_to_the_real_run():
    tried = [
        (TrainingSetting(factor=2), 40),
        (TrainingSetting(2, factor=4, insertion_point="before_augmentation"), 32),  # two workers are those there were
        (TrainingSetting(4, factor=4), 25),  # more are not on the line, nor is what follows
        (TrainingSetting(factor=2, cached_fraction=0.5), 25),
        (TrainingSetting(factor=2, step_speedup=2), 25),
        (TrainingSetting(factor=2, storage_speedup=2), 25),
    ]
    checked = tuple(CheckedSetting(setting, Spread.exactly(milliseconds * MS)) for setting, milliseconds in tried)
    found = points_of(draw(replace(ANALYSIS, checked=checked)))
    assert sorted(found) == [pytest.approx(point) for point in ([1, 1], [2, 80 / 40], [4, 80 / 32])]


def test_lines_reach_a_larger_factor_that_was_tried():
    found = draw(replace(ANALYSIS, checked=(CheckedSetting(TrainingSetting(factor=12), Spread.exactly(22 * MS)),)))
    assert max(lines_of(found)["after_batching"]) == pytest.approx(12)


def test_a_png_is_one(tmp_path):
    save_png(ANALYSIS, tmp_path / "figure.png")
    written = (tmp_path / "figure.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", written[16:24]) == (960, 768)  # 8 by 6.4 inches of 120 dots


def test_an_svg_is_one_element_the_same_each_time_and_settings_stay_as_they_were():
    settings = ("svg.fonttype", "svg.hashsalt")
    before = [matplotlib.rcParams[name] for name in settings]
    svg = as_svg(ANALYSIS)
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    assert as_svg(ANALYSIS) == svg
    assert [matplotlib.rcParams[name] for name in settings] == before


def test_without_matplotlib_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for function in (draw, as_svg):
        with pytest.raises(ModuleNotFoundError, match=r"not installed: pip install 'lightning-echo\[report\]'"):
            function(ANALYSIS)
