"""Which setting an error about a component is about: the argument that it names, or one that an override has changed.

A component knows where its `type` was written. An override may have changed one argument alone, and blaming the file
would send its user to the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from trainwright.config.schema import RunConfig
from trainwright.config.tree import Origin
from trainwright.errors import ComponentError

_NOT_BUILT = "could not be built"


@contextmanager
def blaming_arguments(config: RunConfig, label: str, arguments: Iterable[str]) -> Iterator[None]:
    """Lets an error about the component at `label` begin with the place of the argument that it is about."""
    try:
        yield
    except ComponentError as error:
        place = _place(error, config, label, arguments)
        if place is None or error.where is None or place == error.where:
            raise
        raise type(error)(error.problem, where=place) from error.__cause__


def _place(error: ComponentError, config: RunConfig, label: str, arguments: Iterable[str]) -> Origin | None:
    # A component inside of another, such as a source of a dataset, has a longer label.
    own_label = error.problem.partition(":")[0] if error.problem.startswith(label) else label
    for name in re.findall(r'takes no argument "(\w+)"', error.problem):
        return config.written_at((*own_label.split("."), name))
    if _NOT_BUILT in error.problem:
        places = [config.written_at((*label.split("."), name)) for name in arguments]
        return next((place for place in places if place is not None and place.is_override), None)
    return None


def overridden_among(config: RunConfig, *settings: str) -> Origin | None:
    """Return where the first of these settings was written that an override gives; else where the first one was."""
    places = [place for setting in settings if (place := config.origin(setting)) is not None]
    return next((place for place in places if place.is_override), places[0] if places else None)
