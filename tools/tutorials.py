"""Executes the notebooks in docs/tutorials/ and saves their outputs: `make tutorials`.

tests/test_tutorials.py executes them in the same way and compares what they show with what is saved.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import nbclient
import nbformat
from nbformat import NotebookNode

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
SHOWN = ("image/png", "text/html", "text/plain")
"""The kinds of data that are saved of an output: the first one that it has."""


def executed(paths: list[Path], folder: Path) -> Iterator[NotebookNode]:
    """Yields each notebook with new outputs. One kernel executes all, each in its own folder, without earlier names."""
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # with more, a busy machine is many times slower
    client = nbclient.NotebookClient(notebooks[0], timeout=300, record_timing=False, coalesce_streams=True)
    with client.setup_kernel():
        for path, notebook in zip(paths, notebooks, strict=True):
            (folder / path.stem).mkdir()
            prepare(client, folder / path.stem)
            client.nb = notebook
            for number, cell in enumerate(notebook.cells):
                if cell.cell_type == "code":
                    cell.outputs = []
                    client.execute_cell(cell, number)
                    cell.execution_count = None
                    cell.outputs = [without_rest(output) for output in cell.outputs]
            yield notebook


def prepare(client: nbclient.NotebookClient, folder: Path) -> None:
    """Makes the kernel one without names, in a folder, with the same figures on every machine."""
    code = f"""
        %reset -f
        %cd -q {folder}
        %matplotlib inline
        %config InlineBackend.rc = {{"figure.dpi": 90}}
        import warnings
        warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, without ipywidgets
    """
    client.nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(dedent(code).strip())])
    client.execute_cell(client.nb.cells[0], 0)


def without_rest(output: NotebookNode) -> NotebookNode:
    """Returns an output with the kind of data that the site shows, and without its number."""
    if "data" in output:
        kind = next(kind for kind in SHOWN if kind in output.data)
        output.data = {kind: output.data[kind]}
        output.metadata = {}
    if "execution_count" in output:
        output.execution_count = None
    return output


def main() -> None:
    """Saves the outputs of the notebooks that are named, by default all."""
    paths = [TUTORIALS / f"{name}.ipynb" for name in sys.argv[1:]] or sorted(TUTORIALS.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as folder:
        for path, notebook in zip(paths, executed(paths, Path(folder)), strict=True):
            path.write_text(nbformat.writes(notebook, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
