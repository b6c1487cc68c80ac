"""What a training takes from the reader, and how it goes on when that dies.

`attachment.py` is its connection. Of data that is read by index, `shared_order.py` says which item comes at which position, and
`shared_pipeline.py` is the pipeline. Of anything else, `shared_stream.py` stands in for the training's data set or loader, and
`rows.py` cuts whole batches for another batch size. `pace.py` measures how long the training is busy with an example.
"""
