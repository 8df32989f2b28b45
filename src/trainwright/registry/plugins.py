"""Components of installed packages, which declare them as entry points in groups such as `trainwright.optimizer`.

    [project.entry-points."trainwright.optimizer"]
    lookahead = "my_package.optim:Lookahead"

Listing them reads the metadata of installed packages and imports none of them. resolve.py imports the one that a run
names.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from trainwright.config.builtin import BUILT_INS
from trainwright.errors import ComponentError

GROUP = "trainwright."
"""The prefix of an entry-point group; the kind of the components follows."""


class Plugin(NamedTuple):
    """A component that an installed package declares."""

    name: str
    reference: str
    """`module:Name`, as in the table of built-in components."""
    distribution: str
    """The name of the package in pip, with its version."""


def installed(kind: str) -> Mapping[str, tuple[Plugin, ...]]:
    """Returns the components of a kind by name. A name has several entries if packages conflict."""
    return _installed(kind, tuple(sys.path))


def forget_installed() -> None:
    """Reads the metadata again at the next call: a package may have been installed since."""
    _installed.cache_clear()


# Cached: on a network file system the metadata of hundreds of packages takes a second.
@lru_cache(maxsize=64)
def _installed(kind: str, _path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:
    found: dict[str, tuple[Plugin, ...]] = {}
    for entry in entry_points(group=f"{GROUP}{kind}"):
        plugin = Plugin(entry.name, entry.value.partition("[")[0].strip(), _distribution(entry))
        known = found.get(entry.name, ())
        if plugin not in known:  # sys.path may have a folder twice
            found[entry.name] = (*known, plugin)
    return found


def find_plugin(kind: str, name: str) -> Plugin | None:
    """Returns the installed component of this name; raises if the name is not unique."""
    plugins = sorted(installed(kind).get(name, ()))
    owners = [f"{each.distribution} ({each.reference})" for each in plugins]
    if name in BUILT_INS[kind] and plugins:
        owners.insert(0, f"trainwright ({BUILT_INS[kind][name]})")
    if len(owners) > 1:
        raise ComponentError(
            f'the {kind} "{name}" is defined by {" and by ".join(owners)}. Name the one that you want by its import '
            f"path, such as {plugins[0].reference}, or uninstall a package."
        )
    return plugins[0] if plugins else None


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
