"""From the plan to batches in the main process: one pipeline, started once, that knows no epochs.

In: the user's loader (`Source`), the insertion point (`Choice`), and where a run goes on (`Launch`). Out: batch after batch, each
with its `Report` (`IndexPipeline`, `StreamPipeline`).

May import: ``insertion.py``, ``planning``, ``protecting``, ``splitting``, ``workers``. A change must not break:

* Requests and answers stay in step.
* A worker that dies is an error, and not a hang.
* Threads and processes end with the pipeline.
* Nothing is added to the way of a batch: the training thread waits for each call of it.
"""
