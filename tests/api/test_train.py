"""`train()`: its arguments, its errors, code that was edited between two calls, and its log."""

import functools
import inspect
import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from tests.distributed.forked_launch import launch_well
from tests.forked_program import run_script
from tests.messages import mentions, raises
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from trainwright import Component, Every, Hook, RunConfig, Trainer, build_trainer, train
from trainwright.errors import CheckpointError, ConfigError, DataError, TrainwrightError
from trainwright.loop.metrics import TopKAccuracy

HERE = Path(__file__)
DOCS = HERE.parents[2] / "docs"


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


class Points:
    """Points with their classes."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": torch.sin(torch.arange(4) * (index + 1.0)), "labels": torch.tensor(index % 3)}


def forward(model, batch):
    logits = model(batch["x"])
    return {"loss": cross_entropy(logits, batch["labels"]), "logits": logits}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def short(model=None, data=None, **arguments):
    defaults = {
        "forward": forward,
        "max_steps": 3,
        "batch_size": 4,
        "overrides": ["writers=[json]", "log.every_steps=1"],
    }
    return train(model or net(), data or Points(), **{**defaults, **arguments})


def lines(name="notebook"):
    return [json.loads(line) for line in Path(f"runs/{name}/metrics.json").read_text("utf-8").splitlines()]


def losses(name="notebook"):
    return [line["loss"] for line in lines(name)]


def only(trainer):
    [optimizer] = trainer.optimizers.values()
    return optimizer


# the arguments


def test_epochs_limit_a_run():
    assert short(max_steps=None, max_epochs=2).step == 12
    assert short(name="both", max_steps=4, max_epochs=2).step == 4


def test_an_optimizer_is_a_name_a_mapping_a_component_a_class_or_a_partial():
    class Local(torch.optim.SGD):
        pass

    for number, (optimizer, kind, lr) in enumerate(
        [
            ("lion", "Lion", None),
            ({"type": "adamw", "lr": 0.2}, "AdamW", 0.2),
            (Component(torch.optim.Adam, lr=0.3), "Adam", 0.3),
            (torch.optim.SGD, "SGD", None),
            (functools.partial(torch.optim.SGD, lr=0.4, momentum=0.9), "SGD", 0.4),
            (Local, "Local", None),
        ]
    ):
        made = only(short(name=f"run{number}", optimizer=optimizer))
        assert type(made).__name__ == kind
        assert lr is None or made.param_groups[0]["lr"] == lr


def test_lr_is_that_of_the_optimizer_and_a_default_of_its_own_stays():
    assert only(short(optimizer=torch.optim.SGD, lr=0.5)).param_groups[0]["lr"] == 0.5
    assert only(short(name="b", optimizer=torch.optim.Adadelta)).param_groups[0]["lr"] == 1.0  # torch's default
    assert only(short(name="c")).param_groups[0]["lr"] == 1e-3


def test_an_optimizer_of_the_program_trains_the_parameters_that_it_has():
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.5, momentum=0.9)
    trainer = short(model, optimizer=optimizer)
    assert only(trainer) is optimizer
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"2.weight", "2.bias"}


def test_an_optimizer_of_the_program_gives_the_losses_of_its_class_and_resumes():
    def made():
        model = net()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)}

    short(name="whole", optimizer={"type": "torch.optim:SGD", "lr": 0.5, "momentum": 0.9}, max_steps=6)
    short(**made(), name="parts")
    short(**made(), name="parts", max_steps=6)
    assert losses("parts") == losses("whole")


def test_a_schedule_leaves_an_optimizer_of_the_program_with_its_rate():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    one_cycle = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.7)
    for name, schedule in (("one_cycle", one_cycle), ("notebook", "cosine")):
        short(model, name=name, optimizer=optimizer, schedule=schedule, max_steps=4)
        assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before
    short(model, optimizer=optimizer, schedule="cosine", max_steps=8)
    short(name="whole", optimizer={"type": "torch.optim:SGD", "lr": 0.5}, schedule="cosine", max_steps=8)
    assert [line["lr"] for line in lines()][4:] == [line["lr"] for line in lines("whole")][4:]


def test_a_schedule_is_a_component():
    torchs = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    for number, schedule in enumerate(("linear", {"type": "linear"}, Component("linear"), torchs)):
        short(name=f"run{number}", schedule=schedule)
        assert lines(f"run{number}")[-1]["lr"] < 1e-3


def test_metrics_are_names_components_and_objects():
    torchmetrics = pytest.importorskip("torchmetrics.classification")
    sets = {"valid": Points()}
    for number, metrics in enumerate(
        ("accuracy", ["accuracy"], {"accuracy": {"type": "accuracy"}}, {"type": "accuracy"})
    ):
        assert "valid/accuracy" in short(name=f"run{number}", metrics=metrics, eval_data=sets).eval_logs
    made = torchmetrics.MulticlassAccuracy(3, average="micro")
    logs = short(name="object", metrics={"mine": made}, eval_data=sets).eval_logs
    assert logs["valid/mine"] == pytest.approx(
        short(name="run0", metrics="accuracy", eval_data=sets).eval_logs["valid/accuracy"]
    )


def test_a_sampler_is_a_component_or_an_object_of_torch():
    seen = []

    def noting(model, batch):
        seen.extend(batch["labels"].tolist())
        return forward(model, batch)

    weights = [float(index % 3 == 1) for index in range(24)]
    short(forward=noting, sampler=WeightedRandomSampler(weights, 24))
    assert {*seen} == {1}
    seen.clear()
    short(name="b", forward=noting, sampler={"type": "weighted", "weights": weights})
    assert {*seen} == {1}
    seen.clear()
    short(name="c", forward=noting, sampler=BatchSampler(SequentialSampler(range(24)), 4, drop_last=True))
    assert seen == [index % 3 for index in range(12)]


def test_device_and_precision_may_be_those_of_torch():
    seen = []

    def noting(model, batch):
        seen.append(model[0](batch["x"]).dtype)
        return forward(model, batch)

    trainer = short(forward=noting, device=torch.device("cpu"), precision=torch.bfloat16)
    assert {*seen} == {torch.bfloat16}
    assert trainer.config.runtime.precision == "bf16"


def test_every_argument_is_in_the_docstring_and_in_the_table_of_the_docs():
    parameters = inspect.signature(train).parameters.values()
    names = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    listed = re.findall(r"^        (\w+): ", train.__doc__, re.MULTILINE)
    assert listed == names
    table = re.findall(r"^\| `(\w+)` \|", (DOCS / "notebooks.md").read_text("utf-8"), re.MULTILINE)
    assert table == names


def test_two_processes_train_as_one_and_reject_an_optimizer_of_unsharded_parameters(tmp_path):
    settings = ["writers=[json]", "log.every_steps=1", "runtime.device=cpu"]

    def given():
        model = net()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5)}

    def act(folder):
        os.chdir(folder)
        short(**given(), name="two", overrides=settings)
        with pytest.raises(ConfigError, match="sharded"):
            short(**given(), name="sharded", overrides=[*settings, "runtime.mesh={fsdp: 2}"])
        mesh = [*settings, "runtime.mesh={fsdp: 2}"]
        short(name="by_class", optimizer=torch.optim.SGD, lr=0.5, overrides=mesh)

    launch_well(tmp_path, 2, act)
    short(**given(), name="one", overrides=settings)
    assert losses("two") == pytest.approx(losses("one"))
    assert losses("by_class") == pytest.approx(losses("one"))
    assert "2 processes" in Path("runs/two/logs/rank-1.txt").read_text("utf-8")


# errors name arguments


@pytest.mark.parametrize(
    ("given", "mentioned"),
    [
        ({"optimizer": {"type": "adamw", "lr": 0.1}, "lr": 0.2}, ["lr=0.2", "optimizer"]),
        ({"optimizer": "adamv"}, ["optimizer.type", "adamw"]),
        ({"optimizer": 3}, ["optimizer", "3"]),
        ({"schedule": {"type": "cosine", "warmup": 3}}, ["schedule", "warmup_steps"]),
        ({"metrics": {"a": {"type": "acuracy"}}, "eval_data": Points()}, ["metrics.a", "accuracy"]),
        ({"sampler": {"type": "wieghted"}}, ["sampler", "weighted"]),
        ({"device": "gpu"}, ["device", "gpu"]),
        ({"precision": "half"}, ["precision", "half"]),
        ({"max_steps": None}, ["max_steps", "max_epochs"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"model": nn.Linear}, ["model", "Linear(…)"]),
    ],
)
def test_errors_name_the_arguments_of_train(given, mentioned):
    with raises(TrainwrightError, *mentioned) as caught:
        short(**given)
    text = str(caught.value)
    assert text.startswith(f"{HERE}:")
    assert not re.search(r"trainer\.|runtime\.|evaluation\.|data\.\w|--\w", text)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "mentioned"),
    [
        ("epochs", "max_epochs"),
        ("learning_rate", "lr"),
        ("global_batch_size", "batch_size"),
        ("max_step", "max_steps"),
        ("save_steps", "checkpoint.every_steps in overrides"),
        ("num_workers", 'overrides=["data.num_workers=…"]'),
        ("devices", "--nproc"),
        ("verbose", "help(train)"),
    ],
)
def test_an_argument_of_another_name_is_answered_with_ours(name, mentioned):
    with raises(ConfigError, name, mentioned) as caught:
        short(**{name: 1})
    assert str(caught.value).startswith(f"{HERE}:")
    assert not Path("runs").exists()


def test_a_setting_that_overrides_sets_keeps_its_name():
    with raises(ConfigError, "trainer.schedule"):
        short(overrides=["trainer.schedule={type: cosin}"])


def test_an_optimizer_of_another_model_and_a_rate_next_to_one_are_rejected():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ConfigError, "optimizer", "4"):
        short(net(), optimizer=optimizer)
    with raises(ConfigError, "lr=1"):
        short(model, optimizer=optimizer, lr=1.0)
    with raises(ConfigError, "schedule", "torch.optim.lr_scheduler:StepLR"):
        short(model, optimizer=optimizer, schedule=torch.optim.lr_scheduler.StepLR(optimizer, 3))


def groups_of(model, **settings):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], **settings}, {"params": others}], lr=0.01)


def local_class():
    class Local(torch.optim.Optimizer):
        def __init__(self, params, lr, scale=1.0):
            super().__init__(params, {"lr": lr, "scale": scale})

        def step(self, closure=None):
            pass

    return Local


LOCAL = local_class()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), {"betas": (0.5, 0.6)}),
        (groups_of, {"lr": 0.1}),
        (groups_of, {"weight_decay": 0.5}),
        (lambda model: functools.partial(LOCAL, scale=1.0), {"scale": 2.0}),
        (lambda model: functools.partial(LOCAL, lr=0.1), {"lr": 0.2}),
    ],
    ids=["betas", "rate of a group", "decay of a group", "local class", "rate of a local class"],
)
def test_other_settings_of_an_optimizer_of_the_program_are_not_ignored(before, after):
    model = net()
    optimizer = before(model)
    short(model, optimizer=optimizer)
    short(model, optimizer=optimizer)  # ended: loads its checkpoint
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = groups_of(model, **after) if before is groups_of else type(optimizer)(model.parameters(), **after)
    else:
        optimizer = functools.partial(optimizer, **after)
    with raises(CheckpointError, "optimizer: was", golden=False):
        short(model, optimizer=optimizer, max_steps=5)


def test_a_rate_that_the_program_lowers_between_two_calls_is_not_ignored():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    short(model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.01
    with raises(CheckpointError, "groups with lr=0.01", golden=False):
        short(model, optimizer=optimizer, max_steps=5)
    short(model, optimizer=optimizer, max_steps=5, accept_changes=True)
    assert [line["lr"] for line in lines()] == [0.1, 0.1, 0.1, 0.01, 0.01]


def test_a_rate_that_a_hook_writes_does_not_prevent_a_second_call():
    def lower(trainer):
        for group in trainer.optimizers["main"].param_groups:
            group["lr"] *= 0.5

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for max_steps in (2, 3):
        short(model, optimizer=optimizer, max_steps=max_steps, hooks=[Every(1)(lower)])
    assert [line["lr"] for line in lines()] == [0.1, 0.05, 0.025]


def test_a_local_optimizer_class_has_the_default_rate_and_one_rate():
    assert short(optimizer=LOCAL).optimizers["main"].param_groups[0]["lr"] == 1e-3
    with raises(ConfigError, "lr=0.2", "0.1"):
        short(name="two", optimizer=functools.partial(LOCAL, lr=0.1), lr=0.2)


def test_metrics_in_a_list_are_named_after_their_types():
    metrics = [{"type": "f1"}, Component("accuracy"), functools.partial(TopKAccuracy, k=2)]
    logs = short(metrics=metrics, eval_data=Points()).eval_logs
    assert {"eval/f1", "eval/accuracy", "eval/topkaccuracy"} <= logs.keys()
    with raises(ConfigError, "metrics", "accuracy"):
        short(name="two", metrics=["accuracy", {"type": "accuracy"}], eval_data=Points())


def test_metrics_without_an_evaluation_set_are_rejected():
    with raises(ConfigError, "metrics", "eval_data"):
        short(metrics="accuracy")


def test_changed_arguments_of_a_run_are_named_with_the_options():
    short()
    with raises(CheckpointError, "batch_size: 4 → 8", "accept_changes=True", "fresh=True") as caught:
        short(batch_size=8)
    assert "--" not in str(caught.value)
    assert short(batch_size=8, max_steps=4, accept_changes=True).step == 4
    assert short(batch_size=8, max_steps=5).step == 5  # the accepted ones are recorded


# code that was edited


def test_an_edited_forward_raises_with_the_options_and_its_line():
    short()

    def forward(model, batch):  # edited
        return 2 * cross_entropy(model(batch["x"]), batch["labels"])

    with raises(CheckpointError, "forward", "another name", "accept_changes=True", "fresh=True") as caught:
        short(forward=forward)
    line = next(number for number, text in enumerate(HERE.read_text("utf-8").splitlines(), 1) if "# edited" in text)
    assert f"{HERE}:{line}: " in str(caught.value)
    assert short(forward=forward, accept_changes=True, max_steps=4).step == 4
    assert short(forward=forward, max_steps=5).step == 5
    assert short(forward=forward, fresh=True).step == 3


def test_an_edited_loss_function_model_class_layer_collator_or_hook_raises():
    def parts(loss_factor=1, forward_factor=1, layer=None, collate=0, hook=0):
        names = {"nn": nn, "Hook": Hook, "torch": torch, "cross_entropy": cross_entropy, "__name__": "a_notebook"}
        exec(
            f"""
class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.body, self.layer, self.head = nn.Linear(4, 8), layer, nn.Linear(8, 3)
    def forward(self, x):
        return {forward_factor} * self.head(self.layer(self.body(x)))
def loss(logits, labels):
    return {loss_factor} * cross_entropy(logits, labels)
def forward(model, batch):
    return loss(model(batch["x"]), batch["labels"])
def collator(samples):
    return {{key: torch.stack([each[key] for each in samples]) + {collate} for key in samples[0]}}
class Watch(Hook):
    def after_step(self):
        self.seen = {hook}
""",
            names,
        )
        given = {"forward": names["forward"], "collator": names["collator"], "hooks": [names["Watch"]()]}
        return {"model": names["Net"](layer or nn.ReLU()), **given}

    short(**parts())
    assert short(**parts()).step == 3
    for edit, argument in (
        ({"loss_factor": 2}, "forward"),
        ({"forward_factor": 2}, "model"),
        ({"layer": nn.GELU()}, "model"),
        ({"collate": 1}, "collator"),
        ({"hook": 1}, "hooks.Watch"),
    ):
        with raises(CheckpointError, f"{argument}: ", golden=False):
            short(**parts(**edit))
    assert short(**{**parts(), "hooks": []}).step == 3  # a hook may be removed


def test_another_number_of_the_enclosing_function_raises_but_not_a_counter():
    def scaled(factor):
        num_calls = 0

        def forward(model, batch):
            nonlocal num_calls
            num_calls += 1
            return factor * cross_entropy(model(batch["x"]), batch["labels"])

        return forward

    first = scaled(1.0)
    short(forward=first)
    assert short(forward=first, max_steps=4).step == 4
    assert short(forward=scaled(1.0), max_steps=5).step == 5
    with raises(CheckpointError, "forward: ", golden=False):
        short(forward=scaled(2.0))


def test_another_number_of_the_module_raises_but_not_a_counter():
    source = """
from torch.nn.functional import cross_entropy

SMOOTHING, num_calls = 0.1, 0


def forward(model, batch):
    global num_calls
    num_calls += 1
    return cross_entropy(model(batch["x"]), batch["labels"], label_smoothing=SMOOTHING)
"""
    module = {}
    exec(compile(source, "<cell>", "exec"), module)
    short(forward=module["forward"])
    assert short(forward=module["forward"], max_steps=4).step == 4
    module["SMOOTHING"] = 0.5
    with raises(CheckpointError, "forward: ", golden=False):
        short(forward=module["forward"])


def fold(kind, rows):
    """The rows of one fold, in one of the forms that programs use."""
    x, labels = torch.arange(48.0).view(12, 4)[rows], torch.arange(12)[rows] % 3
    samples = [{"x": each, "labels": label} for each, label in zip(x, labels, strict=True)]
    if kind == "list":
        return samples
    if kind == "concatenated":
        return ConcatDataset([samples[:4], samples[4:]])
    if kind == "tensors":
        return TensorDataset(x, labels)
    if kind == "arrays":
        return list(zip(x.numpy(), labels.numpy(), strict=True))
    if kind == "selected":
        whole = pytest.importorskip("datasets").Dataset.from_dict(
            {"x": torch.arange(48.0).view(12, 4).tolist(), "labels": [0] * 12}
        )
        return whole.select(rows).with_format("torch")
    return Subset(Points(), rows)


def with_pairs(model, batch):
    x, labels = batch.values() if isinstance(batch, dict) else batch
    return cross_entropy(model(x), labels)


@pytest.mark.parametrize("kind", ["list", "concatenated", "tensors", "arrays", "selected", "subset"])
def test_another_fold_under_the_same_name_raises_instead_of_returning_the_first(kind):
    folds = [[row for row in range(12) if row % 3 != number] for number in range(3)]
    arguments = {"forward": with_pairs, "overrides": ["writers=[json]"]}
    short(data=fold(kind, folds[1]), **arguments)
    assert short(data=fold(kind, folds[1]), **arguments).step == 3  # the same rows
    with raises(CheckpointError, "data: ", "other rows", golden=False):
        short(data=fold(kind, folds[2]), **arguments)
    assert short(data=fold(kind, folds[2]), name="another", **arguments).step == 3
    assert short(data=fold(kind, folds[2]), accept_changes=True, max_steps=4, **arguments).step == 4


def test_an_edited_function_of_a_hook_raises():
    def watch(trainer):
        assert trainer.step

    short(hooks=[Every(1)(watch)])
    assert short(hooks=[Every(1)(watch)]).step == 3

    def watch(trainer):
        assert trainer.step > 0

    with raises(CheckpointError, "hooks.CallbackHook watch", golden=False):
        short(hooks=[Every(1)(watch)])


def test_a_lambda_may_move_to_another_line_and_have_other_arguments_next_to_it():
    short(forward=lambda model, batch: cross_entropy(model(batch["x"]), batch["labels"]), max_steps=2)
    trainer = short(forward=lambda model, batch: cross_entropy(model(batch["x"]), batch["labels"]), max_steps=4)
    assert trainer.step == 4
    with raises(CheckpointError, "forward", golden=False):
        short(forward=lambda model, batch: 2 * cross_entropy(model(batch["x"]), batch["labels"]), max_steps=4)


# explanations


def samples(x=torch.float32, labels=torch.long, name="x"):
    return [{name: torch.zeros(4, dtype=x), "labels": torch.tensor(index % 3).to(labels)} for index in range(8)]


class Net(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.layer = nn.Linear(4, 3, device=device)

    def forward(self, x, labels):
        return cross_entropy(self.layer(x), labels)


@pytest.mark.parametrize("with_function", [True, False])
@pytest.mark.parametrize(
    ("given", "mentioned"),
    [
        ({"name": "inputs"}, ["x", "inputs"]),
        ({"x": torch.float64}, ["x", "float64", "float32"]),
        ({"x": torch.long}, ["x", "int64", "float32"]),
        ({"labels": torch.float32}, ["labels", "float32", "int64"]),
    ],
)
def test_wrong_keys_and_dtypes_of_a_batch_are_explained_with_the_line(given, mentioned, with_function):
    def forward(model, batch):
        return cross_entropy(model.layer(batch["x"]), batch["labels"])

    with raises(DataError, *mentioned, golden=with_function) as caught:
        short(Net(), samples(**given), forward=forward if with_function else None)
    assert str(caught.value).startswith(f"{HERE}:")
    assert mentions(Path("runs/notebook/log.txt").read_text("utf-8"), "ERROR", mentioned[0])


def test_a_key_error_that_is_not_about_the_batch_stays():
    table = {"a": 1}

    def forward(model, batch):
        return table["x1"] * model(batch["x"]).sum()

    with pytest.raises(KeyError, match="x1"):
        short(forward=forward)


def test_a_model_on_the_meta_device_is_rejected_before_anything_is_written():
    with raises(ConfigError, "meta", "layer.weight", "to_empty"):
        short(Net("meta"))
    assert not Path("runs").exists()


# the log


SCRIPT = """
import logging, sys
import torch
from trainwright import train

{configure}
data = [{{"x": torch.ones(4), "labels": torch.tensor(1)}} for _ in range(8)]
forward = lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
train(torch.nn.Linear(4, 3), data, forward=forward, max_steps=2, batch_size=4, overrides=["log.every_steps=1"])
train(torch.nn.Linear(4, 3), data, forward=forward, max_steps=2, batch_size=4)
"""
LEFT = "nothing is left to do"


@pytest.mark.parametrize(
    ("configure", "times", "shows_progress"),
    [
        ("", 1, True),
        ('logging.getLogger("trainwright").setLevel(logging.WARNING)', 0, False),
        ('logging.getLogger("trainwright").setLevel(logging.DEBUG)', 1, True),
        ("logging.basicConfig(level=logging.WARNING)", 0, False),
        ("logging.basicConfig(level=logging.ERROR)", 0, False),
        ("logging.basicConfig(level=logging.INFO)", 1, True),
    ],
)
def test_the_level_that_the_program_sets_is_respected(tmp_path, configure, times, shows_progress):
    reset = "logging.getLogger().handlers.clear()\nlogging.getLogger().setLevel(logging.WARNING)\n"
    reset += 'logging.getLogger("trainwright").handlers.clear()\nlogging.getLogger("trainwright").setLevel(0)\n'
    (tmp_path / "script.py").write_text(SCRIPT.format(configure=reset + configure))  # a forked child has pytest's
    done = run_script(tmp_path / "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    assert shown.count(LEFT) == times
    assert ("step 2/2" in shown) == shows_progress
    log = (tmp_path / "runs/notebook/log.txt").read_text("utf-8")
    assert ("12 parameters" in log or "15 parameters" in log) == (times == 1)


def test_a_built_trainer_writes_its_log_with_what_was_built_and_the_error(tmp_path):
    class Failing(Trainer):
        @classmethod
        def build_model(cls, build):
            return net()

        @classmethod
        def build_train_data(cls, build):
            return Points()

        def forward(self, x, labels):
            if self.step == 1:
                raise ValueError("no such layer")
            return cross_entropy(self.model(x), labels)

    settings = {"trainer": {"max_steps": 3, "global_batch_size": 4, "optimizer": "adamw"}, "writers": ["json"]}
    trainer = build_trainer(RunConfig.from_dict({"name": "built", **settings}), Failing)
    with pytest.raises(ValueError, match="no such layer"):
        trainer.train()
    log = Path("runs/built/log.txt").read_text("utf-8")
    assert mentions(log, "INFO", "built:", "67 parameters")
    assert "ERROR no such layer\nTraceback" in log
    assert mentions(log, "test_train.py", "in forward")
    assert log.count("67 parameters") == 1
    assert not [each for each in logging.getLogger("trainwright").handlers if isinstance(each, logging.FileHandler)]


# the trainer


def test_a_trainer_shows_and_plots_its_whole_run():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    sets = {"valid": Points()}
    short(eval_data=sets)
    trainer = short(eval_data=sets, max_steps=6)  # resumed
    axes = trainer.plot("loss", "valid/loss")
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert axes.lines[0].get_ydata().tolist() == losses()
    assert trainer.plot(ax=axes) is axes
    pyplot.close(axes.figure)
    page = trainer._repr_html_()
    assert "step 6 of 6" in page
    assert "valid/loss" in page
    with raises(TrainwrightError, "valid/accuracy", "valid/loss"):
        trainer.plot("valid/accuracy")


def test_a_trainer_without_a_metrics_file_shows_what_its_storage_has():
    trainer = short(overrides=["writers=[]", "log.every_steps=1"])
    assert "<path" in trainer._repr_html_()
    assert [step for step, _ in trainer._curves()["loss"]] == [1, 2, 3]
