"""Several trainings on a machine, one process that reads (CoorDL's coordinated preparation; TensorSocket, arXiv 2409.18749).

::

    reader, a process of its own                         training: batch size, collate function and factor of its own
    order -> chunks -> workers --write--> window --copy out--> plan, live examples -> collate -> thread -> step
                          ^                  |                    |
                          +------ low <------+---- cursors <------+      over a Unix socket: JSON, never data

The files in the order in which they build on each other: what a user asks for (`share_config.py`); where readers are found
(`folder.py`); messages (`wire.py`); an example as bytes (`packing.py`) in memory that all see (`window.py`); whether data is
the same (`same_data.py`); the reader (`reader/`) and how it is started (`starting.py`); the training's side (`taking/`); one
reader for the nodes of a Ray cluster (`cluster/`); all of it for one loader (`loader_sharing.py`); a reader by hand, and what
readers say of themselves (`serving.py`).

In: a loader with ``share=``. Out: the pipeline that it starts in the place of its own workers.

May import: the folders that stand before it in the map. A change must not break:

* Of data that is read by index, the example at item ``n`` of the reader's stream follows from the name, the data and ``n``:
  whoever starts a reader, and however often, it is the same. So a reader that dies loses nothing, as another one goes on at any
  item. Of anything else, that holds for passes and not for items.
* A training takes each item once, in order. With ``behind="wait"`` nothing that it needs is overwritten.
* Window memory never leaves this folder: examples are copied out before a batch is made of them.
* Nothing that comes over the socket is unpickled, and nothing of ours listens on a network: with ``cluster="ray"``, Ray does.

Source: Mohan et al. 2021 (arXiv 2007.06775), section 4.3.
"""
