"""What a training takes from the reader, and how it goes on when the reader dies.

* `attachment.py`: the training's connection to the reader
* `connecting.py`: how it finds or starts a reader
* `shared_order.py`, `shared_pipeline.py`: for data that is read by index, which item comes at which position, and the pipeline
* `shared_stream.py`: for all other data, a stream or loader of the reader's items in place of the training's own
* `rows.py`: cuts whole batches for another batch size
* `pace.py`: measures how long the training is busy with an example
"""
