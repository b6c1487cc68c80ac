"""The words for figures and findings, and the line to paste: the same in a training's summary and in a stall analysis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["busy", "callback_line", "fewer_fresh", "no_workers", "number_of", "over_last", "percent", "three_digits"]


def busy(idle_fraction: float, only: bool = False, last: int = 0) -> str:
    """Returns the share of the time in which the accelerator works; ``last`` is the number of steps that it was measured over.

    >>> busy(0.25), busy(0.25, only=True, last=100)
    ('the accelerator is busy 75 % of the time', 'the accelerator is busy only 75 % of the time (last 100 steps)')
    """
    return f"the accelerator is busy {'only ' if only else ''}{percent(1 - idle_fraction)} of the time{over_last(last)}"


def callback_line(options: Mapping[str, Any]) -> str:
    """Returns the `EchoCallback` with these options, as a line of Python to paste.

    >>> print(callback_line({"factor": 2.0, "cache": "8GiB"}))
    EchoCallback(factor=2, cache="8GiB")
    >>> print(callback_line({"cache": {"size": "8GiB", "path": "/it's"}}))
    EchoCallback(cache={'size': '8GiB', 'path': "/it's"})
    """
    values = {name: f"{value:g}" if isinstance(value, float) else repr(value) for name, value in options.items()}
    line = f"EchoCallback({', '.join(f'{name}={value}' for name, value in values.items())})"
    return line if '"' in line else line.replace("'", '"')


def fewer_fresh(factor: float) -> str:
    """Returns what an echo factor costs.

    >>> fewer_fresh(4)
    'each step then has 25 % as many fresh examples'
    """
    return f"each step then has {percent(1 / factor)} as many fresh examples"


def no_workers(workers: int, idle_fraction: float, last: int = 0) -> str:
    """Returns the advice for a training without workers; ``last`` as in `busy`.

    >>> no_workers(2, 0.5)
    'Set num_workers to 2 or more first, since with 0 loading and training take turns: the accelerator is busy 50 % of the time.'
    """
    why = f"since with 0 loading and training take turns: {busy(idle_fraction, last=last)}"
    return f"Set num_workers to {workers} or more first, {why}."


def number_of(number: float, one: str, several: str) -> str:
    """Returns a number with its noun, in the singular or in the plural.

    >>> number_of(1, "pass", "passes"), number_of(1200, "step", "steps")
    ('1 pass', '1,200 steps')
    """
    digits = three_digits(number)
    return f"{digits} {one if digits == '1' else several}"


def over_last(steps: int) -> str:
    """Returns the words for the steps that a figure was measured over. They are empty if the number of steps is not known.

    >>> over_last(100), over_last(0)
    (' (last 100 steps)', '')
    """
    return f" (last {number_of(steps, 'step', 'steps')})" if steps else ""


def percent(share: float) -> str:
    """Returns a share in percent.

    >>> percent(0.126)
    '13 %'
    """
    return f"{100 * share:.0f} %"


def three_digits(number: float) -> str:
    """Returns a number with three digits, or with all digits of its integer part.

    >>> three_digits(0.01234), three_digits(12.345), three_digits(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
