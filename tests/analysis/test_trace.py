"""Dynamo tells what the watch cannot see; where Dynamo fails, that is a remark and never a crash."""

from __future__ import annotations

import pytest
import torch

from trainwright.analysis import check as trace


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


def test_a_line_that_the_watch_has_noted_is_not_repeated(check, at):
    report = broken(check, "        x = x * 2\n        if x.sum() > 0:\n            x = x + 1\n")
    assert [str(each.location) for each in report.findings] == [at("if x.sum()")]


def test_a_user_s_trainer_forward_is_traced_whole(check, at):
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
    def fail(*_):
        raise RuntimeError("no bytecode for this Python\nmore lines")

    monkeypatch.setattr(torch._dynamo, "explain", fail)
    report = check("runtime.mode=compile")
    (finding,) = report.findings
    assert report.is_ok
    assert finding.problem == "torch.compile cannot trace this forward: no bytecode for this Python."
    assert str(finding.location) == "run.yaml:1"


def test_reasons_are_told_in_a_sentence_with_a_hint_that_a_user_can_follow():
    reason = (
        "Unsupported thing\n  Explanation: Dynamo cannot trace `time.time.` This is a builtin.\n"
        "  Hint: please file an issue on GitHub.\n  Hint: Use torch.cond.\n"
    )
    assert trace._title(reason) == "Unsupported thing: Dynamo cannot trace time.time."
    assert trace._hint(reason) == "Use torch.cond."
    assert trace._title("generic_jump TensorVariable()") == "a tensor decides a Python branch."
