"""Reads user code: which code is the user's, on which line, and whether its signatures fit. Imports no torch."""
