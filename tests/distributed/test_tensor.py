"""Models that are split along the tensor axis train as whole ones do, in float64, to the last digits."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from torch.utils.checkpoint import checkpoint

from trainwright.models.bert import Bert, BertClassifier
from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora
from trainwright.models.t5 import T5
from trainwright.models.vit import ViT
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.pipeline import Pipeline, split_layers
from trainwright.parallel.sharding import packaged_rules, plan_sharding
from trainwright.parallel.tensor import split_tensors

SMALL = {"hidden_size": 16, "num_layers": 2, "num_heads": 4}
TOKENS = torch.randint(0, 33, (4, 7), generator=torch.Generator().manual_seed(1))  # 7 positions: uneven over ranks
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
# The last rows are padded, on the right; all rows have equally many labels, so that means over rows agree.
PADDED = {**TEXT, "attention_mask": (torch.arange(7) < torch.tensor([[7], [5], [7], [5]])).long()}
PAIRS = {"input_ids": TOKENS, "labels": torch.tensor([0, 2, 1, 0])}
IMAGES = {
    "pixel_values": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64),
    "labels": torch.tensor([0, 2, 1, 0]),
}


def with_adapters(model, *layers, dropout=0.0):
    add_lora(model, match=layers, rank=3, dropout=dropout)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter)
    return model


MODELS = {
    "llama": (lambda: Llama(vocab_size=34, num_kv_heads=2, attention_bias="qkv", **SMALL), PADDED),
    "llama_untied": (lambda: Llama(vocab_size=33, tie_embeddings=False, attention_bias="all", **SMALL), TEXT),
    "llama_dropout": (lambda: Llama(vocab_size=34, dropout=0.3, **SMALL), TEXT),
    "llama_adapters": (
        lambda: with_adapters(Llama(vocab_size=34, **SMALL), "q_proj", "o_proj", "up_proj", "down_proj", dropout=0.2),
        TEXT,
    ),
    "gpt2": (lambda: GPT2(vocab_size=33, **SMALL), PADDED),
    "gpt2_dropout": (lambda: GPT2(vocab_size=34, dropout=0.3, tie_embeddings=False, **SMALL), TEXT),
    "gpt2_adapters": (lambda: with_adapters(GPT2(vocab_size=33, **SMALL), "c_attn", "c_proj"), TEXT),
    "bert": (lambda: Bert(vocab_size=33, pad_token_id=int(TOKENS[0, 0]), **SMALL), PADDED),
    "bert_classifier": (lambda: BertClassifier(vocab_size=34, num_labels=3, dropout=0.2, **SMALL), PAIRS),
    "vit": (lambda: ViT(num_labels=3, image_size=8, patch_size=4, dropout=0.2, **SMALL), IMAGES),
    "t5": (lambda: T5(vocab_size=33, **SMALL), PADDED),
    "t5_gated": (lambda: T5(vocab_size=34, feed_forward="gated-gelu", tie_embeddings=False, **SMALL), TEXT),
}


def made(make):
    torch.manual_seed(0)
    return make().double().train()


def distance(make, batch, mesh, *, change=None):
    """Trains a whole and a split model; returns how far losses, gradients and evaluations are apart at most.

    On ranks along fsdp each takes rows of its own, of which the whole model takes all.
    """
    alone, split = made(make), made(make)
    plan = plan_sharding(split, packaged_rules(split), mesh.sizes)
    split_tensors(split, plan, mesh)
    if change is not None:
        change(split)
    if mesh.size("fsdp") > 1:
        shard_parameters(split, mesh, settings=SplitSettings(), device=torch.device("cpu"), data_dim=plan.data_dim)
    rows = slice(mesh.data_rank, None, mesh.num_data_ranks)
    own = {name: values[rows] for name, values in batch.items()}
    optimizers = [
        torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2, foreach=True)
        for model in (alone, split)
    ]
    worst = [0.0]
    for step in range(2):
        torch.manual_seed(step)
        expected = alone(**batch)["loss"]
        torch.manual_seed(step)
        loss = split(**own)["loss"]
        expected.backward()
        loss.backward()
        if mesh.num_data_ranks == 1:
            worst.append(float((loss - expected).abs()))
        assert [one.grad is None for one in alone.parameters()] == [one.grad is None for one in split.parameters()]
        for (name, one), (other_name, other) in zip(alone.named_parameters(), split.named_parameters(), strict=True):
            assert name == other_name
            if one.grad is not None:
                assert other.grad.placements == other.placements, name
                worst.append(float((one.grad - other.grad.full_tensor()).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        expected, outputs = alone.eval()(**batch), split.eval()(**batch)
    worst += [float((expected[name] - outputs[name]).abs().max()) for name in ("loss", "logits")]
    return max(worst)


def test_every_shipped_model_trains_on_two_tensor_ranks_as_on_one(tmp_path):
    def act(mesh):
        return {name: distance(*each, mesh) for name, each in MODELS.items()}

    for distances in on_ranks(tmp_path, {"tensor": 2}, act):
        assert set(distances) == set(MODELS)
        assert max(distances.values()) < 1e-10, distances


# Each is split along either axis alone above and in tests/parallel: one shows that both go together.
OF_BOTH_AXES = [("llama",), pytest.param(("llama_untied", "gpt2", "bert", "vit", "t5"), marks=pytest.mark.slow)]


@pytest.mark.parametrize("names", OF_BOTH_AXES, ids=lambda names: "-".join(names))
def test_every_shipped_model_trains_on_two_data_by_two_tensor_ranks_as_on_one(names, tmp_path):
    def act(mesh):
        found = {}
        for name in names:
            make, batch = MODELS[name]
            # Dropout draws by rows, and these are dealt out here.
            found[name] = distance(lambda make=make: without_dropout(make()), batch, mesh)
        return found

    for distances in on_ranks(tmp_path, {"fsdp": 2, "tensor": 2}, act):
        assert max(distances.values()) < 1e-10, distances


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def recompute(model):
    for block in model.get_submodule(model.blocks):
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)


def compile_block(model):
    block = model.get_submodule(model.blocks)[0]
    block.compile(backend="eager", fullgraph=True, dynamic=False)


@pytest.mark.parametrize("name", ["llama_dropout", pytest.param("gpt2_dropout", marks=pytest.mark.slow)])
def test_split_blocks_may_be_recomputed(name, tmp_path):
    distances = on_ranks(tmp_path, {"tensor": 2}, lambda mesh: distance(*MODELS[name], mesh, change=recompute))
    assert max(distances) < 1e-10


def test_split_blocks_may_be_compiled(tmp_path):
    even = {name: values[:, :6] for name, values in TEXT.items()}

    def make():
        return Llama(vocab_size=34, **{**SMALL, "num_layers": 1})

    distances = on_ranks(tmp_path, {"tensor": 2}, lambda mesh: distance(make, even, mesh, change=compile_block))
    assert max(distances) < 1e-10


def stage_distance(name, mesh):
    """Runs two micro-batches over two stages; returns how far the gradients are from those of a whole model."""
    make, batch = MODELS[name]
    alone, split = without_dropout(made(make)), without_dropout(made(make))
    split_layers(split, mesh)
    split_tensors(split, plan_sharding(split, packaged_rules(split), mesh.sizes), mesh)
    pipeline = Pipeline(split, mesh, num_micro_batches=2, device=torch.device("cpu"))
    micro_batches = [{name: values[rows] for name, values in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    pipeline.run(micro_batches, lambda outputs, number: outputs["loss"])
    pipeline.sum_tied_gradients()
    for micro_batch in micro_batches:
        alone(**micro_batch)["loss"].backward()
    expected = dict(alone.named_parameters())
    own = {name: one for name, one in split.named_parameters() if one.grad is not None}
    assert own
    return max(float((one.grad.full_tensor() - expected[name].grad).abs().max()) for name, one in own.items())


# Those of language models are in tests/parallel/test_pipeline.py too.
@pytest.mark.parametrize("names", [("vit",), pytest.param(("llama", "gpt2"), marks=pytest.mark.slow)], ids="-".join)
def test_stages_of_a_pipeline_may_be_split_along_tensor(names, tmp_path):
    def act(mesh):
        return {name: stage_distance(name, mesh) for name in names}

    for distances in on_ranks(tmp_path, {"pipeline": 2, "tensor": 2}, act):
        assert max(distances.values()) < 1e-10, distances
