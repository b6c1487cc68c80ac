"""Examples that are kept for good: what fits into memory is read once (CoorDL's MinIO cache; Mohan et al. 2021, section 4.1).

The files in the order in which they build on each other: what a user asks for (`cache_config.py`, `free_memory.py`); which
example it is (`keys.py`); an example as bytes (`record.py`); where the bytes are (`arena_file.py`, `arena.py`, `kept.py`,
`example_store.py`); the reads of a worker (`cached_reads.py`); what is held (`holding.py`); the cache of a node
(`node_cache.py`), of a loader (`loader_cache.py`) and of a data set (`cached_dataset.py`). In `nodes/`: how the nodes of a job
hold different examples and hand them to each other.

In: the examples that a worker has read. Out: the same examples, for all workers and ranks of a node, without reading.

May import: the folders that stand before it in the map. A change must not break: what is held is never replaced and never
wrong; a process that is killed costs space and nothing else; an edit of what was handed out does not reach the cache.
"""
