"""lm-eval's tasks on a checkpoint: the same values as ours and as lm-eval's own adapter on the exported folder."""

from __future__ import annotations

import json

import pytest
from tests.benchmarks.quiz import build
from tests.messages import check_message, raises

from trainwright import cli
from trainwright.errors import ConfigError, DataError
from trainwright.export.huggingface import export_run
from trainwright.export.lm_harness import run_tasks
from trainwright.export.text import load_text_model

pytest.importorskip("lm_eval")

COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{file}.jsonl}}}}
test_split: test
"""
TASKS = {
    "quiz": """
task: own_quiz
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "cities": """
task: own_cities
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
    "texts": """
task: own_texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{question}} {{question}}"
metric_list: [{metric: bits_per_byte}]
""",
}

MODEL = "model={type: llama, vocab_size: 260, hidden_size: 32, num_layers: 2, num_heads: 4, max_positions: 64}"
BENCHMARKS = """evaluation.benchmarks=[
  {type: multiple_choice, path: quiz.jsonl, tokenizer: tokenizer.json},
  {type: generate, path: cities.jsonl, tokenizer: tokenizer.json, max_new_tokens: 8, stop: "."}]"""


def write_tokenizer(folder):
    """A tokenizer of words and bytes, whose tokens may cross the end of a prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>", "<pad>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Question: Where does Ada live?\nAnswer: Rome."] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run in a folder with lm-eval's tasks, which have the rows of its benchmarks."""
    folder = tmp_path_factory.mktemp("harness")
    write_tokenizer(folder)
    trainer = build(
        folder,
        MODEL.replace("260", "400"),
        "data.collator.tokenizer=tokenizer.json",
        "trainer.max_steps=15",
        " ".join(BENCHMARKS.split()),
    )
    logs = trainer.train()
    (folder / "tasks").mkdir()
    for file, text in TASKS.items():
        rows = "cities" if file == "texts" else file
        (folder / "tasks" / f"{file}.yaml").write_text(text + COMMON.format(folder=folder, file=rows))
    return folder, trainer, logs


def values_of(results):
    return {f"{each.name}/{name}": one.value for each in results for name, one in each.values.items()}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)


def test_tasks_give_our_values_and_those_of_the_exported_model(run):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, trainer, logs = run
    model, tokenizer = load_text_model(trainer.folder)
    names = ["own_quiz", "own_cities", "own_texts"]
    results, details = run_tasks(model, tokenizer, names, include_path=folder / "tasks", batch_size=3)
    found = values_of(results)
    assert found["own_quiz/acc"] == logs["quiz/acc"]
    assert found["own_quiz/acc_norm"] == logs["quiz/acc_norm"]
    assert found["own_cities/exact_match"] <= logs["cities/exact_match"]  # lm-eval keeps the space before an answer
    exported = folder / "exported"
    export_run(trainer.folder, exported)
    theirs = simple_evaluate(
        model=HFLM(pretrained=str(exported), device="cpu", batch_size=3, dtype="float32"),
        tasks=names,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
    )
    json.dumps(details, default=str)
    for name in names:
        for key, value in theirs["results"][name].items():
            if isinstance(value, float):
                assert details["results"][name][key] == pytest.approx(value, abs=1e-4), key
        for own, other in zip(results, names, strict=True):
            assert own.name == other
    pairs = zip(results[0].samples, theirs["samples"]["own_quiz"], strict=True)
    for own, other in pairs:
        likelihoods = [float(each[0]) for each in own["filtered_resps"]]
        assert likelihoods == pytest.approx([float(each[0]) for each in other["filtered_resps"]], abs=1e-4)
    texts = [
        [each["filtered_resps"] for each in some] for some in (results[1].samples, theirs["samples"]["own_cities"])
    ]
    assert texts[0] == texts[1]


def test_the_command_prints_a_table_and_writes_the_results(run, monkeypatch, capsys):
    folder, trainer, _ = run
    words = f"trainwright evaluate {trainer.folder} --tasks own_quiz --include-path {folder / 'tasks'} --limit 4"
    monkeypatch.setattr("sys.argv", [*words.split(), "--num-fewshot", "0", "--device", "cpu"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["benchmark", "metric", "value", "±", "samples"] in shown
    assert any(line[:2] == ["own_quiz", "acc"] and line[-1] == "4" for line in shown)
    to = trainer.folder / "benchmarks" / "step-00000015" / "lm_eval"
    assert "acc,none" in json.loads((to / "results.json").read_text())["results"]["own_quiz"]
    assert len((to / "own_quiz.jsonl").read_text().splitlines()) == 4


def test_chats_are_rendered_with_the_template(run):
    folder, trainer, _ = run
    model, tokenizer = load_text_model(trainer.folder)
    results, _ = run_tasks(
        model, tokenizer, ["own_quiz"], include_path=folder / "tasks", limit=1, apply_chat_template=True
    )
    [(prompt, choice), *_] = results[0].samples[0]["arguments"]
    asked = "Question: Where does Ada live?\nAnswer:"
    assert prompt == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert not choice.startswith(" ")


def test_what_cannot_be_run_is_reported(run, tmp_path):
    folder, trainer, _ = run
    model, tokenizer = load_text_model(trainer.folder)
    long = TASKS["cities"].replace("own_cities", "long").replace("max_gen_toks: 8", "max_gen_toks: 64")
    (tmp_path / "long.yaml").write_text(long + COMMON.format(folder=folder, file="cities"))
    with raises(DataError, "max_gen_toks", 64):
        run_tasks(model, tokenizer, ["long"], include_path=tmp_path)
    (tmp_path / "gone.yaml").write_text(
        TASKS["quiz"].replace("own_quiz", "gone") + COMMON.format(folder=tmp_path, file="x")
    )
    with pytest.raises(DataError) as caught:
        run_tasks(model, tokenizer, ["gone"], include_path=tmp_path)
    check_message(str(caught.value), "gone", golden=False)


@pytest.mark.slow  # reads the files of all tasks of lm-eval
def test_an_unknown_task_is_reported(run, tmp_path):
    model, tokenizer = load_text_model(run[1].folder)
    with raises(ConfigError, "--tasks", "nonsense_task"):
        run_tasks(model, tokenizer, ["nonsense_task"], include_path=tmp_path)
