"""generate: completions, what ends them, and how they are compared with the answers."""

from __future__ import annotations

import pytest
import torch
from tests.benchmarks.quiz import write_lines
from tests.messages import raises

from trainwright.benchmarks.generate import Generate, complete
from trainwright.data.tokenizer import load_tokenizer
from trainwright.errors import ConfigError, DataError
from trainwright.models.llama import Llama

BYTES = load_tokenizer("bytes")
EOS = 258


class Says(torch.nn.Module):
    """Continues each prompt, with the text whose number is the first digit in it."""

    def __init__(self, *texts):
        super().__init__()
        self.texts = [[*text.encode(), EOS] for text in texts]
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.num_calls = 0

    def forward(self, input_ids):
        self.num_calls += 1
        logits = torch.zeros(*input_ids.shape, 260)
        for row, ids in enumerate(input_ids.tolist()):
            digits = [place for place, each in enumerate(ids) if 48 <= each < 58]
            text = self.texts[ids[digits[0]] - 48] if digits else [EOS]
            for place in range(len(ids)):
                number = place - digits[0] if digits else 0
                logits[row, place, text[number] if 0 <= number < len(text) else EOS] = 1.0
        return {"logits": logits}


def make(folder, answers, **settings):
    write_lines(folder / "rows.jsonl", [{"question": str(n), "answer": each} for n, each in enumerate(answers)])
    settings = {"prompt": "{question}", "max_new_tokens": 12, **settings}
    return Generate("rows.jsonl", "bytes", project_dir=folder, **settings)


def results(folder, texts, answers, **settings):
    benchmark = make(folder, answers, **settings)
    return benchmark.run_batch(Says(*texts), benchmark.load(), bool)


def scores(folder, texts, answers, **settings):
    return [each["exact_match"] for each in results(folder, texts, answers, **settings)]


def test_completions_are_compared_with_the_answers(tmp_path):
    assert scores(tmp_path, [" yes", "no", "yes!"], ["yes", "yes", "yes"]) == [1, 0, 0]
    assert scores(tmp_path, [" yes"], [["no", "yes"]]) == [1]
    assert scores(tmp_path, ["Yes!"], ["yes"], ignore_case=True, ignore_punctuation=True) == [1]
    assert scores(tmp_path, ["12"], [12]) == [1]


def test_a_regular_expression_finds_the_answer(tmp_path):
    assert scores(tmp_path, ["1 or 2 is 3.", "none"], ["3", "3"], extract=r"\d") == [1, 0]
    assert scores(tmp_path, ["so #### 7"], ["3 + 4 = #### 7"], extract=r"#### (\d+)", extract_answer=r"#### (\d+)") == [
        1
    ]


def test_a_completion_ends_at_a_text_or_a_token(tmp_path):
    found = results(tmp_path, ["a. b", "ab\n\nc", "abc", "endless text"], ["a"] * 4, stop=[".", "\n\n"])
    assert [each["completion"] for each in found] == ["a", "ab", "abc", "endless text"]
    assert [each["truncated"] for each in found] == [0, 0, 0, 1]


def test_generation_ends_when_every_row_has_ended():
    model = Says("a.bcdefgh", "ab.cdefgh")
    made = complete(model, BYTES, [[48], [49]], stop_ids={EOS}, stop_texts=["."], temperature=0, max_new_tokens=9)
    assert [each.text for each in made] == ["a", "ab"]
    assert model.num_calls == 3  # and not 9


def test_metrics_can_be_the_users(tmp_path):
    (tmp_path / "mine.py").write_text("def half(prediction, answer, row):\n    return 0.5 * (row['question'] == '0')\n")
    benchmark = make(tmp_path, ["x", "x"], metric=["contains", "mine.py:half"])
    assert benchmark.metrics == {"contains": "max", "half": "max", "truncated": "min"}
    found = benchmark.run_batch(Says("an x", "y"), benchmark.load(), bool)
    assert [(each["contains"], each["half"]) for each in found] == [(1, 0.5), (0, 0)]


@pytest.mark.parametrize("names", [["mine.py:truncated"], ["mine.py:contains"], ["contains", "contains"]])
def test_two_metrics_with_one_name_are_rejected(tmp_path, names):
    functions = (f"def {name}(prediction, answer, row):\n    return 1\n" for name in ("truncated", "contains"))
    (tmp_path / "mine.py").write_text("".join(functions))
    with raises(ConfigError, "metric", names[-1].rpartition(":")[2]):
        make(tmp_path, ["a"], metric=names)


@pytest.mark.parametrize("settings", [{"temperature": -1.0}, {"temperature": 1.0, "top_p": 2.0}])
def test_impossible_sampling_is_rejected_before_the_first_step(tmp_path, settings):
    with raises(ConfigError, *settings.keys() - {"temperature"} or settings):
        make(tmp_path, ["a"], **settings)


@pytest.mark.parametrize(
    ("source", "mentions"),
    [
        ("def score(prediction):\n    return 1\n", ["prediction, answer, row"]),
        ("def score(prediction, answer, row):\n    return 'good'\n", ["score", "str"]),
        ("other = 1\n", ["score"]),
    ],
)
def test_a_function_that_cannot_be_a_metric_is_rejected(tmp_path, source, mentions):
    (tmp_path / "mine.py").write_text(source)
    with raises(ConfigError, *mentions, "metric"):
        results(tmp_path, ["a"], ["a"], metric="mine.py:score")


def test_samples_depend_on_the_seed_and_the_row_only(tmp_path):
    torch.manual_seed(0)
    model = Llama(vocab_size=260, hidden_size=16, num_layers=1, num_heads=2).eval()
    made = {}
    for seed in (1, 2):
        benchmark = make(tmp_path, ["x"] * 3, temperature=1.0, seed=seed)
        samples = benchmark.load()
        state = torch.get_rng_state()
        together = benchmark.run_batch(model, samples, bool)
        assert [benchmark.run_batch(model, [each], bool)[0] for each in samples] == together
        assert torch.equal(torch.get_rng_state(), state)
        made[seed] = [each["completion"] for each in together]
    assert made[1] != made[2]


def test_a_chat_ends_at_the_end_of_the_turn(tmp_path):
    benchmark = make(tmp_path, ["yes"], chat=True, max_new_tokens=30)
    [sample] = benchmark.load()
    assert sample.prompt == "<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n"
    model = Says("-" * 33 + "yes<|im_end|>\nmore")  # the first bytes are predicted within the prompt
    [found] = benchmark.run_batch(model, [sample], bool)
    assert found["completion"] == "yes"
    assert not found["truncated"]


@pytest.mark.parametrize(
    ("row", "settings", "mentions"),
    [
        ("", {}, ["answer"]),
        ([], {}, ["answer"]),
        (None, {}, ["answer"]),
        ("none", {"extract_answer": r"\d"}, ["extract_answer"]),
    ],
)
def test_a_wrong_answer_is_named_with_its_line(tmp_path, row, settings, mentions):
    with raises(DataError, *mentions, at="rows.jsonl line 2"):
        make(tmp_path, ["1", row], **settings).load()


def test_a_prompt_without_room_is_rejected(tmp_path):
    benchmark = make(tmp_path, ["a"])
    small = {"vocab_size": 260, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    with raises(DataError, "max_new_tokens", 12, at="rows.jsonl line 1"):
        benchmark.check(Llama(**small, max_positions=11), benchmark.load())
    benchmark.check(Llama(**small, max_positions=12), benchmark.load())


@pytest.mark.parametrize(
    ("settings", "mentions"),
    [
        ({"metric": "bleu"}, ["metric", "exact_match"]),
        ({"metric": []}, ["metric"]),
        ({"extract": "("}, ["extract"]),
        ({"max_new_tokens": 0}, ["max_new_tokens"]),
        ({"top_k": 5}, ["top_k", "temperature"]),
        ({"seed": 5}, ["seed", "temperature"]),
    ],
)
def test_settings_that_cannot_be_are_rejected(tmp_path, settings, mentions):
    with raises(ConfigError, *mentions):
        make(tmp_path, ["a"], **settings)
