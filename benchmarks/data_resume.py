"""Seconds to the first batch of a run that goes on at an early and at a late row of one large file of JSON lines.

The file is in the system's cache. Ours shuffle (the stream in blocks of 1,000 rows, which are read first); the streams
of `datasets` do not, and are asked for the same number of rows as one batch holds. Opening the dataset is included,
except where the index of ours is said to be kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_rounds import Measured, Rounds, median, ratio, show_ratio, table, take_turns

from trainwright.data.loader import TrainData
from trainwright.data.sources.files import json_lines
from trainwright.data.stream_loader import StreamData

BATCH, EARLY = 32, 10
SECONDS = "seconds to the first batch"
STREAM, KEPT, INDEXED = "ours, stream", "ours, by index (kept)", "ours, by index (built)"
SKIP, STATE = "datasets, skip(n)", "datasets, load_state_dict"


def write_rows(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            text = f"Row {number} says that {number * 7919 % count} follows it, and that the text is about this long."
            file.write(json.dumps({"text": text, "label": number % 10}) + "\n")


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    texts = [sample["text"] for sample in samples]
    return {"text": texts, "labels": torch.tensor([sample["label"] for sample in samples])}


def stream_data(path: Path, batch_size: int = BATCH) -> StreamData:
    stream = json_lines(str(path), streaming=True)
    return StreamData(stream, collator=collate, global_batch_size=batch_size, seed=0)


def read_with_datasets(path: Path) -> Any:
    import datasets

    return datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)


def find_states(path: Path, rows: list[int]) -> tuple[dict[int, Any], dict[int, Any]]:
    """Reads up to the rows for once, as a run would have done; returns our states there and those of `datasets`."""
    ours, theirs = {}, {}
    for row in rows:
        data = stream_data(path, batch_size=EARLY if row < 1000 else 1000)
        for _ in data.batches(iter):
            if data.samples_seen + data.global_batch_size > row:
                break
        if data.samples_seen < row:
            data.num_samples = row
            next(data.batches(iter))
        assert data.samples_seen == row
        ours[row] = data.state_dict()
    read = read_with_datasets(path)
    for number, _ in enumerate(read, start=1):
        if number in rows:
            theirs[number] = read.state_dict()
            if len(theirs) == len(rows):
                break
    return ours, theirs


def make_contenders(path: Path, rows: list[int]) -> dict[str, Callable[[], Measured]]:
    states, their_states = find_states(path, rows)
    kept = json_lines(str(path))
    len(kept)  # builds the index

    def of_stream(row: int) -> Iterator[Any]:
        data = stream_data(path)
        data.load_state_dict(states[row])
        return data.batches(iter)

    def of_index(dataset: Any, row: int) -> Iterator[Any]:
        data = TrainData(dataset, collator=collate, global_batch_size=BATCH, seed=0)
        data.load_state_dict({"position": row})
        return data.batches(iter)

    def of_skip(row: int) -> Iterator[Any]:
        return iter(read_with_datasets(path).skip(row).batch(BATCH))

    def of_state(row: int) -> Iterator[Any]:
        read = read_with_datasets(path)
        read.load_state_dict(their_states[row])
        samples = iter(read)
        return iter(lambda: collate(list(islice(samples, BATCH))), None)

    makers = {
        STREAM: of_stream,
        KEPT: lambda row: of_index(kept, row),
        INDEXED: lambda row: of_index(json_lines(str(path)), row),
        SKIP: of_skip,
        STATE: of_state,
    }
    return {
        f"{name}; {row}": lambda make=make, row=row: clock(make, row) for name, make in makers.items() for row in rows
    }


def clock(make: Callable[[int], Iterator[Any]], row: int) -> Measured:
    began = time.perf_counter()
    batches = make(row)
    next(batches)
    return {SECONDS: time.perf_counter() - began}


def measure(folder: Path, *, rounds: int, late: int) -> Rounds:
    """Returns the rounds of every contender at an early row and at `late`."""
    path = folder / "rows.jsonl"
    write_rows(path, late + late // 10)
    turns = take_turns(make_contenders(path, [EARLY, late]), rounds)
    for name in turns:
        print(f"resume: {name}: {1e3 * median(turns, name, SECONDS):.1f} ms", flush=True)
    return turns


def report(turns: Rounds) -> str:
    """Returns one table."""
    rows = []
    names = dict.fromkeys(name.split("; ")[0] for name in turns)
    early, late = dict.fromkeys(name.split("; ")[1] for name in turns)
    for name in names:
        own = [f"{1e3 * median(turns, f'{name}; {row}', SECONDS):,.1f}" for row in (early, late)]
        rows.append([name, *own, show_ratio(ratio(turns, SECONDS, f"{name}; {late}", f"{name}; {early}"))])
    return table(["", f"at row {int(early):,}, ms", f"at row {int(late):,}, ms", "late / early"], rows)
