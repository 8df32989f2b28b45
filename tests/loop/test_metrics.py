"""Configured metrics: what they are fed, and what is said when it is missing."""

from __future__ import annotations

import pytest
import torch
from tests.messages import raises

from trainwright.errors import ConfigError
from trainwright.loop.metrics import Accuracy, ConfiguredMetric


def test_accuracy_counts_samples_over_batches():
    accuracy = Accuracy()
    accuracy.update(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1, 1]))
    accuracy.update(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))
    mean = accuracy.compute()
    assert (float(mean.total), float(mean.count)) == (2, 4)


def test_accuracy_leaves_out_ignored_labels():
    accuracy = Accuracy(ignore_index=-1)
    accuracy.update(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), torch.tensor([[0, -1]]))
    assert float(accuracy.compute().value) == 1.0
    assert float(accuracy.compute().count) == 1


def test_accuracy_forgets_when_it_is_reset():
    accuracy = Accuracy()
    accuracy.update(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    accuracy.reset()
    assert float(accuracy.compute().count) == 0


def test_a_metric_is_fed_what_its_names_say():
    metric = ConfiguredMetric("top", Accuracy(), "scores", "target")
    metric.update({"logits": None, "scores": torch.tensor([[0.0, 1.0]])}, {"target": torch.tensor([1])})
    assert float(metric.metric.compute().value) == 1.0


@pytest.mark.parametrize(
    ("outputs", "have"),
    [({"scores": 1, "hidden": 2}, ()), (None, ())],
)
def test_missing_outputs_are_named_with_what_there_is(outputs, have):
    metric = ConfiguredMetric("top", Accuracy(), "logits", "labels", "run.yaml:9")
    with raises(ConfigError, *have, "evaluation.metrics.top.outputs", "logits", "eval_step", at="run.yaml:9"):
        metric.require_outputs(outputs)


@pytest.mark.parametrize(("batch", "have"), [({"x": 1, "y": 2}, ()), ([1, 2], ())])
def test_missing_labels_are_named_with_what_there_is(batch, have):
    metric = ConfiguredMetric("top", Accuracy(), "logits", "labels", "run.yaml:9")
    with raises(ConfigError, *have, "evaluation.metrics.top.labels", at="run.yaml:9"):
        metric.update({"logits": torch.zeros(1, 2)}, batch)


@pytest.mark.parametrize("name", ["output", "scores"])
def test_the_only_output_is_measured_whatever_its_name(name):
    metric = ConfiguredMetric("top", Accuracy(), "logits", "labels")
    metric.update({name: torch.tensor([[0.0, 1.0]])}, {"labels": torch.tensor([1])})
    assert float(metric.metric.compute().value) == 1.0


def test_the_only_output_is_not_taken_where_another_is_named_or_it_is_a_number():
    for outputs, name in (({"output": torch.zeros(1, 2)}, "scores"), ({"quality": torch.tensor(0.5)}, "logits")):
        metric = ConfiguredMetric("top", Accuracy(), name, "labels")
        with raises(ConfigError, name, next(iter(outputs))):
            metric.require_outputs(outputs)
