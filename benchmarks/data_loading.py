"""Samples per second of our TrainData and of torch's DataLoader, on the same dataset with the same collator.

Ours gives every sample that draws random numbers generators of its own, so that it is reproducible; torch's does not.
That costs 10 to 16 µs a sample that draws, and to see that none does, about 80 µs a batch in the run's own process and
10 µs in a worker, unless the dataset says so itself; none here does, but TensorDataset is known to draw nothing.
DataLoader runs twice where its own `default_collate` can do the work: with our collator and with its own. Measured is
the steady state, after some batches; the time to the first batch is told apart. Beside samples per second there is the
processor's time per sample, of workers and all, which other people's work on the machine disturbs less.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_rounds import Measured, median, ratio, show_ratio, table, take_turns
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from trainwright.data.collators.stack import Stack
from trainwright.data.collators.tokenize import Tokenize
from trainwright.data.loader import TrainData
from trainwright.data.stream_loader import StreamData
from trainwright.data.workers import LoaderOptions

BATCH, WARM_BATCHES = 32, 20
WALL, PROCESSOR, FIRST = "samples per second", "samples per second of the processor", "seconds to the first batch"
OURS, SAME, TORCH = "trainwright", "DataLoader, same collator", "DataLoader, default_collate"


class Numbers(Dataset):
    """The cheapest item there is: its own number."""

    def __len__(self):
        return 500_000

    def __getitem__(self, index):
        return torch.tensor(index)


class Rows(Dataset):
    """Rows of a small table as dicts of tensors."""

    def __init__(self):
        self.x, self.y = torch.randn(200_000, 16), torch.randint(0, 10, (200_000,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class TokenBlocks(Dataset):
    """Blocks of 512 tokens from a memory map of a million; they overlap, so that an epoch is long enough."""

    LENGTH, EVERY, TOKENS = 512, 8, 1_000_000

    def __init__(self, folder: Path):
        path = folder / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, self.TOKENS, dtype=np.uint16).tofile(path)
        self.tokens = np.memmap(path, dtype=np.uint16, mode="r")

    def __len__(self):
        return (self.TOKENS - self.LENGTH) // self.EVERY

    def __getitem__(self, index):
        start = index * self.EVERY
        return {"input_ids": torch.from_numpy(self.tokens[start : start + self.LENGTH].astype(np.int64))}


class Pictures(Dataset):
    """Random crops resized to 3×64×64, flipped, brightened and made noisy, by draws of all three generators."""

    MEAN, DEVIATION = torch.tensor([0.48, 0.46, 0.41])[:, None, None], torch.tensor([0.23, 0.22, 0.23])[:, None, None]

    def __init__(self):
        self.pixels = np.random.default_rng(0).integers(0, 256, (256, 3, 80, 80), dtype=np.uint8)

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        size = random.randint(48, 80)
        top, left = random.randint(0, 80 - size), random.randint(0, 80 - size)
        return self.make(index, size, top, left, random.random() < 0.5, np.random.uniform(0.9, 1.1))

    def make(self, index, size, top, left, flips, brightness):
        crop = torch.from_numpy(self.pixels[index % 256, :, top : top + size, left : left + size].astype(np.float32))
        picture = functional.interpolate(crop[None], (64, 64), mode="bilinear")[0]
        if flips:
            picture = picture.flip(-1)
        picture = (picture * (brightness / 255) + 0.05 * torch.randn(3, 64, 64)).clamp(0, 1)
        return {"pixel_values": (picture - self.MEAN) / self.DEVIATION, "labels": index % 10}


class TorchPictures(Pictures):
    """The same, with torch's generator alone, as torchvision's transforms draw."""

    def __getitem__(self, index):
        size = int(torch.randint(48, 81, ()))
        top, left = torch.randint(0, 81 - size, (2,)).tolist()
        flip, brightness = torch.rand(2).tolist()
        return self.make(index, size, top, left, flip < 0.5, 0.9 + 0.2 * brightness)


class Texts(Dataset):
    """Texts of some 60 words, to be tokenized by the collator."""

    def __init__(self):
        words = ["the", "of", "to", "and", "in", "is", "for", "that", "data", "batch", "model", "step", "loss", "token"]
        draw = random.Random(0)
        self.texts = [" ".join(draw.choices(words, k=draw.randint(20, 100))) for _ in range(2_000)]

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return {"text": self.texts[index % 2_000]}


class TextStream(IterableDataset):
    """The texts one after the other, without an end; torch's workers share them out as its documentation shows."""

    num_shards = 8

    def __init__(self, start=0, step=1):
        self.texts, self.start, self.step = Texts(), start, step

    def __iter__(self):
        worker = get_worker_info()
        own, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for row in count(self.start + own * self.step, self.step * workers):
            yield self.texts[row % len(self.texts)]

    def shard(self, num_shards, index):
        return TextStream(self.start + index * self.step, self.step * num_shards)


def make_tokenizer(folder: Path) -> Path:
    """A byte-level BPE of the texts themselves."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(Texts().texts, vocab_size=2_000, special_tokens=["<pad>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@dataclass(frozen=True)
class Case:
    """A dataset, and how it is read."""

    make: Callable[[], Any]
    bar: float
    """What share of DataLoader's speed ours must have."""
    collator: Any = None
    """None: samples that can be stacked, which `default_collate` does too."""


def make_cases(folder: Path) -> dict[str, Case]:
    generator = torch.Generator().manual_seed(0)
    table_of_floats = torch.randn(200_000, 16, generator=generator)
    return {
        "a number": Case(Numbers, 0.9),
        "a dict of two small tensors": Case(Rows, 0.9),
        "TensorDataset": Case(lambda: TensorDataset(table_of_floats, torch.arange(200_000)), 0.95),
        "blocks of 512 tokens": Case(lambda: TokenBlocks(folder), 0.95),
        "pictures, drawing from torch, numpy and random": Case(Pictures, 0.95),
        "pictures, drawing from torch": Case(TorchPictures, 0.95),
        "a stream of texts, tokenized (ours shuffles)": Case(
            TextStream, 0.95, Tokenize(tokenizer=make_tokenizer(folder), max_length=128)
        ),
        "texts, tokenized": Case(Texts, 0.95, Tokenize(tokenizer=make_tokenizer(folder), max_length=128)),
    }


def processor_seconds() -> float:
    """What this process and its workers have used of the processor so far."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        # One line per thread: nanoseconds on a processor, waiting for one, and number of turns. Linux only.
        for thread in Path(f"/proc/{worker.pid}/task").glob("*/schedstat"):
            seconds += int(thread.read_text().split()[0]) / 1e9
    return seconds


def clock(make_batches: Callable[[], Iterator[Any]], seconds: float) -> Measured:
    """Measures the first batch, and after a warm-up the batches of this many seconds."""
    began = time.perf_counter()
    batches = make_batches()
    next(batches)
    first = time.perf_counter() - began
    for _ in range(WARM_BATCHES):
        next(batches)
    num_batches, processor, start = 0, processor_seconds(), time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds:
        batch = next(batches)  # as in a loop over batches, the one before lives until this one is there
        num_batches += 1
    processor = processor_seconds() - processor
    del batch, batches  # ends the workers
    num_samples = num_batches * BATCH
    return {WALL: num_samples / passed, PROCESSOR: num_samples / processor, FIRST: first}


def contenders_of(case: Case, workers: int, seconds: float) -> dict[str, Callable[[], Measured]]:
    dataset = case.make()
    collator = case.collator or Stack()

    def ours() -> Iterator[Any]:
        kind = StreamData if isinstance(dataset, IterableDataset) else TrainData
        data = kind(
            dataset, collator=collator, global_batch_size=BATCH, seed=0, options=LoaderOptions(num_workers=workers)
        )
        return data.batches(iter)

    def of_torch(collate: Any) -> Callable[[], Iterator[Any]]:
        shuffle = None if isinstance(dataset, IterableDataset) else True
        return lambda: iter(DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers, collate_fn=collate))

    makers = {OURS: ours, SAME: of_torch(collator)}
    if case.collator is None:
        makers[TORCH] = of_torch(default_collate)
    return {name: lambda maker=maker: clock(maker, seconds) for name, maker in makers.items()}


def measure(folder: Path, *, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """Returns, for every dataset and number of workers, the rounds of each contender."""
    found = {}
    for name, case in make_cases(folder).items():
        for workers in (0, 2):
            turns = take_turns(contenders_of(case, workers, seconds), rounds)
            found[f"{name}; {workers}"] = {"bar": case.bar, "rounds": turns}
            ratios = [show_ratio(ratio(turns, quantity, OURS, SAME)) for quantity in (WALL, PROCESSOR)]
            print(f"loading: {name}, {workers} workers: wall {ratios[0]}, processor {ratios[1]}", flush=True)
    return found


def report(found: dict[str, dict[str, Any]]) -> str:
    """Returns one table of speeds, ratios and times to the first batch."""
    rows = []
    for name, case in found.items():
        turns = case["rounds"]
        own = TORCH in turns
        rows.append(
            [
                *name.split("; "),
                f"{median(turns, OURS, WALL):,.0f}",
                f"{median(turns, SAME, WALL):,.0f}",
                show_ratio(ratio(turns, WALL, OURS, SAME)),
                show_ratio(ratio(turns, PROCESSOR, OURS, SAME)),
                show_ratio(ratio(turns, WALL, OURS, TORCH)) if own else "–",
                show_ratio(ratio(turns, PROCESSOR, OURS, TORCH)) if own else "–",
                f"{case['bar']:.2f}",
                _judge([ratio(turns, quantity, OURS, SAME)["median"] for quantity in (WALL, PROCESSOR)], case["bar"]),
                f"{1e3 * median(turns, OURS, FIRST):.0f} / {1e3 * median(turns, SAME, FIRST):.0f}",
            ]
        )
    head = ["item", "workers", "ours, samples/s", "DataLoader, same collator, samples/s", "ratio", "by processor time"]
    head += [
        "ratio to DataLoader with default_collate",
        "by processor time",
        "bar",
        "reached",
        "first batch, ours / DataLoader, ms",
    ]
    return table(head, rows)


def _judge(ratios: list[float], bar: float) -> str:
    """By the clock and by the processor's time, the bar is reached by both, by none, or nearly."""
    reached = [each >= bar for each in ratios]
    return "yes" if all(reached) else "nearly" if any(reached) else "no"
