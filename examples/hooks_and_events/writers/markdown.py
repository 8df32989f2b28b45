"""MarkdownWriter: every log line as a row of a table. A writer receives events, never the trainer."""

from pathlib import Path

from trainwright import Writer


class MarkdownWriter(Writer):
    def __init__(self, folder):  # the run folder, passed by trainwright
        self.path = Path(folder) / "table.md"

    def write(self, storage):
        row = {name: f"{value:.4g}" for name, value in storage.line.items() if isinstance(value, int | float)}
        with self.path.open("a") as file:
            file.write("| " + " | ".join(f"{name} {value}" for name, value in row.items()) + " |\n")
