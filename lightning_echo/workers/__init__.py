"""What runs in worker processes: look up or read an example, augment it, collate the batch; the same for streams.

In: a request (which positions, from which indices). Out: a batch, and what its examples cost.

May import: ``planning``, ``protecting``, ``splitting``, ``caching``. A change must not break:

* An example that is read again is the same as before, since it is read under the same seeds.
* If a worker loses the examples that it holds, the training gets the same batches.
"""
