"""Rows of what users were promised elsewhere that no other file of this folder holds: one test a promise."""

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.doors.folders import lines, load, write
from tests.doors.function_runs import Classifier, run

from trainwright import Trainer, build_trainer, run_experiment

FILES = {
    "run.yaml": """
        name: mine
        model: {type: net.Net}
        data: {train: {type: words.Words}}
        trainer: {max_steps: 4, global_batch_size: 4, optimizer: {type: sgd, lr: 0.1}}
        writers: [json]
        log: {every_steps: 1}
        runtime: {device: cpu}
        """,
    "models/net.py": """
        import torch
        from torch import nn


        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(8, 4)
                self.layers = nn.ModuleList(nn.ModuleDict({"mlp": nn.Linear(4, 4)}) for _ in range(2))
                self.head = nn.Linear(4, 8)
                self.criterion = nn.CrossEntropyLoss()

            def forward(self, tokens):
                x = self.embed(tokens).mean(1)
                for layer in self.layers:
                    x = x + layer["mlp"](x)
                return {"logits": self.head(x)}


        class Adapter(nn.Module):
            \"\"\"As an adapter mixin: the old module's output, and a small way around it.\"\"\"

            def __init__(self, width, replaces):
                super().__init__()
                self.old = replaces.requires_grad_(False)
                self.down, self.up = nn.Linear(4, width), nn.Linear(width, 4)
                nn.init.zeros_(self.up.weight)
                nn.init.zeros_(self.up.bias)

            def forward(self, x):
                return self.old(x) + self.up(torch.relu(self.down(x)))
        """,
    "datasets/words.py": """
        import torch


        class Words:
            tokens_per_sample = 6

            def __len__(self):
                return 16

            def __getitem__(self, index):
                return {"tokens": (torch.arange(6) * index) % 8, "labels": torch.tensor(index % 8)}
        """,
}


@pytest.fixture
def project(tmp_path):
    return write(tmp_path, FILES)


# SwissArmyTransformer


def test_a_mixin_changes_a_model_s_mlp_without_editing_it(project):
    """A mixin there is `model.replace` here."""
    plain = build_trainer(load(project, "name=plain"))
    rule = "model.replace={layers.*.mlp: {type: net.Adapter, width: 2}}"
    config = load(project, rule)
    trainer = build_trainer(config)
    assert [type(layer["mlp"]).__name__ for layer in trainer.model.layers] == ["Adapter", "Adapter"]
    tokens = torch.arange(6)[None]
    # The way around begins with nothing: the model is the one that it was.
    assert torch.equal(trainer.model(tokens)["logits"], plain.model(tokens)["logits"])
    old = trainer.model.layers[0]["mlp"].old.weight.clone()
    trainer.train()
    assert torch.equal(trainer.model.layers[0]["mlp"].old.weight, old)
    assert trainer.model.layers[0]["mlp"].up.weight.any()


def test_parameters_marked_no_weight_decay_are_not_decayed(in_tmp):
    class Marked(Classifier):
        def __init__(self):
            super().__init__()
            for parameter in self.parameters():
                parameter.no_weight_decay = True

    def train(model_cls, name, decay):
        torch.manual_seed(0)
        words = ("--train-iters", "3", "--weight-decay", decay, "--lr", "0.1", "--experiment-name", name)
        return run(*words, model_cls=model_cls).state_dict()

    decayed, free = train(Classifier, "decayed", "0.5"), train(Classifier, "free", "0")
    marked = train(Marked, "marked", "0.5")
    assert all(torch.equal(marked[name], free[name]) for name in free)
    assert not any(torch.equal(decayed[name], free[name]) for name in free if name.endswith("weight"))


WITHOUT = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deepspeed", "wandb", "apex", "triton", "tensorboard", "transformers"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Refuses())
import trainwright
for name in trainwright.__all__:
    getattr(trainwright, name)
import torch
assert not torch.cuda.is_initialized()
assert not {"deepspeed", "wandb"} & sys.modules.keys()
"""


def test_everything_is_imported_without_cuda_deepspeed_and_wandb():
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


# easy-torch-tpu


def test_the_atoms_that_a_run_has_seen_are_logged(project):
    build_trainer(load(project, "hooks=[{type: count_progress}]")).train()
    assert [line["tokens_seen"] for line in lines(project)] == [24, 48, 72, 96]
    build_trainer(load(project, "hooks=[{type: count_progress}]", "trainer.max_steps=5")).train()
    assert lines(project)[-1]["tokens_seen"] == 120


COLLATE = """
import torch


def collate(samples, turn=0):
    stacked = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    return {**stacked, "labels": (stacked["labels"] + turn) % 8}
"""


def test_a_plain_function_is_a_collator(project):
    write(project, {"collators/plain.py": COLLATE})
    collators = {"stack": "stack", "plain": "plain.collate", "turned": "{type: plain.collate, turn: 3}"}
    for name, collator in collators.items():
        build_trainer(load(project, f"name={name}", f"data.collator={collator}")).train()
    stack, plain, turned = ([line["loss"] for line in lines(project, name)] for name in collators)
    assert stack == plain != turned


# LiBai


class Medians(Trainer):
    """Writes the median of the last 20 losses, as LiBai's writers do."""

    def train_loop_end(self):
        last = [float(value) for _, value in self.storage.history("loss")[-20:]]
        return {**super().train_loop_end(), "loss_median": statistics.median(last)}


def test_a_median_of_the_last_20_values_is_in_the_line_if_one_wants_it(project):
    run_experiment(load(project, "trainer.max_steps=24"), trainer=Medians)
    written = lines(project)
    losses = [line["loss"] for line in written]
    assert written[-1]["loss_median"] == pytest.approx(statistics.median(losses[-20:]))
    assert written[4]["loss_median"] == pytest.approx(statistics.median(losses[:5]))
    assert Path(project / "runs" / "mine" / "metrics.json").is_file()
