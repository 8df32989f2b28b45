"""A tiny language model on bytes, trained for some steps: what exports and texts are made of."""

from __future__ import annotations

import textwrap

from trainwright import RunConfig, build_trainer

TEXT = "def grüße(x):\n    return '€' + x\n" * 40

RUN = """
name: bytes
model: {type: llama, vocab_size: 260, hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, max_positions: 64}
data:
  train: {type: pack, length: 32, tokenizer: bytes, source: {type: text, path: text.txt}}
trainer:
  type: language_model
  max_steps: 4
  global_batch_size: 4
  optimizer: {type: adamw, lr: 1e-2}
checkpoint: {every_steps: 2, keep_last: 3}
runtime: {device: cpu}
"""


def train_run(folder, text=RUN, overrides=()):
    """Trains a run in a folder of its own; returns its run folder and the trainer."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "run.yaml").write_text(textwrap.dedent(text))
    config = RunConfig.load(folder / "run.yaml", [f"output_dir={folder / 'runs'}", "writers=[]", *overrides])
    trainer = build_trainer(config)
    trainer.train()
    return folder / "runs" / config.name, trainer
