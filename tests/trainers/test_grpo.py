"""GRPO: losses equal to TRL's, the same for any micro-batches, exact after a resume; rewards and their errors."""

import json
from pathlib import Path

import pytest
import torch
from tests.references import grpo_cases as cases
from tests.references import preference_cases
from tests.trainers import preference_runs as runs

from trainwright import build_trainer
from trainwright.models.generation import Completions
from trainwright.trainers.grpo import GRPOTrainer

TRL = json.loads((Path(__file__).parents[1] / "references" / "grpo_trl.json").read_text())
REFERENCES = Path(cases.__file__)


class Given(GRPOTrainer):
    """Uses the completions of the reference instead of generating them."""

    def _generate(self, batch, *, copies, temperature, seeds):
        table = dict(zip(cases.prompts(), cases.completions(), strict=True))
        rows = [ids for row in batch["rows"] for ids in table[row["prompt"]]]
        width = max(map(len, rows))
        return Completions(
            tokens=torch.tensor([ids + [0] * (width - len(ids)) for ids in rows]),
            mask=torch.tensor([[True] * len(ids) + [False] * (width - len(ids)) for ids in rows]),
            is_stopped=torch.tensor([ids[-1] == cases.END for ids in rows]),
            log_probabilities=None,
        )


def settings(folder, **trainer):
    """The config of a run on the prompts of the reference."""
    num_iterations = trainer.get("num_iterations", 1)
    return {
        "name": "run",
        "output_dir": str(folder / "runs"),
        "seed": 3,
        "writers": ["json"],
        "log": {"every_steps": 1},
        "model": {"type": "transformers:LlamaForCausalLM", "pretrained": "base"},
        "data": {
            "train": {"type": "json_lines", "path": "prompts.jsonl"},
            "collator": {"type": "prompts", "tokenizer": "base"},
            "shuffle": False,
        },
        "trainer": {
            "type": "grpo",
            "rewards": [
                {"type": f"{REFERENCES}:{name}", "weight": weight}
                for name, weight in zip(("evenness", "brevity"), cases.WEIGHTS, strict=True)
            ],
            "max_steps": cases.NUM_BATCHES * num_iterations,
            "global_batch_size": cases.NUM_PROMPTS,
            "optimizer": {"type": "sgd", "lr": cases.RATE},
            **cases.COMMON,
            **trainer,
        },
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    preference_cases.save_base(folder / "base")
    preference_cases.write_rows(folder / "prompts.jsonl", [{"prompt": each} for each in cases.prompts()])
    return folder


def train(base, tmp_path, *overrides, kind=None, **trainer):
    content = settings(base, **trainer)
    content["output_dir"] = str(tmp_path / "runs")
    made = build_trainer(runs.load(base, content, *overrides), kind)
    made.train()
    return made, runs.lines_of(tmp_path)


def assert_close(found, expected, **tolerances):
    assert len(found) == len(expected)
    for line, one in zip(found, expected, strict=True):
        untimed = {name: value for name, value in one.items() if not name.endswith(runs.TIMED)}
        assert {name: line[name] for name in untimed} == pytest.approx(untimed, **tolerances)


@pytest.mark.parametrize("model", ["transformers:LlamaForCausalLM", "llama"])
@pytest.mark.parametrize("case", cases.CASES)
def test_losses_and_metrics_are_those_of_trl(base, tmp_path, case, model):
    _, lines = train(base, tmp_path, f"model.type={model}", kind=Given, **cases.CASES[case])
    assert_close(lines, TRL[case], rel=1e-5, abs=1e-6)
    clipped = [line["clip_ratio/region_mean"] for line in lines]
    assert any(clipped) == (cases.CASES[case].get("num_iterations", 1) > 1)
