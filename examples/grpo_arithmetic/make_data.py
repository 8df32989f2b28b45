"""Writes sums of two numbers below 20: prompts with their answers for GRPO, and examples for the warm-up.

The answer of an example is right, too high by one (twice as often), or too high by two, so most examples are wrong.
"""

import json
import random
from pathlib import Path

MISTAKES = (0, 1, 1, 2)


def write(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


draw = random.Random(0)
sums = [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left in range(20) for right in range(20)]
draw.shuffle(sums)
write("valid.jsonl", sums[:80])  # not in the training set of GRPO
write("prompts.jsonl", sums[80:])
examples = [
    {"prompt": row["prompt"], "completion": str(int(row["answer"]) + draw.choice(MISTAKES))}
    for row in sums
    for _ in range(10)
]
draw.shuffle(examples)
write("examples.jsonl", examples)
