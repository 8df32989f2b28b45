"""Benchmarks of language models, for `evaluation.benchmarks`."""
