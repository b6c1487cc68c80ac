"""Which example is used when: arithmetic, without torch and without data.

In: sizes, seed, factor. Out: for batch after batch the stream positions to read anew, those to use again, those to keep or
forget, and which index stands at a position.

May import: nothing of the package. A change must not break: every fresh example has its uses, exactly; no example twice in a
batch; the plan is the same on all ranks, and its state is positions alone.
"""
