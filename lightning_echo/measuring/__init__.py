"""Clocks, costs and controllers: they decide from seconds alone what to do about a stall.

* In: the seconds of steps, of waits and of the pipeline's stages.
* Out: a `Decision` with its reason, an idle fraction, text for people.
* May import: of this package only the insertion points; torchmetrics in ``metrics`` only.
* A change must not break: the same observations lead to the same decision, on every rank and after a resume.
"""
