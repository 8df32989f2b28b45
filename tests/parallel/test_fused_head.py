"""Head and loss in one under FSDP: the model's forward gathers the head's weight, whichever way it is tied."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from torch.distributed.tensor import DTensor

from trainwright.models.bert import Bert
from trainwright.models.gpt2 import GPT2
from trainwright.models.layers.losses import is_plain_head
from trainwright.models.llama import Llama
from trainwright.models.transformers_kernels import fuse_head
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters

CPU = torch.device("cpu")
SMALL = {"vocab_size": 23, "hidden_size": 16, "num_layers": 2, "num_heads": 2}


def transformers_llama(*, tied, fused):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)
    model = LlamaForCausalLM(config)
    if fused:
        fuse_head(model, wanted=True)
    return model


MODELS = {
    "llama": lambda fused: Llama(**SMALL, fused_loss=fused),
    "llama, tied": lambda fused: Llama(**SMALL, fused_loss=fused, tie_embeddings=True),
    "gpt2, tied": lambda fused: GPT2(**SMALL, fused_loss=fused),
    "bert, tied, with a bias": lambda fused: Bert(**SMALL, fused_loss=fused),
    "transformers": lambda fused: transformers_llama(tied=False, fused=fused),
    "transformers, tied": lambda fused: transformers_llama(tied=True, fused=fused),
}


def build(name, *, fused):
    torch.manual_seed(0)
    return MODELS[name](fused).double().train()


def batch_of(rank):
    ids = torch.randint(1, 23, (2, 6), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def pass_of(model, batch):
    outputs = model(**batch)
    outputs["loss"].backward()
    return outputs["loss"].item(), outputs.get("logits") is None


def full(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Losses, whether there were no logits, and averaged gradients of two ranks."""

    def act(mesh):
        found = {}
        for name in MODELS:
            model = build(name, fused=True)
            sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
            loss, is_fused = pass_of(model, batch_of(mesh.rank("fsdp")))
            sync.finish()
            found[name] = loss, is_fused, {each: full(value.grad) for each, value in model.named_parameters()}
        return found

    return on_ranks(tmp_path_factory.mktemp("fused"), {"fsdp": 2}, act)


@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_head_is_fused_and_has_the_loss_and_gradients_of_a_whole_one(sharded, name):
    whole = build(name, fused=False)
    losses = [pass_of(whole, batch_of(rank)) for rank in range(2)]
    limit = 1e-6 if name.startswith("transformers") else 1e-12  # whose stock loss is in fp32
    for rank, found in enumerate(sharded):
        loss, is_fused, gradients = found[name]
        assert is_fused
        assert loss == pytest.approx(losses[rank][0], rel=limit)
        for key, parameter in whole.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[key], parameter.grad / 2, rtol=1e3 * limit, atol=limit)


def test_a_head_that_is_a_block_of_its_own_is_left_to_its_forward(tmp_path):
    """FSDP gathers it around its own call alone: a product with its weight would meet a shard."""

    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 7)), torch.nn.Linear(1024, 1024)])

        def forward(self, x):
            return is_plain_head(self.heads[1])

    def act(mesh):
        model = TwoHeads()
        shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
        return model(torch.randn(2, 4))

    assert on_ranks(tmp_path, {"fsdp": 2}, act) == [False, False]
