"""Analyzes a run before it trains: check, explain, data, shard and estimate."""
