"""Writes preferences_trl.json: losses and metrics of TRL's trainers on the cases of preference_cases.py.

pip install --no-deps --target /tmp/trl trl
PYTHONPATH=/tmp/trl python tests/references/preferences_trl.py
"""

import json
import sys
import tempfile
from pathlib import Path

import transformers
import trl
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

sys.path.insert(0, str(Path(__file__).parent))
import preference_cases as cases

COMMON = {
    "max_steps": cases.STEPS,
    "per_device_train_batch_size": cases.BATCH_SIZE,
    "learning_rate": cases.RATE,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "max_length": cases.MAX_LENGTH,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def recording(kind):
    """Returns the trainer class, in the order of the rows and with the exact losses, which the log rounds."""

    class Recording(kind):
        def _get_train_sampler(self, *args):
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.lines.append({"loss": loss.item()})
            return loss

        def log(self, logs, *args, **kwargs):
            stored = getattr(self, "_metrics", None) or self._stored_metrics
            found = {name: sum(values) / len(values) for name, values in stored["train"].items()}
            if found:
                kept = (*cases.METRICS, "kl", "accuracy", "margin", "mean_reward")
                kept += () if isinstance(self, CPOTrainer) else ("nll_loss",)
                self.lines[-1] |= {name: float(found[name]) for name in kept if name in found}
            super().log(logs, *args, **kwargs)

    Recording.lines = []
    return Recording


def run(kind, config, options, *, paired=True, head="lm"):
    """Returns the loss and the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        cases.save_base(folder, head=head)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        auto = transformers.AutoModelForSequenceClassification if head == "score" else transformers.AutoModelForCausalLM
        trainer = recording(kind)(
            model=auto.from_pretrained(folder),
            args=config(**{"output_dir": folder, **COMMON, **options}),
            train_dataset=Dataset.from_list(cases.make_rows(paired=paired)),
            processing_class=tokenizer,
        )
        trainer.train()
        return trainer.lines


if __name__ == "__main__":
    results = {"trl": trl.__version__, "transformers": transformers.__version__}
    for name, options in cases.LOSSES.items():
        if name == "kto":
            results[name] = run(trl.KTOTrainer, trl.KTOConfig, options, paired=False)
        elif name == "orpo":
            results[name] = run(ORPOTrainer, ORPOConfig, options)
        elif name == "simpo":
            results[name] = run(CPOTrainer, CPOConfig, {"loss_type": name, "cpo_alpha": 0.0, **options})
        else:
            results[name] = run(trl.DPOTrainer, trl.DPOConfig, {"loss_type": name, **options})
    reward = {**cases.REWARD, "max_length": cases.SIZES["max_position_embeddings"], "learning_rate": cases.REWARD_RATE}
    results["reward"] = run(trl.RewardTrainer, trl.RewardConfig, reward, head="score")
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
