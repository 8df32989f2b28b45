"""Benchmarks within a run: their values, their files, and that training does not notice them."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch
from tests.benchmarks.quiz import build, lines_of, math_of
from tests.messages import raises

from trainwright import Benchmark, RunConfig, build_component
from trainwright.api.run import run_experiment
from trainwright.benchmarks.benchmark import ConfiguredBenchmark
from trainwright.errors import ConfigError, DataError

DROPOUT = ("model.dropout=0.2", "model.type=noisy.py:Noisy")

NOISY = """
import torch
from trainwright import get_event_storage
from trainwright.models.gpt2 import GPT2


class Noisy(GPT2):
    def forward(self, input_ids, **rest):
        torch.rand(3)
        get_event_storage().put_scalar("width", input_ids.shape[1])
        return super().forward(input_ids, **rest)
"""
EVERY = ("evaluation.every_steps=1", "log.every_steps=1", "trainer.max_steps=3")


def test_training_is_bit_identical_to_one_without_benchmarks(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    runs = {}
    for name, overrides in (("with", ()), ("without", ("evaluation.benchmarks=[]",))):
        trainer = build(tmp_path, f"name={name}", *EVERY, *DROPOUT, *overrides)
        trainer.train()
        runs[name] = trainer
    assert math_of(runs["with"]) == math_of(runs["without"])
    assert [{line["width"] for line in lines_of(each).values()} for each in runs.values()] == [{30}, {30}]
    assert all(map(torch.equal, runs["with"].model.parameters(), runs["without"].model.parameters()))
    assert runs["with"].model.training


def test_values_join_the_line_of_the_step_and_files_have_the_samples(tmp_path):
    trainer = build(tmp_path, *EVERY, "evaluation.benchmarks.0.log_samples=2")
    logs = trainer.train()
    assert logs.keys() == {"quiz/acc", "quiz/acc_norm", "cities/exact_match", "cities/truncated"}
    assert logs.items() <= lines_of(trainer)[3].items()
    folder = trainer.folder / "benchmarks" / "step-00000003"
    written = json.loads((folder / "results.json").read_text())
    assert written["quiz"]["num_samples"] == 7
    rows = {name: list(map(json.loads, (folder / f"{name}.jsonl").open())) for name in ("quiz", "cities")}
    assert [len(each) for each in rows.values()] == [2, 7]
    shares = [row["exact_match"] for row in rows["cities"]]
    assert written["cities"]["exact_match"]["value"] == logs["cities/exact_match"] == sum(shares) / 7
    assert [row["row"] for row in rows["cities"]] == list(range(7))
    assert sorted(path.name for path in folder.parent.iterdir()) == [f"step-0000000{n}" for n in (1, 2, 3)]


def test_values_select_checkpoints_and_stop_the_run(tmp_path):
    # What cannot improve stops the run, and lowers the rate; the first value is the best.
    trainer = build(
        tmp_path,
        "evaluation.every_steps=1",
        "trainer.max_steps=9",
        "trainer.schedule={type: reduce_on_plateau, metric: cities/exact_match, mode: max, patience: 0}",
        "checkpoint.keep_best={metric: cities/exact_match, mode: max}",
        "hooks=[{type: early_stopping, metric: cities/exact_match, mode: max, patience: 2}]",
    )
    trainer.train()
    assert trainer.step == 3
    assert trainer.best.step == 1
    assert next(iter(trainer.optimizers.values())).param_groups[0]["lr"] < 1e-2


@pytest.mark.parametrize(
    ("metric", "mode", "mentions"),
    [("quiz/ac", "max", ["quiz/acc"]), ("quiz/acc", "min", ["max"]), ("quizz/acc", "max", ["quiz"])],
)
def test_a_wrong_name_of_a_value_is_reported_before_the_first_step(tmp_path, metric, mode, mentions):
    with raises(ConfigError, *mentions, "checkpoint.keep_best"):
        build(tmp_path, f"checkpoint.keep_best={{metric: {metric}, mode: {mode}}}").train()
    if metric != "quizz/acc":
        hook = f"hooks=[{{type: early_stopping, metric: {metric}, mode: {mode}}}]"
        with raises(ConfigError, *mentions, "early_stopping"):
            build(tmp_path, hook, "name=other").train()


def test_averaged_weights_are_benchmarked(tmp_path):
    trainer = build(tmp_path, "hooks=[{type: ema, decay: 0.5}]", "trainer.max_steps=4", "checkpoint.every_steps=4")
    trained = trainer.train()
    config = RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path / 'runs'}"])
    likelihoods = {}
    for weights in (None, "ema", "raw"):
        _, logs = run_experiment(config, mode="eval", weights=weights)
        name = "step-00000004" + (f"-{weights}" if weights else "")
        rows = map(json.loads, (trainer.folder / "benchmarks" / name / "quiz.jsonl").open())
        likelihoods[weights] = [row["log_likelihoods"] for row in rows]
        assert weights == "raw" or logs == trained
    assert likelihoods[None] == likelihoods["ema"] != likelihoods["raw"]


def test_adapters_and_models_of_transformers_are_benchmarked(tmp_path):
    lora = build(tmp_path, "name=lora", "model.lora={match: '*_proj', rank: 2}")
    assert "quiz/acc" in lora.train()
    sizes = "vocab_size: 260, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 64"
    model = f"model={{type: 'transformers:GPT2LMHeadModel', {sizes}}}"
    assert "quiz/acc" in build(tmp_path, "name=gpt2", model).train()


def test_a_table_ends_the_run(tmp_path, caplog):
    build(tmp_path)
    config = RunConfig.load(tmp_path / "run.yaml", [f"output_dir={tmp_path / 'runs'}"])
    for mode in ("train_and_eval", "eval"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "trainwright"):
            run_experiment(config, mode=mode)
        shown = [record.getMessage().split() for record in caplog.records]
        assert ["benchmark", "metric", "value", "±", "samples"] in shown
        assert any(line[:2] == ["quiz", "acc"] and line[-1] == "7" for line in shown)


MINE = """
from trainwright import Benchmark


class Parity(Benchmark):
    metrics = {"even": "max"}

    def __init__(self, size, results="right"):
        self.size = size
        self.results = results

    def load(self):
        return list(range(self.size))

    def run_batch(self, model, samples, all_agree):
        if self.results == "right":
            return [{"even": None if each == 3 else each % 2 == 0, "number": each} for each in samples]
        return {"short": [{"even": 1}], "text": [{"even": "yes"}] * len(samples), "none": None,
                "other": [{"odd": 1}] * len(samples)}[self.results]
"""


def test_a_benchmark_can_be_the_users(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    entries = "evaluation.benchmarks=[{type: mine.py:Parity, size: 5}, {type: mine.py:Parity, size: 2, name: two}]"
    trainer = build(tmp_path, entries)
    assert trainer.train() == {"Parity/even": 0.75, "two/even": 0.5}  # 0, 1, 2 and 4; 3 is not counted
    built = build_component(trainer.config, "evaluation.benchmarks.1")
    assert isinstance(built, Benchmark)
    assert built.size == 2


@pytest.mark.parametrize("results", ["short", "text", "none", "other"])
def test_results_of_another_form_are_rejected(tmp_path, results):
    (tmp_path / "mine.py").write_text(MINE)
    entry = f"evaluation.benchmarks=[{{type: mine.py:Parity, size: 4, batch_size: 4, results: {results}}}]"
    with raises(ConfigError, "Parity.run_batch", at="mine.py:15"):
        build(tmp_path, entry).train()


def test_long_benchmarks_report_their_progress(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("trainwright.progress.LOGGED_AFTER_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "trainwright"):
        build(tmp_path).train()
    assert any(re.match(r"Evaluating quiz: \d/7 samples", record.getMessage()) for record in caplog.records)


def test_batches_do_not_depend_on_the_ranks_and_the_longest_come_first():
    class Texts(Benchmark):
        def length_of(self, sample):
            return len(sample)

    configured = ConfiguredBenchmark("texts", Texts(), ["a", "ccc", "bb", "ddd", "e"], batch_size=2)
    assert configured.batches() == [[1, 3], [2, 0], [4]]
    assert configured.batches(max_batches=1) == [[1, 0]]


@pytest.mark.parametrize(
    ("entry", "kind", "mentions"),
    [
        ("{type: multiple_choice, path: quiz.jsonl}", ConfigError, ["tokenizer"]),
        ("{type: multiple_choice, path: none.jsonl, tokenizer: bytes}", DataError, ["none.jsonl"]),
        ("{type: multiple_choice, path: quiz.jsonl, tokenizer: bytes, normalize: words}", ConfigError, ["normalize"]),
        ("{type: multiple_choise, path: quiz.jsonl, tokenizer: bytes}", ConfigError, ["multiple_choice"]),
        ("{type: multiple_choice, path: quiz.jsonl, tokenizer: bytes, choice: a}", ConfigError, ["choice", "choices"]),
        ("{type: multiple_choice, path: '*.jsonl', tokenizer: bytes}", ConfigError, ["name"]),
        ("{type: multiple_choice, path: quiz.jsonl, tokenizer: bytes, batch_size: 0}", ConfigError, ["batch_size"]),
        ("{type: multiple_choice, path: quiz.jsonl, tokenizer: bytes, name: test}", ConfigError, ["test"]),
        ("{type: adamw}", ConfigError, ["adamw"]),
        ("{type: 'collections:OrderedDict'}", ConfigError, ["OrderedDict"]),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path, entry, kind, mentions):
    text = f"""
model: {{type: llama, vocab_size: 260, hidden_size: 16, num_layers: 1, num_heads: 2}}
data:
  train: {{type: json_lines, path: facts.jsonl, columns: [prompt, completion]}}
  collator: {{type: tokenize, tokenizer: bytes, prompt: prompt, completion: completion, add_eos: true}}
trainer: {{type: language_model, max_steps: 1, global_batch_size: 8, optimizer: {{type: adamw, lr: 1e-2}}}}
runtime: {{device: cpu}}
evaluation:
  benchmarks:
    - {entry}
"""
    with raises(kind, *mentions, "evaluation.benchmarks.0", at="run.yaml:10"):
        build(tmp_path, text=text)


def test_a_model_that_is_no_language_model_is_rejected(tmp_path):
    text = """
model: {type: bert, vocab_size: 260, hidden_size: 16, num_layers: 1, num_heads: 2}
data:
  train: {type: json_lines, path: facts.jsonl, columns: [prompt]}
  collator: {type: masked_language_model, tokenizer: bytes, text: prompt}
trainer: {type: masked_language_model, max_steps: 1, global_batch_size: 8, optimizer: {type: adamw, lr: 1e-2}}
runtime: {device: cpu}
evaluation: {benchmarks: [{type: multiple_choice, path: quiz.jsonl, tokenizer: bytes}]}
"""
    with raises(ConfigError, "evaluation.benchmarks.0", "Bert", at="run.yaml:8"):
        build(tmp_path, text=text)


def test_a_resumed_run_has_the_same_values(tmp_path):
    whole = build(tmp_path, *EVERY, "name=whole")
    whole.train()
    build(tmp_path, *EVERY, "name=parts", "trainer.max_steps=2").train()
    resumed = build(tmp_path, *EVERY, "name=parts")
    assert resumed.step == 2
    resumed.train()
    found = [
        {name: value for name, value in lines_of(each)[3].items() if name.startswith(("quiz", "cities", "loss"))}
        for each in (whole, resumed)
    ]
    assert found[0] == found[1]
    samples = [(each.folder / "benchmarks" / "step-00000003" / "quiz.jsonl").read_text() for each in (whole, resumed)]
    assert samples[0] == samples[1]
