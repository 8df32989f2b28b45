"""Graph mode with the code of several ranks, captured on one GPU.

Two ranks cannot share a GPU under NCCL: the second rank is imagined. `replicate` runs with an NCCL group of this rank
alone, whose collectives are captured and replayed. `fsdp` runs with torch's fake group of two ranks and FSDP2's own
streams, buffers and hooks; the second rank's shards are copies of the first's. What a layout computes is tested with
real ranks in tests/distributed/test_modes.py; here only the capture is: a run in graph mode is the run of the same
kernels, launched one by one.
"""

import json
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.compile.graph import GraphStep
from trainwright.errors import TrainwrightError
from trainwright.models.llama import Llama
from trainwright.parallel import collectives, processes
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import ALONE, Mesh, lay_out, local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
NUM_STEPS = 8


class ImaginedRanks(Ranks):
    """Rank 0 of two; the other one answers what this one says, or nothing."""

    def gather(self, value):
        return [value] * self.size

    def broadcast(self, value):
        return value

    def copy_from_first_(self, tensor):
        pass

    def barrier(self):
        pass

    def sum_counts(self, *counts):
        return tuple(self.size * each for each in counts)

    def highest_votes(self, *votes):
        return votes

    def raise_flag(self, name):
        pass

    def is_raised(self, *names):
        return False


class OneReplica(Mesh):
    """Two replicas, of which the group has one."""

    def group(self, axis):
        return dist.group.WORLD if axis == "replicate" else None


def gather_copies(self, output_tensor, input_tensor, group, async_op=False):
    output_tensor.view(2, -1).copy_(input_tensor.view(1, -1).expand(2, -1))


def scatter_own(self, output_tensor, input_tensor, group, op, async_op=False):
    output_tensor.copy_(input_tensor.view(2, -1)[0].view_as(output_tensor))


@pytest.fixture
def imagine(tmp_path, monkeypatch):
    """Returns a function that opens the group of an axis and makes runs join it."""

    def open_group(axis):
        if axis == "replicate":
            backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
            mesh = OneReplica({**ALONE, "replicate": 2})
        else:
            dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
            mesh = lay_out({"fsdp": 2}, device_type=DEVICE)
            notes = dist.FileStore(str(tmp_path / "notes"), 1)
            monkeypatch.setattr(collectives, "default_store", lambda: notes)  # the fake store has no connections
            monkeypatch.setattr(_fsdp_collectives.DefaultAllGather, "__call__", gather_copies)
            monkeypatch.setattr(_fsdp_collectives.DefaultReduceScatter, "__call__", scatter_own)
        monkeypatch.setattr(processes, "join", lambda *_, **__: ImaginedRanks(0, 2, mesh=mesh))
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}.items():
            monkeypatch.setenv(name, str(value))

    yield open_group
    torch.compiler.reset()
    dist.destroy_process_group()  # hangs if a graph still has collectives of the group


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = torch.randint(1, 256, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class Words(Trainer):
    options: ClassVar[dict[str, object]] = {}

    @classmethod
    def build_model(cls, build):
        return Llama(vocab_size=256, hidden_size=128, num_layers=3, num_heads=2, **cls.options)

    @classmethod
    def build_train_data(cls, build):
        return Tokens()

    @classmethod
    def build_eval_data(cls, build):
        return {"valid": Tokens()}

    def save(self):
        """Writes nothing: a checkpoint would wait for the other rank's shards."""
        return self.folder


class Untied(Words):
    options: ClassVar[dict[str, object]] = {"tie_embeddings": False}


class Unused(Words):
    """A parameter gets no gradient."""

    @classmethod
    def build_model(cls, build):
        model = super().build_model(build)
        model.spare = nn.Parameter(torch.ones(3))
        return model


def train(folder, axis, mode, kind=Words, **runtime):
    runtime = {"device": DEVICE, "mode": mode, "mesh": {axis: 2}, "precision": "bf16", **runtime}
    if mode != "eager":
        runtime.setdefault("compile_backend", "aot_eager")
    config = RunConfig.from_dict(
        {
            "name": "run",
            "output_dir": str(folder / mode),
            "trainer": {
                "max_steps": NUM_STEPS,
                "global_batch_size": 16,
                "micro_batch_size": 4,
                "max_grad_norm": 1.0,
                "optimizer": {"type": "adamw", "lr": 1e-3},
            },
            "evaluation": {"every_steps": 5, "batch_size": 64},
            "checkpoint": {"every_steps": None},
            "log": {"every_steps": 1},
            "watchdog": {"watch": False},
            "runtime": runtime,
        }
    )
    trainer = build_trainer(config, kind)
    trainer.train()
    lines = [json.loads(line) for line in (trainer.folder / "metrics.json").read_text().splitlines()]
    log = [[line[name] for name in ("loss", "grad_norm") if name in line] for line in lines]
    evaluated = [line["valid/loss"] for line in lines if "valid/loss" in line]
    weights = [local(each).detach().float().cpu() for each in trainer.model.parameters()]
    return log, evaluated, weights


@pytest.fixture
def replays(monkeypatch):
    """Counts the updates that were captured or replayed."""
    count = []
    finish = GraphStep._finish

    def counted(self, *arguments, **rest):
        count.append(1)
        return finish(self, *arguments, **rest)

    monkeypatch.setattr(GraphStep, "_finish", counted)
    return count


CASES = {
    "replicate": ("replicate", Words, {}),
    "replicate, inductor": ("replicate", Words, {"compile_backend": "inductor"}),
    "fsdp": ("fsdp", Words, {}),
    "fsdp, untied, inductor": ("fsdp", Untied, {"compile_backend": "inductor"}),
    "fsdp, gathered in fp32": ("fsdp", Words, {"gather_precision": "fp32"}),
    "fsdp, gathered once": ("fsdp", Words, {"reshard_after_forward": False}),
    "fsdp, reduced once": ("fsdp", Words, {"accumulate_unsharded": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_captured_run_of_several_ranks_equals_the_run_of_the_same_kernels(tmp_path, imagine, replays, name):
    axis, kind, settings = CASES[name]
    imagine(axis)
    plain, captured = (train(tmp_path, axis, mode, kind, **settings) for mode in ("compile", "graph"))
    assert len(replays) == NUM_STEPS - (3 if DEVICE == "cuda" else 2)  # those warm up
    assert torch.tensor(captured[0]) == pytest.approx(torch.tensor(plain[0]), rel=2e-2, abs=1e-3)
    assert len(plain[1]) == 2
    assert captured[1] == pytest.approx(plain[1], rel=1e-2)  # eager passes between the replays
    for one, other in zip(captured[2], plain[2], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("axis", ["replicate", "fsdp"])
def test_a_parameter_without_a_gradient_is_rejected_and_the_device_stays_usable(tmp_path, imagine, axis):
    imagine(axis)
    with pytest.raises(TrainwrightError, match="spare got no gradient in this step"):
        train(tmp_path, axis, "graph", Unused)
    assert torch.rand(3, device=DEVICE).isfinite().all()
