"""`EchoLoader`: epochs, their length, counts, the state, and how a run goes on.

In: the user's loader and options. Out: batches, epoch after epoch; a state of plain types.

May import: everything below it, nothing of Lightning. A change must not break: counts are of batches in use; a run that goes on
from a state delivers what the whole run would have; ``iter()`` by itself does nothing.
"""
