"""How a data set is cut into the part that an echo reuses and the part that runs for each use, and the proof that this is right.

A data set goes through four steps, in this order. `splits.py` runs them. Each step is a file that does not use the next one:

* ``describe(dataset)`` looks at the data set once: the data sets inside it, how it passes indices on to them, the conventions
  that each may follow, and the names of their transforms. It returns a value that can be printed and sent.
* ``cut(description, raw=...)`` cuts that value at an insertion point: what is reused and what is redone of each data set inside.
* ``make(cut, dataset)`` makes the functions, `Stages`: once for a temporary copy, for the proof, and once in each worker. In the
  worker the data set is described again, because a ``worker_init_fn`` may have changed it, and cut in the way that was proved.
* ``prove(dataset, make, ...)`` compares what the stages return with what the data set returns.

While training runs, `fallback.py` watches each read. An example that does not fit the split is read whole for each use.

>>> from functools import partial
>>> import torch
>>> from lightning_echo.splitting.cut import cut
>>> from lightning_echo.splitting.describe import describe
>>> from lightning_echo.splitting.make import make
>>> from lightning_echo.splitting.prove import prove, read_plainly
>>> class Ones(torch.utils.data.Dataset):
...     transform = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout())
...     def __getitem__(self, index):
...         return self.transform(torch.ones(3)), index
>>> description = describe(Ones())
>>> print(description)
0: Ones reads (transform: Identity | Dropout; transform(image) and target_transform(target); transform(*sample); ...)
>>> where = cut(description, raw=False)
>>> print(where)
Ones: reuse [load, Identity], redo [Dropout]
>>> stages = make(where, Ones())
>>> stages.load(7)
(tensor([1., 1., 1.]), 7)
>>> min(prove(Ones(), partial(make, where), read_plainly(Ones(), [0, 7]))) > 0  # bytes of an example; SplitRefused if it is wrong
True

In: a data set, and whether raw items are to be reused. Out: `Stages` (two functions, load and augment), or a `SplitRefused` with
the reason.

May import: the insertion points, ``planning``, ``protecting``. A change must not break:

* Both stages in a row return what the data set returns, random numbers included.
* The user's objects stay as they are.
* Each read is watched, and an example that does not fit is read whole.
"""
