"""Starting several processes. Imports no torch."""
