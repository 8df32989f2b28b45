"""Builds the objects of a run from a RunConfig: run.py defines the order; components.py, data.py and parallelize.py
build the parts."""
