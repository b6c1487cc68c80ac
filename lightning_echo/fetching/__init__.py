"""From the plan to batches in the main process: one pipeline, started once, that has no epochs.

In: the user's loader (`Source`), the insertion point (`Choice`), and the place at which a run begins (`Launch`). Out: batch after
batch, each with its `Report` (`IndexPipeline`, `StreamPipeline`).

May import: ``insertion.py``, ``planning``, ``protecting``, ``splitting``, ``workers``. A change must not break:

* Requests and answers stay in step.
* If a worker dies, there is an error, and the training does not hang.
* Threads and processes end with the pipeline.
* No call is added on the way of a batch, because the training thread waits for each of them.
"""
