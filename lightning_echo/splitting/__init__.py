"""Where a data set is cut: into what an echo reuses and what each use redoes, with the proof that this changes nothing.

A data set goes through four steps, which stand in a row in ``splits.py``. Each is a file, and none knows of the next one:

* ``describe(dataset)`` looks at it once: the data sets inside, how they lead to each other, how each may call its transforms,
  and their names. It returns a frozen value that can be printed and sent; it makes no function and calls none of the user's.
* ``cut(description, ...)`` cuts that at an insertion point: for each data set inside, what is reused and what is redone.
* ``make(cut, dataset)`` makes the functions, `Stages`: of a throw-away copy for the proof, and in each worker, where the data set
  is described again (a ``worker_init_fn`` may have changed it) and cut in the way that was proved.
* ``prove(dataset, make, ...)`` compares what the stages return with what the data set returns.

In: a data set and whether raw bytes are to be reused. Out: `Stages` (two functions: load and augment), or a `SplitRefused` with
the reason.

May import: the insertion points, ``planning``, ``protecting``. A change must not break: both stages in a row return what the data
set returns, random numbers included; the user's objects are left as they are; each read is watched, and read whole where it does
not fit.
"""
