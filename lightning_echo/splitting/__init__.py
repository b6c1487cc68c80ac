"""Where a data set is cut: into what an echo reuses and what each use redoes, with the proof that this changes nothing.

In: a data set and whether raw bytes are to be reused. Out: `Stages` (two functions: load and augment), or a `SplitRefused` with
the reason.

May import: the insertion points, ``planning``, ``protecting``. A change must not break: both stages in a row return what the data
set returns, random numbers included; the user's objects are left as they are; each read is watched, and read whole where it does
not fit.
"""
