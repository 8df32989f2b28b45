"""Writes sums: examples.jsonl, half of whose answers are wrong, prompts.jsonl for GRPO, and valid.jsonl for both."""

import json
import random
from pathlib import Path


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


draw = random.Random(0)
pairs = [(left, right) for left in range(50) for right in range(50)]
draw.shuffle(pairs)
questions = [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in pairs]
valid, train = questions[:250], questions[250:]
write("valid.jsonl", valid)
write("prompts.jsonl", train)
examples = []
for row in train:
    wrong = str(max(0, int(row["answer"]) + draw.choice([-10, -2, -1, 1, 2, 10])))
    examples.append({"prompt": row["prompt"], "completion": row["answer"] if draw.random() < 0.4 else wrong})
write("examples.jsonl", examples)
