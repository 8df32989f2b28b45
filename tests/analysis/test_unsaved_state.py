"""A check names state that a step changes and no checkpoint contains, with its line; nothing else."""

import pytest
from tests.messages import mentions

from trainwright import RunConfig, build_component
from trainwright.build.components import Build

CARRIED = """
class Carried(Trainer):
    def post_init(self):
        self.hidden = torch.zeros(4)

    def forward(self, x, labels):
        outputs = self.model(x + self.hidden, labels)
        self.hidden = 0.5 * self.hidden + x.mean(0)
        return outputs
"""
SAVED = """
    def state_dict(self):
        return {"hidden": self.hidden}

    def load_state_dict(self, state):
        self.hidden = state["hidden"]
"""


def unsaved(report):
    """The findings of the stage: location → the attribute, if there is one."""
    found = [each for each in report.findings if "no checkpoint contains" in each.problem]
    assert all(each.severity == "remark" for each in found)
    return {str(each.location): each.problem.split()[0] for each in found}


def test_a_hidden_state_of_the_trainer_is_named_at_the_line_that_changes_it(check, at):
    report = check("trainer.type=parts.py:Carried", more=CARRIED)
    (finding,) = report.findings
    assert str(finding.location) == at("self.hidden = 0.5")
    assert mentions(finding.problem, "Carried.hidden", "no checkpoint contains")
    assert mentions(finding.advice, "Carried.state_dict()", "differs", "loss")
    assert report.is_ok


def test_state_that_is_saved_and_restored_has_no_finding(check):
    report = check("trainer.type=parts.py:Carried", more=CARRIED + SAVED)
    assert list(report.findings) == []
    assert "a step after the checkpoint" in report.checked


def test_state_that_is_saved_but_wrongly_restored_is_named(check, at):
    wrong = SAVED.replace('self.hidden = state["hidden"]', "pass")
    report = check("trainer.type=parts.py:Carried", more=CARRIED + wrong)
    (finding,) = report.findings
    assert (finding.severity, str(finding.location)) == ("error", at("def load_state_dict"))
    assert mentions(finding.problem, "Carried.load_state_dict", '"hidden"')


RECOMPUTED = """
class Own(Trainer):
    def post_init(self):
        self.cache = None
        self.table = {}

    def next_train_inputs(self, iterator):
        self.inputs = next(iterator)
        return self.inputs

    def forward(self, **batch):
        if self.cache is None:
            self.cache = torch.ones(3)
        self.table["one"] = 1
        self.outputs = self.model(**batch)
        self.last_loss = float(self.outputs["loss"].detach())
        return self.outputs

    def train_loop_begin(self):
        self.window = []

    def train_loop_end(self):
        self.window.append(self.last_loss)
        return super().train_loop_end()
"""


def test_what_each_step_computes_again_before_it_reads_it_has_no_finding(check):
    report = check("trainer.type=parts.py:Own", more=RECOMPUTED)
    assert unsaved(report) == {}
    assert "a step after the checkpoint" in report.checked


READ_ONLY = """
import logging

logger = logging.getLogger("of a step")

class Making(dict):
    def __iter__(self):
        return super().__iter__()

    def __getitem__(self, key):
        MADE.append(key)
        return object()

MADE, making = [], Making(a=1)

class Own(Trainer):
    def train_loop_end(self):
        logger.debug("a loop ends")
        return super().train_loop_end()
"""


def test_a_logger_and_the_items_that_a_mapping_makes_have_no_finding(check):
    assert unsaved(check("trainer.type=parts.py:Own", more=READ_ONLY)) == {}


OWNERS = {
    "a counter of a task": (
        """
class Mine(Task):
    count = 0

    def forward(self, model, batch):
        self.count += 1
        return super().forward(model, batch)
""",
        "task=parts.py:Mine",
        "Mine.count",
        "self.count += 1",
    ),
    "a list of a hook": (
        """
class Mine(Hook):
    def before_train(self):
        if not hasattr(self, "steps"):
            self.steps = []

    def after_step(self):
        self.steps.append(self.trainer.step)
""",
        "hooks=[parts.py:Mine]",
        "Mine.steps",
        "self.steps.append",
    ),
    "numpy's generator": (
        """
import numpy as np

class Mine(Trainer):
    def post_init(self):
        self.rng = np.random.default_rng(0)

    def forward(self, x, labels):
        return self.model(x + torch.tensor(self.rng.normal(size=4)).float(), labels)
""",
        "trainer.type=parts.py:Mine",
        "Mine.rng",
        "self.rng.normal",
    ),
    "python's generator": (
        """
import random

class Mine(Hook):
    def __init__(self):
        self.draws = random.Random(0)

    def after_step(self):
        self.draws.random()
""",
        "hooks=[parts.py:Mine]",
        "Mine.draws",
        "self.draws.random()",
    ),
    "an environment": (
        """
class World:
    def __init__(self):
        self.place = {"x": [0.0]}

    def move(self):
        self.place["x"][0] += 1.0

class Mine(Trainer):
    def post_init(self):
        self.world = World()

    def next_train_inputs(self, iterator):
        self.world.move()
        return next(iterator)
""",
        "trainer.type=parts.py:Mine",
        "Mine.world",
        "self.world.move()",
    ),
    "a teacher": (
        """
import copy

class Mine(Trainer):
    def post_init(self):
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def train_step(self, batch):
        result = super().train_step(batch)
        for own, other in zip(self.teacher.parameters(), self.model.parameters()):
            own.lerp_(other.detach(), 0.5)
        return result
""",
        "trainer.type=parts.py:Mine",
        "Mine.teacher",
        "in zip(self.teacher",
    ),
    "an iterator": (
        """
class Mine(Trainer):
    def post_init(self):
        self.scales = (1.0 + 0.1 * number for number in range(100))

    def forward(self, x, labels):
        return self.model(x * next(self.scales), labels)
""",
        "trainer.type=parts.py:Mine",
        "Mine.scales",
        "next(self.scales)",
    ),
    "a class attribute": (
        """
class Mine(Trainer):
    calls = 0

    def forward(self, **batch):
        Mine.calls += 1
        return self.model(**batch)
""",
        "trainer.type=parts.py:Mine",
        "Mine.calls",
        "Mine.calls += 1",
    ),
    "a global": (
        """
calls = []

class Mine(Trainer):
    def forward(self, **batch):
        calls.append(1)
        return self.model(**batch)
""",
        "trainer.type=parts.py:Mine",
        "parts.calls",
        "calls.append(1)",
    ),
}


@pytest.mark.parametrize("case", OWNERS)
def test_other_state_is_named_too(check, at, case):
    more, override, name, line = OWNERS[case]
    assert unsaved(check(override, more=more)) == {at(line): name}


@pytest.mark.parametrize(
    ("change", "name"),
    [("self.calls = getattr(self, 'calls', 0) + 1", "Net.calls"), ("self.kept = self.kept + x.mean(0)", "Net.kept")],
)
def test_python_values_and_tensors_of_a_module_that_are_not_buffers_are_named(spoilt, at, change, name):
    report = spoilt(
        "logits = ",
        f"if not hasattr(self, 'kept'):\n            self.kept = torch.zeros(4)\n        {change}\n        logits = ",
    )
    assert unsaved(report) == {at(change): name}
    (finding,) = [each for each in report.findings if "no checkpoint contains" in each.problem]
    assert "register_buffer" in finding.advice


def test_a_buffer_has_no_finding(spoilt):
    report = spoilt(
        "super().__init__()\n", "super().__init__()\n        self.register_buffer('mean', torch.zeros(4))\n"
    )
    assert list(report.findings) == []
    moved = spoilt(
        "super().__init__()\n",
        "super().__init__()\n        self.register_buffer('mean', torch.zeros(4))\n",
        more="""
class Moving(Net):
    def forward(self, x, labels=None):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean, labels)
""",
    )
    assert unsaved(moved) == {}


def test_state_of_a_closure_shows_as_a_step_that_differs(check):
    more = """
def counter():
    calls = [0]
    def count():
        calls[0] += 1
        return calls[0]
    return count

class Mine(Trainer):
    def post_init(self):
        self.count = counter()

    def forward(self, x, labels):
        return self.model(x * self.count(), labels)
"""
    (finding,) = check("trainer.type=parts.py:Mine", more=more).findings
    assert finding.severity == "remark"
    assert mentions(finding.problem, "after loading a checkpoint differs", "loss")


def test_a_load_state_dict_that_breaks_the_next_step_is_reported_at_the_line_that_fails(check, at):
    broken = SAVED.replace('self.hidden = state["hidden"]', "self.hidden = None")
    report = check("trainer.type=parts.py:Carried", "evaluation={}", "data.eval={}", more=CARRIED + broken)
    (finding,) = [each for each in report.findings if "after loading a checkpoint" in each.problem]
    assert str(finding.location) == at("self.model(x + self.hidden")
    assert "TypeError" in finding.problem


def test_a_hook_that_cannot_run_again_after_it_was_closed_has_no_finding(check):
    more = """
class Mine(Hook):
    closed = False

    def after_step(self):
        assert not self.closed

    def close(self):
        self.closed = True
"""
    assert list(check("hooks=[parts.py:Mine]", more=more).findings) == []


def test_a_run_of_one_step_is_not_resumed(check):
    report = check("trainer.max_steps=1", "trainer.type=parts.py:Carried", more=CARRIED)
    assert list(report.findings) == []
    assert "a step after the checkpoint" not in report.checked


def test_classes_are_as_before_after_a_check(check):
    check("trainer.type=parts.py:Carried", more=CARRIED)
    config = RunConfig.load("run.yaml", ["trainer.type=parts.py:Carried"])
    kinds = [Build(config).trainer_class(), type(build_component(config, "model"))]
    assert [kind.__name__ for kind in kinds] == ["Carried", "Net"]
    assert not any("__getattribute__" in vars(kind) or "__setattr__" in vars(kind) for kind in kinds)
