"""Draws sentences at random from messages, docstrings, comments, docs and examples, for a review of the language.

`python tools/sentences.py --seed 1` prints 100 sentences with file and line. A reviewer rewrites each one that would
look odd in PyTorch's documentation, looks for the same construction elsewhere, and draws again with another seed until
no sentence needs a change. tools/sentences.md records the seeds.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("src", "docs", "examples", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile")
MIN_WORDS = 4
WORD = re.compile(r"(?<!\S)[^\s\w]*[A-Za-z][A-Za-z'-]*[^\s\w]*(?!\S)")  # without the parts of a name or a path
END = re.compile(r"(?<=[a-z0-9)`\"'][.!?])\s+(?=[A-Z`*\[\"(])")
NO_PROSE = re.compile(r"(noqa|type: ignore|mypy:|fmt:|!/)")


class Sentence(NamedTuple):
    """A sentence and the line on which its paragraph begins."""

    path: str
    line: int
    text: str


def main() -> None:
    """Prints the sentences that the seed selects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", default=WHERE, help="files and folders below the repository's root")
    parser.add_argument("--number", type=int, default=100, help="how many to draw; 0 prints all of them")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = sorted({sentence for path in arguments.paths for sentence in sentences_below(ROOT / path)})
    chosen = (
        found
        if arguments.number == 0
        else random.Random(arguments.seed).sample(found, min(arguments.number, len(found)))
    )
    for number, sentence in enumerate(chosen, 1):
        print(f"{number:3} {sentence.path}:{sentence.line}\n    {sentence.text}")
    print(f"{len(chosen)} of {len(found):,} sentences, seed {arguments.seed}")


def sentences_below(path: Path) -> Iterator[Sentence]:
    """Yields the sentences of a file, or of all files below a folder."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file() or "__pycache__" in file.parts:
            continue
        if file.suffix == ".py":
            paragraphs = python_paragraphs(file.read_text("utf-8"))
        elif file.suffix == ".md":
            paragraphs = markdown_paragraphs(file.read_text("utf-8"))
        elif file.suffix in (".yaml", ".yml", ".toml", ".sh", ".js", ".css") or file.name == "Makefile":
            paragraphs = comment_paragraphs(file.read_text("utf-8"))
        else:
            continue
        name = file.resolve().relative_to(ROOT).as_posix()
        for line, text in paragraphs:
            for sentence in END.split(" ".join(text.split())):
                if len(WORD.findall(sentence)) >= MIN_WORDS:
                    yield Sentence(name, line, sentence)


def python_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields docstrings, comments and other texts of a module. Values in an f-string are shown as `{…}`."""
    yield from comment_paragraphs_of_tokens(text)
    tree = ast.parse(text)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)} - {
        id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, paragraph in paragraphs_of(node.value):
                yield node.lineno + offset, paragraph
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values)
            yield node.lineno, "".join(str(part) for part in parts)


def comment_paragraphs_of_tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yields the comments of a Python file; those on consecutive lines are one paragraph."""
    comments = [
        (token.start[0], token.start[1], token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not NO_PROSE.search(token.string)
    ]
    yield from joined(comments)


def comment_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields the comments of a file in YAML, TOML, shell, make, JavaScript or CSS."""
    comments = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.search(r"(?:^|\s)(?:#+|//|/\*)\s+(.*?)(?:\*/)?$", line)
        if match and not NO_PROSE.search(match[1]):
            comments.append((number, match.start(1), match[1]))
    yield from joined(comments)


def joined(comments: list[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Joins comments on consecutive lines that begin in the same column."""
    begin, texts, last = 0, list[str](), (-1, -1)
    for line, column, comment in comments:
        if (line - 1, column) != last and texts:
            yield begin, " ".join(texts)
            texts = []
        if not texts:
            begin = line
        texts.append(comment)
        last = (line, column)
    if texts:
        yield begin, " ".join(texts)


def markdown_paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields paragraphs, list items and table cells. Code blocks are left out."""
    text = re.sub(r"^```.*?^```$", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(\s*)(?:[-*]|\d+\.)\s+", r"\n\1", text, flags=re.MULTILINE)
    text = re.sub(r"^(#+ .*)$", r"\n\1\n", text, flags=re.MULTILINE)
    for number, paragraph in paragraphs_of(text):
        cells = paragraph.split("|") if paragraph.lstrip().startswith("|") else [paragraph]
        for cell in cells:
            yield number + 1, cell


def paragraphs_of(text: str) -> Iterator[tuple[int, str]]:
    """Yields the paragraphs of a text with the number of lines above each."""
    for match in re.finditer(r"(?:[^\n]*\S[^\n]*\n?)+", text):
        yield text.count("\n", 0, match.start()), match[0]


if __name__ == "__main__":
    main()
