"""The reader: the process that reads and prepares for all trainings that share a name.

* `process.py`: what the process runs
* `loader_parts.py`: the parts of a loader that the reader gets
* `by_value.py`: how classes and functions of a script come to it and to its workers
* `worker_start.py`: what its workers run first
* `reading.py`, `stream_reading.py`: what its workers do then
* `trainings.py`, `agreeing.py`: where its trainings stand, and what the ranks of a training agree on
* `server.py`: the connections to its trainings
"""
