"""Figures of a report: a white figure, its file, its SVG element for a page.

* matplotlib is an optional package. Its global state (pyplot, the current figure) is not used.
* The colours are those of Okabe and Ito, which colour-blind people can tell apart.
* The background is white, so that the picture can be read on a dark page, too.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BLUE", "GREEN", "ORANGE", "PINK", "SKY", "VERMILION", "as_svg", "check_matplotlib", "new_figure", "save"]

ORANGE, SKY, GREEN, BLUE, VERMILION, PINK = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
_DOTS_PER_INCH = 120


def check_matplotlib(user: str = "figures") -> None:
    """Makes sure that matplotlib is installed.

    Args:
        user: What needs matplotlib, for the message.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"{user} need matplotlib, which is not installed: pip install 'lightning-echo[report]'"
        raise ModuleNotFoundError(message) from error


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure. Its layout keeps the contents from overlapping.

    Args:
        width: Width in inches. A file has 120 dots per inch.
        height: Height in inches.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, facecolor="white")
    figure.set_layout_engine("constrained", h_pad=0.12)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Writes a figure as PNG.

    Raises:
        OSError: The file cannot be written.
    """
    figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)


def as_svg(figure: Figure) -> str:
    """Returns a figure as an SVG element. It refers to nothing outside itself, and is the same in each process."""
    import matplotlib

    written = StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "lightning_echo"}):
        figure.savefig(written, format="svg", metadata=nothing)
    svg = written.getvalue()
    return svg[svg.index("<svg") :].strip()
