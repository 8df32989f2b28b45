"""Rows of what users were promised elsewhere that no other file of this folder holds: one test a promise."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.api.folders import equal_weights, lines, load, write
from tests.api.function_runs import Classifier, run
from tests.compile import test_graph_mode
from tests.distributed.forked_launch import launch_well
from tests.messages import mentions

from trainwright import Trainer, build_trainer, run_experiment
from trainwright.errors import TrainwrightError
from trainwright.parallel import processes

replays = test_graph_mode.replays  # a fixture

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

class Rejects:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("deepspeed", "wandb", "apex", "triton", "tensorboard", "transformers"):
            raise ImportError(f"{name} is not installed")

import torch  # whose CUDA builds look for Triton themselves
sys.meta_path.insert(0, Rejects())
import trainwright
for name in trainwright.__all__:
    getattr(trainwright, name)
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


BLOCKS = """
from typing import NamedTuple

import torch
from torch import nn


class Outputs(NamedTuple):
    added: torch.Tensor
    inner: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden):
        inner = torch.relu(self.up(hidden))
        return Outputs(self.down(inner), inner.detach())


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 8)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            outputs = layer(hidden)
            hidden = hidden + outputs.added
        self.layouts = [str(getattr(each, "placements", list(each.shape))) for each in outputs]
        return {"logits": self.head(hidden).mean(1)}
"""
RULES = """
layers.*.up.weight: [[fsdp, tensor], null]
layers.*.up.bias: [tensor]
layers.*.down.weight: [null, tensor]
layers.*.down.bias: null
layers.*[0]: [[replicate, fsdp], tensor, null]
embed: [[replicate, fsdp], tensor, null]
"""


def test_rules_put_two_axes_on_one_dim_and_pick_one_of_several_outputs(project):
    """As they are written there, in one list of globs; only the axes have other names."""
    write(project, {"models/blocks.py": BLOCKS, "sharding/blocks.yaml": RULES})
    model = "model.type=blocks.Blocks"
    alone = build_trainer(load(project, model, "name=alone"))
    alone.train()

    def act(folder):
        config = load(folder, model, "model.sharding=sharding/blocks.yaml", "runtime.mesh={fsdp: 2, tensor: 2}")
        trainer = build_trainer(config)
        trainer.train()
        up, down = trainer.model.layers[1].up.weight, trainer.model.layers[1].down.weight
        told = [list(up.to_local().shape), list(down.to_local().shape), *trainer.model.layouts]
        (folder / f"{trainer.ranks.rank}.json").write_text(json.dumps(told))

    launch_well(project, 4, act)
    told = [json.loads((project / f"{rank}.json").read_text()) for rank in range(4)]
    # A quarter of 8 rows; half of 8 columns, and along fsdp half of 4 rows. The first output is split by position, the
    # second stays what it was: 2 samples of 6 positions with a rank's 4 of 8 features.
    assert told == [[[2, 4], [2, 4], "(Shard(dim=1),)", "[2, 6, 4]"]] * 4
    assert [line["loss"] for line in lines(project)] == pytest.approx(
        [line["loss"] for line in lines(project, "alone")], rel=1e-5
    )


def test_rules_that_do_not_match_a_model_s_outputs_are_named(project):
    write(project, {"models/blocks.py": BLOCKS, "third.yaml": RULES.replace("[0]", "[2]")})
    write(project, {"alone.yaml": RULES.replace("embed:", "head:")})

    def act(folder):
        for name in ("third", "alone"):
            settings = ("model.type=blocks.Blocks", f"model.sharding={name}.yaml", "runtime.mesh={tensor: 2}")
            with pytest.raises(TrainwrightError) as rejected:
                build_trainer(load(folder, *settings, f"name={name}")).train()
            (folder / f"{name}-{processes.rank_and_size().rank}").write_text(str(rejected.value))
            processes.leave()

    launch_well(project, 2, act)
    for rank in range(2):
        third, alone = ((project / f"{name}-{rank}").read_text() for name in ("third", "alone"))
        assert mentions(third, "layers.0", "2")
        assert "models/blocks.py:34: " in alone
        assert "Add a rule for the latter" in alone


# LiBai


def test_graph_mode_is_a_setting_and_an_iteration_is_an_update_there_too(project, replays):
    settings = ("trainer.max_steps=8", "trainer.micro_batch_size=2", "hooks=[{type: count_progress}]")
    eager, graph = (
        build_trainer(load(project, *settings, f"name={mode}", f"runtime.mode={mode}")) for mode in ("eager", "graph")
    )
    eager.train()
    assert not replays
    graph.train()
    assert 0 < len(replays) < 8
    assert (graph.iter, graph.train_data.samples_seen) == (eager.iter, eager.train_data.samples_seen) == (8, 32)
    assert equal_weights(eager.model, graph.model)
    assert lines(project, "graph") == lines(project, "eager")


def test_precision_and_recomputation_act_in_graph_mode_as_in_eager_mode(project, replays):
    less = ("runtime.precision=bf16", "model.activation_checkpointing=[Linear]", "trainer.max_steps=8")
    for mode in ("eager", "graph"):
        build_trainer(load(project, *less, f"name={mode}", f"runtime.mode={mode}")).train()
    build_trainer(load(project, "trainer.max_steps=8", "name=whole")).train()
    assert replays
    assert lines(project, "graph") == lines(project, "eager")
    assert lines(project, "eager")[0]["loss"] != lines(project, "whole")[0]["loss"]


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
