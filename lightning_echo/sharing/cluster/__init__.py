"""One reader for the nodes of a Ray cluster: it reads on one node, and relays on the other nodes get its examples from an actor.

::

    node that reads                                                     any other node
    workers -> window -> trainings                                      trainings <- window <- relay
                  |                                                                             |
                  +-> actor: a feed for each relay --chunks of packed examples, over Ray--------+

* **The actor** is found by the name that is shared. The first reader that needs it makes it on its own node, and that node then
  reads. The actor belongs to this reader and ends with it. For this reader, each relay is one more training that it waits for.
* **A relay** is an ordinary reader for the trainings of its node. In place of workers it has a thread that asks the actor for
  chunk after chunk. When the window of the relay is full, it asks for nothing, and then the feed makes the reader wait. So an
  example crosses the network once for each node, however many trainings there are.
* **If the node that reads is lost**, or its reader or its actor, the relays end with an error in their logs, since each call has
  a time-out. Their trainings start the next reader, as they do when any reader dies. The first new reader that makes an actor
  reads, and begins at the earliest item that its trainings need. If the trainings of a relay need an item that this reader does
  not have any more, the relay reads for its own node. So nothing is lost, and nothing comes twice.
* **If a relay is lost**, the reader keeps the items that are not yet in the relay's window, for the next relay of that node. If
  no relay comes within half a minute, the actor drops it, so that nothing waits for it.

The network carries numpy arrays of bytes. The process that has asked for an array fetches it at once. No reference is kept, so
none is lost with its owner. Nothing of Ray runs in the workers of a ``DataLoader``.

The files, in the order in which they build on each other:

* `chunk.py`: packed examples as one array
* `handing.py`: what the actor runs
* `relay.py`: the relay
* `ray_cluster.py`: all code that uses Ray, which it imports in its functions
* `process.py`: what a reader's process runs
"""
