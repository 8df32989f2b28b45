"""Two processes on the CPU: our step against hand-written DDP and FSDP2, bytes sent, and memory of a rank.

    python benchmarks/distributed.py [--steps 60] [--output FILE]

Every contender trains the same Llama on the same tokens with torch's fused AdamW and clipping to norm 1. In each pair
the two take turns, step after step, in the same processes, because the machine's speed drifts: after each of our steps
(the whole loop, with its default hooks and a log line every 10) the hand-written loop makes one. Reported is the median
of the ratios of neighbouring steps. Bytes are those of the collectives that torch was asked for, of whole tensors;
the least is what the layout needs: the gradients summed once (DDP), or the parameters gathered for the forward, those
of the blocks again for the backward, and the gradients reduced once (FSDP2).

    python benchmarks/distributed.py --messages [--output FILE]

counts the messages of one update in every mode, and compares them with a formula; it measures no time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.utils.data import Dataset

LAYERS, WIDTH, VOCABULARY, LENGTH, BATCH = 4, 256, 2048, 128, 8
"""BATCH is the samples of all ranks."""


class Tokens(Dataset):
    """Random tokens by number."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def model_section():
    """The model of every contender."""
    return {
        "type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_layers": LAYERS,
        "num_heads": 4,
        "tie_embeddings": False,
    }


class HandWritten:
    """What a person writes: DDP or FSDP2 around the model, and five lines."""

    def __init__(self, layout):
        from trainwright.models.llama import Llama

        torch.manual_seed(0)
        model = Llama(**{key: value for key, value in model_section().items() if key != "type"})
        if layout == "replicate":
            model = nn.parallel.DistributedDataParallel(model)
        elif layout == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(self, batch):
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def ours(folder, layout, steps, hooks_of, **runtime):
    """Builds our run of this layout; `runtime` has further settings."""
    from trainwright import RunConfig, Trainer, build_trainer

    settings = {
        "name": layout,
        "output_dir": str(folder),
        "model": model_section(),
        "data": {"train": {"type": f"{Path(__file__).resolve()}:Tokens"}},
        "trainer": {
            "max_steps": steps,
            "global_batch_size": BATCH,
            "max_grad_norm": 1.0,
            "optimizer": {"type": "adamw", "lr": 1e-3},
        },
        "checkpoint": {"every_steps": None},
        "writers": ["json"],
        "runtime": {"device": "cpu", "mesh": {"replicate" if layout == "one" else layout: -1}, **runtime},
    }
    path = Path(folder) / f"{'-'.join([layout, *map(str, runtime.values())])}.yaml"
    if os.environ.get("RANK", "0") == "0":
        path.write_text(yaml.safe_dump(settings))
    if dist.is_initialized():
        dist.barrier()
    else:
        while not path.exists():
            time.sleep(0.05)

    class Measured(Trainer):
        """The default trainer with a hook more."""

        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), *hooks_of()]

    return build_trainer(RunConfig.load(path), Measured, fresh=True)


def take_turns(folder, layout, steps):
    """Returns the seconds of our steps and of the hand-written ones, which ran in between."""
    from trainwright import Hook

    class Turns(Hook):
        """Times our step, then makes one by hand."""

        def __init__(self):
            self.seconds, self.by_hand, self.other, self.ended = [], [], None, None

        def after_step(self):
            # The first of the hooks to see the step's end: what follows (vote, log line) is counted to the next step.
            now = time.perf_counter()
            if self.ended is not None:
                self.seconds.append(now - self.ended)
            if self.other is None:
                self.other = HandWritten(layout)
            begun = time.perf_counter()
            self.other.step(self.batch)
            ended = time.perf_counter()
            if self.ended is not None:
                self.by_hand.append(ended - begun)
            self.ended = ended

    turns = Turns()
    trainer = ours(folder, layout, steps, lambda: [turns])
    ids = torch.randint(0, VOCABULARY, (BATCH // dist.get_world_size(), LENGTH))
    turns.batch = {"input_ids": ids, "labels": ids}
    trainer.train()
    return turns.seconds, turns.by_hand


def bytes_of_a_step(folder, layout):
    """Returns the collectives of one of our steps, and what a layout needs at least, in bytes of whole tensors."""
    from trainwright import Hook
    from trainwright.analysis.shard import CollectiveRecorder

    class Record(Hook):
        """Records the third step."""

        def before_step(self):
            if self.trainer.step == 2:
                self.recorder = CollectiveRecorder(self.trainer.ranks.mesh)
                self.recorder.__enter__()

        def after_step(self):
            if self.trainer.step == 3:
                self.recorder.__exit__(None, None, None)

    record = Record()
    trainer = ours(folder, layout, 4, lambda: [record])
    sizes = {name: each.numel() * each.element_size() for name, each in trainer.model.named_parameters()}
    weights, in_blocks = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers." in name)
    trainer.train()
    sent = sum(each.sent_bytes for each in record.recorder.found)
    # One all-reduce of the gradients; or a gather for the forward, one of the blocks for the backward, one reduction.
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    least = share * (2 * weights if layout == "replicate" else 2 * weights + in_blocks)
    table = [(each.kind, each.axis, each.count, each.num_bytes) for each in record.recorder.found]
    return {"sent": sent, "least": least, "collectives": table}


MODES = {
    "eager": {"mode": "eager"},
    "compile": {"mode": "compile", "compile_backend": "aot_eager"},
    "graph": {"mode": "graph"},
}
REPLAYED = 5
"""The update that is counted: in graph mode two warm up, and the third is captured."""


def messages_of_a_step(folder, layout, mode, gathered):
    """Returns number and bytes of each kind of message of one update in bf16, and those of the formula."""
    from trainwright import Hook
    from trainwright.analysis.shard import CollectiveRecorder

    class Record(Hook):
        def before_step(self):
            if self.trainer.step == REPLAYED:
                self.recorder = CollectiveRecorder(self.trainer.ranks.mesh)
                self.recorder.__enter__()

        def after_step(self):
            if self.trainer.step == REPLAYED + 1:
                self.recorder.__exit__(None, None, None)

    record = Record()
    precision = {"precision": "bf16"} if gathered is None else {"precision": "bf16", "gather_precision": gathered}
    trainer = ours(folder, layout, REPLAYED + 1, lambda: [record], **MODES[mode], **precision)
    sizes = {name: each.numel() for name, each in trainer.model.named_parameters()}
    every, in_blocks = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers." in name)
    trainer.train()
    found = {each.kind: (each.count, each.num_bytes) for each in record.recorder.found}
    # The sums of losses and of their weights (float64), and one flag for each parameter; with shards also the norm.
    small, more = 16 + 4 * len(sizes), 0
    if mode == "graph":  # and what the ranks agree on before an update, between hosts
        small, more = small + 32, 1
    if layout == "replicate":
        owned = trainer._updater.owned_by(tuple(trainer.optimizers))
        return found, {"all-reduce": (len(owned.gradient_sum._buckets) + 2 + more, 4 * every + small)}
    width = 4 if gathered == "fp32" else 2
    return found, {
        "all-gather": (1 + 2 * LAYERS, width * (every + in_blocks)),
        "reduce-scatter": (1 + LAYERS, 4 * every),
        "all-reduce": (3 + more, small + 8),
    }


def count_messages(folder):
    """What each process does with --messages."""
    rows = []
    for layout, gathered in (("replicate", None), ("fsdp", "fp32"), ("fsdp", None)):
        for mode in MODES:
            found, formula = messages_of_a_step(folder, layout, mode, gathered)
            assert found == formula, (layout, mode, gathered, found, formula)
            kinds = ("all-gather", "reduce-scatter", "all-reduce")
            cells = [f"{found[kind][0]}: {found[kind][1]:,}" if kind in found else "–" for kind in kinds]
            gathered_as = "–" if layout == "replicate" else gathered or "bf16 (default)"
            rows.append(f"| {layout} 2 | {mode} | {gathered_as} | {' | '.join(cells)} | equal |")
    if dist.get_rank() == 0:
        (Path(folder) / "found.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def memory_of_a_rank(folder, layout):
    """Returns what parameters, gradients and optimizer state hold on this rank after a few steps, in bytes."""
    from trainwright.parallel.mesh import local

    trainer = ours(folder, layout, 3, list)
    trainer.train()
    held = 0
    for parameter in trainer.model.parameters():
        held += local(parameter).nbytes + (0 if parameter.grad is None else local(parameter.grad).nbytes)
    for optimizer in trainer.optimizers.values():
        for state in optimizer.state.values():
            held += sum(local(value).nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return held


def work(folder, steps):
    """What each process does."""
    found = {}
    for layout in ("replicate", "fsdp"):
        own, by_hand = take_turns(folder, layout, steps)
        pairs = list(zip(own, by_hand, strict=True))[5:]
        found[layout] = {
            "ours_ms": statistics.median(own for own, _ in pairs) * 1e3,
            "by_hand_ms": statistics.median(other for _, other in pairs) * 1e3,
            "ratio": statistics.median(own / other for own, other in pairs),
            "bytes": bytes_of_a_step(folder, layout),
            "held": memory_of_a_rank(folder, layout),
        }
    if dist.get_rank() == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def report(found, one):
    """Prints the figures and returns them as lines of Markdown."""
    lines = [
        "| layout | ours, ms | by hand, ms | ratio | bytes sent / least | state per rank / one process |",
        "|---|---|---|---|---|---|",
    ]
    names = {"replicate": "replicate 2 (DDP)", "fsdp": "fsdp 2 (FSDP2)"}
    for layout, row in found.items():
        lines.append(
            f"| {names[layout]} | {row['ours_ms']:.1f} | {row['by_hand_ms']:.1f} | {row['ratio']:.3f} | "
            f"{row['bytes']['sent'] / row['bytes']['least']:.4f} | {row['held'] / one:.3f} |"
        )
    return lines


def report_messages(rows, output):
    """Prints the messages of every mode, and writes them to a file."""
    lines = [
        "| layout | mode | gathered as | all-gathers: bytes | reduce-scatters: bytes | all-reduces: bytes | formula |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]
    print("\n".join(lines))
    if output:
        write_section(output, "# Messages of one update", "python benchmarks/distributed.py --messages", lines)


def write_section(path, heading, command, lines):
    """Writes a section of a report, in place of an earlier one with this heading."""
    text = path.read_text() if path.exists() else ""
    others = [f"# {each.strip()}\n" for each in f"\n{text}".split("\n# ") if each.strip()]
    kept = [each for each in others if not each.startswith(f"{heading}\n")]
    path.write_text("\n".join([*kept, "\n".join([heading, "", f"`{command}`", "", *lines, ""])]))


def main():
    """Launches two processes, then prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--messages", action="store_true", help="count the messages of every mode instead")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(memory_of_a_rank(Path(chosen.folder), "one"))
        return
    if chosen.folder:
        count_messages(chosen.folder) if chosen.messages else work(chosen.folder, chosen.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"  # the key that signs run folders
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        counts = ["--messages"] if chosen.messages else []
        subprocess.run([*launch, __file__, "--folder", folder, "--steps", str(chosen.steps), *counts], check=True)
        if chosen.messages:
            report_messages(json.loads((Path(folder) / "found.json").read_text()), chosen.output)
            return
        alone = [sys.executable, __file__, "--folder", folder, "--one"]
        one = int(subprocess.run(alone, check=True, capture_output=True, text=True).stdout.split()[-1])
        found = json.loads((Path(folder) / "found.json").read_text())
    lines = report(found, one)
    print("\n".join(lines))
    for layout, row in found.items():
        print(
            layout,
            *(
                f"{kind} along {axis}: {count} × , {size:,} bytes"
                for kind, axis, count, size in row["bytes"]["collectives"]
            ),
            sep="\n  ",
        )
    if chosen.output:
        command = f"python benchmarks/distributed.py --steps {chosen.steps}"
        write_section(chosen.output, "# Two processes on the CPU", command, lines)


if __name__ == "__main__":
    main()
