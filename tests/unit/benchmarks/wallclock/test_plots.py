"""The pictures of the timed runs."""

from types import SimpleNamespace

from matplotlib.figure import Figure
from wallclock.plot_times import _COLORS, _draw


def test_a_line_goes_from_the_least_ratio_to_the_largest_in_whatever_order_they_were_measured():
    cases = [
        SimpleNamespace(stage=SimpleNamespace(ratio=ratio), seconds=lambda arm, ratio=ratio: [10.0 * ratio])
        for ratio in (4, 16, 8)
    ]
    axes = Figure().subplots()
    _draw(axes, cases)
    lines = [container.lines[0] for container in axes.containers]
    assert len(lines) == len(_COLORS)
    assert [list(line.get_ydata()) for line in lines] == [[40.0, 80.0, 160.0]] * len(lines)
