"""Built-in datasets, which a config file selects by name.

Other modules of data/ define order, batching and collation. Constructors do not access the disk.
"""
