"""Which example is used when: arithmetic, without torch and without data.

In: sizes, seed, factor. Out: for batch after batch the positions to read, those to use again, and those to let go; and which
index stands at a position. ``plan.py`` defines the words.

May import: nothing of the package. A change must not break: every fresh example has its uses, exactly; no example is in a batch
twice; the plan is the same on all ranks; and its state is positions alone.
"""
