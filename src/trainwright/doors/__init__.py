"""Other ways in than a file or a subclass. Each is a thin adapter onto the one loop; none has a loop of its own."""
