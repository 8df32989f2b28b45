"""A sequence that is whole: nothing is cut, and attention is torch's own."""

import torch
import torch.nn.functional as F

from trainwright.models.gpt2 import GPT2
from trainwright.models.layers.attention import WholeSequence


def test_nothing_is_cut_joined_or_weighed():
    sequence, tensor = WholeSequence(), torch.randn(2, 5)
    assert sequence.take(tensor) is tensor
    assert sequence.whole(tensor) is tensor
    assert sequence.mean(tensor.sum(), torch.ones(2, 5)) == tensor.sum()
    assert sequence.positions(5, torch.device("cpu")).tolist() == [0, 1, 2, 3, 4]


def test_attention_takes_grouped_heads_scale_mask_and_causality():
    queries, keys, values = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
    expected = F.scaled_dot_product_attention(
        queries, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), attn_mask=mask, scale=0.5
    )
    sequence = WholeSequence()
    for how in ({"mask": mask}, {"is_causal": True}):
        mixed = sequence.attend(queries, keys, values, scale=0.5, enable_gqa=True, **how)
        torch.testing.assert_close(mixed, expected)


class Halves(WholeSequence):
    """The first half of every sequence, as one of two ranks might see it."""

    def take(self, tensor, dim=1, fill=0):
        return tensor.narrow(dim, 0, tensor.shape[dim] // 2)

    def positions(self, length, device):
        return super().positions(length, device)[: length // 2]


def test_a_model_works_on_the_part_that_its_sequence_takes():
    model = GPT2(vocab_size=11, hidden_size=8, num_heads=2, num_layers=1)
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    expected = model(**batch)["logits"]
    for module in model.modules():
        if hasattr(module, "sequence"):
            module.sequence = Halves()
    # No token sees a later one: the first half by itself is what it was in the whole.
    torch.testing.assert_close(model(**batch)["logits"], expected[:, :4])
