"""GRPO: losses equal to TRL's, the same for any micro-batches; rewards, references, evaluation, and mistakes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.messages import raises
from tests.references import grpo_cases as cases
from tests.references import preference_cases
from tests.trainers import grpo_runs
from tests.trainers import preference_runs as runs

from trainwright import build_trainer
from trainwright.build.components import Build
from trainwright.errors import ComponentError, ConfigError, DataError, TrainwrightError
from trainwright.models.generation import Completions
from trainwright.trainers.grpo import GRPOTrainer, compare

TRL = json.loads((Path(__file__).parents[1] / "references" / "grpo_trl.json").read_text())
REFERENCES = Path(cases.__file__)


class Given(GRPOTrainer):
    """Uses the completions of the reference instead of generating them."""

    def _generate(self, batch, *, copies, temperature, seeds):
        table = dict(zip(cases.prompts(), cases.completions(), strict=True))
        rows = [ids for row in batch["rows"] for ids in table[row["prompt"]]]
        width = max(map(len, rows))
        return Completions(
            tokens=torch.tensor([ids + [0] * (width - len(ids)) for ids in rows]),
            mask=torch.tensor([[True] * len(ids) + [False] * (width - len(ids)) for ids in rows]),
            is_stopped=torch.tensor([ids[-1] == cases.END for ids in rows]),
            log_probabilities=None,
        )


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    grpo_runs.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def reference_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trl")
    preference_cases.save_base(folder / "base")
    preference_cases.write_rows(folder / "prompts.jsonl", [{"prompt": each} for each in cases.prompts()])
    return folder


def build(base, tmp_path, *overrides, kind=None, content=None, **trainer):
    content = content or grpo_runs.settings(base, **trainer)
    content["output_dir"] = str(tmp_path / "runs")
    return build_trainer(runs.load(base, content, *overrides), kind)


def train(base, tmp_path, *overrides, **options):
    trainer = build(base, tmp_path, *overrides, **options)
    trainer.train()
    return trainer, [grpo_runs.untimed(line) for line in runs.lines_of(tmp_path)]


def assert_close(found, expected, **tolerances):
    assert len(found) == len(expected)
    for line, one in zip(found, expected, strict=True):
        assert {name: line[name] for name in one} == pytest.approx(one, **tolerances)


@pytest.mark.parametrize("model", ["transformers:LlamaForCausalLM", "llama"])
@pytest.mark.parametrize("case", cases.CASES)
def test_losses_and_metrics_are_those_of_trl(reference_base, tmp_path, case, model):
    options = cases.CASES[case]
    rewards = [
        {"type": f"{REFERENCES}:{name}", "weight": weight}
        for name, weight in zip(("evenness", "brevity"), cases.WEIGHTS, strict=True)
    ]
    content = grpo_runs.settings(
        reference_base,
        **cases.COMMON,
        **options,
        rewards=rewards,
        max_steps=cases.NUM_BATCHES * options.get("num_iterations", 1),
        global_batch_size=cases.NUM_PROMPTS,
        optimizer={"type": "sgd", "lr": cases.RATE},
    )
    content["data"]["shuffle"] = False
    _, lines = train(reference_base, tmp_path, f"model.type={model}", kind=Given, content=content)
    assert_close(lines, TRL[case], rel=1e-5, abs=1e-6)
    assert any(line["clip_ratio/region_mean"] for line in lines) == ("num_iterations" in options)


# Together these use every option that a split into micro-batches could disturb.
SPLIT = {
    "dapo": {"beta": 0.1, "mask_truncated_completions": True, "scale_rewards": "batch"},
    "grpo": {"num_iterations": 2, "epsilon": 0.01},
    "dr_grpo": {"num_iterations": 2, "beta": 0.1, "importance_sampling_level": "sequence", "scale_rewards": "none"},
}


@pytest.mark.parametrize("loss_type", SPLIT)
def test_accumulation_changes_nothing(base, tmp_path, loss_type):
    options = {"loss_type": loss_type, **SPLIT[loss_type]}
    _, whole = train(base, tmp_path / "whole", **options)
    for size in (1, 2):
        _, split = train(base, tmp_path / str(size), f"trainer.micro_batch_size={size}", **options)
        assert_close(split, whole, rel=2e-5, abs=2e-6)


class Watching(GRPOTrainer):
    """Keeps the completions of each step."""

    def _make_rollouts(self, batch):
        self.was_training = self.model.training
        rollouts, metrics = super()._make_rollouts(batch)
        self.made = [*getattr(self, "made", []), rollouts]
        return rollouts, metrics


def test_dropout_changes_no_completion_and_no_log_probability_of_the_sampler(base, tmp_path):
    content = grpo_runs.settings(base, max_steps=1, num_iterations=2)
    content["model"] |= {"lora": {"match": "*_proj", "rank": 4, "dropout": 0.5}}
    made = []
    for dropout in (0.0, 0.5):
        content["model"]["lora"]["dropout"] = dropout
        trainer, _ = train(base, tmp_path / str(dropout), kind=Watching, content=content)
        assert trainer.was_training
        assert trainer.model.training
        made += trainer.made
    for name, value in made[0].items():
        assert torch.equal(value, made[1][name]), name


def test_log_probabilities_are_those_of_the_sampler(base, tmp_path, monkeypatch):
    from trainwright.trainers import grpo

    sampled = []

    def sample(*args, **options):
        sampled.append(original(*args, **options, log_probabilities=True))
        return sampled[-1]

    original = grpo.sample_completions
    monkeypatch.setattr(grpo, "sample_completions", sample)
    trainer, _ = train(base, tmp_path, kind=Watching, max_steps=1, num_iterations=2, temperature=0.8)
    [rollouts], [completions] = trainer.made, sampled
    counted = rollouts["labels"].flatten(0, 1)[:, 1:] >= 0
    torch.testing.assert_close(
        rollouts["old_log_probs"].flatten(0, 1)[counted], completions.log_probabilities[completions.mask]
    )


def test_a_prompt_gets_other_completions_at_its_next_position(base, tmp_path):
    content = grpo_runs.settings(base, max_steps=6, optimizer={"type": "sgd", "lr": 1e-9})
    trainer, _ = train(base, tmp_path, kind=Watching, content=content)
    rows = [row for each in trainer.made for row in each["input_ids"].tolist()]
    assert len(rows) == 24
    assert len({str(each) for row in rows for each in row}) > 60  # 12 prompts twice, with 4 completions each


@pytest.mark.parametrize("adapters", [{}, {"lora": {"match": "*_proj", "rank": 4}}])
def test_the_reference_is_the_model_before_the_first_step(base, tmp_path, adapters):
    content = grpo_runs.settings(base, beta=0.5, optimizer={"type": "adamw", "lr": 0.02})
    content["model"] |= adapters
    trainer, lines = train(base, tmp_path, kind=Watching, content=content)
    assert lines[0]["kl"] == 0.0
    assert lines[-1]["kl"] > 1e-3
    assert bool(trainer.context.frozen_models) == (not adapters)  # under adapters the model's own base
    first = build(base, tmp_path / "first", content=content)
    last = trainer.made[-1]
    expected, _ = first._log_probs(first.model.eval(), last)
    torch.testing.assert_close(last["reference_log_probs"].flatten(0, 1), expected)


def test_without_a_kl_term_there_is_no_reference(base, tmp_path):
    trainer, lines = train(base, tmp_path, max_steps=1)
    assert not trainer.context.frozen_models
    assert "kl" not in lines[0]


def test_compiled_steps_have_the_losses_of_eager_ones(base, tmp_path):
    options = {"max_steps": 2, "num_iterations": 2, "beta": 0.1}
    _, eager = train(base, tmp_path / "eager", **options)
    compiled = ("runtime.mode=compile", "runtime.compile_backend=aot_eager")
    _, lines = train(base, tmp_path / "compiled", *compiled, **options)
    assert_close(lines, eager, rel=1e-4, abs=1e-6)


@given(
    rewards=st.lists(st.lists(st.integers(-5, 5), min_size=4, max_size=4), min_size=1, max_size=4),
    shift=st.integers(-3, 3),
)
def test_an_advantage_depends_on_its_group_alone_and_groups_add_up_to_nothing(rewards, shift):
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages, deviation = compare(values, scale="group")
    assert advantages.sum(dim=1).abs().max() < 1e-9
    for number in range(len(values)):
        torch.testing.assert_close(
            compare(values[number : number + 1] + shift, scale="group")[0][0], advantages[number]
        )
    assert (advantages[deviation == 0] == 0).all()


def test_a_completion_without_a_reward_has_the_advantage_0_and_is_left_out_of_the_mean():
    advantages, _ = compare(torch.tensor([[1.0, 3.0, torch.nan]]), scale="none")
    assert advantages.tolist() == [[-1.0, 1.0, 0.0]]


def test_completions_that_no_reward_applies_to_are_reported_once(base, tmp_path, caplog):
    rewards = [{"type": "ours.Brevity"}]  # None for every third row
    _, lines = train(base, tmp_path, rewards=rewards)
    assert sum("All rewards are None" in text for text in caplog.messages) == 1
    assert all(-0.601 < line["reward"] < 0 for line in lines)


# Evaluation.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_evaluation_counts_each_prompt_once_for_any_batches(base, tmp_path, temperature):
    content = grpo_runs.with_evaluation(grpo_runs.settings(base, max_steps=2, eval_temperature=temperature))
    found = []
    for size in (1, 2, 5):
        trainer, lines = train(base, tmp_path / str(size), f"evaluation.batch_size={size}", content=content)
        found.append({name: value for name, value in lines[-1].items() if name.startswith("valid/")})
        assert trainer.evaluate() == pytest.approx(found[-1])
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])
    names = ("reward", "rewards/evenness/mean", "rewards/Brevity/mean", "completions/mean_length")
    assert found[0].keys() == {f"valid/{name}" for name in (*names, "completions/clipped_ratio")}
    mean = found[0]["valid/rewards/Brevity/mean"] / -0.2  # of the rows 1, 2 and 4
    assert mean * 3 == pytest.approx(round(mean * 3))


def test_the_best_checkpoint_has_the_highest_reward(base, tmp_path):
    content = grpo_runs.with_evaluation(grpo_runs.settings(base))
    build(base, tmp_path, "checkpoint.keep_best={metric: valid/rewards/evenness/mean, mode: max}", content=content)
    trainer = build(base, tmp_path, "checkpoint.keep_best={metric: valid/reward, mode: min}", content=content)
    with raises(ConfigError, "valid/reward", "max", at="checkpoint.keep_best={metric: valid/reward, mode: min}"):
        trainer.train()


def test_each_log_line_shows_a_completion_with_its_reward(base, tmp_path):
    content = grpo_runs.with_evaluation(grpo_runs.settings(base, max_steps=2))
    train(base, tmp_path, content=content)
    lines = runs.lines_of(tmp_path)
    prompts = [row["prompt"] for row in map(json.loads, (base / "prompts.jsonl").read_text().splitlines())]
    assert any(lines[0]["completion"].startswith(f"{prompt!r} → ") for prompt in prompts)
    assert "(reward " in lines[1]["valid/completion"]
    train(base, tmp_path / "without", "trainer.log_completions=false", content=content)
    assert not any("completion" in line for line in runs.lines_of(tmp_path / "without"))


# Prompts of messages.


def test_prompts_of_messages_get_completions_of_messages(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "chat")
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": text} for text in ("abc", "de")] * 2
    preference_cases.write_rows(folder / "prompts.jsonl", rows)
    (folder / "rewards" / "ours.py").write_text(
        "seen = []\n\ndef watch(prompts, completions, completion_ids, answer):\n"
        "    seen.append((prompts, completions, completion_ids, answer))\n"
        "    return [float(len(ids)) for ids in completion_ids]\n"
    )
    # The turn ends with a special token that is not the EOS token.
    template = "{% for m in messages %}{{ m.content }}{{ '<unk>' if m.role == 'assistant' else '?' }}{% endfor %}"
    content = grpo_runs.settings(folder, rewards=["ours.watch"], max_completion_length=12, max_steps=2)
    content["data"]["collator"]["chat_template"] = template
    trainer, _ = train(folder, tmp_path, content=content)
    [reward] = trainer.rewards
    seen = reward.function.func.__globals__["seen"]
    assert len(seen) == 2
    for prompts, completions, ids, answers in seen:
        assert len(prompts) == len(completions) == len(ids) == len(answers) == 16
        assert [prompt[0]["content"] for prompt in prompts] == answers
        assert all(list(each[0]) == ["role", "content"] for each in completions)
        stops = {each[-1] for each in ids if len(each) < 12}
        assert stops <= {1, 2}
        assert not any(token in (1, 2) for each in ids for token in each[:-1])


# Mistakes in rewards.

MISTAKES = {
    "too few": ("return [1.0]", 2),
    "a number": ("return 1.0", 2),
    "not finite": ("return [float('nan')] * len(completions)", 2),
    "a text": ("return ['1'] * len(completions)", 2),
    "an exception": ("return [answer / 0 for answer in completions]", 3),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_reward_is_reported_with_its_line(base, tmp_path, case):
    body, line = MISTAKES[case]
    folder = shutil.copytree(base, tmp_path / "project")
    (folder / "rewards" / "ours.py").write_text(f"\ndef mine(completions, **columns):\n    {body}\n")
    with raises(TrainwrightError, "mine", at=f"ours.py:{line}"):
        train(folder, tmp_path, rewards=["ours.mine"])


def test_a_reward_that_needs_a_missing_field_names_the_fields(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "project")
    (folder / "rewards" / "ours.py").write_text("def mine(completions, solution):\n    return completions\n")
    with raises(DataError, "solution", "counts", "completion_ids", at="ours.py:1"):
        train(folder, tmp_path, rewards=["ours.mine"])
    with raises(DataError, "answer", "counts"):
        train(folder, tmp_path, rewards=["exact_match"])


@pytest.mark.parametrize(
    ("rewards", "kind", "mentions", "where"),
    [
        ([], ConfigError, ["trainer.rewards"], "run.yaml"),
        (None, ConfigError, ["trainer.rewards"], "run.yaml"),
        ([{"type": "ours.nothing"}], ComponentError, ["nothing", "evenness"], "run.yaml"),
        ([{"type": "ours.Brevity", "scales": 1}], ComponentError, ["scales", "scale"], "run.yaml"),
        ([{"type": "exact_matc"}], ComponentError, ["exact_match"], "run.yaml"),
        ([{"type": "pattern", "pattern": "("}], ConfigError, ["pattern"], "run.yaml"),
        ([{"weight": 1.0}], ConfigError, ["type"], "run.yaml"),
        ([{"type": "ours.evenness", "weight": "high"}], ConfigError, ["weight"], "run.yaml"),
        (["ours.evenness", "ours.evenness"], ConfigError, ["name"], "run.yaml"),
    ],
)
def test_wrong_rewards_are_rejected_before_the_model_is_built(base, tmp_path, rewards, kind, mentions, where):
    content = grpo_runs.settings(base, rewards=rewards)
    if rewards is None:
        del content["trainer"]["rewards"]
    with raises(kind, *mentions, at=None) as caught:
        build(base, tmp_path, content=content)
    assert where in str(caught.value)


def test_two_rewards_of_a_class_have_names_of_their_own(base, tmp_path):
    rewards = ["ours.evenness", {"type": "ours.evenness", "name": "again", "weight": 0.0}]
    _, lines = train(base, tmp_path, rewards=rewards, max_steps=1)
    assert lines[0]["rewards/again/mean"] == lines[0]["rewards/evenness/mean"] == lines[0]["reward"]


# Settings that do not work together.

REJECTED = {
    "graph": (["runtime.mode=graph"], "runtime.mode"),
    "epochs": (["trainer.num_iterations=2", "trainer.max_epochs=1"], "trainer.max_epochs"),
    "rollback": (["trainer.num_iterations=2", "anomalies.non_finite=rollback"], "anomalies.non_finite"),
    "epsilon": (["trainer.epsilon=0.1"], "trainer.epsilon"),
    "bias": (["trainer.use_bias_correction_kl=false"], "trainer.use_bias_correction_kl"),
    "bnpo": (["trainer.loss_type=bnpo"], "trainer.loss_type"),
    "one": (["trainer.num_generations=1"], "trainer.num_generations"),
    "auto": (["trainer.micro_batch_size=auto"], "trainer.micro_batch_size"),
    "checkpointing": (["model.activation_checkpointing={budget: auto}"], "model.activation_checkpointing"),
    "data": (["data.train=null"], "data.train"),
    "collator": (["data.collator={type: tokenize, tokenizer: bytes, text: prompt, drop: [counts]}"], "data.collator"),
    "room": (["trainer.max_completion_length=64"], "trainer.max_completion_length"),
    "prompt": (["data.collator.max_length=2"], "data.collator.max_length"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_settings_that_do_not_work_are_rejected_by_name(base, tmp_path, case):
    overrides, setting = REJECTED[case]
    with raises(TrainwrightError, setting):
        train(base, tmp_path, *overrides)


@pytest.mark.parametrize("axis", ["context", "pipeline"])
def test_a_mesh_whose_models_cannot_generate_is_rejected_before_the_model_is_built(base, axis):
    build = Build(runs.load(base, grpo_runs.settings(base), f"runtime.mesh={{{axis}: 2}}"))
    build.take_trainer(GRPOTrainer)
    with raises(ConfigError, f"runtime.mesh.{axis}"):
        GRPOTrainer.build_parts(build)


def test_a_subclass_makes_its_own_prompts(base, tmp_path):
    class Curriculum(GRPOTrainer):
        def next_train_inputs(self, iterator):
            return self._collator([{"prompt": "ab"[: 1 + self.step], "counts": True}] * 4)

    content = grpo_runs.with_evaluation(grpo_runs.settings(base, max_steps=2))
    content["data"]["train"] = None
    _, lines = train(base, tmp_path, kind=Curriculum, content=content)
    assert [line["step"] for line in lines] == [1, 2]
