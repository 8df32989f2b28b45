"""Attention, forward and backward, by each of torch's kernels; documents that share a row also by borders in blocks.

    python benchmarks/attention.py [--output FOLDER] [--sections causal documents] [--rounds 20] [--dry-run]

Causal attention in bf16 over 16,384 tokens at a time, 2,048 features in heads 64 or 128 wide, rows of 512 to 8,192
tokens, with as many heads of keys and values as of queries or an eighth; then rows of documents of 512 tokens on
average, by a mask over all pairs and by borders in blocks. Times are medians of one pass measured on the device, after
warm-up; contenders take turns. "bits" says whether two passes gave equal bits, "error" how far the worst of output and
gradients is from torch's choice. A section that is left out keeps what FOLDER has of it. `--dry-run`: tiny, on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data_rounds import table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainwright.models.layers.attention import WholeSequence
from trainwright.models.layers.document_attention import document_borders, visible_pairs

Attend = Callable[..., Tensor]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PASSES = 4
"""In a row for one measurement, so that the device does not wait for the host to ask for the next."""
TORCH, BORDERS = "torch's choice", "borders in blocks"
TITLES = {
    "causal": "Causal",
    "documents": "Documents of 512 tokens on average (TFLOP/s as if whole rows were seen)",
}


def by_kernel(kernel: SDPBackend) -> Attend:
    def attend(*tensors: Tensor, **settings: Any) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*tensors, **settings)

    return attend


class Case:
    """Tensors of one shape, laid out as the projections of a model are."""

    def __init__(
        self, *, tokens: int, length: int, features: int, width: int, share: int, device: torch.device
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        heads = features // width
        self.shape = {"length": length, "batch": tokens // length, "heads": heads, "width": width}
        self.shape["kv_heads"] = heads // share
        self.tensors = []
        for count in (heads, heads // share, heads // share):
            drawn = torch.randn(tokens // length, length, count, width, generator=generator)
            self.tensors.append(drawn.to(device, torch.bfloat16).transpose(1, 2).requires_grad_())
        self.gradient = torch.randn(self.tensors[0].shape, generator=generator).to(device, torch.bfloat16)
        self.device = device

    def documents(self) -> Tensor:
        """Rows of documents, each 512 tokens long on average, and some padding."""
        batch, length = self.shape["batch"], self.shape["length"]
        generator = torch.Generator().manual_seed(1)
        ids = (torch.rand(batch, length, generator=generator) < 1 / min(512, length // 2)).cumsum(dim=1)
        ids[:, length - length // 32 :] = -1
        return ids.to(self.device)

    def once(self, attend: Attend) -> list[Tensor]:
        mixed = attend(*self.tensors, enable_gqa=self.shape["heads"] != self.shape["kv_heads"])
        return [mixed, *torch.autograd.grad(mixed, self.tensors, self.gradient)]

    def measure(self, contenders: dict[str, Attend], rounds: int) -> dict[str, dict[str, Any]]:
        """Returns milliseconds, TFLOP/s, memory and whether bits repeat, of every contender that can run."""
        results: dict[str, dict[str, Any]] = {}
        reference: list[Tensor] = []
        for name, attend in contenders.items():
            try:
                first, second = (self.once(attend) for _ in range(2))
            except (RuntimeError, NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
                results[name] = {"cannot": str(error).strip().splitlines()[0][:160]}
                continue
            self.once(attend)
            results[name] = {
                "times": [],
                "bits": all(map(torch.equal, first, second)),
                "error": max(map(difference, first, reference or first)),
                "peak_mib": round(self.peak(attend) / 2**20, 1),
            }
            reference = reference or [each.detach() for each in first]
            del first, second
        able = [name for name in contenders if "times" in results[name]]
        for number in range(rounds):
            for name in able if number % 2 else able[::-1]:
                results[name]["times"].append(milliseconds(lambda name=name: self.once(contenders[name]), self.device))
        shape = self.shape
        flops = 7 * shape["batch"] * shape["heads"] * shape["length"] ** 2 * shape["width"]  # half is masked
        for name in able:
            taken = statistics.median(results[name].pop("times"))
            results[name] |= {"ms": round(taken, 4), "tflops": round(flops / taken / 1e9, 1)}
        return results

    def peak(self, attend: Attend) -> int:
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.once(attend)
        return torch.cuda.max_memory_allocated() - before


def difference(found: Tensor, expected: Tensor) -> float:
    return round(float((found.double() - expected.double()).norm() / expected.double().norm()), 5)


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    for _ in range(PASSES):
        run()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / PASSES


def causal_contenders() -> dict[str, Attend]:
    plain: dict[str, Attend] = {TORCH: F.scaled_dot_product_attention}
    plain |= {name: by_kernel(kernel) for name, kernel in KERNELS.items()}

    def causal(attend: Attend) -> Attend:
        return lambda *tensors, **settings: attend(*tensors, is_causal=True, **settings)

    return {name: causal(attend) for name, attend in plain.items()}


def document_contenders(documents: Tensor) -> dict[str, Attend]:
    mask, borders = visible_pairs(documents), document_borders(documents)
    plain: dict[str, Attend] = {TORCH: F.scaled_dot_product_attention}
    plain |= {name: by_kernel(KERNELS[name]) for name in ("cuDNN", "efficient")}

    def masked(attend: Attend) -> Attend:
        return lambda *tensors, **settings: attend(*tensors, attn_mask=mask, **settings)

    contenders = {name: masked(attend) for name, attend in plain.items()}
    contenders[BORDERS] = lambda *tensors, **settings: WholeSequence().attend(*tensors, mask=borders, **settings)
    return contenders


def making(documents: Tensor) -> dict[str, float]:
    """Milliseconds for what is made once per batch."""
    ways = {"mask": visible_pairs, "borders": document_borders}
    return {
        name: statistics.median(milliseconds(lambda make=make: make(documents), documents.device) for _ in range(9))
        for name, make in ways.items()
    }


def show(title: str, found: list[dict[str, Any]]) -> str:
    names = list(found[0]["results"])
    rows = []
    for case in found:
        results = case["results"]
        able = {name: results[name]["ms"] for name in names if "ms" in results[name]}
        best = min(able, key=able.get)  # type: ignore[arg-type]  # a dict's get
        cells = []
        for name in names:
            one = results[name]
            mark = "**" if name == best else ""
            bits = "" if one.get("bits", True) else " ≠"
            bits += " WRONG" if one.get("error", 0.0) > 0.02 else ""
            cells.append(f"{mark}{one['ms']:.2f}{mark} ({one['tflops']:.0f}){bits}" if name in able else "–")
        shape = case["shape"]
        rows.append(
            [f"{shape['batch']} × {shape['length']}, {shape['heads']}/{shape['kv_heads']} × {shape['width']}", *cells]
        )
    head = ["rows × tokens, heads/kv × width", *names]
    return f"## {title}\n\nms (TFLOP/s); ≠: bits differ between two passes\n\n{table(head, rows)}\n"


def text_of(found: dict[str, Any]) -> str:
    parts = [
        f"# Attention on one {found['device']}, torch {found['torch']}, cuDNN {found['cudnn']}",
        "`python benchmarks/attention.py --output benchmarks/results`",
        *(show(TITLES[section], found[section]) for section in TITLES if found.get(section)),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def write(found: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "attention.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "attention.md").write_text(text_of(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sections", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    tokens, features = (1024, 512) if options.dry_run else (16384, 2048)
    lengths = (512,) if options.dry_run else (512, 1024, 2048, 4096, 8192)
    rounds = 2 if options.dry_run else options.rounds
    found: dict[str, Any] = {}
    if options.output is not None and (options.output / "attention.json").exists():
        found = json.loads((options.output / "attention.json").read_text())
    name = "cpu" if options.dry_run else torch.cuda.get_device_name()
    found |= {"device": name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    shapes = [(width, share, length) for width in (64, 128) for share in (1, 8) for length in lengths]
    for section in options.sections:
        found[section] = []
        for width, share, length in shapes:
            if features // width % share or (section == "documents" and length == 4096):
                continue
            case = Case(tokens=tokens, length=length, features=features, width=width, share=share, device=device)
            torch._dynamo.reset()  # each shape is measured as if it were the only one
            contenders = causal_contenders() if section == "causal" else document_contenders(case.documents())
            measured = {"shape": case.shape, "results": case.measure(contenders, rounds)}
            if section == "documents":
                measured["making_ms"] = making(case.documents())
            found[section].append(measured)
            print(section, json.dumps(measured), flush=True)
            if options.output is not None:
                write(found, options.output)
    print(text_of(found))


if __name__ == "__main__":
    main()
