"""Clocks, costs and controllers: they decide from seconds alone what to do about a stall.

* In: the seconds of steps, of waits and of the pipeline's stages.
* Out: a `Decision` with its reason, an idle fraction, text for people.
* May import: of this package only the insertion points; torchmetrics in ``metrics`` only.
* A change must not break: the same observations lead to the same decision, on every rank and after a resume.

| file | idea |
| --- | --- |
| ``timing`` | the clock of the steps |
| ``metrics`` | torchmetrics that join the ranks' steps and counts |
| ``cost`` | the cost model |
| ``control`` | what a controller gets, and what it returns |
| ``target_idle`` | `TargetIdle`, the controller of ``factor="auto"`` |
| ``recent``, ``trials`` | its two parts: short epochs judged together; raises that brought too little |
| ``guard``, ``schedule`` | the other controllers |
| ``report``, ``summary``, ``words`` | an epoch as a value; the text at the end of a training; its words |
"""
