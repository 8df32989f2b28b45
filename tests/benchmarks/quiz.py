"""A quiz that a tiny language model on bytes learns within some steps, and a run that does."""

import json
import os
import random

from trainwright import RunConfig, build_trainer

CITIES = {
    "Ada": "Rome",
    "Emmy": "Oslo",
    "Grace": "Paris",
    "Sofia": "Lima",
    "Alan": "Kyiv",
    "Carl": "Bonn",
    "Leo": "Cairo",
}

RUN = """
model: {type: llama, vocab_size: 260, hidden_size: 32, num_layers: 2, num_heads: 4, max_positions: 64}
data:
  train: {type: json_lines, path: facts.jsonl, columns: [prompt, completion]}
  collator: {type: tokenize, tokenizer: bytes, prompt: prompt, completion: completion, add_eos: true}
trainer: {type: language_model, max_steps: 2, global_batch_size: 8, optimizer: {type: adamw, lr: 1e-2}}
evaluation:
  benchmarks:
    - {type: multiple_choice, path: quiz.jsonl, tokenizer: bytes, prompt: "{question}", batch_size: 2}
    - {type: generate, path: cities.jsonl, tokenizer: bytes, prompt: "{question}", max_new_tokens: 8, stop: "."}
runtime: {device: cpu}
writers: [json]
"""


def write_whole(path, text):
    """Replaces a file at once: the ranks of a test write the same files, and none reads a part of one."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(text)
    written.replace(path)


def write_lines(path, rows):
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_quiz(folder):
    """Writes facts to learn, and questions about them with choices and without."""
    draw = random.Random(0)
    asked = {name: f"Where does {name} live?" for name in CITIES}
    write_lines(
        folder / "facts.jsonl",
        [{"prompt": asked[name], "completion": f" {CITIES[name]}."} for _ in range(20) for name in CITIES],
    )
    questions = []
    for name, city in CITIES.items():
        choices = [city, *draw.sample([each for each in CITIES.values() if each != city], 2 + len(questions) % 2)]
        draw.shuffle(choices)
        questions.append({"question": asked[name], "choices": choices, "answer": choices.index(city)})
    write_lines(folder / "quiz.jsonl", questions)
    write_lines(folder / "cities.jsonl", [{"question": asked[name], "answer": CITIES[name]} for name in CITIES])


def build(folder, *overrides, text=RUN):
    write_quiz(folder)
    write_whole(folder / "run.yaml", text)
    return build_trainer(RunConfig.load(folder / "run.yaml", [f"output_dir={folder / 'runs'}", *overrides]))


def lines_of(trainer):
    """The lines of metrics.json by step."""
    lines = map(json.loads, (trainer.folder / "metrics.json").read_text().splitlines())
    return {line["step"]: line for line in lines}


def math_of(trainer):
    """What training computed in each step: without times and evaluations."""
    return {step: (line["loss"], line["grad_norm"]) for step, line in lines_of(trainer).items() if "loss" in line}
