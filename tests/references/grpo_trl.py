"""Writes grpo_trl.json: losses and metrics of TRL's GRPOTrainer on the completions of grpo_cases.py.

pip install trl
PYTHONPATH=. python tests/references/grpo_trl.py
"""

import json
import tempfile
from pathlib import Path
from typing import ClassVar

import transformers
import trl
from datasets import Dataset
from tests.references import grpo_cases as cases
from tests.references import preference_cases
from transformers import AutoModelForCausalLM, AutoTokenizer

COMMON = {
    "max_steps": None,
    "per_device_train_batch_size": cases.NUM_PROMPTS * cases.NUM_GENERATIONS,
    "gradient_accumulation_steps": 1,
    "learning_rate": cases.RATE,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "shuffle_dataset": False,
    "reward_weights": list(cases.WEIGHTS),
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


class Recording(trl.GRPOTrainer):
    """Keeps the exact losses, which the log rounds, and the metrics of each update."""

    lines: ClassVar[list] = []

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.lines.append({"loss": loss.item()})
        return loss

    def log(self, logs, *args, **kwargs):
        stored = self._metrics["train"]
        if stored:
            self.lines[-1] |= {name: float(stored[name][-1]) for name in cases.METRICS if stored.get(name)}
        super().log(logs, *args, **kwargs)


def run(options):
    """Returns the loss and the metrics of each update."""
    Recording.lines = []
    table = dict(zip(cases.prompts(), cases.completions(), strict=True))

    with tempfile.TemporaryDirectory() as folder:
        preference_cases.save_base(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)

        def rollout(prompts, trainer):
            found = [table[prompt][number % cases.NUM_GENERATIONS] for number, prompt in enumerate(prompts)]
            ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
            return {"prompt_ids": ids, "completion_ids": found, "logprobs": None}

        num_iterations = options.get("num_iterations", 1)
        settings = {**COMMON, **cases.COMMON, **options, "max_steps": num_iterations * cases.NUM_BATCHES}
        trainer = Recording(
            model=AutoModelForCausalLM.from_pretrained(folder),
            args=trl.GRPOConfig(output_dir=folder, **settings),
            reward_funcs=[cases.evenness, cases.brevity],
            train_dataset=Dataset.from_list([{"prompt": each} for each in cases.prompts()]),
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()
        return trainer.lines


if __name__ == "__main__":
    results = {"trl": trl.__version__, "transformers": transformers.__version__}
    results |= {name: run(options) for name, options in cases.CASES.items()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
