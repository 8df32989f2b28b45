"""The default task, and what counts as overriding it."""

from __future__ import annotations

import torch
from tests.messages import raises
from torch import nn

from trainwright.errors import DataError
from trainwright.loop.task import Task, overrides


class Spy(nn.Module):
    def forward(self, x, scale=1.0):
        return {"logits": x * scale}


class TakesLabels(nn.Module):
    def forward(self, x, labels=None):
        return labels


class TakesAnything(nn.Module):
    def forward(self, **batch):
        return sorted(batch)


X, LABELS = torch.ones(2), torch.zeros(2)


def test_the_default_task_calls_the_model_with_the_batch():
    assert Task().forward(Spy(), {"x": X, "scale": 3.0})["logits"].tolist() == [3.0, 3.0]


def test_labels_are_given_only_to_models_that_take_them():
    assert "logits" in Task().forward(Spy(), {"x": X, "labels": LABELS})
    assert Task().forward(TakesLabels(), {"x": X, "labels": LABELS}) is LABELS
    assert Task().forward(TakesAnything(), {"x": X, "labels": LABELS}) == ["labels", "x"]


def test_keys_that_the_model_does_not_take_are_an_error():
    with raises(DataError, "Spy.forward", at="test_task.py"):
        Task().forward(Spy(), {"x": X, "weights": X})


def test_keys_that_the_model_needs_and_the_batch_lacks_are_an_error():
    with raises(DataError, "Spy.forward"):
        Task().forward(Spy(), {"labels": LABELS})


def test_a_batch_that_is_no_mapping_is_rejected_with_what_to_override():
    with raises(DataError, "Task.forward"):
        Task().forward(Spy(), (X, LABELS))


def test_the_default_task_has_no_metrics_and_no_logs():
    assert Task().build_metrics() == {}
    assert Task().reduce_aggregated_logs(None, 3) == {}


def test_overriding_is_seen_through_inheritance():
    class Mine(Task):
        def build_model(self):
            return Spy()

    class Child(Mine):
        pass

    assert overrides(Child(), "build_model", Task)
    assert not overrides(Child(), "build_dataset", Task)
    assert not overrides(Task(), "build_model", Task)
