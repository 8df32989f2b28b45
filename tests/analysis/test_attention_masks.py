"""`check` reports masks of attention that change nothing, with the line or the setting that makes them."""

from __future__ import annotations

import pytest

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Tokens(Dataset):
    padding = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        mask = (torch.arange(8) < 8 - self.padding).long()
        return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": mask}


class Padded(Tokens):
    padding = 3


class Plain(Tokens):
    def __getitem__(self, index):
        sample = super().__getitem__(index)
        del sample["attention_mask"]
        return sample


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 32)

    def forward(self, input_ids, labels, attention_mask=None):
        states = self.words(input_ids)
        heads = states.unflatten(-1, (2, 4)).transpose(1, 2)
        states = states + self.mix(heads, states, attention_mask)
        return {"loss": F.cross_entropy(self.head(states).flatten(0, 1), labels.flatten())}

    def mix(self, heads, states, attention_mask):
        length = heads.shape[2]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        return BODY
"""
RUN = """\
model: {type: parts.py:Net}
data: {train: {type: parts.py:Tokens}}
trainer: {max_steps: 4, global_batch_size: 2, optimizer: {type: adamw, lr: 1e-2}}
"""
JOINED = ".transpose(1, 2).flatten(2)"
CALL = f"F.scaled_dot_product_attention(heads, heads, heads, MASK){JOINED}"
ADDED = "attn_mask=torch.zeros(length, length).masked_fill(~causal, float('-inf'))"
PADDED = "attn_mask=causal & attention_mask.bool()[:, None, None]"
MODULE = "self.attention(states, states, states, attn_mask=~causal)[0] + 0 * " + CALL.replace("MASK", "is_causal=True")
OURS = f"attention(heads, heads, heads, mask=causal){JOINED}"


def masks_of(report):
    return [each for each in report.findings if "mask" in each.problem]


@pytest.fixture
def mixed(check):
    """mixed(body, *overrides) → what `check` says of masks in a model whose attention is `body`."""

    def check_mixed(body, *overrides):
        head = "from trainwright.models.layers.attention import attention\n"
        return masks_of(check(*overrides, parts=head + MODEL.replace("BODY", body), run=RUN))

    return check_mixed


@pytest.mark.parametrize(
    ("body", "problem", "advice"),
    [
        (CALL.replace("MASK", "attn_mask=causal"), "a causal mask [8, 8]", "Pass is_causal=True instead of attn_mask"),
        (CALL.replace("MASK", "causal"), "a causal mask [8, 8]", "Pass is_causal=True instead of attn_mask"),
        (CALL.replace("MASK", ADDED), "a causal mask [8, 8]", "trainwright.models.layers.attention"),
        (CALL.replace("MASK", PADDED), "a causal mask [2, 1, 8, 8]", "is_causal=True"),
        (CALL.replace("MASK", "torch.ones_like(causal)"), "hides nothing", "only for batches with padding"),
        (MODULE, "a causal mask [8, 8]", "Pass is_causal=True and need_weights=False as well"),
    ],
)
def test_a_mask_that_changes_nothing_is_a_remark_at_its_line(mixed, at, body, problem, advice):
    (finding,) = mixed(body)
    assert (finding.severity, str(finding.location)) == ("remark", at("return " + body))
    assert problem in finding.problem
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("body", "overrides"),
    [
        (CALL.replace("MASK", "is_causal=True"), ()),
        (CALL.replace("MASK", PADDED), ("data.train.type=parts.py:Padded",)),
        (CALL.replace("MASK", "torch.where(causal, 0.1, 0.2)"), ()),  # a bias
        (CALL.replace("MASK", "causal & causal.flip(0).flip(1).T.triu(-3)"), ()),  # a window
        (OURS, ()),
    ],
)
def test_other_masks_and_calls_without_one_have_no_finding(mixed, body, overrides):
    assert mixed(body, *overrides) == []


TRANSFORMERS = """\
model: {type: "transformers:LlamaForCausalLM", hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
        intermediate_size: 16, vocab_size: 32}
data: {train: {type: parts.py:Plain}}
trainer: {max_steps: 4, global_batch_size: 2, optimizer: {type: adamw, lr: 1e-2}}
runtime: {mode: compile}
"""


def test_a_stock_model_of_transformers_that_makes_masks_when_compiled_is_a_remark(check):
    pytest.importorskip("transformers")
    (finding,) = masks_of(check(parts=MODEL, run=TRANSFORMERS.replace("vocab", "kernels: stock, vocab")))
    assert (finding.severity, str(finding.location)) == ("remark", "run.yaml:2")
    assert finding.advice.startswith("Remove kernels")
    assert masks_of(check(parts=MODEL, run=TRANSFORMERS)) == []


def test_eager_attention_of_transformers_is_a_remark(check):
    pytest.importorskip("transformers")
    run = TRANSFORMERS.replace("vocab", "attn_implementation: eager, vocab").replace("compile", "eager")
    (finding,) = masks_of(check(parts=MODEL, run=run))
    assert finding.problem.startswith("attn_implementation: eager")
    assert str(finding.location) == "run.yaml:2"
