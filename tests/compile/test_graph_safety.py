"""Before the first step in compile and graph mode: every use of the host is told, and the look leaves no trace."""

import logging
import random
from collections import deque

import numpy as np
import pytest
import torch
from tests.compile.test_compile_mode import COMPILED, make
from tests.messages import mentions, raises
from tests.project.parts import Net
from torch import nn

from trainwright import Trainer, get_event_storage
from trainwright.errors import TrainwrightError

HERE = "tests.compile.test_graph_safety"


class Reading(Net):
    """Reads two values on the host."""

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        scale = outputs["loss"].item()
        if x.sum() > 1e9:
            return {**outputs, "loss": outputs["loss"] * scale}
        return outputs


def places():
    first = Reading.forward.__code__.co_firstlineno
    return [f"test_graph_safety.py:{first + 2}: .item() waits", f"test_graph_safety.py:{first + 3}: a tensor decides"]


def look(folder, *overrides, model="Reading", trainer=Trainer, batch=None):
    """Builds a run and looks at its first batch; returns the trainer."""
    settings = (f"model={{type: {HERE}:{model}}}", "data.eval={}", "evaluation={}", *overrides)
    built = make(folder, *settings, trainer=trainer)
    built.set_batch(None, 8)
    with built.storage:
        built._inspect_forward(BATCH if batch is None else batch)
    return built


BATCH = {"x": torch.linspace(-1, 1, 32).reshape(8, 4), "labels": torch.arange(8) % 2}


def test_compile_mode_warns_of_each_place_with_what_to_write(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        look(tmp_path / "run", *COMPILED)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    for message, place in zip(told, places(), strict=True):
        file_and_line, _, what = place.partition(": ")
        assert file_and_line in message
        assert f"in runtime.mode compile this breaks the graph: {what}" in message
    assert "return it as a metric" in told[0]
    assert "torch.where" in told[1]


@pytest.mark.parametrize(
    ("settings", "name"),
    [((*COMPILED, "runtime.max_graph_breaks=0"), "max_graph_breaks"), (("runtime.mode=graph",), "mode")],
)
def test_where_no_break_is_allowed_one_error_lists_all_places(tmp_path, settings, name):
    with raises(TrainwrightError, name, "2", "graph") as caught:
        look(tmp_path / "run", *settings)
    assert str(caught.value).startswith(f"override runtime.{name}=")
    assert all(place in str(caught.value) for place in places())


def test_a_forward_that_stays_on_the_device_is_not_spoken_of(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "trainwright.loop"):
        look(tmp_path / "run", "runtime.mode=graph", model="Leaving")
    assert not [record for record in caplog.records if record.name.startswith("trainwright.loop")]


class Leaving(Net):
    """Leaves traces wherever a forward can."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4), persistent=False)
        self.count, self._sizes = 0, [0]

    def forward(self, x, labels=None):
        self.count += 1
        self._sizes.append(len(x))
        self.seen = self.seen + x.detach().mean(0)
        random.random()
        np.random.rand()
        outputs = super().forward(self.norm(x), labels)
        get_event_storage().put_scalar("told", outputs["loss"])
        return outputs


class Counting(Trainer):
    def post_init(self):
        self.calls = []

    def forward(self, **batch):
        self.calls.append(len(batch["labels"]))
        self.storage.put_scalar("told_too", 1.0)
        return super().forward(**batch)


def traces_of(trainer):
    state = {name: value.tolist() for name, value in trainer.model.state_dict().items()}
    gradients = [parameter.grad for parameter in trainer.model.parameters()]
    draws = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    own = (trainer.model.count, list(trainer.model._sizes), trainer.model.seen.tolist(), list(trainer.calls))
    return (
        state,
        gradients,
        draws,
        own,
        trainer.batch.num_samples,
        trainer.storage.latest(),
        len(trainer._unchecked_metrics),
    )


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_the_look_leaves_no_trace(tmp_path, mode):
    settings = (f"model={{type: {HERE}:Leaving}}", f"runtime.mode={mode}")
    trainer = make(tmp_path / "run", *settings, trainer=Counting)
    trainer.set_batch(None, 8)
    buffer, storage, seen = trainer.model.seen, trainer.storage, []
    trainer.model.register_forward_hook(lambda *_: seen.append(trainer.model.count))
    before = traces_of(trainer)
    with trainer.storage:
        trainer._inspect_forward(BATCH)
    assert seen == [1]  # it was called, once, on the first micro-batch
    assert traces_of(trainer) == before
    assert trainer.model.seen is buffer
    assert trainer.storage is storage


class Helper:
    """An object of the user's that a model calls."""

    def __init__(self):
        self.calls, self.seen = 0, {"sizes": [[]]}

    def note(self, size):
        self.calls += 1
        self.seen["sizes"][0].append(size)


class Hiding(Net):
    """Leaves traces where one has to look for them."""

    def __init__(self):
        super().__init__()
        self.helper, self.tables = Helper(), {"a": deque([1]), "b": [{2}]}
        self.generators = [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)]
        self.mean, self.kept = torch.zeros(4), torch.zeros(4)

    def forward(self, x, labels=None):
        self.helper.note(len(x))
        self.tables["a"].append(3)
        self.tables["b"][0].add(4)
        self.tables["c"] = x
        torch.rand(1, generator=self.generators[0])
        for draw in (self.generators[1].random, self.generators[2].rand, self.generators[3].random):
            draw()
        self.mean = self.mean + x.mean(0)
        self.kept.data += 1
        self.made_here = x
        return super().forward(x, labels)


def hidden_traces_of(model):
    generators = [
        model.generators[0].get_state().tolist(),
        repr(model.generators[1].bit_generator.state),
        repr(model.generators[2].get_state()),
        model.generators[3].getstate(),
    ]
    tensors = (id(model.mean), model.mean.tolist(), model.kept.tolist())
    return generators, tensors, repr(model.tables), model.helper.calls, repr(model.helper.seen), sorted(vars(model))


def test_nested_containers_own_objects_generators_tensors_and_made_attributes_are_put_back(tmp_path):
    settings = (f"model={{type: {HERE}:Hiding}}", "runtime.mode=graph")
    trainer = make(tmp_path / "run", *settings)
    trainer.set_batch(None, 8)
    before, called = hidden_traces_of(trainer.model), []
    trainer.model.register_forward_hook(lambda *_: called.append(trainer.model.helper.calls))
    with trainer.storage:
        trainer._inspect_forward(BATCH)
    assert called == [1]
    assert hidden_traces_of(trainer.model) == before
    trainer.model(**BATCH)
    assert all(after != earlier for after, earlier in zip(hidden_traces_of(trainer.model), before, strict=True))


class Differentiating(Net):
    """Takes a gradient within its forward."""

    def forward(self, x, labels=None):
        x = x.requires_grad_()
        outputs = super().forward(x, labels)
        (slope,) = torch.autograd.grad(outputs["loss"], x, create_graph=True)
        outputs["loss"] = outputs["loss"] + slope.square().sum()
        return outputs


def test_a_forward_that_differentiates_by_itself_is_looked_at_too(tmp_path):
    batch = {name: value.clone() for name, value in BATCH.items()}
    trainer = look(tmp_path / "run", *COMPILED, model="Differentiating", batch=batch)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_what_a_forward_raises_is_raised(tmp_path):
    with raises(TrainwrightError):
        look(tmp_path / "run", *COMPILED, batch={**BATCH, "labels": BATCH["labels"] + 7})


class Copying(Net):
    """Copies to the host, which is compiled and waits."""

    def forward(self, x, labels=None):
        return super().forward(torch.from_numpy(x.numpy()), labels)


def test_a_copy_to_the_host_is_no_break_of_a_compiled_graph_but_is_rejected_in_a_recorded_one(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "trainwright"):
        look(tmp_path / "run", *COMPILED, "runtime.max_graph_breaks=0", model="Copying")
    [told] = [record.getMessage() for record in caplog.records]
    assert mentions(told, "runtime.mode", "compile")
    with raises(TrainwrightError, "1"):
        look(tmp_path / "graph", "runtime.mode=graph", model="Copying")


class OwnStep(Trainer):
    def train_step(self, batch):
        raise AssertionError("not called by a look")

    def forward(self, **batch):
        raise AssertionError("not called by a look")


def test_a_step_of_the_users_own_is_left_alone(tmp_path):
    assert look(tmp_path / "run", *COMPILED, trainer=OwnStep).step == 0
