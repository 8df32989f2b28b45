"""`trainer.loss`: the loss of a model that returns only outputs, exact for any split of a batch."""

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import Mean, RunConfig, Task, Trainer, build_component, build_trainer
from trainwright.errors import ConfigError
from trainwright.loop.outputs import CriterionError

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 2, -100, 1, 0, 0, 2, -100, -100, 1])
CLASSES = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]
NUMBERS = [{"x": x, "labels": x.sum()} for x in X]


class Scores(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.linear = nn.Linear(4, classes)

    def forward(self, x):
        return self.linear(x)


class Named(Scores):
    def forward(self, x):
        return {"logits": self.linear(x), "features": x, "loss": None}


class WithLoss(Scores):
    def forward(self, x, labels):
        scores = self.linear(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def start(loss, *, model=Scores, dataset=CLASSES, micro_batch_size=12, kind=Trainer, name="loss", **further):
    class Given(kind):
        @classmethod
        def build_model(cls, build):
            torch.manual_seed(0)
            return model()

        @classmethod
        def build_train_data(cls, build):
            return dataset

        @classmethod
        def build_eval_data(cls, build):
            return {"valid": dataset}

    trainer = {"max_steps": 3, "global_batch_size": 12, "micro_batch_size": micro_batch_size, "loss": loss}
    settings = {"name": name, "trainer": {**trainer, "optimizer": {"type": "sgd", "lr": 0.5}}, **further}
    return build_trainer(RunConfig.from_dict(settings), Given, fresh=True)


LOSSES = {
    "smoothed": {"type": "torch.nn:CrossEntropyLoss", "label_smoothing": 0.1},
    "weighted": {"type": "torch.nn:CrossEntropyLoss", "weight": [1.0, 5.0, 0.2]},
    "both": {"type": "cross_entropy", "weight": [1.0, 5.0, 0.2], "label_smoothing": 0.2},
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("model", [Scores, Named])
def test_a_run_is_that_of_a_plain_loop_for_any_micro_batch_size(in_tmp, name, model):
    options = {key: value for key, value in LOSSES[name].items() if key != "type"}
    weight = torch.tensor(options.pop("weight")) if "weight" in options else None
    criterion = nn.CrossEntropyLoss(weight=weight, **options)
    torch.manual_seed(0)
    plain = Scores()
    for _ in range(3):
        loss = criterion(plain(X), Y)
        plain.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.5 * parameter.grad
    for size in (12, 4, 3):
        run = start(LOSSES[name], model=model, micro_batch_size=size)
        logs = run.train()
        assert torch.allclose(run.model.linear.weight, plain.linear.weight, atol=1e-6)
        with torch.no_grad():
            assert logs["valid/loss"] == pytest.approx(criterion(plain(X), Y).item(), abs=1e-5)


def test_weights_are_on_the_device_and_a_component_can_be_built_alone(in_tmp):
    run = start(LOSSES["weighted"])
    assert run.context.loss.function.weight.tolist() == pytest.approx([1.0, 5.0, 0.2])
    config = RunConfig.from_dict({"trainer": {"loss": "mse"}})
    assert isinstance(build_component(config, "trainer.loss"), nn.MSELoss)


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_the_loss_is_computed_in_other_modes_too(in_tmp, mode):
    further = {"runtime": {"mode": mode, "compile_backend": "aot_eager"} if mode == "compile" else {"mode": mode}}
    eager, other = start(LOSSES["weighted"]), start(LOSSES["weighted"], name=mode, **further)
    eager.train()
    other.train()
    assert torch.allclose(eager.model.linear.weight, other.model.linear.weight, atol=1e-6)


def test_a_function_of_the_user_is_a_loss(in_tmp):
    (in_tmp / "losses").mkdir()
    (in_tmp / "losses" / "mine.py").write_text(
        "from trainwright import Mean\n"
        "def absolute(outputs, labels, scale=1.0):\n"
        "    return Mean(scale * (outputs.squeeze(-1) - labels).abs().sum(), len(labels))\n"
    )
    (in_tmp / "run.yaml").write_text("trainer:\n  loss: {type: mine.absolute, scale: 2.0}\n")
    loss = build_component(in_tmp / "run.yaml", "trainer.loss")
    found = loss(torch.ones(3, 1), torch.zeros(3))
    assert isinstance(found, Mean)
    assert found.total == 6


@pytest.mark.parametrize(
    ("loss", "model", "mentioned"),
    [
        ({"type": "cross_entropy", "reduction": "sum"}, Scores, ["trainer.loss.reduction", "sum"]),
        ({"type": "cross_entropy", "reduction": "none"}, Scores, ["trainer.loss.reduction", "none"]),
        ({"type": "torch.nn:CTCLoss"}, Scores, ["trainer.loss", "input_lengths"]),
        ({"type": "torch.nn:AdaptiveLogSoftmaxWithLoss", "in_features": 3, "n_classes": 5, "cutoffs": [2]}, Scores,
         ["trainer.loss", "parameters"]),
        ({"type": "cross_entropy", "label_smothing": 0.1}, Scores, ["trainer.loss", "label_smoothing"]),
    ],
)  # fmt: skip
def test_a_loss_that_cannot_be_used_is_rejected_before_the_first_step(in_tmp, loss, model, mentioned):
    with raises(ConfigError, *mentioned):
        start(loss, model=model)


class Returning(Trainer):
    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.model(x), labels), {"half": 0.5}


@pytest.mark.parametrize(("model", "kind"), [(WithLoss, Trainer), (Scores, Returning)])
def test_a_second_loss_is_rejected(in_tmp, model, kind):
    with raises(ConfigError, "trainer.loss", "no effect"):
        start("cross_entropy", model=model, kind=kind).train()


def test_outputs_that_would_be_broadcast_are_rejected(in_tmp):
    with raises(CriterionError, "trainer.loss", "[12, 1]", "[12]"):
        start("mse", model=lambda: Scores(1), dataset=NUMBERS).train()


def test_labels_are_not_passed_to_a_task_s_model_that_has_no_such_parameter(in_tmp):
    assert Task().forward(Scores(), {"x": X, "labels": Y}).shape == (12, 3)


def test_a_mapping_has_outputs_and_metrics(in_tmp):
    class Both(Scores):
        def forward(self, x, labels):
            scores = self.linear(x)
            spread = Mean(scores.detach().abs().sum(), len(scores))
            metrics = {"spread": spread}
            return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores, "metrics": metrics}

    accuracy = {"metrics": {"accuracy": "accuracy"}}
    dataset = [{**row, "labels": row["labels"].clamp(0)} for row in CLASSES]
    run = start(None, model=Both, micro_batch_size=4, dataset=dataset, evaluation=accuracy)
    logs = run.train()
    assert logs["valid/spread"] > 0
    assert 0 <= logs["valid/accuracy"] <= 1
    assert run.storage.latest()["spread"][0] > 0
