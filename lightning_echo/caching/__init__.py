"""Examples that are kept for good: what fits into memory is read once (CoorDL's MinIO cache; Mohan et al. 2021, section 4.1).

The files, in the order in which they build on each other:

* `cache_config.py`, `free_memory.py`: what a user asks for
* `keys.py`: which example it is
* `records/`, `record.py`: an example as bytes, to the bit
* `arena_file.py`, `arena.py`, `kept.py`, `example_store.py`: where the bytes are
* `cached_reads.py`: the reads of a worker
* `holding.py`: what is held of an example
* `node_cache.py`, `loader_cache.py`, `cached_dataset.py`: the cache of a node, of a loader, of a data set
* `nodes/`: how the nodes of a job hold different examples and send them to each other

In: the examples that a worker has read. Out: the same examples, for all workers and ranks of a node, without reading.

May import: the folders that stand before it in the map. A change must not break:

* What is held is never replaced and never wrong.
* A process that is killed costs space and nothing else.
* If a returned example is edited, the cache does not change.
"""
