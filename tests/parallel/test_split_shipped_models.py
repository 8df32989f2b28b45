"""Every shipped model trains split over ranks as it does in one process, with adapters and frozen parts too."""

import pytest
import torch
from tests.parallel.forked_ranks import on_ranks
from tests.parallel.split_training import CPU, assert_equal, whole
from torch.distributed.tensor import DTensor

from trainwright.models.bert import Bert
from trainwright.models.cnn import CNN
from trainwright.models.gpt2 import GPT2
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora
from trainwright.models.t5 import T5
from trainwright.models.vit import ViT
from trainwright.optim.adamw import AdamW
from trainwright.parallel.fully_shard import SplitSettings, shard_parameters
from trainwright.parallel.mesh import Mesh

TEXT = {"vocab_size": 31, "hidden_size": 24, "num_heads": 4, "num_layers": 2}


def words(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 31, (4, 7), generator=generator) for name in ("input_ids", "labels")}


def images(size):
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64),
        "labels": torch.tensor([0, 1, 2, 1]),
    }


def with_lora():
    model = Llama(**TEXT)
    add_lora(model, match=["*.q_proj", "*.down_proj"], rank=3)
    return model


MODELS = {
    "llama": (lambda: Llama(**TEXT, num_kv_heads=2, tie_embeddings=True), words()),
    "llama_untied": (lambda: Llama(**TEXT, tie_embeddings=False), words()),
    "llama_lora": (with_lora, words()),
    "gpt2": (lambda: GPT2(**TEXT, dropout=0.0), words()),
    "bert": (lambda: Bert(**TEXT, dropout=0.0), words()),
    "vit": (
        lambda: ViT(num_labels=3, image_size=8, patch_size=4, hidden_size=24, num_heads=4, num_layers=2),
        images(8),
    ),
    "t5": (lambda: T5(vocab_size=31, hidden_size=24, num_heads=4, num_layers=2, dropout=0.0), words()),
    "cnn": (lambda: CNN(num_labels=3), images(8)),
}


def train(name, mesh):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().double().train()
    sync = shard_parameters(model, mesh, settings=SplitSettings(), device=CPU)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    num_ranks = mesh.size("fsdp", "replicate")
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        own = {key: value.chunk(num_ranks)[mesh.data_rank] for key, value in batch.items()}
        loss = model(**own)["loss"]
        loss.backward()
        sync.finish()
        optimizer.step()
        losses.append(loss.item())
    num_split = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    return losses, whole(model), num_split, len(list(model.parameters()))


HYBRID = {"replicate": 2, "fsdp": 2}
SOME = ("llama", "llama_lora")
"""Two along both axes say what the others along one do not."""
OTHERS = tuple(name for name in MODELS if name not in SOME)


@pytest.mark.parametrize(
    ("axes", "names"),
    [({"fsdp": 2}, tuple(MODELS)), (HYBRID, SOME), pytest.param(HYBRID, OTHERS, marks=pytest.mark.slow)],
    ids=["fsdp", "hybrid", "hybrid, others"],
)
def test_shipped_models_train_split_as_they_do_whole(axes, names, tmp_path):
    ranks = on_ranks(tmp_path, axes, lambda mesh: {name: train(name, mesh) for name in names})
    for name in names:
        if name == "cnn":
            continue  # its BatchNorms see each rank's samples alone; that it trains at all is tested by coming here
        losses, weights, _, _ = train(name, Mesh())
        together = torch.tensor([rank[name][0] for rank in ranks], dtype=torch.float64).mean(0)
        assert together.tolist() == pytest.approx(losses, rel=1e-10), name
        for rank in ranks:
            assert_equal(rank[name][1], weights, tolerance=1e-9)
            assert rank[name][2] == rank[name][3]  # nothing stays whole


def gradients_in_bf16(name, mesh, gather_dtype):
    """Returns the loss and the gradient's norm of a rank's samples, under autocast with fp32 weights."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().float().train()
    sync = shard_parameters(model, mesh, settings=SplitSettings(gather_dtype=gather_dtype), device=CPU)
    own = {key: value.chunk(2)[mesh.data_rank] for key, value in batch.items()}
    own = {key: value.float() if value.is_floating_point() else value for key, value in own.items()}
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(**own)["loss"]
    loss.backward()
    sync.finish()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    squares = [gradient.full_tensor().square().sum() for gradient in gradients]
    return loss.item(), torch.stack(squares).sum().sqrt().item()


def test_parameters_gathered_in_bf16_train_as_under_autocast_to_rounding(tmp_path):
    """Norms and embeddings are rounded to bf16 too, which autocast would not do."""

    def act(mesh):
        return {name: [gradients_in_bf16(name, mesh, dtype) for dtype in (None, torch.bfloat16)] for name in MODELS}

    for rank in on_ranks(tmp_path, {"fsdp": 2}, act):
        for name, (wide, narrow) in rank.items():
            assert narrow == pytest.approx(wide, rel=2e-2), name
