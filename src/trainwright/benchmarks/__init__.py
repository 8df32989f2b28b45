"""Benchmarks of language models: what `evaluation.benchmarks` can name."""
