"""An extension of Griffe, which reads docstrings for the API reference: examples become blocks of code."""

from __future__ import annotations

from typing import Any

import griffe
from tools.docs_site import fenced_examples


class DocstringExamples(griffe.Extension):
    """Changes docstrings when they are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced_examples(obj.docstring.value)
