"""Attention over a sequence that is split over 2 ranks: torch's ring against gathered keys and values.

    python benchmarks/context.py [--device cuda] [--length 8192] [--rounds 10] [--output benchmarks/results/context]

Both ranks are processes on one device, joined by gloo, for NCCL does not let two ranks share a GPU: messages go through
main memory, so that the times say what the kernels cost and not what a link would. The first table says how far each
way is from one process that holds the whole sequence (attention in float64), beside how far that process is itself
in the same dtype; the second what a forward and backward pass costs. On a CPU torch's ring runs on the CPU's kernel.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from data_rounds import table

from trainwright.models.llama import Llama
from trainwright.parallel.context import SplitSequence, split_sequences
from trainwright.parallel.context_ring import RingKernel, ring_attention, ring_kernel
from trainwright.parallel.mesh import lay_out

RANKS = 2
HEADS, KV_HEADS, WIDTH = 16, 4, 128
CPU_KERNEL = RingKernel(
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
# dtype, what is added to the length: an odd length takes positions added at the end
CASES = {
    "bf16": (torch.bfloat16, 0),
    "bf16, odd length": (torch.bfloat16, -37),
    "fp16": (torch.float16, 0),
    "fp32": (torch.float32, 0),
}


def inputs(length: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)  # the last is the gradient of what comes out
    drawn = (torch.randn(1, heads, length, WIDTH, generator=generator) for heads in sizes)
    return [each.to(device, dtype) for each in drawn]


class Ring:
    """Attention by torch's ring alone."""

    def __init__(self, sequence: SplitSequence) -> None:
        self.sequence = sequence

    def __call__(self, queries, keys, values):
        kernel = ring_kernel(queries, keys) or (CPU_KERNEL if queries.device.type == "cpu" else None)
        if kernel is None:
            raise RuntimeError(f"no ring for {queries.dtype} {tuple(queries.shape)} here")
        return ring_attention(queries, keys, values, group=self.sequence.group, kernel=kernel)


class Gathered(Ring):
    """Attention with the keys and values of all ranks gathered."""

    def __call__(self, queries, keys, values):
        # A mask is what the ring cannot take; the plain causal one is made inside, from the chunks.
        sequence = self.sequence
        settings = {"dropout_p": 0.0, "scale": None, "enable_gqa": True}
        keys, values = sequence.gather(keys, values)
        return sequence._attend_to_all(queries, keys, values, mask=None, is_causal=True, settings=settings)


WAYS = {"ring": Ring, "gathered": Gathered}


def whole(length: int, dtype: torch.dtype, device: torch.device, *, precise: bool) -> list[torch.Tensor]:
    """Returns what comes out and the gradients of queries, keys and values, of the sequence in one process."""
    *tensors, grad = inputs(length, dtype, device)
    if precise:
        *tensors, grad = (each.double() for each in (*tensors, grad))
    tensors = [each.requires_grad_() for each in tensors]
    if precise:  # by pieces of queries, or the scores of all would not fit
        mixed = torch.cat([_precise_rows(*tensors, start) for start in range(0, length, 1024)], dim=2)
    else:
        mixed = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    mixed.backward(grad)
    return [mixed.detach(), *(each.grad for each in tensors)]


def _precise_rows(queries, keys, values, start):
    def rows(queries, keys, values):
        queries = queries[:, :, start : start + 1024]
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (keys, values))
        scores = queries @ keys.transpose(2, 3) / WIDTH**0.5
        places = torch.arange(keys.shape[2], device=keys.device)
        hidden = places[None] > places[start : start + 1024, None]
        return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ values

    return torch.utils.checkpoint.checkpoint(rows, queries, keys, values, use_reentrant=False)


def parts_of(sequence: SplitSequence, length: int, dtype: torch.dtype, device: torch.device):
    *tensors, grad = (sequence.take(each, dim=2) for each in inputs(length, dtype, device))
    return [each.requires_grad_() for each in tensors], grad


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Relative distances of the output and of the three gradients."""
    pairs = zip(found, expected, strict=True)
    return [float((one.double() - two.double()).norm() / two.double().norm()) for one, two in pairs]


def accuracy(sequence: SplitSequence, way: str, length: int, dtype: torch.dtype, device: torch.device) -> list[float]:
    tensors, grad = parts_of(sequence, length, dtype, device)
    mixed = WAYS[way](sequence)(*tensors)
    mixed.backward(grad)
    is_real = sequence.take(torch.ones(length, 1, device=device), dim=0)  # 0 at positions that were added
    mixed = mixed * is_real
    expected = [sequence.take(each, dim=2) for each in whole(length, dtype, device, precise=True)]
    return distance([mixed.detach(), *(each.grad for each in tensors)], expected)


def seconds(sequence: SplitSequence, way: str, length: int, dtype: torch.dtype, device: torch.device, rounds: int):
    """Returns the median seconds of a forward and backward pass, and the peak of memory beside the inputs in MiB."""
    tensors, grad = parts_of(sequence, length, dtype, device)
    attend, times, peak = WAYS[way](sequence), [], 0.0
    for _ in range(rounds + 2):
        dist.barrier()
        _wait(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        attend(*tensors).backward(grad)
        _wait(device)
        times.append(time.perf_counter() - start)
        if device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        for each in tensors:
            each.grad = None
    return sorted(times[2:])[rounds // 2], peak


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def llama_losses(mesh, device: torch.device, length: int) -> dict[str, float]:
    """The loss and the norm of the gradient of a small Llama in bf16, whole and split, as a run would have them."""
    results = {}
    for name in ("whole", "split"):
        torch.manual_seed(0)
        model = Llama(
            vocab_size=512, hidden_size=512, num_layers=4, num_heads=8, num_kv_heads=4, max_positions=length
        ).to(device)
        if name == "split":
            split_sequences(model, mesh)
        tokens = torch.randint(512, (1, length), generator=torch.Generator().manual_seed(1)).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        squares = torch.zeros((), device=device)
        for parameter in model.parameters():
            if name == "split":
                dist.all_reduce(parameter.grad, group=mesh.group("context"))
                parameter.grad /= mesh.num_gradient_copies
            squares += parameter.grad.float().square().sum()
        results |= {f"{name} loss": loss.item(), f"{name} grad_norm": squares.sqrt().item()}
    return results


def attempt(act, *args):
    """Returns what `act` gives, or the error in words: one way that fails must not hide the others."""
    try:
        return act(*args)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def work(rank: int, folder: str, arguments) -> None:
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = lay_out({"context": RANKS}, device_type="cpu")  # gloo's groups take tensors of either device
    sequence = SplitSequence(rank=rank, size=RANKS, group=mesh.group("context"))
    results: dict = {"accuracy": {}, "cost": {}}
    for case, (dtype, more) in CASES.items():
        length = arguments.length + more
        own = attempt(
            lambda d=dtype, n=length: distance(whole(n, d, device, precise=False), whole(n, d, device, precise=True))
        )
        results["accuracy"][f"{case}, one process"] = own
        for way in WAYS:
            results["accuracy"][f"{case}, {way}"] = attempt(accuracy, sequence, way, length, dtype, device)
            results["cost"][f"{case}, {way}"] = attempt(seconds, sequence, way, length, dtype, device, arguments.rounds)
    results["llama"] = attempt(llama_losses, mesh, device, min(arguments.length, 2048))
    dist.barrier()
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def worst(per_rank: list) -> list[str]:
    for each in per_rank:
        if isinstance(each, str):
            return [each, "", "", ""]
    return [f"{max(column):.1e}" for column in zip(*per_rank, strict=True)]


def show(results: list[dict], arguments) -> None:
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    conditions = (
        f"{where}, Python {platform.python_version()}, torch {torch.__version__}, {RANKS} processes on one device with "
        f"gloo. {HEADS} heads, {KV_HEADS} of keys and values, {WIDTH} wide, {arguments.length} positions, batch 1."
    )
    rows = [[name, *worst([each["accuracy"][name] for each in results])] for name in results[0]["accuracy"]]
    text = f"{conditions}\n\nRelative distance from float64, the worse rank:\n\n"
    text += table(["", "output", "grad of queries", "of keys", "of values"], rows)
    rows = []
    for name, cost in results[0]["cost"].items():
        rows.append([name, cost, ""] if isinstance(cost, str) else [name, f"{1e3 * cost[0]:.1f}", f"{cost[1]:.0f}"])
    text += "\n\nForward and backward on the first rank, messages through main memory:\n\n"
    text += table(["", "ms", "MiB beside the inputs"], rows)
    text += f"\n\nA small Llama under bf16 autocast: {results[0]['llama']}\n"
    print(text)
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        arguments.output.with_suffix(".md").write_text(f"# Attention over split sequences\n\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(work, (folder, arguments), nprocs=RANKS)
        results = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    show(results, arguments)


if __name__ == "__main__":
    main()
