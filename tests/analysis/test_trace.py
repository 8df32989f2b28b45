"""Graph breaks are findings with their line; a failure of torch.compile itself is a remark."""

from __future__ import annotations

import pytest
import torch


def broken(check, body, *overrides):
    more = f"\nimport time\n\n\nclass Broken(Net):\n    def forward(self, x, labels):\n{body}"
    more += "        return nn.functional.cross_entropy(self.head(self.inner(x)), labels)\n"
    return check("model.type=parts.py:Broken", *overrides, more=more)


@pytest.mark.parametrize("before", ["", "        x = x * 2\n"])
@pytest.mark.parametrize(("mode", "severity"), [("eager", "remark"), ("compile", "error")])
def test_a_break_is_found_at_its_line_whether_or_not_anything_was_computed_before(check, at, before, mode, severity):
    report = broken(check, f"{before}        torch._dynamo.graph_break()\n", f"runtime.mode={mode}")
    (finding,) = report.findings
    assert (str(finding.location), finding.severity) == (at("graph_break()"), severity)
    assert finding.problem.startswith("a compiled graph breaks here: Call to `torch._dynamo.graph_break()`")
    assert finding.advice == "Remove the `torch._dynamo.graph_break()` call."


def test_a_line_that_has_a_finding_is_not_repeated(check, at):
    report = broken(check, "        x = x * 2\n        if x.sum() > 0:\n            x = x + 1\n")
    assert [str(each.location) for each in report.findings] == [at("if x.sum()")]


def test_the_forward_of_a_user_trainer_is_traced_as_a_whole(check, at):
    more = """
class Own(Trainer):
    def forward(self, x, labels):
        loss = self.model(x, labels)["loss"]
        torch._dynamo.graph_break()
        return loss
"""
    report = check("trainer.type=parts.py:Own", more=more)
    assert [str(each.location) for each in report.findings] == [at("graph_break()")]


def test_a_failure_of_dynamo_itself_is_a_remark(check, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no bytecode for this Python\nmore lines")

    monkeypatch.setattr(torch, "compile", fail)
    report = check("runtime.mode=compile")
    (finding,) = report.findings
    assert report.is_ok
    assert finding.problem == "torch.compile cannot trace this forward: no bytecode for this Python."
    assert str(finding.location) == "run.yaml:1"
