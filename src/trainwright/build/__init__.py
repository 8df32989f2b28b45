"""From a RunConfig to live objects: run.py is the order, components.py, data.py and parallelize.py the parts."""
