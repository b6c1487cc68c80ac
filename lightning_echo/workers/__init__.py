"""What runs in worker processes: look an example up or read it, augment it, collate the batch; the same for streams.

In: a request (which positions, from which indices). Out: a batch, and what its examples cost.

May import: ``planning``, ``protecting``, ``splitting``. A change must not break: an example that is read again is the same one,
under the seeds of the first time; and if a worker loses what it holds, the training does not notice.
"""
