"""Packed documents train transformers' own classes on a sharded model as in one process, and crossing is rejected."""

import json
from pathlib import Path

import pytest
import torch
from tests.distributed.forked_launch import forget_groups, launch_well

from trainwright import RunConfig, build_trainer
from trainwright.errors import ConfigError
from trainwright.parallel import processes

transformers = pytest.importorskip("transformers")
LLAMA = (
    "model={type: transformers:LlamaForCausalLM, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, "
    "intermediate_size: 32, vocab_size: 23, max_position_embeddings: 16"
)
GPT2 = "model={type: transformers:GPT2LMHeadModel, n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 23, n_positions: 16, "
GPT2 += "embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0"
HERE = Path(__file__).name
CASES = {
    "llama": (LLAMA + "}", "documents"),
    "llama-mask": (LLAMA + "}", "mask"),
    "gpt2-mask": (GPT2 + "}", "mask"),
    "crossing": (LLAMA + ", attn_implementation: blind}", "mask"),
}


class Documents(torch.utils.data.Dataset):
    """Rows of several documents each, packed."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 2 + int(torch.randint(4, (1,), generator=generator))
        return {"input_ids": torch.randint(1, 23, (length,), generator=generator).tolist()}


def blind(module, query, key, value, attention_mask, **options):
    """An attention without any mask."""
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    return attended.transpose(1, 2).contiguous(), None


def main(folder):
    transformers.AttentionInterface.register("blind", blind)
    world, rank = processes.world_size(), processes.rank_and_size().rank
    for name, (model, borders) in CASES.items():
        forget_groups()
        config = RunConfig.load(
            Path(__file__).with_name("pipeline_run.yaml"),
            [
                *(f"output_dir={folder}", f"name={name}", model, "data.eval={}", "evaluation={}"),
                f"data.train={{type: pack, length: 12, borders: {borders}, source: {{type: {HERE}:Documents}}}}",
                *("data.collator={type: stack}", "trainer.max_steps=2", "checkpoint.every_steps=null"),
                *("trainer.micro_batch_size=4", "trainer.global_batch_size=8", f"runtime.mesh={{fsdp: {world}}}"),
            ],
        )
        trainer = build_trainer(config)
        try:
            trainer.train()
        except ConfigError as error:
            (folder / f"{name}-{rank}.error").write_text(str(error))


def test_packed_documents_train_a_sharded_model_of_transformers(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    main(one)
    launch_well(two, 2, main)
    for name in CASES:
        if name == "crossing":
            continue
        left, right = (read(folder / name) for folder in (one, two))
        assert left == pytest.approx(right, rel=1e-4), name
    for error in [one / "crossing-0.error", *(two / f"crossing-{rank}.error" for rank in range(2))]:
        assert "LlamaForCausalLM" in error.read_text()
        assert "FSDP" not in error.read_text()


def read(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.json").read_text().splitlines()]
