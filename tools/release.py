"""Prepares a release from a tag such as v0.2.0; .github/workflows/release.yml calls it.

`notes TAG` prints the section of CHANGELOG.md for the version of the tag. `links TAG` rewrites README.md in place.
PyPI and release pages do not resolve relative links, so both commands replace them by addresses of the tag.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def notes(changelog: str, version: str) -> str:
    """Returns the body of a version's section. Raises SystemExit if it is missing or has no date."""
    heading = re.search(rf"^## \[{re.escape(version)}\] - (.+)$", changelog, re.MULTILINE)
    if heading is None:
        raise SystemExit(f"CHANGELOG.md has no section [{version}].")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", heading[1]):
        raise SystemExit(f"CHANGELOG.md: the date of [{version}] is {heading[1]!r}. Write it as YYYY-MM-DD.")
    body = re.split(r"^(?:## \[|\[[^\]]+\]: )", changelog[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    return body.strip() + "\n"


def absolute(text: str, repository: str, tag: str) -> str:
    """Returns the Markdown with relative links to files and images of the tag."""

    def replace(match: re.Match[str]) -> str:
        kind = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}({repository}/{kind}/{tag}/{match[2]})"

    return re.sub(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?![a-z]+:|#)([^)\s]+)\)", replace, text)


def main(command: str, tag: str) -> None:
    """Runs `notes` or `links`, after a comparison of the tag with the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    if tag != f"v{project['version']}":
        raise SystemExit(f"The tag is {tag}, but pyproject.toml has version {project['version']}.")
    repository = project["urls"]["Repository"]
    if command == "notes":
        changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
        print(absolute(notes(changelog, project["version"]), repository, tag), end="")
    elif command == "links":
        path = ROOT / "README.md"
        path.write_text(absolute(path.read_text("utf-8"), repository, tag), encoding="utf-8")
    else:
        raise SystemExit(f"{command!r} is neither notes nor links.")


if __name__ == "__main__":
    main(*sys.argv[1:])
