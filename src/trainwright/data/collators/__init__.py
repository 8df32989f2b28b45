"""From a list of samples to one batch, on the host. The loop moves it to the device.

A collator is any callable from a list of samples to a nest of tensors; one that packs samples into rows
of its own defines `split(batch, n)` too, which returns n micro-batches. One that surely uses no randomness
may say `draws_nothing = True`, which saves seeding the generators for each batch. Each file here holds one;
samples.py (what is in a batch's samples) and padding.py (how wide a batch is) serve them all.
"""

from trainwright.data.collators.stack import Stack, reject_lists
from trainwright.events.mean import IGNORED_LABEL

__all__ = ["IGNORED_LABEL", "Stack", "reject_lists"]
