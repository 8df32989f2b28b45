"""Metrics of torchmetrics by name: what they infer, what they reject, and names that settings refer to."""

import json
import logging
import sys

import pytest
import torch
from tests.loop.test_evaluation import lines_of, load
from tests.messages import mentions, raises

from trainwright import Trainer, build_trainer
from trainwright.errors import ConfigError
from trainwright.loop.metrics import ConfiguredMetric, MetricNames
from trainwright.loop.named_metrics import AUROC, BLEU, F1, MeanSquaredError, Perplexity, Recall

SCORES = torch.tensor([[2.0, 0.1, -1.0], [0.3, 0.2, 0.1], [-1.0, 0.5, 3.0], [0.1, 1.0, 0.2]])


def fed(metric, *batches):
    for outputs, labels in batches:
        metric.update(outputs, labels)
    return float(metric.compute())


def test_a_segmentation_with_classes_first_is_as_one_with_classes_last():
    image, labels = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    assert fed(F1(), (image, labels)) == fed(F1(), (image.movedim(1, -1), labels))


def test_a_score_is_read_the_same_in_every_batch():
    """torchmetrics takes a batch whose scores are all between 0 and 1 for probabilities."""
    scores, labels = torch.tensor([0.4, 0.9, -0.3, 0.1]), torch.tensor([0, 1, 0, 1])
    whole = fed(Recall(), (scores, labels))
    assert fed(Recall(), (scores[:2], labels[:2]), (scores[2:], labels[2:])) == whole == 1.0
    aucs = [fed(AUROC(), (scores, labels)), fed(AUROC(), (scores[:2], labels[:2]), (scores[2:], labels[2:]))]
    assert aucs[0] == aucs[1] == 0.75


def test_two_columns_of_a_binary_task_are_the_scores_of_both_classes():
    scores, labels = torch.randn(20, 2), torch.randint(0, 2, (20,))
    binary = fed(F1(task="binary"), (scores, labels))
    assert binary == pytest.approx(fed(F1(task="binary"), (scores[:, 1] - scores[:, 0], labels)))


def test_class_indices_need_the_number_of_classes():
    predicted, labels = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2])
    expected = fed(F1(), (torch.eye(3)[predicted], labels))
    assert fed(F1(num_classes=3), (predicted, labels)) == expected
    with raises(ConfigError, "num_classes"):
        F1().check_inputs(predicted, labels)


@pytest.mark.parametrize(
    ("metric", "outputs", "labels"),
    [
        (F1(num_classes=4), SCORES, torch.zeros(4).long()),
        (F1(task="binary", average="macro"), SCORES[:, 0], torch.zeros(4)),
        (F1(threshold=0.3), SCORES, torch.zeros(4).long()),
        (F1(), SCORES, torch.zeros(3).long()),
        (F1(task="multilabel"), SCORES, torch.zeros(4).long()),
        (AUROC(num_classes=3), torch.zeros(4).long(), torch.zeros(4).long()),
        (Perplexity(shift=True), SCORES, torch.zeros(4).long()),
        (MeanSquaredError(), SCORES, torch.zeros(4)),
        (BLEU(), SCORES, ["a"] * 4),
        (BLEU(), ["a"] * 4, SCORES),
        (BLEU(), ["a"] * 4, ["a"] * 3),
    ],
)
def test_inputs_that_cannot_be_compared_are_rejected_before_the_first_evaluation(metric, outputs, labels):
    configured = ConfiguredMetric("mine", metric, "logits", "labels", "run.yaml:9")
    with raises(ConfigError, "evaluation.metrics.mine", at="run.yaml:9"):
        configured.require({"logits": outputs}, {"labels": labels})
    assert metric.metric is None


def test_probabilities_outside_of_0_to_1_are_rejected_and_logits_inside_are_reported(caplog):
    metric = F1(task="binary", from_logits=False)
    metric.update(SCORES[:, 0], torch.tensor([0, 1, 0, 1]))
    with raises(ConfigError, "from_logits"):
        metric.check_values()
    metric = F1(task="binary")
    metric.update(SCORES[:, 0].sigmoid(), torch.tensor([0, 1, 0, 1]))
    with caplog.at_level(logging.WARNING):
        metric.check_values()
    assert mentions(caplog.text, "from_logits: false")


def test_a_missing_package_is_named_with_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.classification", None)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    metrics = "evaluation.metrics={f1: {type: f1}}"
    with raises(ConfigError, "evaluation.metrics.f1", 'pip install "trainwright[metrics]"', at=metrics):
        build_trainer(load(tmp_path, metrics))


@pytest.mark.parametrize(
    "metric",
    ["{type: f1, task: binray}", "{type: top_k_accuracy, k: 0}", "{type: perplexity}", "{type: f1, avrage: 1}"],
)
def test_wrong_arguments_name_the_setting_before_anything_is_trained(tmp_path, metric):
    with raises(Exception, "evaluation.metrics.mine", at="evaluation.metrics="):
        build_trainer(load(tmp_path, f"evaluation.metrics={{mine: {metric}}}"))


class Writes(Trainer):
    """Returns texts, as a model that generates would."""

    def eval_step(self, batch):
        size = len(batch["labels"])
        return {**super().eval_step(batch), "texts": ["a b c d e"] * size, "targets": ["a b c d f"] * size}


def test_texts_come_from_eval_step(tmp_path):
    metrics = "{bleu: {type: bleu, n_gram: 2, outputs: texts, labels: targets}, rouge: {type: rouge, outputs: texts, "
    metrics += "labels: targets, rouge_keys: rouge1}}"
    logs = build_trainer(load(tmp_path, f"evaluation.metrics={metrics}"), Writes).train()
    assert logs["valid/bleu"] == pytest.approx((4 / 5 * 3 / 4) ** 0.5)
    assert logs["valid/rouge/rouge1_fmeasure"] == pytest.approx(0.8)


NAMES = MetricNames(("valid", "other"), ("loss", "accuracy"), are_all=True)


@pytest.mark.parametrize("name", ["valid/acuracy", "vaild/loss", "loss", "valid/", "test/loss"])
def test_a_name_that_no_evaluation_gives_is_rejected_with_the_closest(name):
    with raises(ConfigError, "early_stopping.metric", at="run.yaml:3"):
        NAMES.check(name, label="early_stopping.metric", where="run.yaml:3")


def test_known_names_and_parts_of_a_metric_are_accepted():
    for name in ("valid/loss", "other/accuracy", "valid/accuracy/macro"):
        NAMES.check(name, label="x")


def test_a_name_that_user_code_may_add_is_only_reported_if_it_looks_misspelled(caplog):
    names = MetricNames(("valid",), ("loss", "accuracy"), are_all=False)
    with caplog.at_level(logging.WARNING):
        names.check("valid/quality", label="x")
        assert not caplog.records
        names.check("valid/acuracy", label="x")
    assert mentions(caplog.text, "valid/acuracy", "valid/accuracy")


SHIPPED = (
    "model={type: cnn, num_labels: 10, num_channels: 1, stage_channels: [8]}",
    "data={train: {type: digits, part: train}, eval: {valid: {type: digits, part: valid}}}",
    "trainer.type=classification",
)


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ("checkpoint.keep_best={metric: valid/acuracy, mode: max}", "checkpoint.keep_best.metric"),
        ("hooks=[{type: early_stopping, metric: valid/acuracy}]", "early_stopping.metric"),
        ("trainer.schedule={type: reduce_on_plateau, metric: valid/acuracy}", "trainer.schedule.metric"),
    ],
)
def test_a_misspelled_metric_is_rejected_before_the_first_step_where_the_names_are_known(tmp_path, setting, label):
    trainer = build_trainer(load(tmp_path, *SHIPPED, setting))
    assert trainer.metric_names.are_all
    with raises(ConfigError, label, "valid/acuracy", 'Did you mean "valid/accuracy"?', at=setting):
        trainer.train()
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ("checkpoint.keep_best={metric: valid/accuracy}", "checkpoint.keep_best.mode"),
        ("hooks=[{type: early_stopping, metric: valid/f}]", "early_stopping.mode"),
        ("trainer.schedule={type: reduce_on_plateau, metric: valid/f}", "trainer.schedule.mode"),
        ("checkpoint.keep_best={metric: valid/error, mode: max}", "checkpoint.keep_best.mode"),
    ],
)
def test_the_wrong_mode_of_a_metric_is_rejected_before_the_first_step(tmp_path, setting, label):
    metrics = "evaluation.metrics={f: f1, error: {type: 'torchmetrics:MeanSquaredError', num_outputs: 10}}"
    trainer = build_trainer(load(tmp_path, *SHIPPED, metrics, setting))
    with raises(ConfigError, label, at=setting):
        trainer.train()
    assert trainer.step == 0


@pytest.mark.parametrize(
    "setting",
    [
        "checkpoint.keep_best={metric: valid/quality, mode: max}",
        "hooks=[{type: early_stopping, metric: valid/quality}]",
        "trainer.schedule={type: reduce_on_plateau, metric: valid/quality}",
    ],
)
def test_the_lines_of_completed_steps_are_written_before_an_unknown_metric_ends_the_run(tmp_path, setting):
    settings = ("log.every_steps=5", "checkpoint.every_steps=100", setting)
    with raises(ConfigError, "valid/quality", at=setting):
        build_trainer(load(tmp_path, *settings)).train()
    [line] = lines_of(tmp_path)
    assert line["step"] == 5
    assert line["loss"] > 0
    assert (tmp_path / "small" / "checkpoints" / "step-00000005" / "MANIFEST.json").exists()
    fixed = settings[:-1]
    if "schedule" in setting:  # another schedule is another run
        return
    build_trainer(load(tmp_path, *fixed)).train()
    build_trainer(load(tmp_path, *fixed, "name=undisturbed")).train()
    assert lines_of(tmp_path) == lines_of(tmp_path, "undisturbed")
    assert json.dumps(lines_of(tmp_path)[0]).count("valid/") > 0
