"""What a person should know of the data that was looked at: foreign tokens, dropped fields, padding, broken rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainwright.config import RunConfig
from trainwright.data.fetch import Failure
from trainwright.looking.facts import Batch, Sample, Values
from trainwright.looking.values import fields_of, is_label_field, is_token_field, tensor_of

MOST_PADDING = 0.3
"""The share of padding from which on there is advice against it."""
_MOST_ROWS = 5


class TokenRange:
    """The smallest and the largest token that was met, and where."""

    def __init__(self) -> None:
        self.least: tuple[int, str] | None = None
        self.most: tuple[int, str] | None = None

    def note(self, sample: Any, where: str) -> None:
        """Looks at the tokens of a sample or a batch."""
        for name, value in fields_of(sample):
            if not is_token_field(name):
                continue
            tensor = tensor_of(value)
            if tensor is None or not tensor.numel() or tensor.is_floating_point():
                continue
            low, high = int(tensor.min()), int(tensor.max())
            self.least = min(self.least or (low, where), (low, where), key=lambda each: each[0])
            self.most = max(self.most or (high, where), (high, where), key=lambda each: each[0])


def remarks_on_tokens(config: RunConfig, tokens: TokenRange, tokenizer: Any) -> Iterable[str]:
    """Yields what does not fit the model's vocabulary."""
    vocab_size = None if config.model is None else config.model.arguments.get("vocab_size")
    if not isinstance(vocab_size, int):
        return
    if tokens.least is not None and tokens.least[0] < 0:
        yield f"{tokens.least[1]} holds the token {tokens.least[0]}: tokens count from 0. Look at the tokenizer."
    if tokens.most is not None and tokens.most[0] >= vocab_size:
        yield (
            f"{tokens.most[1]} holds the token {tokens.most[0]:,}, but model.vocab_size is {vocab_size:,}. "
            f"Raise it to more than {tokens.most[0]:,}, or use the tokenizer that the model was made for."
        )
        return
    known = tokenizer_size(tokenizer)
    if known is not None and known > vocab_size:
        yield (
            f"The tokenizer has {known:,} tokens, but model.vocab_size is {vocab_size:,}; those that were seen fit. "
            f"Set it to {known:,}."
        )


def tokenizer_size(tokenizer: Any) -> int | None:
    """Returns how many tokens a tokenizer has, where it says so."""
    size = getattr(tokenizer, "vocab_size", None)
    if size is None and hasattr(tokenizer, "get_vocab_size"):
        size = tokenizer.get_vocab_size()
    return size if isinstance(size, int) else None


def remarks_on_batch(batch: Batch, sample: Any, collated: Any) -> Iterable[str]:
    """Yields what is lost and what is wasted between the samples and the batch."""
    if isinstance(sample, Mapping) and isinstance(collated, Mapping):
        missing = [str(name) for name in sample if name not in collated]
        if "input_ids" in collated and "input_ids" not in sample:
            # Texts that became tokens are not lost.
            missing = [name for name in missing if not isinstance(sample[name], str)]
        if missing:
            yield f"The collator drops or renames {_listed(missing)}: the batch has no such field."
    if batch.padding is not None and batch.padding > MOST_PADDING:
        yield (
            f"{100 * batch.padding:.0f} % of the batch is padding (by {batch.padding_by}), which is computed and "
            "thrown away. Pack the samples into rows (type: pack), or set data.group_by_length, so that a batch holds "
            "samples of about equal length."
        )
    for field in batch.fields:
        if _is_broken(field):
            yield f"{field.name} holds values that are not finite (from {field.minimum} to {field.maximum})."


def remarks_on_samples(samples: Sequence[Sample]) -> Iterable[str]:
    """Yields samples from which nothing can be learnt."""
    for sample in samples:
        for field in sample.fields:
            total = math.prod(field.shape or ())
            if is_label_field(field.name) and field.shape and field.num_ignored == total:
                yield f"Position {sample.position}: every label is -100, so nothing is learnt from this sample."


def remarks_on_failures(failures: Sequence[Failure]) -> Iterable[str]:
    """Yields the rows that could not be read, as far as a person reads them."""
    for failure in failures[:_MOST_ROWS]:
        yield f"Left out: {failure.describe()}."
    if len(failures) > _MOST_ROWS:
        yield f"Left out: {len(failures) - _MOST_ROWS} further rows that cannot be read."


def _is_broken(field: Values) -> bool:
    return any(each is not None and not math.isfinite(each) for each in (field.minimum, field.maximum))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
