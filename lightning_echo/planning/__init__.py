"""Which example is used when: arithmetic, without torch and without data.

* In: sizes, seed, factor.
* Out: for each batch, the positions to read, those to use again, and those to let go. And the index at each position.
* May import: nothing of the package.

``plan.py`` defines the words. A change must not break:

* Once the buffer has been filled, the share of fresh examples is exactly the one that the factor asks for.
* No position is in a batch twice.
* The plan is the same on all ranks.
* The state of the plan holds positions, and no indices.
"""
