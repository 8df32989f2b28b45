"""Analyzes user code: which code is the user's, its lines, and its signatures. Imports no torch."""
