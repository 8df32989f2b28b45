"""From a list of samples to one batch, on the host. The loop moves it to the device.

A collator is any callable from a list of samples to a nest of tensors; one that packs samples into rows also defines
`split(batch, n)`, which returns n micro-batches. A collator without randomness may set `draws_nothing = True`, so that
the generators are not seeded for each batch. Each file has one collator; samples.py has their common functions, and
fields.py names the elements of tuple samples.
"""

from trainwright.data.collators.fields import plain_mappings, returns_dicts
from trainwright.data.collators.stack import Stack, reject_lists
from trainwright.events.mean import IGNORED_LABEL

__all__ = ["IGNORED_LABEL", "Stack", "plain_mappings", "reject_lists", "returns_dicts"]
