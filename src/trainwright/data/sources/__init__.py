"""Where samples come from: datasets that are ready to use by their name in a config file.

Their order, batching and collation are decided elsewhere in data/. Constructors touch no disk.
"""
