"""A partitioned cache: the nodes of a job hold different examples, and send them to each other (CoorDL, section 4.2).

How it works, in the order of one batch:

1. Every rank makes the same requests in the same order, since a plan knows no data. A request has a number, its *round*. When the
   leader of a node (its first rank) asks its workers for a batch, it knows from the order which examples *all* ranks need for
   that round (``fetching/rounds.py``). ``DataLoader`` asks for some batches ahead, so the needs are known that early. To plan
   further ahead is not possible: a new factor would then count from a later batch, and the batches would change.
2. The leader gives the needs to a thread (`exchange.py`). The threads of all leaders have a Gloo group, and take turns together.
   A turn begins with a header from each node: how far it has asked, how far its workers have taken, whether its cache is full,
   and whether it ends. A round is done in this turn if all nodes have asked for it. A node without anything to say takes its turn
   four times a second.
3. Each node tells the lengths of the needed records that it holds, in one collective with a number for each need. So all nodes
   know who holds what. From that, all compute the same answers: who sends what to whom, where it will lie, and which node may
   keep an example that no node holds. That is the first node that reads it and whose cache is not full (`partition.py`).
4. The records are sent by ``all_to_all_single``, with one call for each round, directly into the *ring*: shared memory beside the
   arena (`board.py`). If the ring of a node has no room, all nodes wait. A round is free when the workers have taken what they
   need from it.
5. A worker that misses an example waits until its round has arrived, looks into the ring, and reads what is not there.

A failure here cannot make a batch wrong, because what does not arrive is read. When a node ends, dies or does not answer, the
threads of all nodes end, and everything is read from storage. `joining.py` says how the nodes of a job find each other, and what
is refused.
"""
