"""Clocks, costs and controllers: what to do about a stall, from seconds alone.

In: seconds of steps, waits and stages. Out: a `Decision` with its reason, an idle fraction, text for people.

May import: nothing of the package but the insertion points; torchmetrics in ``metrics`` alone. A change must not break: the same
observations lead to the same decision, on every rank and after a resume.
"""
