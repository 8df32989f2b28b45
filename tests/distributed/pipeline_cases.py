"""Runs of a small language model on one process and on two stages; test_pipeline.py compares what they leave."""

import json
from pathlib import Path

import torch

from trainwright import Mean, RunConfig, build_trainer
from trainwright.build.run import _count_parameters
from trainwright.hooks.flops import flops_per_token
from trainwright.parallel import processes
from trainwright.trainers.language_model import LanguageModelTrainer

CASES = {
    "tied": [],
    "ragged": ["trainer.max_steps=null", "trainer.max_samples=33", "model.tie_embeddings=false"],
    "parts": ["trainer.max_steps=3"],  # goes on below
    "halves": ["trainer.type=pipeline_cases.py:Halves"],
    "gpt2": ["model={type: gpt2, vocab_size: 23, hidden_size: 16, num_heads: 2, num_layers: 3, max_positions: 16}"],
}
"""What each run changes of the file. Rows have different lengths, so that shapes change from step to step."""


class Halves(LanguageModelTrainer):
    """Splits a batch by itself: each micro-batch is half of the rows, with its own number of samples."""

    def micro_batches(self, batch):
        rows = len(batch["input_ids"])
        for part in (slice(0, rows // 2), slice(rows // 2, rows)):
            micro_batch = {name: value[part] for name, value in batch.items()}
            self.set_batch(micro_batch, len(micro_batch["input_ids"]))
            yield micro_batch


class Rows(torch.utils.data.Dataset):
    """Rows of three to nine words, drawn by their number."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 3 + int(torch.randint(7, (1,), generator=generator))
        return {"input_ids": torch.randint(1, 23, (length,), generator=generator).tolist()}


class Hits:
    """Counts right words; asks for logits and labels of the same shape."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.total = 0

    def update(self, logits, labels):
        counted = labels[:, 1:] != -100
        self.right += int(((logits[:, :-1].argmax(-1) == labels[:, 1:]) & counted).sum())
        self.total += int(counted.sum())

    def compute(self):
        return Mean(self.right, self.total)


def load(folder, name, *overrides):
    mesh = f"runtime.mesh={{pipeline: {processes.world_size()}}}"
    place = (f"output_dir={folder}", f"name={name}")
    return RunConfig.load(Path(__file__).parent / "pipeline_run.yaml", [*place, mesh, *overrides])


def main(folder):
    for name, overrides in CASES.items():
        trainer = build_trainer(load(folder, name, *overrides))
        trainer.train()
        flops = flops_per_token(trainer.model, trainer.ranks, trainer.context.updater.pipeline)
        counts = {"flops": flops, "parameters": _count_parameters(trainer)}
        (folder / f"{name}-{trainer.ranks.rank}.json").write_text(json.dumps(counts))
    build_trainer(load(folder, "parts")).train()
