"""Nothing of the user's is changed: copies against edits, random states put back, what was drawn from seeded again.

In: an example, a batch or a data set, whatever it is made of. Out: a copy, its size in bytes, where two of them differ, the
generators in it.

May import: ``planning`` (for seeds). A change must not break: what is handed out is never what is kept, and the random states of
the training are those that it would have without echoing.
"""
