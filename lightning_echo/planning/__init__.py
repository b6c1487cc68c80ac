"""Which example is used when: arithmetic, without torch and without data.

In: sizes, seed, factor. Out: for batch after batch the positions to read, those to use again, and those to let go; and which
index stands at a position. ``plan.py`` defines the words.

May import: nothing of the package. A change must not break: the share of fresh examples is exactly the one that the factor
asks for, once the buffer has been filled; no position is in a batch twice; the plan is the same on all ranks; and its state is
positions alone.
"""
