"""One file per command: its arguments, and one call into the package. Imports torch only when it runs."""
