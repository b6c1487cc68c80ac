"""How figures and findings are said: the same words in a training's summary and in a stall analysis."""

from __future__ import annotations

__all__ = ["busy", "fewer_fresh", "many", "no_workers", "of_last", "percent", "short"]


def busy(idle_fraction: float, only: bool = False, last: int = 0) -> str:
    """How much of the time the accelerator works; ``last``: which is that of so many steps.

    >>> busy(0.25), busy(0.25, only=True, last=100)
    ('the accelerator is busy 75 % of the time', 'the accelerator is busy only 75 % of the time (last 100 steps)')
    """
    return f"the accelerator is busy {'only ' if only else ''}{percent(1 - idle_fraction)} of the time{of_last(last)}"


def fewer_fresh(factor: float) -> str:
    """What an echo factor costs.

    >>> fewer_fresh(4)
    'each step then has 25 % as many fresh examples'
    """
    return f"each step then has {percent(1 / factor)} as many fresh examples"


def no_workers(workers: int, idle_fraction: float, last: int = 0) -> str:
    """What to do before anything else where there are none; ``last`` as in `busy`.

    >>> no_workers(2, 0.5)
    'Set num_workers to 2 or more first, since with 0 loading and training take turns: the accelerator is busy 50 % of the time.'
    """
    why = f"since with 0 loading and training take turns: {busy(idle_fraction, last=last)}"
    return f"Set num_workers to {workers} or more first, {why}."


def many(number: float, one: str, several: str) -> str:
    """A number of things.

    >>> many(1, "pass", "passes"), many(1200, "step", "steps")
    ('1 pass', '1,200 steps')
    """
    said = short(number)
    return f"{said} {one if said == '1' else several}"


def of_last(steps: int) -> str:
    """What the figures before it are of; nothing where it is not known.

    >>> of_last(100), of_last(0)
    (' (last 100 steps)', '')
    """
    return f" (last {many(steps, 'step', 'steps')})" if steps else ""


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.126)
    '13 %'
    """
    return f"{100 * share:.0f} %"


def short(number: float) -> str:
    """Three digits, or all of an integer part.

    >>> short(0.01234), short(12.345), short(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
