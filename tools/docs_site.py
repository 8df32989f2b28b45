"""Writes the sources of the documentation site: `python tools/docs_site.py FOLDER`; `make docs` then builds it.

The pages of docs/ are written for GitHub. The site differs from it:

- The home page is README.md.
- Links to files outside of docs/ lead to the repository, and links to notebooks lead to their pages.
- Lists and tables follow an empty line.
- A notebook is a page that has the outputs which are saved in it.
- Built-in components have pages with their docstrings, one for each kind.

The folder has Markdown, pictures and styles only, so that any generator can build the site.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trainwright.registry.catalogue import Entry, read_catalogue

ROOT = Path(__file__).parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Repository"]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", flags=re.DOTALL | re.MULTILINE)
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", flags=re.DOTALL | re.MULTILINE)
KINDS = {
    "trainer": ("Trainers", "`trainer.type`"),
    "model": ("Models", "`model.type`"),
    "optimizer": ("Optimizers", "`trainer.optimizer`"),
    "schedule": ("Schedules", "`trainer.schedule`"),
    "loss": ("Losses", "`trainer.loss`"),
    "dataset": ("Datasets", "`data.train` and the sets of `data.eval`"),
    "collator": ("Collators", "`data.collator`"),
    "sampler": ("Samplers", "`data.sampler`"),
    "transform": ("Transforms", "the `transform` of a dataset"),
    "tokenizer": ("Tokenizers", "the `tokenizer` of a dataset or a collator"),
    "metric": ("Metrics", "`evaluation.metrics`"),
    "benchmark": ("Benchmarks", "`evaluation.benchmarks`"),
    "reward": ("Rewards", "`trainer.rewards` of the trainer `grpo`"),
    "hook": ("Hooks", "`hooks`"),
    "writer": ("Writers", "`writers`"),
    "task": ("Tasks", "`task`"),
}
"""The kinds of components, each with the title of its page and the settings that name such a component."""


def write_sources(folder: Path) -> None:
    """Writes all pages of the site, and what they show, to an empty folder."""
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.md", "*.py", "*.ipynb", "__pycache__"))
    pages = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")}
    pages |= {"README.md": (ROOT / "README.md").read_text("utf-8")}
    for path in (ROOT / "docs").rglob("*.ipynb"):
        pages[path.relative_to(ROOT).as_posix()] = notebook_page(json.loads(path.read_text("utf-8")))
    for source, text in pages.items():
        target = folder / page_of(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        linked = outside_fences(text, partial(rewrite_links, source=source))
        target.write_text(separate_blocks(linked), "utf-8")
    (folder / "components").mkdir()
    for name, text in component_pages().items():
        (folder / "components" / name).write_text(text, "utf-8")


def page_of(source: str) -> str:
    """Returns the page of the site, relative to its root, that shows a file of the repository."""
    return re.sub(r"README\.md$", "index.md", re.sub(r"\.ipynb$", ".md", source.removeprefix("docs/")))


def rewrite_links(markdown: str, source: str) -> str:
    """Returns text of the file `source` with the links of the site."""

    def rewritten(link: re.Match[str]) -> str:
        target, anchor = link[1], link[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        is_page = path == "README.md" or (path.startswith("docs/") and not path.endswith(".py"))
        if is_page and not (ROOT / path).is_dir():  # a file that is missing is found by the generator
            return posixpath.relpath(page_of(path), posixpath.dirname(page_of(source)) or ".") + anchor
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{path}{anchor}"

    return LINK.sub(rewritten, markdown)


def separate_blocks(markdown: str) -> str:
    """Returns the text with an empty line before each list and table and after each block of code, as on GitHub."""
    start = r"(?:[-*] |1\. |\|)"
    after_paragraph = re.compile(rf"^((?!{start}|[ #>]|\d+\. ).+\n)(?={start})", flags=re.MULTILINE)
    return outside_fences(FENCE.sub(r"\g<0>\n", markdown), lambda part: after_paragraph.sub(r"\1\n", part))


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Returns the text with `change` applied to all but blocks of code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def notebook_page(notebook: dict[str, Any]) -> str:
    """Returns a notebook as Markdown, with the outputs that are saved in it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            parts.append(f"```python\n{source}\n```")
            parts += [output_text(output) for output in cell["outputs"]]
        else:
            parts.append(source)
    return "\n\n".join(parts) + "\n"


def output_text(output: dict[str, Any]) -> str:
    """Returns one output of a cell as Markdown: a picture, HTML or text."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items() if kind != "application/json"}
    if "image/png" in data:
        encoded = "".join(data["image/png"].split())
        return f'<img class="output" alt="The output of the cell" src="data:image/png;base64,{encoded}">'
    if "text/html" in data:
        lines = [line.strip() for line in data["text/html"].splitlines()]
        return '<div class="output">\n' + "\n".join(filter(None, lines)) + "\n</div>"
    if output["output_type"] == "error":
        text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(output["traceback"]))
    else:
        text = "".join(output.get("text", "")) or data["text/plain"]
    return f"```{{.text .output}}\n{text.rstrip()}\n```"


def component_pages() -> dict[str, str]:
    """Returns the pages of the built-in components, one for each kind, by file name."""
    pages = {}
    entries = [entry for entry in read_catalogue(ROOT / "docs").entries if not entry.distribution]
    for kind, (title, settings) in KINDS.items():
        sections = [f"# {title}", f"What {settings} can name."]
        sections += [component_section(entry) for entry in entries if entry.kind == kind]
        pages[f"{kind}.md"] = "\n\n".join(sections) + "\n"
    return pages


def component_section(entry: Entry) -> str:
    """Returns what the page of a kind says about a component: its docstring and its arguments."""
    parts = [f"## `{entry.type}`", fenced_examples(entry.doc)]
    if entry.signature.parameters:
        rows = ["| argument | default | type |", "|---|---|---|"]
        for parameter in entry.signature.parameters:
            default = "*required*" if parameter.default is None else f"`{parameter.default}`"
            annotation = f"`{parameter.annotation}`" if parameter.annotation else ""
            rows.append(f"| `{parameter.name}` | {default} | {annotation} |")
        parts.append("\n".join(rows))
    elif entry.signature.open_to:
        parts.append(f"Its arguments are those of `{entry.signature.open_to}`.")
    return "\n\n".join(parts)


def fenced_examples(docstring: str) -> str:
    """Returns a docstring as Markdown: the paragraphs that begin with `>>>` are blocks of code."""
    return EXAMPLE.sub(r"```pycon\n\g<0>\n```", docstring)


def loaded_from_elsewhere(page: str) -> list[str]:
    """Returns the addresses on other hosts from which a page of HTML loads something when it is viewed."""
    tags = re.findall(r"<(?:script|img|iframe|source|video|link)\b[^>]*>", page)
    is_loaded = re.compile(r"^<(?!link)|\brel=\"?(?:stylesheet|preconnect|preload|icon|shortcut)")
    found = [re.search(r"\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)", tag) for tag in tags if is_loaded.search(tag)]
    return [address[1] for address in found if address]


def missing_in(page: Path, site: Path) -> list[str]:
    """Returns the files that a page of HTML links to or shows, and that the site does not have."""
    targets = re.findall(r"\b(?:src|href)=\"?([^\s\"#?>]+)", page.read_text("utf-8"))
    local = [unquote(target) for target in targets if not re.match(r"[a-z]+:|//", target)]
    paths = {target: site / target[1:] if target.startswith("/") else page.parent / target for target in local}
    return [target for target, path in paths.items() if not (path / "index.html" if path.is_dir() else path).exists()]


def check(site: Path) -> None:
    """Raises if a page shows or links to a missing file, or loads anything from another host, such as fonts."""
    problems = []
    for path in sorted(site.rglob("*.html")):
        problems += [f"{path}: {target} is missing" for target in missing_in(path, site) if path.name != "404.html"]
        problems += [f"{path} loads {address}" for address in loaded_from_elsewhere(path.read_text("utf-8"))]
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check(Path(sys.argv[2]))
    else:
        shutil.rmtree(sys.argv[1], ignore_errors=True)
        write_sources(Path(sys.argv[1]))
