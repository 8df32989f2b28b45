"""Records the losses of TRL's SFTTrainer for tests/trainers/test_sft_trl.py in trl_sft.json.

pip install --no-deps --target /tmp/trl trl accelerate
PYTHONPATH=/tmp/trl:. python tests/references/trl_sft.py
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from tests.data.chats import PREFIX_TEMPLATE
from tests.references import sft_case as case
from trl import SFTConfig, SFTTrainer


class InOrder(SFTTrainer):
    """Reads the rows in the order in which they are given."""

    def _get_train_sampler(self, *arguments):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(folder, **settings):
    """Returns the loss of each step."""
    arguments = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        assistant_only_loss=True,
        learning_rate=case.LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **{"max_length": case.MAX_LENGTH, "max_steps": case.NUM_STEPS, **settings},
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    trainer = InOrder(
        model=model, args=arguments, train_dataset=Dataset.from_list(case.make_rows()), processing_class=tokenizer
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def prepare(folder, rows):
    """Returns the tokens and labels of prompts with completions."""
    arguments = SFTConfig(output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False, max_length=None)
    trainer = SFTTrainer(
        model=transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    return [{name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset]


def main():
    folder = case.make_folder(tempfile.mkdtemp())
    losses = {
        "unpacked": train(folder, per_device_train_batch_size=case.BATCH_SIZE),
        "accumulated": train(folder, per_device_train_batch_size=1, gradient_accumulation_steps=case.BATCH_SIZE),
        "packed": train(
            folder,
            packing=True,
            max_length=case.PACKED_LENGTH,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1000,
            max_steps=case.PACKED_STEPS,
        ),
    }
    found = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "losses": losses,
        "completions": {
            kind: prepare(case.make_folder(tempfile.mkdtemp(), PREFIX_TEMPLATE), rows)
            for kind, rows in case.make_completions().items()
        },
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
