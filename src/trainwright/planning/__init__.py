"""What a run would need on any number of ranks, found out without them: layouts, collectives, memory, disk."""
