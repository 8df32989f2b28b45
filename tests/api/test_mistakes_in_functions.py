"""Mistakes in what training_main and train are given: one error, in the user's words, with the user's file and line."""

import argparse
import logging
import sys

import numpy as np
import pytest
import torch
from tests.api.function_runs import Classifier, Points, flags, forward_step, lines, run
from tests.api.mistakes import place, rejection
from tests.messages import mentions
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from trainwright import Hook, Trainer, build_trainer, get_args, train, training_main
from trainwright.api.arguments import with_defaults
from trainwright.errors import TrainwrightError

ONE = ("--train-iters", "1")
EVALUATED = (*ONE, "--valid-data", "4")


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


# functions that do not take what they are called with


def step_of_two(data_iterator, model):
    """Lacks args and timers."""


def create_of_one(path):
    """Lacks args."""


def init_of_one(model):
    """Lacks args."""


def handle_of_none():
    """Lacks the metrics."""


def collate_of_two(samples, args):
    """Has one too many."""


@pytest.mark.parametrize(
    ("role", "function", "wanted"),
    [
        ("forward_step_function", step_of_two, "(data_iterator, model, args, timers)"),
        ("forward_step_eval", step_of_two, "(data_iterator, model, args, timers)"),
        ("create_dataset_function", create_of_one, "(path, args)"),
        ("init_function", init_of_one, "(args, model)"),
        ("handle_metrics_function", handle_of_none, "(metrics)"),
        ("collate_fn", collate_of_two, "(samples)"),
    ],
)
def test_a_function_of_other_arguments_is_rejected_where_it_is_written(role, function, wanted, tmp_path):
    given = {"forward_step_function": forward_step, "create_dataset_function": Points, role: function}
    text = rejection(training_main, flags(*ONE), Classifier, **given)
    assert text.startswith(place(__file__, f"def {function.__name__}("))
    assert mentions(text, role, wanted)
    assert text.endswith(f"Let it accept {wanted}.")
    assert not list(tmp_path.iterdir())  # nothing was built


def test_a_value_that_is_not_a_function_is_rejected_on_the_line_that_passes_it():
    given = flags(*ONE)
    text = rejection(lambda: training_main(given, Classifier, None, Points))  # no step
    assert text.startswith(place(__file__, "  # no step") + "forward_step_function is None, not a function.")


def test_functions_with_defaults_stars_or_a_class_are_accepted():
    def loose(*given, **more):
        return forward_step(*given)

    class Step:
        def __call__(self, data_iterator, model, args, timers, scale=2):
            return forward_step(data_iterator, model, args, timers)

    run(*ONE, forward_step_function=loose, init_function=lambda args, model, extra=1: None)
    run(*ONE, "--experiment-name", "other", forward_step_function=Step())


def test_the_forward_of_train_is_rejected_where_it_is_written():
    text = rejection(train, Classifier(), Points(24), forward=init_of_one, max_steps=1, batch_size=4)
    assert text.startswith(place(__file__, "def init_of_one("))
    assert "called as forward(model, batch)" in text


# what functions return


def step_without_loss(data_iterator, model, args, timers):
    return {"logits": model(next(data_iterator)[0])}


def step_with_scores(data_iterator, model, args, timers):
    return {"loss": model(next(data_iterator)[0])}


def test_a_mapping_without_a_loss_names_the_forward_step():
    text = rejection(run, *ONE, forward_step_function=step_without_loss)
    assert text.startswith(place(__file__, "def step_without_loss"))
    assert mentions(text, "step_without_loss")
    text = rejection(run, *ONE, forward_step_function=step_with_scores)
    assert text.startswith(place(__file__, "def step_with_scores"))
    assert mentions(text, "4", "3", "tensor")


def test_a_mapping_without_a_loss_is_fine_where_the_model_has_a_criterion():
    class Judged(Classifier):
        criterion = torch.nn.CrossEntropyLoss()

    def step(data_iterator, model, args, timers):
        return {"logits": model(next(data_iterator)["x"])}

    def collate(samples):
        return {"x": torch.stack([each[0] for each in samples]), "labels": torch.stack([each[1] for each in samples])}

    run(*ONE, model_cls=Judged, forward_step_function=step, collate_fn=collate)
    assert lines()[-1]["loss"] > 0


def handle_with_matrix(metrics):
    return {"confusion": torch.ones(2, 2)}


def handle_with_text(metrics):
    return {"verdict": "good"}


def test_a_final_metric_that_is_not_a_number_names_handle_metrics_function():
    text = rejection(run, *EVALUATED, handle_metrics_function=handle_with_matrix)
    assert text.startswith(place(__file__, "def handle_with_matrix"))
    assert mentions(text, "confusion", "2", "tensor")
    text = rejection(run, *EVALUATED, handle_metrics_function=handle_with_text)
    assert text.startswith(place(__file__, "def handle_with_text"))
    assert mentions(text, "verdict")


def step_with_odd_metric(data_iterator, model, args, timers):
    x, labels, _ = next(data_iterator)
    return cross_entropy(model(x), labels), {"odd": torch.ones(3)}


def test_a_metric_of_another_length_is_found_in_the_first_step_and_not_in_the_first_evaluation():
    text = rejection(run, *EVALUATED, forward_step_function=step_with_odd_metric)
    assert text.startswith(place(__file__, "def step_with_odd_metric"))
    assert mentions(text, "3", "4", "tensor")


def test_a_metric_with_rows_that_is_not_finite_skips_the_update():
    def step(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        return cross_entropy(model(x), labels), {"rows": torch.full((4, 2), float("nan"))}

    torch.manual_seed(0)
    model = Classifier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = run(*ONE, model_cls=model, forward_step_function=step)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())


# flags


def test_wrong_flags_are_rejected_on_the_line_that_parses_them():
    text = rejection(lambda: get_args(["--split", "80,abc"]))  # wrong split
    assert text.startswith(place(__file__, "  # wrong split") + "--split: '80,abc' is not a list")
    text = rejection(lambda: get_args(["--device", "gpu"]))  # wrong device
    assert text == place(__file__, "  # wrong device") + (
        "--device: runtime.device: no device 'gpu'. Use auto, cpu, cuda, cuda:N or tpu."
    )


def main_of(**values):
    args = argparse.Namespace(**{"train_iters": 1, "train_data": ["24"], "device": "cpu", **values})
    return training_main(args, Classifier, forward_step, Points)  # by hand


@pytest.mark.parametrize(
    ("values", "answer"),
    [
        ({"batch_size": 0}, "--batch-size: must be a whole number of at least 1; got 0."),
        ({"batch_size": 2.5}, "--batch-size: must be a whole number of at least 1; got 2.5."),
        (
            {"batch_size": 100},
            "--batch-size × --gradient-accumulation-steps × ranks: trainer.global_batch_size: 100 is more than the 24",
        ),
        ({"lr": "fast"}, "--lr: must be a number above 0; got 'fast'."),
        ({"warmup": 20}, "--warmup: must be a fraction from 0 to 1; got 20."),
        ({"fp16": "no"}, "--fp16: must be True or False; got 'no'."),
        ({"split": "80,abc"}, "--split: '80,abc' is not a list"),
        ({"train_data": None}, "--train-data is required"),
        ({"train_data_weights": [0]}, "--train-data-weights: must be a number above 0; got [0]."),
        ({"load": "nowhere"}, "--load: nowhere is not a run folder: it does not exist."),
        ({"load": "nowhere", "mode": "finetune"}, "--load: nowhere is not a run folder: it does not exist."),
        ({"load": "nowhere", "mode": "inference"}, "--load: nowhere is not a run folder: it does not exist."),
        ({"experiment_name": "../x"}, "--experiment-name: name: must be a folder below output_dir"),
        ({"save": ""}, "--save: output_dir: must be text that is not empty"),
        ({"epochs": 0.001}, "--epochs: trainer.max_epochs: 0.001 epochs of 24 samples are 0 samples."),
        ({"mode": "inference", "fresh": True}, "--fresh: has no effect, because --mode inference does not train."),
    ],
)
def test_a_custom_namespace_is_rejected_by_flag_on_the_line_of_training_main(values, answer):
    assert rejection(main_of, **values).startswith(place(__file__, "  # by hand") + answer)


def test_settings_that_changed_are_named_with_their_flags():
    main_of(lr=0.1, margin=1)
    text = rejection(main_of, lr=0.2, margin=2, train_iters=2)
    called = place(__file__, "  # by hand")
    assert f"{called}--lr: trainer.optimizer.lr: 0.1 → 0.2" in text
    assert f"{called}args.margin: trainer.arguments.margin: 1 → 2" in text


def test_a_dictionary_is_not_a_namespace():
    text = rejection(training_main, {"train_iters": 1}, Classifier, forward_step, Points)
    assert mentions(text, "get_args")


def test_numbers_of_numpy_are_numbers():
    given = argparse.Namespace(train_iters=np.int64(2), lr=np.float64(0.1), epochs=None, seed=np.int32(3))
    flags = with_defaults(given)
    assert [type(each) for each in (flags.train_iters, flags.lr, flags.seed)] == [int, float, int]
    assert (flags.train_iters, flags.lr, flags.seed) == (2, 0.1, 3)
    assert isinstance(given.train_iters, np.int64)  # the user's own is left alone


def test_flags_without_effect_are_logged(caplog):
    words = ("--eval-interval", "1", "--eval-iters", "2", "--train-data-weights", "2", "--mode", "finetune")
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        run(*ONE, *words)
    for flag in ("--eval-interval", "--eval-iters", "--train-data-weights", "--mode"):
        assert mentions(caplog.text, flag)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        run(*EVALUATED, "--eval-interval", "1", "--eval-iters", "1", "--experiment-name", "other")
    assert "has no effect" not in caplog.text


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ({"batch_size": 100}, "train(batch_size=…): batch_size: 100 is more than the 24 samples"),
        ({"max_steps": 0}, "train(max_steps=…): max_steps: "),
        ({"max_steps": np.ones(2)}, "train(max_steps=…): max_steps: "),
        ({"lr": "fast"}, "train(lr=…): lr: "),
        ({"name": "../x"}, "train(name=…): name: "),
        ({"data": []}, "train(data=…): data: "),
        ({"eval_data": DataLoader(Points(4))}, "train(eval_data=…): eval_data: "),
    ],
)
def test_wrong_arguments_of_train_are_named_on_the_line_of_the_call(given, origin):
    arguments = {"data": Points(24), "forward": print, "max_steps": 1, "batch_size": 4, **given}
    text = rejection(lambda: train(Classifier(), **arguments))  # wrong argument
    assert text.startswith(place(__file__, "  # wrong argument") + origin)


# idioms of a loop of one's own, and of other frameworks


def loss_of(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def train_with(forward, *overrides, model=None, data=None, **more):
    words = {"max_steps": 2, "batch_size": 8, "optimizer": torch.optim.SGD, "lr": 0.1, "device": "cpu", **more}
    model, data = model or Classifier(), data or Points(24)
    return train(model, data, forward=forward, overrides=["writers=[]", *overrides], **words)


@pytest.mark.parametrize("keeps_graph", [True, False])
def test_a_backward_in_forward_is_rejected(keeps_graph):
    def forward(model, batch):
        loss = loss_of(model, batch)
        loss.backward(retain_graph=keeps_graph)
        return loss

    assert mentions(rejection(train_with, forward), "forward", "backward()")


def test_a_backward_in_forward_that_clears_its_gradients_is_rejected_too():
    def forward(model, batch):
        loss = loss_of(model, batch)
        loss.backward()
        model.zero_grad()
        return loss

    assert mentions(rejection(train_with, forward), "backward()", ".detach()")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_in_forward_to_the_inputs_is_accepted_where_its_gradients_are_cleared(set_to_none):
    def forward(model, batch):
        inputs = batch[0].clone().requires_grad_()
        loss_of(model, (inputs, batch[1])).backward()
        model.zero_grad(set_to_none=set_to_none)
        return loss_of(model, (batch[0] + 0.1 * inputs.grad.sign(), batch[1]))

    assert train_with(forward).step == 2


def test_a_gradient_in_forward_that_is_part_of_the_loss_is_accepted():
    def forward(model, batch):
        loss = loss_of(model, batch)
        (gradient,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
        return loss + 0.1 * gradient.square().sum()

    assert train_with(forward).step == 2


def test_clearing_gradients_in_forward_is_rejected_where_it_would_lose_some():
    def forward(model, batch):
        model.zero_grad()
        return loss_of(model, batch)

    assert train_with(forward, name="whole").step == 2  # there are none
    assert mentions(rejection(train_with, forward, "trainer.micro_batch_size=2"), "zero_grad()")


@pytest.mark.parametrize("first", ["batch", "inputs"])
def test_a_function_that_takes_the_batch_first_is_rejected(first):
    forward = eval(f"lambda {first}, batch_idx: 0")
    assert mentions(rejection(train_with, forward), "(model, batch)", first)


def test_a_function_of_any_arguments_is_accepted():
    assert train_with(lambda *inputs: loss_of(*inputs)).step == 2


@pytest.mark.parametrize("option", ["lr=1", "eval_strategy=epoch", "devices=2", "temperature=2"])
def test_options_of_a_trainer_have_no_effect_on_train(option):
    assert mentions(rejection(train_with, loss_of, f"trainer.{option}"), f"trainer.{option.partition('=')[0]}")


@pytest.mark.parametrize("metrics", [loss_of, [loss_of], {"accuracy": loss_of}])
def test_a_function_is_not_a_metric(metrics):
    text = rejection(train_with, loss_of, eval_data=Points(4), metrics=metrics)
    assert mentions(text, "metrics[", "update(outputs, labels)", "Task.aggregate_logs")


class Lightning(Classifier):
    """What a LightningModule defines: steps that its own trainer calls."""

    def training_step(self, batch, batch_idx):
        return loss_of(self, batch)

    def validation_step(self, batch, batch_idx):
        """Is not called."""

    def configure_optimizers(self):
        """Is not called."""


def test_a_module_with_a_training_step_that_nothing_calls_is_rejected():
    text = rejection(train, Lightning(), Points(24), max_steps=1, batch_size=4)
    assert text.startswith(place(__file__, "def training_step("))
    assert mentions(text, "Lightning.training_step", "forward")


def test_a_module_that_calls_its_training_step_or_has_its_loss_in_the_settings_is_accepted():
    class CallsIt(Classifier):
        def forward(self, x, labels):
            return self.training_step((x, labels))

        def training_step(self, batch):
            return {"loss": cross_entropy(super().forward(batch[0]), batch[1])}

    rows = [{"x": torch.randn(4), "labels": torch.tensor(index % 3)} for index in range(24)]
    assert train_with(None, model=CallsIt(), data=rows, name="calls").step == 2
    assert train_with(None, "trainer.loss=cross_entropy", model=Lightning(), data=rows, name="loss").step == 2


def test_steps_of_a_module_that_are_not_called_are_named(caplog):
    words = {"max_steps": 1, "batch_size": 4, "overrides": ["writers=[]"]}
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        train(Lightning(), Points(24), forward=lambda model, batch: model.training_step(batch, 0), **words)
    (record,) = [each for each in caplog.records if "Lightning" in each.getMessage()]
    assert "configure_optimizers, validation_step" in record.getMessage()


def test_an_optimizer_without_a_learning_rate_is_rejected():
    class Relative(torch.optim.SGD):
        def __init__(self, params, lr=None):
            super().__init__(params, lr=1.0)
            self.param_groups[0]["lr"] = lr

    assert mentions(rejection(train_with, loss_of, optimizer=Relative, lr=None), "Relative", "lr")


def test_assigning_should_stop_to_a_trainer_is_rejected():
    class Stops(Hook):
        def after_step(self):
            self.trainer.should_stop = True

    with pytest.raises(AttributeError, match=r"stop\(reason\)"):
        train_with(loss_of, hooks=[Stops()])


def test_a_trainer_that_reads_its_own_should_stop_may_have_it():
    class Mine(Trainer):
        def post_init(self):
            self.should_stop = False

        def read(self):
            return self.should_stop

    trainer = object.__new__(Mine)
    trainer.post_init()
    assert trainer.read() is False


def test_an_error_within_a_property_named_as_in_another_framework_is_shown():
    class Mine(Trainer):
        @property
        def optimizer(self):
            return self.optimzers["main"]

    trainer = object.__new__(Mine)
    trainer.context = None
    with pytest.raises(AttributeError, match="optimzers"):
        print(trainer.optimizer)


def test_an_argument_with_the_name_of_several_settings_names_all():
    text = rejection(train_with, loss_of, every_steps=5)
    assert mentions(text, "evaluation.every_steps", "checkpoint.every_steps", "log.every_steps")


def test_a_config_of_another_type_is_rejected():
    assert mentions(rejection(lambda: build_trainer({"trainer": {}})), "dict", "RunConfig.from_dict")


# a script that ends with an explained error


def test_a_script_shows_the_one_line_and_no_traceback(monkeypatch, capsys):
    """Python calls sys.excepthook with what ends a script."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(TrainwrightError) as caught:
        get_args(["--train-iter", "5"])  # ends the script
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {place(__file__, '  # ends the script')}--train-iter: there is no such flag.")
    assert len(shown.splitlines()) == 1


def test_other_errors_keep_their_traceback_and_another_hook_stays(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    get_args([])
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setattr(sys, "excepthook", print)
    get_args([])
    assert sys.excepthook is print
