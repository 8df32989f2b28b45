"""Views of runs: the live page of `trainwright watch`, the report of a run, and the list of runs.

listing.py finds runs and their state, series.py reads metrics.json, run_reader.py everything else in a run folder;
server.py answers the page in page/, report.py writes report.html. They only read. Does not import torch.
"""
