"""Generation on a GPU: a captured step gives the tokens of an eager one, also after the weights have changed."""

from __future__ import annotations

import pytest
import torch
from tests.models.folders import our_llama

from trainwright.models.decoding import StaticReader
from trainwright.models.generation import sample_completions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 5], [60, 2, 3, 4]]


@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_a_captured_step_gives_the_tokens_of_an_eager_one(compiler):
    model = our_llama(num_kv_heads=2, initializer_range=0.3).cuda()
    reader = StaticReader(model, compiler=compiler)
    for prompts in (PROMPTS, PROMPTS[::-1], [[1] * 20] * 4):
        options = {"max_new_tokens": 20, "seeds": range(4), "stop_ids": [3]}
        captured = sample_completions(model, prompts, reader=reader, **options)
        assert captured.rows() == sample_completions(model, prompts, **options).rows()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_a_captured_step_under_autocast_reads_the_weights_of_each_call():
    model = our_llama(num_kv_heads=2, initializer_range=0.3).cuda()
    reader = StaticReader(model, compiler=None)
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16):
            options = {"max_new_tokens": 8, "temperature": 0, "log_probabilities": True}
            captured = sample_completions(model, PROMPTS, reader=reader, **options)
            eager = sample_completions(model, PROMPTS, **options)
        # The prompt gives the first token, equally for both, and the first captured step the second.
        assert captured.tokens[:, 0].tolist() == eager.tokens[:, 0].tolist()
        found, expected = (each.log_probabilities[:, :2] for each in (captured, eager))
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.neg_()
