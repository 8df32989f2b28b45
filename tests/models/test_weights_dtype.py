"""`model.dtype`: the type of a model's weights, and training them with masters in fp32."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises

from trainwright import RunConfig, build_trainer
from trainwright.analysis.estimate import TEMPORARY, HeldBytes
from trainwright.config import ModelSection
from trainwright.errors import ConfigError
from trainwright.models.from_config import build_model_section

SIZES = {"vocab_size": 23, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
FILE = """
import torch


class Own(torch.nn.Module):
    def __init__(self, dtype="fp32"):
        super().__init__()
        self.told = dtype
        self.layer = torch.nn.Linear(2, 2)


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 23
        return {"input_ids": ids, "labels": ids}
"""


def build(tmp_path, **section):
    made = ModelSection.from_mapping(section)
    return build_model_section(made, project_dir=tmp_path, origin=lambda setting: None)[0]


def test_weights_have_the_dtype_and_buffers_keep_theirs(tmp_path):
    model = build(tmp_path, type="llama", dtype="bf16", max_positions=16, **SIZES)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert all(each.dtype != torch.bfloat16 for each in model.buffers())


@pytest.mark.parametrize("section", [{"type": "llama", **SIZES}, {"type": "gpt2", "preset": "tiny"}, {"type": "vit"}])
def test_weights_are_those_of_fp32_rounded(tmp_path, section):
    section = {"preset": "tiny", **section} if section["type"] == "vit" else section
    torch.manual_seed(0)
    model = build(tmp_path, dtype="bf16", **section)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    whole = build(tmp_path, **section)
    assert all(
        torch.equal(one, other.bfloat16()) for one, other in zip(model.parameters(), whole.parameters(), strict=True)
    )
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_in_16_bits_are_not_built_in_fp32_first(tmp_path, name):
    """8 billion weights would need 32 GB: at most one weight is in fp32 at a time."""
    section = {"type": name, "vocab_size": 4000, "hidden_size": 128, "num_layers": 8, "num_heads": 4}
    with HeldBytes() as held:
        model = build(tmp_path, dtype="bf16", **section)
    weights = sum(each.numel() for each in model.parameters())
    assert held.most[TEMPORARY] < 2 * weights + 3 * 4 * max(each.numel() for each in model.parameters())
    assert held.most[TEMPORARY] < 4 * weights


def test_a_class_with_a_dtype_of_its_own_is_told(tmp_path):
    (tmp_path / "own.py").write_text(FILE)
    model = build(tmp_path, type="own.py:Own", dtype="bf16")
    assert (model.told, model.layer.weight.dtype) == ("bfloat16", torch.float32)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"dtype": "bf61"}, ("bf61", "model.dtype")),
        (
            {"dtype": "bf16", "pretrained": {"folder": "x", "dtype": "bf16"}},
            ("pretrained.dtype",),
        ),
    ],
)
def test_what_cannot_be_is_rejected(tmp_path, section, said):
    with raises(ConfigError, *said):
        build(tmp_path, type="llama", max_positions=16, **SIZES, **section)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_a_run_with_masters_resumes_bit_for_bit(tmp_path, optimizer):
    (tmp_path / "own.py").write_text(FILE)
    sizes = ", ".join(f"{key}: {value}" for key, value in SIZES.items())
    (tmp_path / "run.yaml").write_text(
        f"output_dir: {tmp_path}\nmodel: {{type: llama, dtype: bf16, max_positions: 16, {sizes}}}\n"
        "data: {train: {type: own.py:Text}}\nruntime: {device: cpu, precision: bf16}\n"
        "trainer: {max_steps: 6, global_batch_size: 4, micro_batch_size: 2, max_grad_norm: 1.0, optimizer: "
        f"{{type: {optimizer}, lr: 1e-3, master_weights: true}}}}\n"
    )

    def run(name, *overrides):
        trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml", [f"name={name}", *overrides]))
        trainer.train()
        return trainer

    def state(trainer):
        states = trainer.optimizers["main"].state
        return [trainer.model.state_dict(), *(states[each] for each in trainer.model.parameters())]

    straight = run("straight")
    run("halted", "trainer.max_steps=3")
    resumed = run("halted")
    assert resumed.step == 6
    for one, other in zip(state(straight), state(resumed), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)
    assert any("master" in entry for entry in state(resumed)[1:])
