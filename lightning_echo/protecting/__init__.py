"""Nothing of the user's is changed: copies against edits, random states put back, random numbers drawn again from the same seeds.

In: an example, a batch or a data set, whatever it is made of. Out: a copy of it, its size in bytes, where two of them differ, the
random generators in it.

May import: ``planning`` (for seeds), ``log``. A change must not break:

* If the training edits a batch, no echo changes.
* The training's random states are the same as without echoing.
"""
