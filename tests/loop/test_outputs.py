"""What a forward may return."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.errors import DataError, TrainwrightError
from trainwright.events import Mean
from trainwright.loop.outputs import CriterionError, explain_failure, read_forward

PROJECT = Path(__file__).parents[1] / "project"
LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
BATCH = {"x": torch.zeros(2, 4), "labels": torch.tensor([0, 1])}


class WithCriterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()


class Plain(nn.Module):
    pass


def read(returned, *, model=None, batch=BATCH, num_samples=2):
    return read_forward(returned, batch, model or Plain(), num_samples)


def test_a_scalar_is_the_loss():
    result = read(torch.tensor(1.5))
    assert result.loss.item() == 1.5
    assert (result.metrics, result.outputs, result.num_samples) == ({}, None, 2)


def test_a_tensor_with_one_element_is_a_scalar_loss():
    assert read(torch.tensor([[1.5]])).loss.shape == ()
    assert read({"loss": torch.tensor([1.5])}).loss.shape == ()


def test_a_mean_is_kept_with_its_weight():
    mean = Mean(torch.tensor(6.0), 3)
    assert read(mean).loss is mean
    assert read((mean, {})).loss is mean
    assert read({"loss": mean}).loss is mean


def test_a_pair_gives_loss_and_metrics_that_may_be_changed():
    given = {"accuracy": 0.5}
    result = read((torch.tensor(1.0), given))
    result.metrics["more"] = 1
    assert (result.metrics, result.outputs) == ({"accuracy": 0.5, "more": 1}, None)
    assert given == {"accuracy": 0.5}


def test_of_a_mapping_only_the_loss_is_taken_and_the_rest_are_outputs():
    result = read(OrderedDict(loss=torch.tensor(1.0), logits=LOGITS, hidden=None))
    assert result.metrics == {}
    assert list(result.outputs) == ["logits", "hidden"]
    assert result.outputs["logits"] is LOGITS


def test_an_object_with_a_loss_is_read_like_a_mapping():
    result = read(SimpleNamespace(loss=torch.tensor(2.0), logits=LOGITS))
    assert (result.loss.item(), list(result.outputs), result.metrics) == (2.0, ["logits"], {})


def test_an_object_with_slots_is_read_like_any_other():
    @dataclass(slots=True)
    class Output:
        loss: torch.Tensor
        logits: torch.Tensor

    result = read(Output(torch.tensor(2.0), LOGITS))
    assert (result.loss.item(), list(result.outputs)) == (2.0, ["logits"])


@pytest.mark.parametrize(
    "returned",
    [
        {"loss": None, "logits": LOGITS, "hidden": LOGITS},
        {"logits": LOGITS},
        {"loss": None, "scores": LOGITS},
        SimpleNamespace(loss=None, logits=LOGITS),
        LOGITS,
    ],
    ids=["logits", "no loss key", "only output", "object", "bare tensor"],
)
def test_without_a_loss_the_criterion_gets_the_outputs_and_the_labels(returned):
    result = read(returned, model=WithCriterion())
    assert torch.equal(result.loss, nn.functional.cross_entropy(LOGITS, BATCH["labels"]))
    assert result.outputs


@pytest.mark.parametrize(
    ("returned", "model", "batch", "missing"),
    [
        ({"logits": LOGITS}, Plain(), BATCH, ("criterion",)),
        ({"logits": LOGITS}, WithCriterion(), {"x": LOGITS}, ("labels",)),
        ({"logits": LOGITS}, WithCriterion(), [LOGITS], ("labels",)),
        ({"a": LOGITS, "b": LOGITS}, WithCriterion(), BATCH, ("logits",)),
        ({}, WithCriterion(), BATCH, ("logits",)),
    ],
)
def test_what_is_missing_for_a_loss_is_named(returned, model, batch, missing):
    with raises(TrainwrightError, *missing):
        read(returned, model=model, batch=batch)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (None, ()),
        ("text", ()),
        ((torch.tensor(1.0),), ("1",)),
        ((torch.tensor(1.0), LOGITS), ("2",)),
        (LOGITS, ("2", "tensor")),
        ({"loss": LOGITS}, ("2", "tensor")),
        ({"loss": 0.5}, ()),
        ((0.5, {}), ()),
    ],
)
def test_anything_else_is_an_error_that_shows_it(returned, shown):
    with raises(TrainwrightError, *shown):
        read(returned)


def test_without_labels_a_tensor_is_a_loss_that_is_not_reduced():
    with raises(TrainwrightError, "tensor"):
        read(LOGITS, batch={"x": LOGITS})


def test_a_criterion_of_torch_that_cannot_compare_is_named_with_both_shapes():
    model = nn.Module()
    model.criterion = nn.BCEWithLogitsLoss()
    said = r"BCEWithLogitsLoss, cannot compare outputs \[2, 2\] float32 and labels \[2\] int64: Target size.*\. Let"
    with pytest.raises(CriterionError, match=said) as caught:
        read(LOGITS, model=model)
    assert isinstance(caught.value.__cause__, ValueError)


def test_labels_that_should_be_class_indices_are_named():
    model = nn.Module()
    model.criterion = nn.CrossEntropyLoss()
    with raises(CriterionError, "CrossEntropyLoss", "[2] float32", "int64", golden=False):
        read(LOGITS, model=model, batch={"labels": torch.tensor([0.0, 1.0])})


def test_a_users_criterion_keeps_its_error_and_notes_what_it_got():
    class Own(nn.Module):
        def forward(self, scores, labels):
            return scores @ scores[:, :1].T

    model = nn.Module()
    model.criterion = Own()
    with pytest.raises(RuntimeError, match="shapes") as caught:
        read(LOGITS, model=model)
    assert caught.value.__notes__ == ["The model's criterion, Own, got outputs [2, 2] float32 and labels [2] int64."]


def test_a_lack_of_memory_in_a_criterion_is_left_alone():
    class Large(nn.Module):
        def forward(self, scores, labels):
            raise torch.OutOfMemoryError("out of memory")

    model = nn.Module()
    model.criterion = Large()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        read(LOGITS, model=model)
    assert not hasattr(caught.value, "__notes__")


def test_ids_that_an_embedding_of_the_users_lacks_are_named_with_it():
    model = nn.ModuleDict({"words": nn.Embedding(20, 2)})
    with raises(DataError, "3", "30", "20"):
        explain_failure(IndexError("index out of range in self"), {"x": torch.tensor([3, 30])}, model)


def test_a_token_outside_of_the_vocabulary_is_named_with_the_embedding(tmp_path):
    config = RunConfig.load(
        PROJECT / "run.yaml",
        [
            f"output_dir={tmp_path}",
            "model={type: llama, vocab_size: 20, hidden_size: 8, num_layers: 1, num_heads: 1}",
            "data.train={type: pack, length: 32, source: {type: parts.py:Documents}}",
            *("data.eval={}", "evaluation.metrics={}", "trainer.type=language_model"),
        ],
    )
    with raises(DataError, "input_ids", "0", "49", "20"):
        build_trainer(config).train()


OUTSIDE_OF_AUTOCAST = {
    "index_add": lambda scores: torch.zeros(4, 4).index_add(0, torch.arange(4), scores),
    "scatter": lambda scores: torch.zeros(4, 4).scatter(0, torch.zeros(4, 4, dtype=torch.long), scores),
    "bincount": lambda scores: torch.bincount(scores.flatten()),
    "numpy": lambda scores: scores.detach().numpy(),
}


@pytest.mark.parametrize("name", OUTSIDE_OF_AUTOCAST)
def test_an_operation_without_autocast_is_told_the_setting(tmp_path, name):
    class Scoring(Trainer):
        def forward(self, x, labels):
            scores = torch.nn.functional.linear(torch.ones(4, 4), torch.ones(4, 4))
            OUTSIDE_OF_AUTOCAST[name](scores)
            return super().forward(x=x, labels=labels)

    def train(precision):
        overrides = [f"output_dir={tmp_path}", "trainer.max_steps=1", f"runtime.precision={precision}"]
        build_trainer(RunConfig.load(PROJECT / "run.yaml", overrides), Scoring).train()

    with raises(TrainwrightError, "runtime.precision: fp32", "bf16", "float()", at="test_outputs.py"):
        train("bf16")
    if name != "bincount":
        train("fp32")


LLAMA = "type: llama, vocab_size: 64, hidden_size: 16, num_layers: 1, num_heads: 2"
THEIRS = (
    "type: 'transformers:LlamaForCausalLM', vocab_size: 64, hidden_size: 16, num_hidden_layers: 1, "
    "num_attention_heads: 2, intermediate_size: 16"
)


@pytest.mark.parametrize("model", [LLAMA, THEIRS], ids=["shipped", "transformers"])
@pytest.mark.parametrize("use", [lambda logits: logits.argmax(-1), lambda logits: logits[:, 0]], ids=["call", "index"])
def test_logits_that_a_fused_loss_does_not_compute_are_explained(tmp_path, model, use):
    class Reading(Trainer):
        def forward(self, **batch):
            outputs = self.model(**batch)
            use(outputs["logits"])
            return outputs["loss"]

    def train(fused):
        data = "data.train={type: pack, length: 32, source: {type: parts.py:Documents}}"
        overrides = [f"output_dir={tmp_path}", "trainer.max_steps=1", "data.eval={}", "evaluation.metrics={}", data]
        config = RunConfig.load(
            PROJECT / "run.yaml", [*overrides, "trainer.micro_batch_size=8", f"model={{{model}, fused_loss: {fused}}}"]
        )
        build_trainer(config, Reading, fresh=True).train()

    with raises(TrainwrightError, "model.fused_loss: false", "NoneType", at="test_outputs.py"):
        train("true")
    train("false")


@pytest.mark.parametrize("layer", [nn.Linear(4, 2), nn.Conv1d(4, 2, 1)])
def test_an_input_in_another_precision_than_the_weights_is_told_the_setting(layer):
    batch = {"ids": torch.zeros(2, dtype=torch.long), "pixels": torch.zeros(1, 4, 4)}
    with pytest.raises(RuntimeError) as failed:
        layer.bfloat16()(batch["pixels"])
    with raises(TrainwrightError, "bf16", "runtime.precision"):
        explain_failure(failed.value, batch, layer)
    assert explain_failure(failed.value, {"pixels": batch["pixels"].bfloat16()}, layer) is None
    assert explain_failure(failed.value, batch, layer.float()) is None
