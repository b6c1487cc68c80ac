"""A partitioned cache: the nodes of a job hold different examples, and hand them to each other (CoorDL, section 4.2).

How it works, in the order of one batch:

1. Every rank makes the same requests in the same order, since a plan knows no data. A request has a number, its *round*. When the
   leader of a node (its first rank) asks its workers for a batch, it knows from the order which examples *all* ranks need for
   that round (``fetching/rounds.py``). ``DataLoader`` asks for some batches ahead: so early the needs are known. To plan further
   ahead would move the batch from which a new factor counts, and with it the batches.
2. The leader gives the needs to a thread (`exchange.py`), which has a Gloo group of the leaders. All threads take turns together.
   A turn begins with a header from each node: how far it has asked, how far its workers have taken, whether its cache is full,
   whether it ends. What all have asked for by then is done in this turn. A node that has nothing to say takes its turn four times
   a second.
3. Each node tells how long the needed records are that it holds: one collective, a number for each need. So all nodes know who
   holds what, and each works out alike who sends what to whom, where it will lie, and who may keep what nobody holds: the first
   node that reads it and whose cache is not full (`partition.py`).
4. The records go by ``all_to_all_single``, a call for each round, straight into the *ring*: shared memory beside the arena
   (`board.py`). If the ring of a node has no room, all wait. A worker frees a round by having taken from it what it needs.
5. A worker that misses an example waits until its round has arrived, looks into the ring, and reads what is not there.

Nothing of it can make a batch wrong: what does not arrive is read. When a node ends, dies or does not answer, the threads of all
nodes end, and all is read from storage. `joining.py` is how the nodes of a job find each other, and what is refused.
"""
