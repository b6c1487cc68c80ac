"""From the plan to batches in the main process: one pipeline, started once, that knows no epochs.

In: the user's loader, a plan and an order. Out: batch after batch, each with its report (`IndexPipeline`, `StreamPipeline`).

May import: everything above in this list. A change must not break: requests and answers stay in step, a worker that dies is an
error and no hang, and threads and processes end with the pipeline.
"""
