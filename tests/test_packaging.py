"""What pyproject.toml declares, and what the sources import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "trainwright"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NOT_FOR_RUNS = {"all", "benchmarks", "dev", "docs", "tpu"}
"""Extras that `all` does not have; a TPU's package would change which device torch finds."""

DISTRIBUTIONS = {"lm_eval": "lm-eval", "sklearn": "scikit-learn", "yaml": "PyYAML"}
"""What packages are called where that is not their import name."""
COME_ALONG = {"pydantic_core": "pydantic", "triton": "torch"}
"""Packages that a dependency brings in the version that it needs. Of torch, builds with CUDA do."""
OTHER_EXTRA = {"data/arrow.py": "datasets"}
"""Files whose hint names an extra that has the package among its own dependencies."""

SOURCES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in PACKAGE.rglob("*.py")
    if "templates" not in path.relative_to(PACKAGE).parts
}


def names_in(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ;]", each, maxsplit=1)[0].lower() for each in requirements}


def imported(node: ast.AST) -> Iterator[str]:
    """The distributions outside of the standard library that a statement imports or looks for."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [node.module or ""]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec") and len(node.args) == 1:
        modules = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
    for module in modules:
        # torch's own module is only an entry point to another package.
        top = "tensorboard" if module == "torch.utils.tensorboard" else module.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "trainwright":
            yield DISTRIBUTIONS.get(top, COME_ALONG.get(top, top)).lower()


def test_modules_import_only_dependencies_when_they_are_imported():
    required = names_in(PROJECT["dependencies"])
    found = {(file, name) for file, tree in SOURCES.items() for node in tree.body for name in imported(node)}
    assert {name for _, name in found} <= required, sorted(each for each in found if each[1] not in required)


def test_each_optional_import_has_an_extra():
    declared = names_in(PROJECT["dependencies"]) | names_in(
        [each for extra, some in EXTRAS.items() if extra not in {"all", "benchmarks", "dev"} for each in some]
    )
    found = {(file, name) for file, tree in SOURCES.items() for node in ast.walk(tree) for name in imported(node)}
    assert {"fsspec", "huggingface_hub", "pyarrow", "scikit-learn", "tensorboard"} <= {name for _, name in found}
    assert sorted(each for each in found if each[1] not in declared) == []


def hints() -> list[tuple[str, str, str]]:
    """File, package and extra of each import whose failure is answered with how to install it."""
    found = []
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Try):
                packages = {name for each in node.body for name in imported(each)}
                said = " ".join(ast.unparse(handler) for handler in node.handlers)
                extras = re.findall(r"trainwright\[(\w+)\]", said)
                found += [(file, package, extra) for package in packages for extra in extras]
    return found


def test_an_install_hint_names_the_extra_with_the_package():
    assert {extra for _, _, extra in hints()} >= {
        "datasets",
        "digits",
        "parquet",
        "peft",
        "tensorboard",
        "transformers",
        "wandb",
    }
    wrong = [
        (file, package, extra)
        for file, package, extra in hints()
        if package not in names_in(EXTRAS[extra]) and OTHER_EXTRA.get(file) != extra
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["src", "docs", "examples", "README.md"])
def test_every_extra_that_is_named_anywhere_is_declared(folder):
    paths = [ROOT / folder] if (ROOT / folder).is_file() else [*(ROOT / folder).rglob("*.[pm][yd]")]
    named = {extra for path in paths for extra in re.findall(r"trainwright\[([a-z_0-9]+)\]", path.read_text("utf-8"))}
    assert named <= EXTRAS.keys()


def test_all_has_every_extra_for_runs():
    [everything] = EXTRAS["all"]
    assert set(everything.removeprefix("trainwright[").removesuffix("]").split(",")) == EXTRAS.keys() - NOT_FOR_RUNS


def test_torch_is_bounded_and_what_make_installs_is_inside():
    [bound] = [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    low, high = re.fullmatch(r"torch>=(\d+\.\d+),<(\d+\.\d+)", bound).groups()
    [pinned] = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    versions = [tuple(map(int, each.split(".")[:2])) for each in (low, pinned, high)]
    assert versions[0] <= versions[1] < versions[2]
    assert bound in (ROOT / "constraints.txt").read_text("utf-8")
    last = f"{versions[2][0]}.{versions[2][1] - 1}"
    assert f"torch {low} to {last}" in (ROOT / "README.md").read_text("utf-8")


def test_the_package_says_that_it_is_typed_and_where_it_lives():
    assert (PACKAGE / "py.typed").is_file()
    assert PROJECT["urls"].keys() >= {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
