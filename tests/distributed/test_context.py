"""Models whose sequences are split over 2 and 4 ranks give the loss, gradients and logits of one process."""

import pytest
import torch
import torch.distributed as dist
from tests.messages import raises
from tests.parallel.forked_ranks import on_ranks

from trainwright.errors import ConfigError
from trainwright.models.bert import Bert, BertClassifier
from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.models.t5 import T5
from trainwright.parallel.context import split_sequences

WORDS = 23
SMALL = {"vocab_size": WORDS, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_positions": 32}


def ids(length, rows=2):
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def text(length, **more):
    tokens = ids(length)
    return {"input_ids": tokens, "labels": tokens.clone(), **more}


def padded(length, *, on_left=False):
    """The second row has two thirds of the tokens."""
    batch = text(length)
    mask = torch.ones(2, length, dtype=torch.long)
    cut = length // 3
    mask[1, :cut] = 0
    mask = mask if on_left else mask.flip(1)
    batch["labels"][mask == 0] = -100
    return {**batch, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}


def packed(length):
    """Several documents in a row, and padding at the end."""
    documents = torch.tensor([[0] * 5 + [1] * (length - 8) + [-1] * 3, [0] * (length - 4) + [1] * 4])
    positions = torch.stack(
        [torch.cat([torch.arange(int((row == d).sum())) for d in row.unique_consecutive()]) for row in documents]
    )
    batch = text(length)
    batch["labels"][documents < 0] = -100
    return {**batch, "document_ids": documents, "position_ids": positions}


def few_targets(length):
    """Only the first two tokens have targets: most ranks have none."""
    batch = text(length)
    batch["labels"][:, 3:] = -100
    return batch


def free_mask(length):
    visible = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(2)) > 0.5
    return text(length, attention_mask=visible | torch.eye(length, dtype=torch.bool))


def masked(length):
    batch = padded(length)
    del batch["position_ids"]
    return batch


CASES = {
    "llama": (Llama, {}, lambda: text(16)),
    "llama, odd": (Llama, {"num_kv_heads": 2, "tie_embeddings": False}, lambda: text(13)),
    "llama, three tokens": (Llama, {}, lambda: text(3)),
    "llama, padded": (Llama, {"num_kv_heads": 1}, lambda: padded(13)),
    "llama, padded on the left": (Llama, {"attention_bias": "qkv"}, lambda: padded(14, on_left=True)),
    "llama, packed": (Llama, {"num_kv_heads": 2}, lambda: packed(19)),
    "llama, few targets": (Llama, {}, lambda: few_targets(16)),
    "llama, few targets, fused": (Llama, {"fused_loss": True}, lambda: few_targets(17)),
    "llama, mask of pairs": (Llama, {}, lambda: free_mask(11)),
    "gpt2": (GPT2, {}, lambda: text(16)),
    "gpt2, all positions": (GPT2, {"max_positions": 13}, lambda: text(13)),
    "gpt2, packed": (GPT2, {"tie_embeddings": False}, lambda: packed(19)),
    "bert": (Bert, {}, lambda: text(16)),
    "bert, odd": (Bert, {}, lambda: text(13)),
    "bert, padded": (Bert, {}, lambda: masked(13)),
    "bert, classes": (BertClassifier, {"num_labels": 3}, lambda: {**masked(13), "labels": torch.tensor([2, 0])}),
}


def build(kind, settings):
    torch.manual_seed(4)
    # Large weights: with the usual small ones attention is nearly uniform, and a wrong mask would hardly show.
    return kind(**{**SMALL, "initializer_range": 0.3, **settings}).double().train()


def results_of(case, prepare=lambda model: None):
    kind, settings, batch = CASES[case]
    model, batch = build(kind, settings), batch()
    prepare(model)
    loss = model(**batch)["loss"]
    loss.backward()
    with torch.no_grad():
        scored = model.eval()(**batch)
        unlabelled = model(**{key: value for key, value in batch.items() if key != "labels"})
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {
        "loss": loss.detach(),
        "grads": grads,
        "eval_loss": scored["loss"],
        "eval_logits": scored["logits"],
        "logits": unlabelled["logits"],
    }


def split_results(mesh):
    results = {}
    for case in CASES:
        found = results_of(case, lambda model: split_sequences(model, mesh))
        for grad in found["grads"].values():
            dist.all_reduce(grad, group=mesh.group("context"))
            grad /= mesh.num_gradient_copies
        results[case] = found
    batch = text(13)
    model = build(Llama, {})
    split_sequences(model, mesh)
    prompt = batch["input_ids"][:, :5]
    results["trained_logits"] = model(**batch)["logits"]
    results["generated"] = model.generate(prompt, max_new_tokens=4, temperature=0.0)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    return on_ranks(tmp_path_factory.mktemp("ranks"), {"context": request.param}, split_results)


@pytest.mark.parametrize("case", list(CASES))
def test_a_split_sequence_has_the_loss_gradients_and_logits_of_one_process(ranks, case):
    expected = results_of(case)
    for found in ranks:
        torch.testing.assert_close(found[case], expected, rtol=1e-10, atol=1e-10)


def test_the_loss_is_bit_equal_on_all_ranks(ranks):
    for case in CASES:
        assert len({float(found[case]["loss"]) for found in ranks}) == 1


def test_a_training_step_joins_no_logits(ranks):
    assert all(found["trained_logits"] is None for found in ranks)


def test_all_ranks_generate_the_same_text(ranks):
    model = build(Llama, {})
    expected = model.generate(text(13)["input_ids"][:, :5], max_new_tokens=4, temperature=0.0)
    for found in ranks:
        assert torch.equal(found["generated"], expected)


def test_a_model_that_cannot_split_its_sequences_is_rejected_by_name(tmp_path):
    def act(mesh):
        model = T5(vocab_size=WORDS, hidden_size=16, num_layers=1, num_heads=2)
        with raises(ConfigError):
            split_sequences(model, mesh)

    on_ranks(tmp_path, {"context": 2}, act)
