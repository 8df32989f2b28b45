"""The model, the tokenizer, the rows and the settings of the comparison with TRL; both sides make them from a seed."""

import random
from pathlib import Path

import numpy as np
import torch
from tests.data.chats import MARKED_TEMPLATE, make_tokenizer_folder

SEED = 5
NUM_ROWS = 16
BATCH_SIZE = 4
NUM_STEPS = 6
LEARNING_RATE = 2e-3
MAX_LENGTH = 96
PACKED_LENGTH = 256
PACKED_STEPS = 4
"""Each step has all rows: packing them in another order changes nothing."""

_WORDS = ("the", "cat", "sat", "on", "mat", "and", "dog", "ran", "7", "über", "日本")


def make_rows(size=NUM_ROWS):
    """Returns conversations of one to three turns; the longest exceed MAX_LENGTH."""
    draw = random.Random(SEED)

    def text():
        return " ".join(draw.choices(_WORDS, k=draw.randint(1, 8)))

    rows = []
    for number in range(size):
        messages = [{"role": "system", "content": text()}] if number % 3 == 0 else []
        for _ in range(draw.randint(1, 3)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        rows.append({"messages": messages})
    return rows


def make_completions(size=4):
    """Returns prompts with their completions, as text and as messages."""
    draw = random.Random(SEED)
    pairs = [[" ".join(draw.choices(_WORDS, k=draw.randint(1, 6))) for _ in range(2)] for _ in range(size)]
    return {
        "text": [{"prompt": prompt, "completion": f" {completion}"} for prompt, completion in pairs],
        "messages": [
            {
                "prompt": [{"role": "user", "content": prompt}],
                "completion": [{"role": "assistant", "content": completion}],
            }
            for prompt, completion in pairs
        ],
    }


def make_folder(folder, template=MARKED_TEMPLATE):
    """Writes a tiny Llama of transformers with random weights, and a tokenizer with generation markers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    generator = np.random.default_rng(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.from_numpy(generator.normal(size=tuple(parameter.shape)))
            parameter.copy_(1 + 0.1 * drawn if "norm" in name else 0.1 * drawn)
    model.save_pretrained(Path(folder))
    make_tokenizer_folder(Path(folder), template)
    return Path(folder)
