"""Anomalies: non-finite values and loss spikes. detection.py finds them, reports.py describes them."""
