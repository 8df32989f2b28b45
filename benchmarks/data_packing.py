"""Tokens per second from tokenized documents in a `datasets.Dataset` to rows of one length, as tensors.

Compared are our `pack`, best fit by index (the plan is made in every trial) and one after the other as a stream, with
the usual `map(batched=True)` of Hugging Face that strings the documents of 1,000 rows together and cuts them. All rows
are read once. `map` writes them all before the first can be read; ours makes each when it is read, and also makes
positions, document ids, and labels that leave out the first token of each document.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from data_rounds import Measured, Rounds, median, ratio, show_ratio, table, take_turns

from trainwright.data.pack import pack

READ_AT_ONCE, MAP_BATCH = 32, 1000
RATE, FIRST, PADDING, LOST, CUT = "tokens per second", "seconds to the first row", "padding", "tokens lost", "cut"
MAP = "datasets, map"


def make_documents(num_tokens: int) -> Any:
    """Documents of log-normal length, with a median of some 330 tokens and a mean of some 550."""
    import datasets

    draw = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths += np.maximum(draw.lognormal(5.8, 1.0, 500).astype(int), 1).tolist()
    documents = [draw.integers(0, 32_000, length) for length in lengths]
    return datasets.Dataset.from_dict({"input_ids": documents})


def group_texts(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """Strings the documents of one call together and cuts them; what is left at its end is dropped."""
    tokens = list(chain.from_iterable(rows["input_ids"]))
    usable = len(tokens) // length * length
    pieces = [tokens[start : start + length] for start in range(0, usable, length)]
    return {"input_ids": pieces, "labels": [list(piece) for piece in pieces]}


def count_cut(lengths: list[int], length: int) -> int:
    """How many documents do not end in the row in which they begin, when they are strung together?"""
    ends = np.cumsum(lengths)
    return int(((ends - lengths) // length != (ends - 1) // length).sum())


def run_map(documents: Any, lengths: list[int], length: int) -> Measured:
    began = time.perf_counter()
    packed = documents.map(
        group_texts, batched=True, batch_size=MAP_BATCH, fn_kwargs={"length": length}, load_from_cache_file=False
    ).with_format("torch")
    first = 0.0
    for start in range(0, len(packed), READ_AT_ONCE):
        packed.__getitems__(list(range(start, min(start + READ_AT_ONCE, len(packed)))))
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    calls = [lengths[start : start + MAP_BATCH] for start in range(0, len(lengths), MAP_BATCH)]
    cut = sum(count_cut(each, length) for each in calls) / len(lengths)
    kept = len(packed) * length
    return {RATE: kept / seconds, FIRST: first, PADDING: 0.0, LOST: 1 - kept / sum(lengths), CUT: cut}


def run_fit(documents: Any, lengths: list[int], length: int) -> Measured:
    began = time.perf_counter()
    packed = pack(documents, length=length)
    first = 0.0
    for start in range(0, len(packed), READ_AT_ONCE):
        packed.__getitems__(list(range(start, min(start + READ_AT_ONCE, len(packed)))))
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    cut = float((np.array(lengths) > length).mean())
    return {RATE: sum(lengths) / seconds, FIRST: first, PADDING: 1 - packed.fill, LOST: 0.0, CUT: cut}


def run_stream(documents: Any, lengths: list[int], length: int) -> Measured:
    began = time.perf_counter()
    num_rows, first = 0, 0.0
    for _ in pack(documents, length=length):
        num_rows += 1
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    padding = 1 - sum(lengths) / (num_rows * length)
    cut = count_cut(lengths, length) / len(lengths)
    return {RATE: sum(lengths) / seconds, FIRST: first, PADDING: padding, LOST: 0.0, CUT: cut}


def measure(*, rounds: int, num_tokens: int, row_lengths: tuple[int, ...]) -> Rounds:
    """Returns the rounds of every contender at every length of a row."""
    import datasets

    datasets.disable_progress_bars()
    documents = make_documents(num_tokens)
    lengths = [len(tokens) for tokens in documents["input_ids"]]
    tensors = documents.with_format("torch")
    runs: dict[str, tuple[Callable[..., Measured], Any]] = {
        "ours, best fit": (run_fit, documents),
        "ours, best fit, documents as tensors": (run_fit, tensors),
        "ours, stream": (run_stream, documents.to_iterable_dataset()),
        "ours, stream, documents as tensors": (run_stream, tensors.to_iterable_dataset()),
        MAP: (run_map, documents),
    }
    contenders = {
        f"{name}; {length}": lambda run=run, source=source, length=length: run(source, lengths, length)
        for length in row_lengths
        for name, (run, source) in runs.items()
    }
    turns = take_turns(contenders, rounds)
    for name in turns:
        print(f"packing: {name}: {median(turns, name, RATE) / 1e6:.1f} million tokens/s", flush=True)
    return turns


def report(turns: Rounds) -> str:
    """Returns one table."""
    rows = []
    for name in turns:
        contender, length = name.split("; ")
        rows.append(
            [
                contender,
                length,
                f"{median(turns, name, RATE) / 1e6:.1f}",
                show_ratio(ratio(turns, RATE, name, f"{MAP}; {length}")),
                f"{median(turns, name, FIRST):.3f}",
                *(f"{100 * median(turns, name, quantity):.2f} %" for quantity in (PADDING, LOST, CUT)),
            ]
        )
    head = ["", "row", "million tokens/s", "ratio to map", "first row, s", "padding", "tokens lost", "documents cut"]
    return table(head, rows)
