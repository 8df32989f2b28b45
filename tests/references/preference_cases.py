"""The model, tokenizer and rows of the comparison with TRL, from seeds; preferences_trl.py and tests use them."""

import json

import torch

CHARACTERS = "abcdefghijklmnopqrstuvwxyz ?."
SIZES = {
    "vocab_size": len(CHARACTERS) + 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MAX_LENGTH = 24
BATCH_SIZE = 4
STEPS = 3
RATE = 0.2
LOSSES = {
    "sigmoid": {},
    "ipo": {},
    "hinge": {"beta": 0.5},
    "orpo": {"beta": 0.3},
    "simpo": {"beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1},
    "kto": {"desirable_weight": 1.5, "undesirable_weight": 0.8},
}
REWARD = {"center_rewards_coefficient": 0.1}
REWARD_RATE = 0.01
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def save_base(folder, *, head="lm"):
    """Writes a Llama of random weights with its tokenizer, one token per character, to a folder."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {each: 3 + i for i, each in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(**SIZES, **({"num_labels": 1} if head == "score" else {}))
    model = (LlamaForSequenceClassification if head == "score" else LlamaForCausalLM)(config)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15 + ("norm" in name))
    model.save_pretrained(folder)


def _text(generator, low, high):
    length = int(torch.randint(low, high, (1,), generator=generator))
    return "".join(CHARACTERS[int(each)] for each in torch.randint(0, len(CHARACTERS), (length,), generator=generator))


def make_rows(number=STEPS * BATCH_SIZE, *, paired=True):
    """Returns rows of random letters, of which some are longer than MAX_LENGTH."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(number):
        prompt = _text(generator, 3, 12)
        answers = [_text(generator, 2, 18), _text(generator, 2, 18)]
        if paired:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
        else:
            rows.append({"prompt": prompt, "completion": answers[0], "label": index % 3 != 0})
    return rows


def write_rows(file, rows):
    """Writes rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
