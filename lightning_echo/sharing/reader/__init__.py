"""The reader: the process that reads and prepares for all trainings that share a name.

`process.py` is what it runs. `loader_parts.py` says what it gets of a loader, `reading.py` and `stream_reading.py` what its
workers do with that (`worker_start.py` first), `trainings.py` and `server.py` what it knows of its trainings.
"""
