"""Several trainings on a machine share one process that reads (CoorDL's coordinated preparation; TensorSocket, arXiv 2409.18749).

::

    reader, a process of its own                         training: batch size, collate function and factor of its own
    order -> chunks -> workers --write--> window --copy out--> plan, live examples -> collate -> thread -> step
                          ^                  |                    |
                          +------ low <------+---- cursors <------+      over a Unix socket: JSON, never data

The files, in the order in which they build on each other:

* `share_config.py`: what a user asks for
* `folder.py`: where readers are found
* `wire.py`: messages
* `packing.py`: an example as bytes
* `window.py`: the memory for examples, which all processes see
* `same_data.py`: whether two trainings have the same data
* `reader/`: the reader
* `starting.py`: how a reader is started
* `taking/`: the training's side
* `cluster/`: one reader for the nodes of a Ray cluster
* `loader_sharing.py`: all of it for one loader
* `idle_runs.py`: several loaders of one process, one after the other
* `serving.py`: `serve`, and what readers tell about themselves

In: a loader with ``share=``. Out: the pipeline that it starts in place of its own workers.

May import: the folders that stand before it in the map. A change must not break:

* If data is read by index, the example at item ``n`` of the reader's stream follows from the name, the data and ``n``. Every
  reader gives the same example there. So nothing is lost when a reader dies, because another one goes on at any item. For all
  other data, this is true of passes and not of items.
* A training takes each item once, in order. With ``behind="wait"`` nothing that it needs is overwritten.
* Window memory never leaves this folder: examples are copied out before a batch is made from them.
* Nothing that comes over the socket is unpickled. No part of this package listens on a network: with ``cluster="ray"``, Ray does.

Source: Mohan et al. 2021 (arXiv 2007.06775), section 4.3.
"""
