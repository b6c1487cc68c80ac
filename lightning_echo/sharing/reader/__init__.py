"""The reader: the process that reads and prepares for all trainings that share a name.

`process.py` is what it runs; `reading.py` what its workers do; `server.py` what it knows of its trainings.
"""
