"""GRPO runs on the model and the prompts of tests/references, which several test files use."""

import copy

import yaml
from tests.references import preference_cases
from tests.trainers import preference_runs

REWARDS = '''
"""Rewards of tests: of the tokens, and of a column of the rows."""


def evenness(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class Brevity:
    def __init__(self, scale=0.1):
        self.scale = scale

    def __call__(self, completion_ids, counts):
        return [-self.scale * len(ids) if count else None for ids, count in zip(completion_ids, counts)]
'''


def prepare(folder, *, number=12):
    """Writes the model, the prompts and the rewards into a folder."""
    preference_cases.save_base(folder / "base")
    rows = preference_cases.make_rows(number)
    prompts = [{"prompt": row["prompt"], "counts": place % 3 > 0} for place, row in enumerate(rows)]
    preference_cases.write_rows(folder / "prompts.jsonl", prompts)
    preference_cases.write_rows(folder / "valid.jsonl", prompts[:5])
    (folder / "rewards").mkdir()
    (folder / "rewards" / "ours.py").write_text(REWARDS)


def settings(folder, **trainer):
    """The config of a run in a folder that `prepare` has filled, as a dict."""
    return {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "seed": 3,
        "writers": ["json"],
        "log": {"every_steps": 1},
        "model": {"type": "llama", "pretrained": "base"},
        "data": {
            "train": {"type": "json_lines", "path": "prompts.jsonl"},
            "collator": {"type": "prompts", "tokenizer": "base"},
        },
        "trainer": {
            "type": "grpo",
            "rewards": [{"type": "ours.evenness"}, {"type": "ours.Brevity", "weight": 0.5, "scale": 0.2}],
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 4,
            "global_batch_size": 4,
            "optimizer": {"type": "sgd", "lr": 0.1},
            **trainer,
        },
    }


def with_evaluation(content):
    """The same config with an evaluation after each second step."""
    content = copy.deepcopy(content)
    content["data"]["eval"] = {"valid": {"type": "json_lines", "path": "valid.jsonl"}}
    content["evaluation"] = {"every_steps": 2, "batch_size": 2}
    return content


def untimed(line):
    """A log line without what the clock decides, and without texts."""
    return {
        name: value
        for name, value in line.items()
        if not name.endswith((*preference_runs.TIMED, "completion")) and value is not None
    }


def write(folder, content, name="run.yaml"):
    """Writes the config as a file, and returns it."""
    (folder / name).write_text(yaml.safe_dump(content))
    return folder / name
