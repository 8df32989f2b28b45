"""Small projects to look at: a run file, data files, and datasets of a user's own."""

import json

MODEL = "model: {type: llama, vocab_size: 300, hidden_size: 8, num_layers: 1, num_heads: 1}\n"
TRAINER = "trainer: {max_steps: 10, global_batch_size: 8, optimizer: {type: adamw, lr: 1.0e-3}}\n"

DATASETS = """
import torch
from trainwright import Task, Trainer
from trainwright.data.loader import TrainData


class Pairs:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.full((3,), float(index)), index % 7


class Drawn:
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"x": torch.rand(4), "index": torch.tensor(index)}


class Tokens:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"input_ids": [(index * 7 + place) % 290 for place in range(index % 5 + 2)], "url": "x"}


class Spelled:
    tokens_per_sample = 4

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([72, 105, 33, 97 + index])}

    def decode(self, ids):
        return bytes(ids).decode()


class Counted(Tokens):
    lengths = [index % 5 + 2 for index in range(40)]


class Endless:
    given = 0

    def __iter__(self):
        while True:
            Endless.given += 1
            yield {"input_ids": torch.tensor([Endless.given % 100, 2])}


class Mine(Trainer):
    @classmethod
    def build_train_data(cls, build):
        return TrainData(Pairs(), collator=build.collator(), global_batch_size=4, seed=3, shuffle=False)


class Learns(Task):
    def build_dataset(self, split):
        return None if split == "test" else Pairs()
"""


def write_project(folder, data, *, model=MODEL, trainer=TRAINER):
    """Writes run.yaml with this data section, and everything that it may name."""
    (folder / "datasets").mkdir(exist_ok=True)
    (folder / "datasets" / "mine.py").write_text(DATASETS)
    rows = [{"text": f"prose {number} " + "so " * (number % 9), "url": f"u{number}"} for number in range(60)]
    (folder / "prose.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"text": f"code {number}\n\tpass", "url": f"u{number}"} for number in range(20)]
    (folder / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"ask": f"{number}+1=", "say": f"{number + 1}"} for number in range(40)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(f"{model}{trainer}data:\n{data}")
    return folder / "run.yaml"
