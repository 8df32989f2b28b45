"""Classification: features, texts or tokens with one class per sample; class names become numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwright.data.collators.padded import Padded
from trainwright.data.collators.samples import Columns, columns_of, names_of, require, sample_error, stack_column
from trainwright.data.collators.tokenize import encode_missing
from trainwright.data.tokenizer import TextTokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.events.mean import IGNORED_LABEL


class Classification:
    """Returns `labels`, int64 [samples], and the samples' inputs: padded tokens, tokenized texts, or stacked features.

    The class is in the field `label`, by default `labels` or `label`: a number, or a name of `classes`, whose number
    is its index. A tokenizer converts the field `text` to `input_ids`; samples with `input_ids` need one only for its
    padding token.

    >>> collator = Classification(classes=["cat", "dog"])
    >>> batch = collator([{"x": [0.5, 1.0], "label": "dog"}, {"x": [1, 0], "label": "cat"}])
    >>> batch["x"].tolist(), batch["labels"].tolist()
    ([[0.5, 1.0], [1.0, 0.0]], [1, 0])
    """

    draws_nothing = True

    def __init__(
        self,
        *,
        classes: Sequence[str | int] | None = None,
        label: str | None = None,
        tokenizer: str | os.PathLike[str] | TextTokenizer | None = None,
        text: str = "text",
        pad_token_id: int | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        buckets: Sequence[int] = (),
        drop: Sequence[str] = (),
        vocab_size: int | None = None,
        project_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.labels = Labels(classes=classes, field=label)
        self.text = text
        self.drop = names_of("drop", drop)
        self.padded: Padded | None = None
        if tokenizer is not None or pad_token_id is not None:
            self.padded = Padded(
                tokenizer=tokenizer,
                pad_token_id=pad_token_id,
                max_length=max_length,
                pad_to_multiple_of=pad_to_multiple_of,
                buckets=buckets,
                make_labels=False,
                vocab_size=vocab_size,
                project_dir=project_dir,
            )
        elif max_length or pad_to_multiple_of or buckets or vocab_size:
            raise ConfigError(
                "max_length, pad_to_multiple_of, buckets and vocab_size need a padding token. Set a tokenizer or "
                "pad_token_id, or remove them."
            )
        self.tokenizer = None if self.padded is None else self.padded.tokenizer

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        """Returns the batch, on the host."""
        columns = columns_of(samples, drop=self.drop)
        labels = self.labels.take(columns)
        if labels is None:
            require(columns, self.labels.field or "label", "Set label to the field of the class.")
        if self.padded is not None and self.tokenizer is not None:
            encode_missing(columns, self.padded, self.text)
        if "input_ids" not in columns:
            batch = {name: stack_column(column, name) for name, column in columns.items()}
        elif self.padded is None:
            raise DataError("The samples have input_ids, but the padding token is unknown. Set pad_token_id.")
        else:
            batch = self.padded.collate(columns)
        return {**batch, "labels": labels}


class Labels:
    """Converts the classes of a batch's samples to numbers."""

    def __init__(self, *, classes: Sequence[str | int] | None, field: str | None) -> None:
        if classes is not None and (isinstance(classes, str) or len(set(classes)) != len(classes) or not classes):
            raise ConfigError(f"classes is {classes!r}. Use a list of different names, such as [cat, dog].")
        self.field = field
        self.numbers: Mapping[Any, int] | None = None
        self._limit = float("inf")
        if classes is not None:
            self.numbers = {name: number for number, name in enumerate(classes)}
            self._limit = len(classes) if all(isinstance(name, str) for name in classes) else 0

    def take(self, columns: Columns) -> Tensor | None:
        """Removes the field of labels from the columns and returns them as numbers; None if there is none."""
        names = [self.field] if self.field is not None else ["labels", "label"]
        name = next((name for name in names if name in columns), None)
        if name is None:
            return None
        return torch.tensor([self._number(value, name, number) for number, value in enumerate(columns.pop(name))])

    def _number(self, value: Any, field: str, sample: int) -> int:
        if isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0:
            value = value.item()
        if self.numbers is not None and isinstance(value, (str, int)) and value in self.numbers:
            return self.numbers[value]
        if isinstance(value, int) and (value == IGNORED_LABEL or 0 <= value < self._limit):
            return int(value)
        known = "Classes are integers from 0, or names that are listed in classes."
        if self.numbers is not None:
            names = [str(name) for name in self.numbers]
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            known = f"classes has {', '.join(names[:20])}{more}."
        raise sample_error(sample, field, f"is the {type(value).__name__} {value!r:.40}, which is not a class. {known}")
