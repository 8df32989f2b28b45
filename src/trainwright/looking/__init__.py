"""Looks at the data of a run before it trains: what the sets are, samples, a batch, lengths, a mixture, remarks.

look.py reads and gathers it as facts.py, page.py writes it for a person. Nothing is trained, and the run's folder
is not touched.
"""
