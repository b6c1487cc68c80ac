"""What runs in worker processes: look an example up or read it, augment it, collate the batch; the same for streams.

In: a request (which positions, from which indices). Out: a batch, and what its examples cost.

May import: ``planning``, ``protecting``, ``splitting``. A change must not break: a miss reads the same again, under the seeds
of the first time; what a worker holds can be lost without the training noticing.
"""
