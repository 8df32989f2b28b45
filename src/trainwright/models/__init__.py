"""Architectures, one readable file each. No training code and no parallel code lives here.

A model file names its parameters as Hugging Face's transformers does, so that weights load both ways.
"""
