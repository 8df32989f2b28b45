"""From rows to batches.

    sources/ → process.py, mix.py, pack.py, split.py → order.py or streams.py
    → loader.py or stream_loader.py, collators/

Data with an index is read by position (order.py, fetch.py, loader.py), a stream row by row (streams.py,
stream_loader.py); workers.py fetches both in worker processes. build/data.py builds what a run file names.
"""
