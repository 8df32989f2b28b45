"""Runs on the rows and the model of tests/references, which several test files use."""

import json
from copy import deepcopy

import yaml
from tests.references import preference_cases as cases

from trainwright import RunConfig

TIMED = ("_per_second", "_per_step", "slowest_rank_share")

ROWS = {"type": "preferences", "path": "rows.jsonl", "tokenizer": "base", "max_length": cases.MAX_LENGTH}

# The trainer, the model and the data of runs on the same rows with other trainers.
REWARD_HEAD = {"lm_head": {"type": "torch.nn:Linear", "in_features": 32, "out_features": 1, "bias": False}}
REWARD = ({"type": "reward"}, {"type": "llama", "replace": REWARD_HEAD}, {})
TEACHER = {"type": "transformers:LlamaForCausalLM", "pretrained": "base"}
DISTILL = (
    {"type": "distill", "teacher": TEACHER, "alpha": 0.7},
    {"type": "llama", "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "pretrained": None},
    {
        "train": {"type": "json_lines", "path": "rows.jsonl"},
        "collator": {
            "type": "tokenize",
            "tokenizer": "base",
            "prompt": "prompt",
            "completion": "chosen",
            "drop": ["rejected"],
        },
    },
)


def settings(folder, *, loss_type="sigmoid", model="transformers:LlamaForCausalLM", steps=cases.STEPS, **trainer):
    """The config of a run in a folder that has `base` and `rows.jsonl`, as a dict."""
    return {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "seed": 3,
        "writers": ["json"],
        "log": {"every_steps": 1},
        "model": {"type": model, "pretrained": "base"},
        "data": {
            "train": dict(ROWS),
            "collator": {"type": "preferences", "tokenizer": "base"},
            "shuffle": False,
        },
        "trainer": {
            "type": "dpo",
            "loss_type": loss_type,
            "max_steps": steps,
            "global_batch_size": cases.BATCH_SIZE,
            "optimizer": {"type": "sgd", "lr": cases.RATE},
            **trainer,
        },
    }


def prepare(folder, *, paired=True, head="lm", number=cases.STEPS * cases.BATCH_SIZE):
    """Writes the model and the rows into a folder."""
    cases.save_base(folder / "base", head=head)
    cases.write_rows(folder / "rows.jsonl", cases.make_rows(number, paired=paired))


def settings_of(folder, trainer, model, data, **options):
    """The config of a case: `trainer`, `model` and `data` are added to the sections of `settings`."""
    content = settings(folder, **options)
    if "type" in trainer:
        del content["trainer"]["loss_type"]
    for name, section in (("trainer", trainer), ("model", model), ("data", data)):
        content[name] |= deepcopy(section)
    return content


def load(folder, content, *overrides):
    """Writes the config as a file, and loads it."""
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return RunConfig.load(folder / "run.yaml", overrides)


def lines_of(folder, name="run"):
    """The lines of metrics.json."""
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.json").read_text().splitlines()]
