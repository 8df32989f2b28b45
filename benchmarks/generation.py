"""Generation: transformers' `generate` with a static cache beside ours, for a small Llama with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--output FOLDER] [--device cpu] [--rounds 7] [--dry-run]

Greedy, 64 tokens after prompts of 64, batch 1 and 16; the contenders take turns. First the tokens of all are compared:
in bf16, on a GPU, rounding selects other tokens sooner or later, and the mean number of equal tokens is shown. A time
is the smallest of all rounds: on the CPU that of the process, which other programs do not lengthen, and on a GPU that
of the clock. Compilation is not counted. The JSON file is written after each case, and the same command continues after
the cases that it has; a contender that fails is reported as such. `--dry-run`: a tiny model, once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from data_rounds import table
from torch import Tensor

from trainwright.backends import pick_backend
from trainwright.models.decoding import StaticReader
from trainwright.models.generation import sample_completions
from trainwright.models.llama import Llama

THEIRS = "transformers, static cache"


class Shape(NamedTuple):
    hidden_size: int
    num_layers: int
    vocab_size: int
    intermediate_size: int


SHAPES = {
    "cpu": [Shape(128, 4, 2048, 352), Shape(256, 6, 8192, 704)],
    "cuda": [Shape(1024, 16, 32000, 2816), Shape(2048, 22, 32000, 5632)],
}
NUM_HEADS, NUM_KEY_HEADS = 8, 4


def models(shape: Shape, device: torch.device) -> tuple[Any, Llama]:
    """Returns transformers' model and ours, with the same weights."""
    sizes = shape._asdict()
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KEY_HEADS,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        eos_token_id=None,
        initializer_range=0.1,  # logits far enough apart that rounding selects no other token
    )
    torch.manual_seed(0)
    theirs: Any = transformers.LlamaForCausalLM(config).eval()
    ours = Llama(**sizes, num_heads=NUM_HEADS, num_kv_heads=NUM_KEY_HEADS, max_positions=512, tie_embeddings=False)
    ours.load_state_dict(theirs.state_dict())
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    # Only the parameters: in 16 bits, transformers' buffer of rotary frequencies would give other angles.
    for model in (theirs, ours.eval()):
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device, dtype)
        model.to(device)
    return theirs, ours


def contenders(
    theirs: Any, ours: Llama, prompts: Tensor, num_tokens: int, compiler: str
) -> dict[str, Callable[[], Any]]:
    """Returns functions that generate the tokens [B, T] for the prompts, on the host."""
    rows = prompts.tolist()
    # Without the mask, transformers takes each 0 of a prompt for padding.
    greedy: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}

    def transformers_static() -> list[list[int]]:
        made = theirs.generate(prompts, max_new_tokens=num_tokens, cache_implementation="static", **greedy)
        found: list[list[int]] = made[:, prompts.shape[1] :].tolist()
        return found

    def of(**options: Any) -> Callable[[], list[list[int]]]:
        return lambda: sample_completions(ours, rows, max_new_tokens=num_tokens, temperature=0, **options).rows()

    return {
        THEIRS: transformers_static,
        "ours, eager": of(),
        "ours, static": of(reader=StaticReader(ours, compiler=None)),
        "ours, static, compiled": of(reader=StaticReader(ours, compiler=compiler)),
    }


def measure(shape: Shape, batch: int, device: torch.device, rounds: int, *, num_tokens: int, compiler: str) -> Any:
    """Returns the milliseconds per token of each contender, and how many tokens of a row begin like transformers'."""
    theirs, ours = models(shape, device)
    prompts = torch.randint(0, shape.vocab_size, (batch, 64), generator=torch.Generator().manual_seed(1)).to(device)
    runs = contenders(theirs, ours, prompts, num_tokens, compiler)
    first, errors = {}, {}
    for name, run in list(runs.items()):
        try:
            first[name] = run()
        except Exception as error:  # of a compiler, or the memory: the others are measured all the same
            traceback.print_exc()
            errors[name] = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            del runs[name]
    expected = first.get(THEIRS, [[]] * batch)
    agree = {name: equal_tokens(made, expected) for name, made in first.items()}
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()  # its result is on the host, so the device has finished
            best[name] = min(best[name], clock() - start)
    found = {name: {"ms": 1e3 * seconds / num_tokens, "equal_tokens": agree[name]} for name, seconds in best.items()}
    return {**found, **errors}


def line(one: Any, theirs: Any, num_tokens: int) -> list[str]:
    """Returns the columns of a contender: its time, the ratio, and whether the tokens agree."""
    if "error" in one:
        return [one["error"], "", ""]
    agree = "yes" if one["equal_tokens"] == num_tokens else f"first {one['equal_tokens']:.0f}"
    return [f"{one['ms']:.3f}", f"{theirs['ms'] / one['ms']:.2f}" if "ms" in theirs else "", agree]


def equal_tokens(rows: list[list[int]], expected: list[list[int]]) -> float:
    """Returns how many tokens of a row are equal before the first that differs, on average."""
    pairs = (zip(row, other, strict=False) for row, other in zip(rows, expected, strict=True))
    return sum(len(list(takewhile(lambda pair: pair[0] == pair[1], pair))) for pair in pairs) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    backend = pick_backend(options.device)
    device = backend.device
    shapes = [Shape(32, 2, 61, 64)] if options.dry_run else SHAPES[device.type]
    rounds, num_tokens = (1, 8) if options.dry_run else (options.rounds, 64)
    compiler = "eager" if options.dry_run else "inductor"
    found: dict[str, Any] = {"device": backend.describe(), "torch": torch.__version__, "cases": []}
    path = None if options.output is None else options.output / "generation.json"
    if path is not None and path.is_file():
        earlier = json.loads(path.read_text("utf-8"))
        if {**earlier, "cases": []} == found:
            found = earlier
    rows = []
    for shape in shapes:
        for batch in (1, 16):
            case = {**shape._asdict(), "batch": batch}
            results = next((each["results"] for each in found["cases"] if each == each | case), None)
            if results is None:
                results = measure(shape, batch, device, rounds, num_tokens=num_tokens, compiler=compiler)
                found["cases"].append({**case, "results": results})
            name = f"{shape.num_layers} × {shape.hidden_size}, vocabulary {shape.vocab_size:,}"
            rows += [[name, str(batch), each, *line(one, results[THEIRS], num_tokens)] for each, one in results.items()]
            print(*(" ".join(row) for row in rows[-len(results) :]), sep="\n", file=sys.stderr, flush=True)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = table(["layers × width", "batch", "contender", "ms per token", "ratio", "tokens agree"], rows)
    print(f"{found['device']}, torch {found['torch']}, transformers {transformers.__version__}\n\n{text}")


if __name__ == "__main__":
    main()
