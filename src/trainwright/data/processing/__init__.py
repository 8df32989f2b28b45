"""Rows that go through a user's function: once, into files that runs share (process.py), or as they are streamed."""
