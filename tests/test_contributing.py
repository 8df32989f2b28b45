"""The components in CONTRIBUTING.md work as written: together they train a run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from trainwright import RunConfig, build_trainer

ROOT = Path(__file__).parents[1]


def test_the_writer_hook_model_and_trainer_of_the_guide_train_a_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for kind, block in zip(("writers", "hooks", "models", "trainers"), blocks, strict=True):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "mine.py").write_text(block, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        f"""
name: guide
output_dir: {tmp_path}/runs
model: {{type: "models/mine.py:Perceptron", num_features: 64, num_classes: 10}}
data: {{train: {{type: digits, part: train, flat: true}}}}
trainer:
  type: trainers/mine.py:SmoothTrainer
  max_steps: 4
  global_batch_size: 8
  optimizer: {{type: adamw, lr: 1e-3}}
hooks: [{{type: "hooks/mine.py:GradientFreeShare"}}]
writers: [{{type: "writers/mine.py:LossWriter"}}]
log: {{every_steps: 2}}
""",
        encoding="utf-8",
    )
    trainer = build_trainer(RunConfig.load(tmp_path / "run.yaml"))
    trainer.train()
    assert trainer.storage.line["gradient_free_share"] == 0.0
    assert 0.0 <= trainer.storage.line["accuracy"] <= 1.0
    first, *lines = (trainer.folder / "loss.csv").read_text("utf-8").splitlines()
    assert first.startswith("# guide ")
    assert [line.split(",")[0] for line in lines] == ["2", "4"]
    assert all(torch.isfinite(torch.tensor(float(line.split(",")[1]))) for line in lines)
