"""Distillation: equal to the plain formula in double precision, exact for any micro-batches, nothing of the teacher."""

import pytest
import torch
from tests.messages import raises
from tests.references import preference_cases as cases
from tests.trainers import preference_runs as runs

from trainwright import build_trainer
from trainwright.errors import ConfigError
from trainwright.trainers.distill import divergence

STUDENT = {"type": "llama", "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    runs.prepare(folder)
    return folder


def settings(folder, tmp_path, *, student=STUDENT, teacher=None, steps=3, **trainer):
    teacher = {"type": "llama", "pretrained": "base"} if teacher is None else teacher
    content = runs.settings(folder, steps=steps, type="distill", teacher=teacher, **trainer)
    del content["trainer"]["loss_type"]
    content["output_dir"] = str(tmp_path / "runs")
    content["model"] = student
    names = {"tokenizer": "base", "prompt": "prompt", "completion": "chosen", "drop": ["rejected"]}
    content["data"] |= {
        "train": {"type": "json_lines", "path": "rows.jsonl"},
        "collator": {"type": "tokenize", **names},
    }
    return content


def first_batch(trainer):
    return next(iter(trainer.train_data.batches(trainer.batches_to_device)))


def plain_loss(student, teacher, labels, *, kl, temperature, alpha):
    """The mean over predicted tokens, one at a time."""
    total, count = 0.0, 0
    for row in range(labels.shape[0]):
        for position in range(labels.shape[1] - 1):
            label = labels[row, position + 1]
            if label == -100:
                continue
            p = (teacher[row, position] / temperature).softmax(-1)
            q = (student[row, position] / temperature).softmax(-1)
            p, q = (p, q) if kl == "forward" else (q, p)
            total += alpha * temperature**2 * (p * (p / q).log()).sum()
            total -= (1 - alpha) * student[row, position].log_softmax(-1)[label]
            count += 1
    return total / count


@pytest.mark.parametrize("kl", ["forward", "reverse"])
@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 1.0), (2.5, 0.3)])
def test_loss_and_gradient_are_those_of_the_formula(folder, tmp_path, kl, temperature, alpha):
    options = {"kl": kl, "temperature": temperature, "alpha": alpha}
    content = settings(folder, tmp_path, student=STUDENT | {"dtype": "float64"}, **options)
    content["trainer"]["teacher"]["dtype"] = "float64"
    trainer = build_trainer(runs.load(folder, content))
    batch = first_batch(trainer)
    parameters = list(trainer.model.parameters())
    student = trainer.model(batch["input_ids"])["logits"]
    teacher = trainer.context.frozen_models["teacher"](batch["input_ids"])["logits"]
    expected = plain_loss(student, teacher, batch["labels"], **options)
    result = trainer.run_forward(batch)
    torch.testing.assert_close(result.loss.value, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(result.loss.value, parameters)
    for one, other in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_a_student_equal_to_its_teacher_has_no_loss_and_no_gradient(folder, tmp_path, kl):
    student = {"type": "llama", "pretrained": "base"}
    trainer = build_trainer(runs.load(folder, settings(folder, tmp_path, student=student, kl=kl, steps=1)))
    result = trainer.run_forward(first_batch(trainer))
    assert result.loss.total == 0
    result.loss.value.backward()
    assert max(each.grad.abs().max() for each in trainer.model.parameters() if each.grad is not None) < 1e-6


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_accumulation_changes_nothing(folder, tmp_path, micro_batch_size):
    lines = []
    for size in (4, micro_batch_size):
        content = settings(folder, tmp_path / str(size), alpha=0.5, micro_batch_size=size)
        build_trainer(runs.load(folder, content)).train()
        lines.append(runs.lines_of(tmp_path / str(size)))
    for line, expected in zip(*lines, strict=True):
        assert {name: line[name] for name in ("loss", "kl", "label_loss", "grad_norm")} == pytest.approx(
            {name: expected[name] for name in ("loss", "kl", "label_loss", "grad_norm")}, rel=1e-5
        )


def test_the_teacher_is_neither_trained_nor_saved_and_the_run_resumes_exactly(folder, tmp_path):
    options = {"optimizer": {"type": "adamw", "lr": 0.01}}
    for name, limits in (("whole", [4]), ("parts", [2, 4])):
        for steps in limits:
            trainer = build_trainer(runs.load(folder, settings(folder, tmp_path / name, steps=steps, **options)))
            teacher = trainer.context.frozen_models["teacher"]
            before = [each.clone() for each in teacher.parameters()]
            trainer.train()
            assert all(torch.equal(*pair) for pair in zip(before, teacher.parameters(), strict=True))
    whole, parts = (runs.lines_of(tmp_path / name) for name in ("whole", "parts"))
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]
    assert whole[-1]["loss"] < whole[0]["loss"]
    saved = tmp_path / "whole" / "runs" / "run" / "checkpoints" / "step-00000004"
    num_bytes = sum(each.nbytes for each in trainer.model.parameters())
    assert sum(file.stat().st_size for file in saved.rglob("*.safetensors")) < 4 * num_bytes  # weights and two moments
    assert sum(each.nbytes for each in teacher.parameters()) > 2 * num_bytes


def test_another_vocabulary_is_rejected(folder, tmp_path):
    content = settings(folder, tmp_path, teacher=STUDENT | {"vocab_size": 40})
    with raises(ConfigError, "teacher", 40, 32, at=f"run.yaml:{line_of(content, 'teacher')}"):
        build_trainer(runs.load(folder, content)).train()


def line_of(content, key):
    """The line of a key in the file that runs.load writes."""
    import yaml

    return next(n for n, line in enumerate(yaml.safe_dump(content).splitlines(), 1) if line.strip() == f"{key}:")


def test_the_teacher_has_the_type_of_the_model_by_default(folder, tmp_path):
    trainer = build_trainer(runs.load(folder, settings(folder, tmp_path, teacher={"pretrained": "base"})))
    assert type(trainer.context.frozen_models["teacher"]) is type(trainer.model)
    assert trainer.context.frozen_models["teacher"].settings["hidden_size"] == cases.SIZES["hidden_size"]


def test_a_mistake_in_the_teacher_names_its_line(folder, tmp_path):
    content = settings(folder, tmp_path, teacher={"type": "llama", "hidden_sizes": 16, "vocab_size": 32})
    with raises(ConfigError, "hidden_sizes", "hidden_size", at=f"run.yaml:{line_of(content, 'teacher') + 1}"):
        build_trainer(runs.load(folder, content))


@pytest.mark.parametrize("kl", ["forward", "reverse"])
def test_a_divergence_is_at_least_zero(kl):
    generator = torch.Generator().manual_seed(2)
    student, teacher = torch.randn(2, 50, 7, generator=generator, dtype=torch.float64) * 4
    assert (divergence(student, teacher, kl=kl, temperature=0.7) > 0).all()
