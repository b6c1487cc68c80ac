"""The two directions of a record: an example is written (`writing.py`), and made of what was written (`reading.py`).

``record.py``, beside this folder, joins them. What one of them can do the other must be able to undo, to the bit.

`made_from.py` says what decides the content of all records of a cache, so that no record is taken for an example of other data,
and `own_changes.py` what of it is changed by reading alone.
"""
