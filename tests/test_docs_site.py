"""What `make docs` needs, without building the site: its sources, its navigation and the reference."""

import importlib
import re
from pathlib import Path

import pytest
import yaml
from tools.docs_site import (
    REPOSITORY,
    loaded_from_elsewhere,
    missing_in,
    rewrite_links,
    separate_blocks,
    write_sources,
)

import trainwright
from trainwright.config.builtin import BUILT_INS

ROOT = Path(__file__).parents[1]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
REFERENCE = "\n".join(path.read_text("utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
DOCUMENTED = re.findall(r"^::: (\S+)$", REFERENCE, re.MULTILINE)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "docs"
    write_sources(folder)
    return folder


def pages_in(navigation):
    """The pages of a section, and of those below."""
    for entry in navigation:
        target = entry if isinstance(entry, str) else next(iter(entry.values()))
        if isinstance(target, list):
            yield from pages_in(target)
        elif not target.startswith("https://"):
            yield target


def test_every_page_is_once_in_the_navigation(sources):
    listed = list(pages_in(SITE["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.relative_to(sources).as_posix() for path in sources.rglob("*.md")}


def text_outside_fences(page):
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors_of(page):
    """The anchors of a page's headings, as GitHub and the site name them."""
    headings = re.findall(r"^#+ (.+)$", text_outside_fences(page), re.MULTILINE)
    shown = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in shown}


def test_every_link_of_the_site_leads_to_a_file_and_a_heading(sources):
    broken = []
    for page in sources.rglob("*.md"):
        for target, anchor in re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)", text_outside_fences(page)):
            outside = re.fullmatch(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/(.*)", target)
            path = ROOT / outside[1] if outside else page.parent / target if target else page
            if not path.exists() and (outside or ":" not in target):
                broken.append(f"{page.relative_to(sources)}: {target}")
            # mkdocstrings names the anchors of the reference.
            elif anchor and path.suffix == ".md" and "reference" not in path.parts and anchor not in anchors_of(path):
                broken.append(f"{page.relative_to(sources)}: {target}#{anchor}")
    assert broken == []


def test_links_of_github_become_links_of_the_site():
    text = "[a](data.md#rows) [b](../src/trainwright) [c](tutorials/chat_model.ipynb) [d](https://x.y)"
    assert rewrite_links(text, "docs/page.md") == (
        f"[a](data.md#rows) [b]({REPOSITORY}/tree/main/src/trainwright) [c](tutorials/chat_model.md) [d](https://x.y)"
    )
    assert rewrite_links("[a](../README.md)", "docs/page.md") == "[a](index.md)"
    assert rewrite_links("[a](docs/data.md)", "README.md") == "[a](data.md)"


def test_lists_and_tables_are_separated_from_paragraphs_but_code_is_not_changed():
    assert separate_blocks("Two:\n- a\n  b\n- c\n") == "Two:\n\n- a\n  b\n- c\n"
    assert separate_blocks("Rows:\n| a |\n|---|\n") == "Rows:\n\n| a |\n|---|\n"
    assert separate_blocks("1. a\n2. b\n\n- c") == "1. a\n2. b\n\n- c"
    assert separate_blocks("a\n```\nb\n- c\n```\n- d") == "a\n```\nb\n- c\n```\n\n- d"


def test_the_site_names_the_repository_of_the_package():
    assert SITE["repo_url"] == REPOSITORY


@pytest.mark.parametrize("name", trainwright.__all__)
def test_every_public_name_is_in_the_reference(name):
    assert f"trainwright.{name}" in DOCUMENTED


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_name_in_the_reference_is_documented(name):
    module, parts = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
    for part in parts:
        found = getattr(found, part)
    assert found.__doc__


def test_every_builtin_component_has_a_section(sources):
    for kind, components in BUILT_INS.items():
        page = (sources / "components" / f"{kind}.md").read_text("utf-8")
        assert re.findall(r"^## `(\w+)`$", page, re.MULTILINE) == list(components)


def test_a_notebook_becomes_a_page_with_its_outputs(sources):
    page = (sources / "tutorials" / "slow_or_wrong.md").read_text("utf-8")
    assert page.startswith("# Find out why a run is slow or goes wrong\n")
    assert '<div class="output">\n<div style=' in page
    assert "```{.text .output}\nAnomalyError: The loss is nan at step 25" in page
    assert 'src="data:image/png;base64,' in (sources / "tutorials" / "chat_model.md").read_text("utf-8")


def test_a_page_that_loads_from_another_host_is_found():
    assert loaded_from_elsewhere('<script src="https://cdn.net/x.js"></script>') == ["https://cdn.net/x.js"]
    assert loaded_from_elsewhere('<link rel="stylesheet" href="//fonts.net/a.css">') == ["//fonts.net/a.css"]
    assert loaded_from_elsewhere('<a href="https://x.y">x</a><link rel="canonical" href="https://x.y">') == []
    assert loaded_from_elsewhere('<img src="images/a.png"><script src="../a.js"></script>') == []


def test_a_page_that_shows_a_missing_file_is_found(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.html").write_text(
        '<img src="../a%20b.svg"><img src=../none.png><a href="/data/#rows">x</a>'
    )
    (tmp_path / "a b.svg").touch()
    assert missing_in(tmp_path / "data" / "index.html", tmp_path) == ["../none.png"]
