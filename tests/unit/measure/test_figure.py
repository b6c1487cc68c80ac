"""Figures: their size, their two forms, and what is said without matplotlib."""

import struct
import sys

import pytest

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")

from lightning_echo.measure import page as figures  # noqa: E402


def drawn():
    figure = figures.new_figure(4, 3)
    figure.subplots().plot([1, 2], [3, 4], color=figures.BLUE)
    return figure


def test_colours_are_different():
    colors = {figures.BLUE, figures.GREEN, figures.ORANGE, figures.PINK, figures.SKY, figures.VERMILION}
    assert len(colors) == 6


def test_a_file_has_120_dots_an_inch(tmp_path):
    figures.save(drawn(), tmp_path / "figure.png")
    written = (tmp_path / "figure.png").read_bytes()
    assert written[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", written[16:24]) == (480, 360)


def test_an_svg_is_one_element_the_same_each_time_and_settings_stay_as_they_were():
    names = ("svg.fonttype", "svg.hashsalt")
    before = [matplotlib.rcParams[name] for name in names]
    svg = figures.as_svg(drawn())
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    assert figures.as_svg(drawn()) == svg
    assert [matplotlib.rcParams[name] for name in names] == before


def test_it_is_said_what_needs_matplotlib(monkeypatch):
    figures.check_matplotlib()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"^pictures need matplotlib, .*pip install 'lightning-echo\[report\]'$"):
        figures.check_matplotlib("pictures")
    with pytest.raises(ModuleNotFoundError, match=r"^figures need matplotlib"):
        figures.new_figure(4, 3)
