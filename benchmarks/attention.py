"""Attention kernels by shape, forward and backward: which one is the fastest for which rows, heads and widths.

    python benchmarks/attention.py [--output FOLDER] [--kinds plain packed padded window] [--seconds 80] [--dry-run]

bf16, 16,384 tokens at a time and 2,048 features, in heads 64, 96, 128 and 256 wide, with as many key and value heads as
query heads or a quarter, in rows of 512, 2,048 and 8,192 tokens. Rows are plain (causal), packed with documents (an
eighth of a row on average, at most 512 tokens), padded (a quarter of the tokens on average, at either end), or limited
to a window of 1,024 keys (128 in rows of 512). Contenders: torch's own choice, cuDNN, FlashAttention 2 and, where it
can be activated, 3 and 4, the memory-efficient kernel, varlen, and flex attention over the blocks of borders.

Times are medians measured on the device after a warm-up; contenders take turns. "error" is how far the worst of output
and gradients is from torch's choice, of the tokens that are not padding. Flex attention is compiled for each shape,
which takes most of the time: it comes last, the most common shapes first, and ends after `--seconds`. What was not
measured stays empty. The last table says which is the fastest.
`--dry-run` uses a tiny shape on the CPU.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from data_rounds import table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainwright.models.layers.document_attention import document_borders, flex, padded_borders, visible_pairs
from trainwright.models.layers.varlen_attention import document_starts

Attend = Callable[..., Tensor]
Contenders = dict[str, tuple[Attend, Callable[[], AbstractContextManager[Any]]]]
"""Each with what makes the context that it runs in."""

KINDS = {
    "plain": "Plain causal rows",
    "packed": "Packed rows",
    "padded": "Padded rows",
    "window": "Sliding window",
}
KERNELS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
TORCH, VARLEN, FLEX = "torch's choice", "varlen", "flex"
ROOMY = {16: "varlen, room for 1/16", 1: "varlen, room for all"}
"""Varlen with starts for a document per so many tokens: code that must not wait for the device cannot count them."""
SHAPES = [
    (width, share, length)
    for width, share in [(128, 4), (64, 4), (64, 1), (128, 1), (256, 4), (96, 1), (256, 1), (96, 4)]
    for length in (2048, 512, 8192)
]
"""(width of a head, query heads per key head, tokens per row), the most common first."""
ROUNDS, MEASURED_MS = 5, 10.0
"""Measurements per contender, and how long one takes at least."""


class Case:
    """Tensors of one shape and kind, laid out as the projections of a model are."""

    def __init__(self, kind: str, *, tokens: int, features: int, width: int, share: int, length: int, device: Any):
        generator = torch.Generator().manual_seed(0)
        heads = features // width // share * share
        batch = tokens // length
        self.kind, self.device = kind, device
        self.shape = {"length": length, "batch": batch, "heads": heads, "kv_heads": heads // share, "width": width}
        self.tensors = []
        for count in (heads, heads // share, heads // share):
            drawn = torch.randn(batch, length, count, width, generator=generator)
            self.tensors.append(drawn.to(device, torch.bfloat16).transpose(1, 2).requires_grad_())
        gradient = torch.randn(batch, length, heads, width, generator=generator)
        self.window = (128 if length <= 512 else 1024) if kind == "window" else None
        self.documents = torch.zeros(batch, length, dtype=torch.long, device=device)
        self.present = torch.ones(batch, length, dtype=torch.long)
        if kind == "packed":
            ends = torch.rand(batch, length, generator=generator) < 1 / min(512, length // 8)
            self.documents = ends.cumsum(dim=1).to(device)
        elif kind == "padded":
            missing = torch.randint(0, length // 2, (batch, 1), generator=generator)
            self.present = (torch.arange(length) < length - missing).long()
            self.present[::2] = self.present[::2].flip(1)
        # Padding has no loss, and so no gradient.
        gradient = gradient * self.present[:, :, None, None]
        self.present = self.present.to(device)
        self.gradient = gradient.to(device, torch.bfloat16).transpose(1, 2)

    def visible(self) -> Tensor | None:
        """Returns the mask of all pairs; None where causality alone decides."""
        length = self.shape["length"]
        positions = torch.arange(length, device=self.device)
        if self.kind == "packed":
            return visible_pairs(self.documents)
        if self.kind == "padded":
            causal = positions[:, None] >= positions
            return (causal & self.present.bool()[:, None, None, :]) | torch.eye(
                length, dtype=torch.bool, device=self.device
            )
        if self.kind == "window":
            distance = positions[:, None] - positions
            return (distance >= 0) & (distance < self.window)
        return None

    def once(self, attend: Attend) -> list[Tensor]:
        mixed = attend(*self.tensors)
        grads = torch.autograd.grad(mixed, self.tensors, self.gradient)
        return [mixed.detach() * self.present[:, None, :, None], *grads]

    def contenders(self) -> Contenders:
        """Returns every contender but flex."""
        mask, grouped = self.visible(), self.shape["heads"] != self.shape["kv_heads"]
        options = {"attn_mask": mask, "is_causal": mask is None, "enable_gqa": grouped}
        attend = partial(F.scaled_dot_product_attention, **options)
        found: Contenders = {TORCH: (attend, nullcontext)}
        for name, kernel in KERNELS.items():
            if name != "flash" or mask is None:
                found[name] = (attend, partial(sdpa_kernel, kernel))
        implementations = other_flash()
        if mask is None:
            for name in implementations:
                found[name] = (attend, partial(activated, name))
        if self.kind != "padded":
            exact = partial(varlen, starts=starts_of(self.documents), window=self.window)
            found[VARLEN] = (exact, nullcontext)
            for name in implementations:
                found[f"{VARLEN} {name}"] = (exact, partial(activated, name))
        if self.kind == "packed":
            for tokens, name in ROOMY.items():
                room = starts_of(self.documents, room=self.documents.numel() // tokens)
                found[name] = (partial(varlen, starts=room, window=None), nullcontext)
        return found

    def flex(self) -> Attend:
        grouped = self.shape["heads"] != self.shape["kv_heads"]
        if self.window is not None:
            window, length = self.window, self.shape["length"]

            def is_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (query >= key) & (query - key < window)

            blocks = create_block_mask(is_near, None, None, length, length, device=str(self.device))
            compiled: Any = torch.compile(flex_attention, fullgraph=True)
            return partial(compiled, block_mask=blocks, enable_gqa=grouped)
        borders = padded_borders(self.present) if self.kind == "padded" else document_borders(self.documents)
        compiled = torch.compile(flex, fullgraph=True)
        return lambda *tensors: compiled(*tensors, borders, None, grouped)

    def measure(self, contenders: Contenders, reference: list[Tensor]) -> dict[str, dict[str, Any]]:
        """Returns milliseconds, TFLOP/s and error of every contender that can run.

        `reference` are the results of the first contender, which fills an empty list.
        """
        results: dict[str, dict[str, Any]] = {}
        passes: dict[str, int] = {}
        for name, (attend, context) in contenders.items():
            try:
                with context():
                    first = self.once(attend)
                    taken = milliseconds(partial(self.once, attend), self.device, 1)
            except Exception as error:  # of any kind: a kernel that is not there, does not fit or does not compile
                results[name] = {"cannot": (str(error).strip() or type(error).__name__).splitlines()[0][:160]}
                continue
            passes[name] = max(1, min(8, int(MEASURED_MS / max(taken, 0.01))))
            reference[:] = reference or first
            results[name] = {"times": [], "error": max(map(difference, first, reference))}
            del first
        for number in range(ROUNDS):
            for name in passes if number % 2 else list(passes)[::-1]:
                attend, context = contenders[name]
                with context():
                    run = partial(self.forward_backward, attend)
                    results[name]["times"].append(milliseconds(run, self.device, passes[name]))
        shape = self.shape
        flops = 7 * shape["batch"] * shape["heads"] * shape["length"] ** 2 * shape["width"]  # half is masked
        for name in passes:
            taken = statistics.median(results[name].pop("times"))
            results[name] |= {"ms": round(taken, 4), "tflops": round(flops / taken / 1e9, 1)}
        return results

    def forward_backward(self, attend: Attend) -> None:
        torch.autograd.grad(attend(*self.tensors), self.tensors, self.gradient)

    def making(self) -> dict[str, float]:
        """Returns milliseconds for what is made once per batch."""
        ways: dict[str, Callable[[], Any]] = {}
        if self.kind in ("packed", "padded"):
            ways["mask"] = self.visible
            ways[FLEX] = lambda: (
                padded_borders(self.present) if self.kind == "padded" else document_borders(self.documents)
            )
        if self.kind == "packed":
            ways[ROOMY[1]] = lambda: starts_of(self.documents, room=self.documents.numel())
        return {
            name: round(statistics.median(milliseconds(make, self.device, 2) for _ in range(3)), 4)
            for name, make in ways.items()
        }


def starts_of(documents: Tensor, *, room: int | None = None) -> Tensor:
    """Returns where documents [B, S] start and, last, the number of tokens: [documents + 1] or, padded, [room + 1].

    Without `room` it waits for the device.
    """
    starts = document_starts(documents).starts
    return starts[: (int((starts < documents.numel()).sum()) if room is None else room) + 1]


def varlen(query: Tensor, key: Tensor, value: Tensor, *, starts: Tensor, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    if "window_size" in known:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    elif window is None:
        options["is_causal"] = True
    else:
        raise NotImplementedError("varlen_attn has no window_size in this torch")
    batch, heads, length, width = query.shape
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    mixed: Any = varlen_attn(*flat, starts, starts, length, length, **options)
    return mixed.view(batch, length, heads, width).transpose(1, 2)  # type: ignore[no-any-return]  # not annotated


def other_flash() -> list[str]:
    """Returns which of FlashAttention 3 and 4 torch can activate here."""
    found = []
    for name in ("FA3", "FA4"):
        try:
            with activated(name):
                found.append(name)
        except Exception as error:  # of any kind: a package that is not there, or does not fit this torch
            MISSING[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


MISSING: dict[str, str] = {}
"""Why FlashAttention 3 or 4 cannot be activated."""


@contextmanager
def activated(name: str) -> Iterator[None]:
    """Makes torch's flash kernel that of FlashAttention 3 or 4, and chooses it."""
    from torch.nn import attention

    attention.activate_flash_attention_impl(name)
    try:
        with sdpa_kernel(KERNELS["flash"]):
            yield
    finally:
        attention.restore_flash_attention_impl()


def difference(found: Tensor, expected: Tensor) -> float:
    return round(float((found.float() - expected.float()).norm() / expected.float().norm()), 5)


def milliseconds(run: Callable[[], Any], device: torch.device, passes: int = 4) -> float:
    """Returns the milliseconds of one run, measured over several passes on a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    for _ in range(passes):
        run()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / passes


def best_of(results: dict[str, dict[str, Any]]) -> str | None:
    able = {name: one["ms"] for name, one in results.items() if "ms" in one and one["error"] < 0.02}
    return min(able, key=able.__getitem__) if able else None


def show(kind: str, cases: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for case in cases for name in case["results"]))
    rows = []
    for case in cases:
        shape, results = case["shape"], case["results"]
        best = best_of(results)
        cells = []
        for name in names:
            one = results.get(name, {})
            mark = "**" if name == best else ""
            wrong = " WRONG" if one.get("error", 0.0) > 0.02 else ""
            absent = "–" if "cannot" in one else ""
            cells.append(f"{mark}{one['ms']:.2f}{mark} ({one['tflops']:.0f}){wrong}" if "ms" in one else absent)
        label = f"{shape['batch']} × {shape['length']}, {shape['heads']}/{shape['kv_heads']} × {shape['width']}"
        making = ", ".join(f"{name} {taken:.2f}" for name, taken in case["making_ms"].items())
        rows.append([label, *cells, *([making] if making else [])])
    head = ["rows × tokens, heads/kv × width", *names, *(["made once per batch"] if cases[0]["making_ms"] else [])]
    note = "ms of forward and backward (TFLOP/s as if all earlier tokens were seen); –: cannot run"
    return f"## {KINDS[kind]}\n\n{note}\n\n{table(head, rows)}"


def text_of(found: dict[str, Any]) -> str:
    parts = [
        f"# Attention on one {found['device']}, torch {found['torch']}, cuDNN {found['cudnn']}",
        "`python benchmarks/attention.py --output benchmarks/results`",
        *(f"{name} was not measured: {why}" for name, why in found["missing"].items()),
        *(show(kind, list(found[kind].values())) for kind in KINDS if found.get(kind)),
        show_best(found),
    ]
    return "\n\n".join(parts) + "\n"


def show_best(found: dict[str, Any]) -> str:
    rows = []
    for kind in KINDS:
        for case in found.get(kind, {}).values():
            shape, best = case["shape"], best_of(case["results"])
            if best is not None and TORCH in case["results"]:
                gain = case["results"][TORCH].get("ms", 0.0) / case["results"][best]["ms"]
                cells = [kind, str(shape["width"]), f"{shape['heads']}/{shape['kv_heads']}", str(shape["length"])]
                rows.append([*cells, best, f"{gain:.2f}"])
    head = ["kind", "width", "heads/kv", "length", "fastest", "torch's choice takes × longer"]
    return f"## Fastest\n\n{table(head, rows)}"


def write(found: dict[str, Any], folder: Path | None) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "attention.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "attention.md").write_text(text_of(found))


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=80.0, help="flex attention is left out after this long")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", 0)
    size = {"tokens": 1024, "features": 128} if options.dry_run else {"tokens": 16384, "features": 2048}
    shapes = [(32, 2, 512)] if options.dry_run else SHAPES
    name = "cpu" if options.dry_run else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": name, "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    found |= {"missing": MISSING, **{kind: {} for kind in options.kinds}}
    for width, share, length in shapes:
        for kind in options.kinds:
            case = Case(kind, width=width, share=share, length=length, device=device, **size)
            results = case.measure(case.contenders(), [])
            measured = {"shape": case.shape, "results": results, "making_ms": case.making()}
            found[kind][f"{width}/{share}/{length}"] = measured
            print(f"{time.monotonic() - began:.0f} s", kind, json.dumps(measured), flush=True)
        write(found, options.output)
    for width, share, length in shapes:
        torch._dynamo.reset()  # each shape is measured as if it were the only one; all kinds but window share a kernel
        for kind in options.kinds:
            if time.monotonic() - began > options.seconds:
                break
            case = Case(kind, width=width, share=share, length=length, device=device, **size)
            reference: list[Tensor] = []
            results = case.measure({TORCH: case.contenders()[TORCH], FLEX: (case.flex(), nullcontext)}, reference)
            found[kind][f"{width}/{share}/{length}"]["results"][FLEX] = results[FLEX]
            print(
                f"{time.monotonic() - began:.0f} s", kind, width, share, length, json.dumps(results[FLEX]), flush=True
            )
        write(found, options.output)
    print(text_of(found))


if __name__ == "__main__":
    main()
