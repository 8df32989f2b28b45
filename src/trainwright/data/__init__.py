"""From rows to batches.

    sources/ → processing/, mix.py, pack.py, split.py → order.py or lanes.py → loader.py or stream_loader.py, collators/

Data with an index is read by position (order.py, fetch.py, loader.py), a stream row by row (stream.py, lanes.py,
lane_fetcher.py, stream_loader.py); both are served by workers.py. components.py builds what a run file names.
"""
