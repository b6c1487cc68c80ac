"""One reader for the nodes of a Ray cluster: it reads on one node, and relays on the others have its examples from an actor.

::

    node that reads                                                     any other node
    workers -> window -> trainings                                      trainings <- window <- relay
                  |                                                                             |
                  +-> actor: a feed for each relay --chunks of packed examples, over Ray--------+

* **The actor** is found by the name that is shared. The first reader that needs it makes it, on its own node: then that node
  reads. It belongs to this reader and ends with it. To the reader each relay is one more training that it waits for.
* **A relay** is a reader like any other to the trainings of its node. In the place of workers it has a thread that asks the
  actor for chunk after chunk. A full window asks for nothing, and the feed then holds the reader back. So an example crosses the
  network once for each node, however many trainings there are.
* **A node that is lost**, its reader or its actor: the relays end with an error in their logs, since each call has a time-out.
  Their trainings start the next reader, as they do when any reader dies. The first one to make a new actor reads, and begins at
  the earliest item that anybody needs. A relay whose trainings need an item that the new reader has not any more reads for its
  own node: nothing is lost, and nothing comes twice.
* **A relay that is lost**: the reader keeps what is not in the relay's window yet for the next relay of that node. If none comes
  within half a minute, the actor lets it go, so that nobody waits for it.

What crosses the network is numpy arrays of bytes, each fetched at once by the process that has asked for it. No reference is
kept, so none is lost with its owner. Nothing of Ray runs in the workers of a ``DataLoader``.

The files in the order in which they build on each other: packed examples as one array (`chunk.py`); what the actor runs
(`handing.py`); the relay (`relay.py`); all that imports Ray (`ray_cluster.py`); what a reader's process runs (`process.py`).
Only `ray_cluster.py` knows Ray, and imports it in its functions.
"""
