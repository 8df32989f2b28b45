"""Metrics of evaluations on one and two ranks are those that torchmetrics computes of the whole set."""

import functools
import json
import math

import pytest
import torch
from tests.distributed import metric_cases
from tests.distributed.forked_launch import launch_well
from tests.distributed.metric_cases import SIZES, Heads, sample, text
from torchmetrics import classification, regression
from torchmetrics import text as texts

LAYOUTS = {"one": None, "replicate": None, "fsdp": {"fsdp": 2}}


@pytest.fixture(scope="module", params=LAYOUTS)
def logs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    act = functools.partial(metric_cases.main, mesh=LAYOUTS[request.param])
    if request.param == "one":
        act(folder)
    else:
        launch_well(folder, 2, act)
    return json.loads((folder / "results.json").read_text())


def whole(name):
    """The labels and outputs of all samples of a set."""
    rows = [sample(index) for index in range(SIZES[name])]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return batch, Heads().outputs(batch["x"])


def expected(name, set_name):
    batch, outputs = whole(set_name)
    classes = {"num_classes": 6}
    probabilities = outputs["logits"].softmax(-1)
    tokens = (outputs["token_logits"].reshape(-1, 6), batch["tokens"].reshape(-1))
    positive = (outputs["score"].sigmoid(), batch["is_positive"].long())
    values = (outputs["value"][:, 0], batch["target"])
    written = [text(index + 1, 7) for index in range(SIZES[set_name])]
    references = [[text(index, 7), text(index + 50, 6)] for index in range(SIZES[set_name])]
    metric, *inputs = {
        "top3": (
            classification.MulticlassAccuracy(**classes, top_k=3, average="micro"),
            probabilities,
            batch["classes"],
        ),
        "f1": (classification.MulticlassF1Score(**classes), probabilities, batch["classes"]),
        "f1_each": (classification.MulticlassF1Score(**classes, average="none"), probabilities, batch["classes"]),
        "precision": (
            classification.MulticlassPrecision(**classes, average="weighted"),
            probabilities,
            batch["classes"],
        ),
        "recall": (classification.BinaryRecall(), *positive),
        "f1_columns": (
            classification.MultilabelF1Score(num_labels=3, average="micro"),
            outputs["scores"].sigmoid(),
            batch["columns"].long(),
        ),
        "f1_tokens": (classification.MulticlassF1Score(**classes, ignore_index=-100), *tokens),
        "auroc": (classification.MulticlassAUROC(**classes), probabilities, batch["classes"]),
        "auroc_binary": (classification.BinaryAUROC(), *positive),
        "perplexity": (texts.Perplexity(ignore_index=-100), outputs["token_logits"], batch["tokens"]),
        "perplexity_next": (
            texts.Perplexity(ignore_index=-100),
            outputs["token_logits"][:, :-1],
            batch["tokens"][:, 1:],
        ),
        "mse": (regression.MeanSquaredError(), *values),
        "rmse": (regression.MeanSquaredError(squared=False), *values),
        "mae": (regression.MeanAbsoluteError(), *values),
        "bleu": (texts.BLEUScore(n_gram=2), written, references),
        "rouge": (texts.ROUGEScore(rouge_keys=("rouge1", "rouge2", "rougeL")), written, references),
        "pearson": (regression.PearsonCorrCoef(), batch["x"][:, 0], batch["target"]),
        "collection": (metric_cases.collection(), probabilities, batch["classes"]),
    }[name]
    metric.update(*inputs)
    value = metric.compute()
    if isinstance(value, dict):
        return {f"{name}/{key}": float(each) for key, each in value.items()}
    if value.numel() > 1:
        return {f"{name}/{number}": float(each) for number, each in enumerate(value)}
    return {name: float(value)}


@pytest.mark.parametrize("name", metric_cases.METRICS)
def test_every_sample_counts_once_as_in_torchmetrics_on_the_whole_set(logs, name):
    for set_name in SIZES:
        for key, value in expected(name, set_name).items():
            found = logs[f"{set_name}/{key}"]
            if math.isnan(value):
                assert found is None or math.isnan(found)
            else:
                assert found == pytest.approx(value, rel=1e-5, abs=1e-6), (set_name, key)


def test_the_metrics_can_tell_samples_apart():
    """No expected value is that of a metric that ignores a rank: half of the set gives others."""
    for name in ("f1", "auroc", "bleu", "perplexity", "mse"):
        assert expected(name, "odd") != expected(name, "one")
