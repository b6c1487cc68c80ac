"""`EchoLoader`: epochs, their length, counts, the state, and how a run goes on.

In: the user's loader and options. Out: batches, epoch after epoch, and a state of plain types for the checkpoint.

May import: the folders that stand before it in the map, and nothing of Lightning. A change must not break:

* Counts and state belong to the batch that is in use, even if a later one has been fetched already.
* A run that goes on from a state delivers the batches that the uninterrupted run would have delivered.
* A call of ``iter()`` changes nothing. A call of ``next()`` does.
"""
