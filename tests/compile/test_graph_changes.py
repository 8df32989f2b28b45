"""Graph mode on the CPU: changes between recorded steps are followed, and what a step keeps in Python is rejected.

Every hook here would leave a run in graph mode with other weights than the same run in eager mode.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.compile.test_graph_mode import Base, Net, Points, assert_equal_runs, config_of, train
from tests.compile.test_graph_mode import replays as counted_replays
from tests.messages import mentions, raises
from torch import nn

from trainwright import Hook, Task, build_trainer, get_event_storage
from trainwright.compile.graph import MAX_SHAPES, GraphStep, _reader, _take_apart
from trainwright.compile.guards import Fingerprint
from trainwright.errors import TrainwrightError
from trainwright.hooks.callback import CallbackHook
from trainwright.loop.update import StepResult

replays = counted_replays

LONG = {"max_steps": 24, "micro_batch_size": 16}


def _with(act):
    """A trainer with a hook that acts before each step."""

    class Changing(Hook):
        def before_step(self):
            act(self, self.trainer)

    class Own(Base):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Changing()]

    return Own


def _groups(trainer):
    return trainer.optimizers["main"].param_groups


def _set_all(key, value):
    def act(hook, trainer):
        for group in _groups(trainer):
            group[key] = value(trainer.step, group)

    return act


def _at_seven(act):
    return lambda hook, trainer: act(trainer) if trainer.step == 7 else None


def _reload(hook, trainer):
    optimizer = trainer.optimizers["main"]
    if trainer.step == 4:
        hook.kept = copy.deepcopy(optimizer.state_dict())
    if trainer.step == 8:
        optimizer.load_state_dict(hook.kept)


def _halve_data(trainer):
    for parameter in trainer.model.parameters():
        parameter.data = parameter.data * 0.5


def _halve_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(0.5)


def _rebind_buffers(trainer):
    trainer.model.layers[1].running_mean = torch.zeros(8)


def _replace_head(trainer):
    trainer.model.layers[4].weight = nn.Parameter(torch.zeros(3, 8))


@pytest.mark.parametrize(
    "act",
    [
        _set_all("lr", lambda step, group: 0.5 * group["lr"]),
        _set_all("lr", lambda step, group: 1e-3 if step == 6 else group["lr"]),
        _set_all("weight_decay", lambda step, group: 0.1 if step < 9 else 0.5),
        _set_all("betas", lambda step, group: (0.9, 0.99) if step < 9 else (0.8, 0.95)),
        _at_seven(lambda trainer: trainer.model.layers[0].requires_grad_(False)),
        _at_seven(lambda trainer: trainer.model.layers[1].eval()),
        _at_seven(lambda trainer: setattr(trainer.model.layers[3], "p", 0.6)),
        _at_seven(_replace_head),
        _at_seven(_rebind_buffers),
        _at_seven(_halve_data),
        _at_seven(lambda trainer: setattr(trainer.context.updater, "max_grad_norm", 0.1)),
        _at_seven(lambda trainer: trainer.optimizers["main"].state.clear()),
        _at_seven(lambda trainer: trainer.optimizers["main"].register_step_pre_hook(_halve_gradients)),
        _reload,
    ],
    ids=[
        *("rate", "rate_once", "decay", "betas", "freeze", "eval", "dropout"),
        *("head", "buffer", "data", "clipping", "clear", "step_hook", "load"),
    ],
)
def test_what_a_hook_changes_between_steps_is_followed_bit_for_bit(tmp_path, replays, act):
    assert_equal_runs(tmp_path, _with(act), trainer={"max_steps": 16, "micro_batch_size": 16})
    assert len(replays) >= 8


class Annealed(Net):
    alpha = 1.0

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        return {**outputs, "loss": outputs["loss"] * self.alpha}


def test_a_number_of_the_models_that_changes_in_every_step_is_named_and_runs_eagerly(tmp_path, caplog):
    class Own(_with(lambda hook, trainer: setattr(trainer.model, "alpha", 1.0 / (1 + trainer.step)))):
        @classmethod
        def build_model(cls, build):
            return Annealed()

    assert_equal_runs(tmp_path, Own, trainer=LONG)
    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len([each for each in warnings if "(Annealed.alpha), so the steps run without a graph" in each]) == 1


def test_a_run_whose_hooks_change_nothing_is_recorded_once(tmp_path, monkeypatch):
    recordings = []
    capture = GraphStep._capture_step
    monkeypatch.setattr(GraphStep, "_capture_step", lambda *given: (recordings.append(1), capture(*given))[1])
    train(tmp_path, "graph", _with(lambda hook, trainer: None), trainer=LONG)
    assert len(recordings) == 1


def test_hooks_that_call_the_users_functions_count_as_the_users(tmp_path):
    plain = build_trainer(config_of(tmp_path / "a", "graph"), Base)

    class Calling(Base):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), CallbackHook(before_step=lambda trainer: None)]

    assert not plain._make_graph_step()._compares_always
    assert build_trainer(config_of(tmp_path / "b", "graph"), Calling)._make_graph_step()._compares_always


def test_a_second_model_of_the_trainers_belongs_to_the_fingerprint(tmp_path):
    trainer = build_trainer(config_of(tmp_path, "graph"), Base)
    trainer.teacher = Net()
    fingerprint = Fingerprint(trainer._make_graph_step()._guarded)
    trainer.teacher.layers[3].p = 0.5
    assert [each.name for each in fingerprint.changes()] == ["trainer.teacher.layers.3.p"]


def test_another_task_belongs_to_the_fingerprint(tmp_path):
    trainer = build_trainer(config_of(tmp_path, "graph"), Base)
    fingerprint = Fingerprint(trainer._make_graph_step()._guarded)
    trainer.task = Task()
    assert [each.name for each in fingerprint.changes()] == ["trainer.task"]


def test_a_fingerprint_names_what_changed_and_takes_equal_values_for_the_same(tmp_path):
    trainer = build_trainer(config_of(tmp_path, "graph"), Base)
    trainer.train()
    fingerprint = Fingerprint(trainer._make_graph_step()._guarded)
    group = _groups(trainer)[0]
    group["betas"] = (group["betas"][0], group["betas"][1])
    assert fingerprint.changes() == []
    trainer.model.layers[0].bias.requires_grad_(False)
    trainer.mood = "good"
    assert [each.name for each in fingerprint.changes()] == ["trainer.mood", "layers.0.bias.requires_grad"]


class Gain:
    """Equal to every other gain: only its identity shows that a step would read other attributes."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Gain)

    __hash__ = None


class Listed(dict):
    """A dict whose values are not a view, like those of python-box."""

    def values(self):
        yield from [self[key] for key in self]


class Guarded(Net):
    scales: ClassVar[dict[str, float]] = {"loss": 1.0}

    def __init__(self):
        super().__init__()
        self.limits, self.names, self.kinds = [1, 2], {"x": 1}, {"a"}
        self.alpha, self.is_fast, self.gain = 1, True, Gain(1.0)
        self.unset, self.empty, self.listed = None, {}, Listed(x=1.0)
        self.done, self.pending = ["a"], ["b", "c"]
        self.register_buffer("scalar", torch.ones(()))


def _replace_tensor(table, key):
    table[key] = table[key].detach().clone()


def _add_group(trainer, model):
    trainer.optimizers["main"].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


CHANGES = {
    "Guarded.alpha": lambda trainer, model: setattr(model, "alpha", 1.0),  # an equal number of another type
    "Guarded.is_fast": lambda trainer, model: setattr(model, "is_fast", 1),
    "Guarded.gain": lambda trainer, model: setattr(model, "gain", Gain(2.0)),
    "Guarded.gain.value": lambda trainer, model: setattr(model.gain, "value", 2.0),
    "Guarded.gain.added": lambda trainer, model: setattr(model.gain, "added", 2.0),
    "Guarded.limits[1]": lambda trainer, model: model.limits.__setitem__(1, 3),
    "Guarded.limits[2]": lambda trainer, model: model.limits.append(2),
    "Guarded.names.x": lambda trainer, model: model.names.update(x=2),
    "Guarded.names.y": lambda trainer, model: model.names.update(y=1),
    "Guarded.names.z": lambda trainer, model: model.names.update(z=model.names.pop("x")),
    "Guarded.listed.x": lambda trainer, model: model.listed.update(x=2.0),
    "Guarded.done[1]": lambda trainer, model: model.done.append(model.pending.pop(0)),
    "Guarded.kinds[1]": lambda trainer, model: model.kinds.add("b"),
    "Guarded.empty.x": lambda trainer, model: model.empty.update(x=1),
    "Guarded.unset": lambda trainer, model: setattr(model, "unset", 1),
    "Guarded.added": lambda trainer, model: setattr(model, "added", None),
    "Guarded.scalar": lambda trainer, model: _replace_tensor(model._buffers, "scalar"),
    "Guarded._forward_hooks[": lambda trainer, model: model.register_forward_hook(lambda *_: None),
    "layers.0._forward_pre_hooks[": lambda trainer, model: model.layers[0].register_forward_pre_hook(lambda *_: None),
    "layers._modules.0": lambda trainer, model: model.layers.__setitem__(0, copy.deepcopy(model.layers[0])),
    "layers.0._buffers": lambda trainer, model: setattr(model.layers[0], "_buffers", {"x": None}),
    "layers.3.training": lambda trainer, model: model.layers[3].eval(),
    "layers.0.weight.requires_grad": lambda trainer, model: model.layers[0].weight.requires_grad_(False),
    "layers.0.weight.data": lambda trainer, model: setattr(model.layers[0].weight, "data", torch.ones(8, 6)),
    "class Guarded.scales.loss": lambda trainer, model: model.scales.update(loss=2.0),
    "trainer.model": lambda trainer, model: setattr(trainer, "model", copy.copy(model)),
    "trainer.task": lambda trainer, model: setattr(trainer, "task", Task()),
    "trainer.mood": lambda trainer, model: setattr(trainer, "mood", None),
    "trainer.kept": lambda trainer, model: delattr(trainer, "kept"),
    "trainer.max_grad_norm": lambda trainer, model: setattr(trainer.context.updater, "max_grad_norm", 0.1),
    "optimizer main.param_groups[0]['weight_decay']": lambda trainer, model: _groups(trainer)[0].update(weight_decay=1),
    "optimizer main.param_groups[0]['amsgrad']": lambda trainer, model: _groups(trainer)[0].update(amsgrad=0),
    "optimizer main.param_groups[1]['params']": _add_group,
    "optimizer main.state[0]['step']": lambda trainer, model: trainer.optimizers["main"].state.clear(),
    "optimizer main.state[0]['exp_avg']": lambda trainer, model: _replace_tensor(
        next(iter(trainer.optimizers["main"].state.values())), "exp_avg"
    ),
    "optimizer main's step hooks": lambda trainer, model: trainer.optimizers["main"].register_step_pre_hook(print),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_of_a_guarded_value_is_seen(tmp_path, monkeypatch, name):
    class Own(Base):
        @classmethod
        def build_model(cls, build):
            return Guarded()

        def post_init(self):
            self.kept = "here"

    monkeypatch.setattr(Guarded, "scales", {"loss": 1.0})
    trainer = train(tmp_path, "graph", Own, trainer={"max_steps": 3, "micro_batch_size": 16})
    graph = trainer._make_graph_step()
    graph._prepare_optimizers()
    fingerprint = Fingerprint(graph._guarded)
    assert fingerprint._is_unchanged()
    assert fingerprint.changes() == []
    CHANGES[name](trainer, trainer.model)
    assert any(each.name.startswith(name) for each in fingerprint.changes())


def test_the_fast_comparison_watches_all_that_is_guarded(tmp_path):
    trainer = train(tmp_path, "graph", Base, trainer={"max_steps": 3, "micro_batch_size": 16})
    graph = trainer._make_graph_step()
    graph._prepare_optimizers()
    fingerprint = Fingerprint(graph._guarded)
    assert {id(value) for _, value in fingerprint.values()} <= {id(value) for value in fingerprint._watched}


def test_what_is_put_into_an_equal_container_that_replaced_another_is_seen(tmp_path):
    trainer = build_trainer(config_of(tmp_path, "graph"), Base)
    trainer.model.limits, trainer.model.empty = [1, 2], {}
    fingerprint = Fingerprint(trainer._make_graph_step()._guarded)
    trainer.model.limits, trainer.model.empty = [1, 2], {}
    assert fingerprint.changes() == []
    trainer.model.limits[0], trainer.model.empty["x"] = 2, 1
    assert {each.name for each in fingerprint.changes()} == {"Net.limits[0]", "Net.empty.x"}


class Counting(Base):
    count = 0

    def train_step(self, batch):
        self.count += 1
        return super().train_step(batch)


def _model(act, make):
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.kept = make()

        def forward(self, x, labels=None):
            act(self, x)
            return super().forward(x, labels)

    return type("OnOwn", (Base,), {"build_model": classmethod(lambda cls, build: Own())})


calls = 0
seen = []


class CountingInTheFile(Base):
    def forward(self, **batch):
        global calls
        calls += 1
        return super().forward(**batch)


class CollectingInTheFile(Base):
    def forward(self, **batch):
        seen.append(batch["x"].shape)
        return super().forward(**batch)


class CollectingInTheClass(Base):
    shapes: ClassVar = []

    def forward(self, **batch):
        self.shapes.append(batch["x"].shape)
        return super().forward(**batch)


class Holder:
    def __init__(self):
        self.number = 0


def _count_in_holder(model, x):
    model.kept.number += 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Counting,
            ("test_graph_changes.py", "trainer.count", "2", "3"),
        ),
        (CountingInTheFile, ("test_graph_changes.calls",)),
        (CollectingInTheFile, ("test_graph_changes.seen",)),
        (CollectingInTheClass, ("CollectingInTheClass.shapes",)),
        (_model(lambda model, x: model.kept.append(x.mean()), list), ("Own.kept",)),
        (_model(lambda model, x: model.kept.update(mean=x.mean()), dict), ("Own.kept.mean",)),
        (_model(_count_in_holder, Holder), ("Own.kept.number",)),
        (_model(lambda model, x: model.kept.random(), np.random.default_rng), ("Own.kept",)),
    ],
    ids=["trainer", "file", "file_list", "class_list", "list", "dict", "object", "generator"],
)
def test_what_a_step_keeps_in_python_is_rejected_by_name(tmp_path, kind, words):
    with raises(TrainwrightError, *words):
        train(tmp_path, "graph", kind, trainer={"micro_batch_size": 16})


class Listing(Base):
    def train_step(self, batch):
        weight = 1 + sum(batch["labels"].tolist())  # reads the labels
        update = self.begin_update()
        update.backward(self.run_forward(batch).loss * weight)
        return update.apply()


class Seeding(Base):
    def forward(self, **batch):
        torch.manual_seed(3)
        return self.model(x=batch["x"] + torch.randn(6), labels=batch["labels"])  # draws after seeding


@pytest.mark.parametrize(
    ("kind", "line", "words"),
    [(Listing, "# reads the labels", ()), (Seeding, "# draws after", ())],
)
def test_what_is_no_operation_is_rejected_with_its_line(tmp_path, kind, line, words):
    with raises(TrainwrightError, *words) as rejected:
        train(tmp_path, "graph", kind, trainer={"micro_batch_size": 16})
    assert str(rejected.value).startswith(f"{__file__}:")
    assert f":{_own_line('  ' + line)}: " in str(rejected.value)


def _own_line(text):
    lines = Path(__file__).read_text("utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


class Numbered(Points):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "number": index}


class Opaque:
    def __init__(self, value):
        self.value = value


def _collating(extra):
    class Weighted(Net):
        def forward(self, x, labels=None, extra=None):
            outputs = super().forward(x, labels)
            factor = extra[2000] if isinstance(extra, np.ndarray) else extra.value if extra is not None else 1.0
            return {**outputs, "loss": outputs["loss"] * (1 + float(factor))}

    def collate(rows):
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("x", "labels")}
        return {**batch, "extra": extra(rows[0]["number"])}

    class Own(Base):
        @classmethod
        def build_model(cls, build):
            return Weighted()

        @classmethod
        def build_train_data(cls, build):
            return Numbered()

        @classmethod
        def build_eval_data(cls, build):
            return {}

        @classmethod
        def build_collator(cls, build):
            return collate

    return Own


def _long_array(number):
    array = np.zeros(4000)
    array[2000] = number % 2
    return array


def test_arrays_of_a_batch_are_known_by_their_values(tmp_path):
    assert_equal_runs(tmp_path, _collating(_long_array), trainer=LONG, evaluation={})


def test_objects_of_a_batch_are_not_recorded_and_named(tmp_path, caplog):
    assert_equal_runs(tmp_path, _collating(Opaque), trainer=LONG, evaluation={})
    assert mentions(caplog.text, "extra")


def test_a_tensor_under_two_names_is_another_kind_of_batch():
    one, other = torch.ones(3), torch.ones(3)
    signatures = [_take_apart(batch, 1)[1] for batch in ({"a": one, "b": one}, {"a": one, "b": other})]
    assert signatures[0] != signatures[1]
    assert signatures[0] == _take_apart({"a": other, "b": other}, 1)[1]


def test_numbers_of_another_type_and_other_strides_are_another_kind_of_batch():
    square = torch.ones(3, 3)
    batches = [{"x": square, "n": value} for value in (1, 1.0, True, 0.0, -0.0)] + [{"x": square.t(), "n": 1}]
    batches[-1]["x"] = torch.ones(3, 6)[:, ::2]
    assert len({_take_apart(batch, 1)[1] for batch in batches}) == len(batches)


def test_batches_that_never_repeat_are_counted_to_a_limit_and_named(tmp_path, caplog):
    trainer = build_trainer(config_of(tmp_path, "graph", trainer={"micro_batch_size": 16}), Base)
    step = trainer._make_graph_step()
    for number in range(MAX_SHAPES + 10):
        batch = {"x": torch.ones(1), "text": str(number)}
        step._may_capture(_take_apart(batch, 1)[1], batch)
    assert len(step._num_runs) == MAX_SHAPES
    assert caplog.text.count("almost every batch differs") == 1
    assert mentions(caplog.text, "text")


def test_numbers_put_into_the_storage_are_warned_of(tmp_path, caplog):
    class Putting(Base):
        def forward(self, **batch):
            get_event_storage().put_scalar("plain", 1.0)
            return self.model(**batch)

    train(tmp_path, "graph", Putting)
    assert "the metrics plain are not tensors" in caplog.text


def test_what_a_step_returned_keeps_its_types():
    tensors = []
    value = {"pair": (torch.ones(1), 2), "list": [torch.ones(1)], "named": StepResult(torch.ones(1), {}, None, 0.1)}
    again = _reader(value, tensors)([torch.zeros(1)] * 3)
    assert isinstance(again["pair"], tuple)
    assert isinstance(again["list"], list)
    assert isinstance(again["named"], StepResult)
    assert again["named"].loss.item() == 0.0


class TwoWidths(Base):
    """Batches of two widths; the narrow ones leave a layer without a gradient."""

    @classmethod
    def build_model(cls, build):
        return SometimesWide()

    def next_train_inputs(self, iterator):
        batch = next(iterator)
        return {**batch, "x": batch["x"][:, : 6 - 2 * (self.step % 2)].contiguous()}


class SometimesWide(Net):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        is_wide = x.shape[1] == 6
        outputs = super().forward(x if is_wide else nn.functional.pad(x, (0, 2)), labels)
        logits = outputs["logits"] + self.wide(x) if is_wide else outputs["logits"]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_an_optimizer_that_steps_after_a_replay_sees_that_replays_gradients(tmp_path, replays):
    optimizer = {"type": "torch.optim:RMSprop", "lr": 1e-3, "foreach": False}
    assert_equal_runs(tmp_path, TwoWidths, trainer={**LONG, "optimizer": optimizer})
    assert len(replays) >= 18


class OneBadLabel(Points):
    """The last batches hold a label that the model has no class for."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return {**item, "labels": torch.tensor(77)} if index >= 40 else item


def test_a_replay_that_fails_is_explained_as_the_step_is_written(tmp_path):
    class Own(Base):
        @classmethod
        def build_train_data(cls, build):
            return OneBadLabel()

    for mode in ("eager", "graph"):
        with raises(TrainwrightError, "77"):
            train(tmp_path / mode, mode, Own, trainer=LONG, data={"shuffle": False})
