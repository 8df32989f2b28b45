"""Tries a run out before it costs anything: every problem at once, each with its line and what to write instead."""
