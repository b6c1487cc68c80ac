"""Examples that are kept for good: what fits into memory is read once (CoorDL's MinIO cache; Mohan et al. 2021, section 4.1).

Being built: until the workers ask the cache, the rest of the package uses `free_memory.py` alone.

In: the examples that a worker has read. Out: the same examples, for all workers and ranks of a node, without reading.

May import: the folders that stand before it in the map. A change must not break: what is held is never replaced and never
wrong; a process that is killed costs space and nothing else; an edit of what was handed out does not reach the cache.
"""
