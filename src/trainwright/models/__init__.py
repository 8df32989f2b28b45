"""Architectures, one readable file each. They contain no training code and no parallel code.

Parameters have the names of Hugging Face's transformers, so weights can be loaded in both directions.
"""
