"""Samples that are tuples: `data.fields` names their elements, and a classification trainer understands pairs."""

from collections import namedtuple

import pytest
import torch
from tests.messages import raises
from torch.utils.data import TensorDataset

from trainwright import RunConfig, Trainer, build_trainer, train
from trainwright.data.collators.stack import Stack
from trainwright.errors import ConfigError, DataError
from trainwright.trainers.classification import ClassificationTrainer

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
PAIRS = TensorDataset(X, Y)
Pair = namedtuple("Pair", ["features", "target"])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, features):
        return self.linear(features)


def run(dataset, *, kind=ClassificationTrainer, **data):
    class Given(kind):
        @classmethod
        def build_model(cls, build):
            return Net()

        @classmethod
        def build_train_data(cls, build):
            return dataset

    trainer = {"max_steps": 2, "global_batch_size": 6, "micro_batch_size": 3, "loss": "cross_entropy"}
    settings = {"name": "pairs", "data": data, "trainer": {**trainer, "optimizer": {"type": "sgd", "lr": 0.1}}}
    made = build_trainer(RunConfig.from_dict(settings), Given, fresh=True)
    made.train()
    return made


@pytest.mark.parametrize(
    "dataset",
    [
        PAIRS,
        [{"features": x, "labels": y} for x, y in PAIRS],
        [[x, y] for x, y in PAIRS],
        [Pair(x, y) for x, y in PAIRS],
    ],
    ids=["TensorDataset", "dicts", "lists", "named tuples"],
)
def test_a_classification_trainer_reads_pairs(in_tmp, dataset):
    weights = run(dataset).model.linear.weight
    assert torch.equal(weights, run(PAIRS, kind=Trainer, fields=["features", "labels"]).model.linear.weight)


def test_the_fields_of_the_config_name_the_elements_of_any_tuple(in_tmp):
    class Weighted(Trainer):
        def forward(self, features, labels, weight):
            losses = torch.nn.functional.cross_entropy(self.model(features), labels, reduction="none")
            return (losses * weight).mean()

    rows = TensorDataset(X, Y, torch.rand(12))

    class Given(Weighted):
        @classmethod
        def build_model(cls, build):
            return Net()

        @classmethod
        def build_train_data(cls, build):
            return rows

    trainer = {"max_steps": 1, "global_batch_size": 4, "optimizer": {"type": "sgd", "lr": 0.1}}
    fields = {"fields": ["features", "labels", "weight"]}
    given = build_trainer(RunConfig.from_dict({"name": "three", "data": fields, "trainer": trainer}), Given)
    before = given.model.linear.weight.detach().clone()
    given.train()
    assert given.step == 1
    assert not torch.equal(given.model.linear.weight, before)


def test_one_field_names_a_sample_that_is_no_tuple(in_tmp):
    class Own(Trainer):
        def forward(self, features):
            return self.model(features).pow(2).mean()

    class Given(Own):
        @classmethod
        def build_model(cls, build):
            return Net()

        @classmethod
        def build_train_data(cls, build):
            return list(X)

    trainer = {"max_steps": 1, "global_batch_size": 4, "optimizer": {"type": "sgd", "lr": 0.1}}
    config = RunConfig.from_dict({"name": "one", "data": {"fields": ["features"]}, "trainer": trainer})
    given = build_trainer(config, Given)
    given.train()
    assert given.step == 1


def test_pairs_without_names_are_rejected_with_the_setting(in_tmp):
    with raises(DataError, "data.fields: [features, labels]"):
        run(PAIRS, kind=Trainer)
    with raises(DataError, "data.fields: [features, target]"):
        run([Pair(x, y) for x, y in PAIRS], kind=Trainer)
    with raises(DataError, "data.fields"):
        train(Net(), PAIRS, max_steps=1, batch_size=4)


@pytest.mark.parametrize(
    ("dataset", "fields", "mentioned"),
    [
        (PAIRS, ["features"], ["1", "2"]),
        (PAIRS, ["features", "labels", "weight"], ["3", "weight"]),
        ([{"features": x, "labels": y} for x, y in PAIRS], ["features", "labels"], ["features, labels", "Remove"]),
        (list(X), ["features", "labels"], ["Tensor"]),
    ],
)
def test_fields_that_do_not_fit_the_samples_are_rejected(in_tmp, dataset, fields, mentioned):
    with raises(DataError, "data.fields", *mentioned):
        run(dataset, fields=fields)


def test_a_triple_of_a_classification_trainer_needs_names(in_tmp):
    with raises(DataError, "data.fields", "3 elements", "features, labels"):
        run(TensorDataset(X, Y, Y))


def test_the_location_of_the_fields_is_named(in_tmp):
    (in_tmp / "run.yaml").write_text("data:\n  train: digits\n  fields: [x, x]\n")
    with raises(ConfigError, "data.fields", at="run.yaml:3"):
        RunConfig.load(in_tmp / "run.yaml")


def test_samples_with_different_numbers_of_elements_are_explained():
    with raises(DataError, "2 and 3"):
        Stack()([(1, 2), (1, 2, 3)])


def test_a_pil_image_without_a_transform_is_explained():
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    with raises(DataError, "PIL", "transform", "'pixel_values'"):
        Stack()([{"pixel_values": image, "labels": 0}] * 2)


def test_a_split_method_of_the_collator_is_used_with_names(in_tmp):
    class Halves(Stack):
        num_calls = 0

        def split(self, batch, n):
            Halves.num_calls += 1
            return [{name: value.chunk(n)[number] for name, value in batch.items()} for number in range(n)]

    class Given(ClassificationTrainer):
        @classmethod
        def build_model(cls, build):
            return Net()

        @classmethod
        def build_train_data(cls, build):
            return PAIRS

        @classmethod
        def build_collator(cls, build):
            return Halves()

    trainer = {"max_steps": 2, "global_batch_size": 6, "micro_batch_size": 3, "loss": "cross_entropy"}
    settings = {"name": "halves", "trainer": {**trainer, "optimizer": {"type": "sgd", "lr": 0.1}}}
    build_trainer(RunConfig.from_dict(settings), Given).train()
    assert Halves.num_calls == 2
