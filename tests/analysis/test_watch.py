"""Every use of the host by a user's code is noted at its line; what stays on the device, or others do, is not."""

from __future__ import annotations

import pytest

HEAD = "\nimport numpy as np\n\n\nclass Watched(Net):\n    def forward(self, x, labels):\n        h = self.inner(x)\n"
TAIL = "\n        return nn.functional.cross_entropy(self.head(h), labels)\n"


def sightings(report):
    return [(str(each.location), each.problem.partition(": ")[2]) for each in report.findings]


def watch(check, line, *overrides):
    return check("model.type=parts.py:Watched", *overrides, more=HEAD + f"        {line}" + TAIL)


CAUGHT = {
    "h.mean().item()": ".item() waits for the device.",
    "float(h.mean())": "float(tensor) waits for the device.",
    "int(labels[0])": "int(tensor) waits for the device.",
    "'%.2f' % h.mean()": "float(tensor) waits for the device.",
    "list(range(labels.sum()))": "a tensor is used as a Python number (an index, a range, a size).",
    "bool(h.sum() > 0)": "a tensor decides a Python branch (if, while, and, not, assert, bool()).",
    "h = h * 2 if h.sum() > 0 else h": "a tensor decides a Python branch (if, while, and, not, assert, bool()).",
    "assert (h == h).all()": "a tensor decides a Python branch (if, while, and, not, assert, bool()).",
    "1 in labels": "`in` on a tensor decides a Python branch.",
    "torch.equal(h, h)": "torch.equal returns a Python bool, which waits for the device.",
    "torch.allclose(h, h)": "torch.allclose returns a Python bool, which waits for the device.",
    "print(h.mean())": "a tensor is printed or turned into text.",
    "repr(h)": "a tensor is printed or turned into text.",
    "str(h)": "a tensor is printed or turned into text.",
    "f'{h.mean():.3f}'": "a tensor is formatted into text.",
    "h.cpu()": ".cpu() copies to the host.",
    "h.to('cpu')": '.to("cpu") copies to the host.',
    "h.to(device='cpu')": '.to("cpu") copies to the host.',
    "x.numpy()": ".numpy() copies to the host.",
    "np.asarray(x)": "numpy receives a tensor, which copies it to the host.",
    "h.tolist()": ".tolist() waits for the device.",
    "h.nonzero()": "the shape of .nonzero() depends on values.",
    "torch.nonzero(h)": "the shape of .nonzero() depends on values.",
    "torch.where(h > 0)": "torch.where(condition) alone gives a shape that depends on values.",
    "torch.masked_select(h, h > 0)": "the shape of masked_select depends on values.",
    "labels.unique()": "the shape of unique depends on values.",
    "h[h > 0]": "indexing by a mask gives a shape that depends on values.",
    "x.clone()[x > -1] = torch.ones(16)": "writing a tensor through a mask needs as many values as the mask has.",
    "y = x.clone(); y[y > 0] = y[y > 0]": "indexing by a mask gives a shape that depends on values.",
    "h[labels[0]]": "indexing by a tensor of one number reads it on the host.",
    "h[: labels[0]]": "indexing by a tensor of one number reads it on the host.",
    "torch.tensor([h.mean(), h.sum()])": "torch.tensor([...]) of tensors reads each of them on the host.",
    "h.repeat_interleave(labels, 0)": "the shape of repeat_interleave depends on values.",
    "nn.functional.one_hot(labels)": "one_hot without num_classes looks for the largest value.",
}


@pytest.mark.parametrize("line", CAUGHT)
def test_a_use_of_the_host_is_a_remark_at_its_line(check, at, line):
    report = watch(check, line)
    assert report.is_ok
    assert (at(line), CAUGHT[line]) in sightings(report)
    assert next(iter(report.findings)).problem.startswith("this would break a compiled graph: ")


FINE = [
    "h = torch.where(h > 0, h, 0.0)",
    "h = h.to(x.device)",
    "h = h.to(torch.float32)",
    "h = h.to('meta' if x.is_meta else 'cpu')",
    "y = x.clone(); y[y > 100] = 0.0",
    "h = h[torch.arange(len(h))]",
    "h = h + torch.tensor(1.0)",
    "h = h + h.shape[1] * float('0.5')",
    "nn.functional.one_hot(labels, 2)",
    "h = h.masked_fill(h > 3, 0.0)",
]


@pytest.mark.parametrize("line", FINE)
def test_code_that_stays_on_the_device_has_no_finding(check, line):
    assert list(watch(check, line).findings) == []


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_a_use_of_the_host_is_an_error_where_the_mode_is_a_graph(check, at, mode):
    report = watch(check, "float(h.mean()); h.cpu()", f"runtime.mode={mode}")
    assert not report.is_ok
    assert [(str(each.location), each.severity, each.problem) for each in report.findings] == [
        (at("float("), "error", f"runtime.mode {mode} cannot capture this: float(tensor) waits for the device."),
        (at("float("), "error", f"runtime.mode {mode} cannot capture this: .cpu() copies to the host."),
    ]


def test_all_uses_are_reported_at_once_each_with_its_fix_and_its_expression(check):
    report = watch(check, "a = h.mean().item(); b = float(h.sum())")
    first, second = report.findings
    assert first.location.text[slice(*first.location.columns)] == "h.mean().item()"
    assert second.location.text[slice(*second.location.columns)] == "float(h.sum())"
    assert first.advice == "Keep it a tensor: return it as a metric, and the loop reads it once per log line."


MORE = """
class Own(Trainer):
    def forward(self, x, labels):
        loss = self.model(x, labels)["loss"]
        return loss, {"copy": loss.item()}  # in forward

    def train_step(self, batch):
        result = super().train_step(batch)
        self.last = float(result.loss)  # in train_step
        return result

    def eval_step(self, batch):
        return {"loss": self.model(**batch)["loss"].item()}  # in eval_step, on the host in every mode

    def eval_end(self, aggregated):
        return super().eval_end(aggregated)


class Careful(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        if self.param_groups[0]["params"][0].grad.norm() < 1e9:  # in the optimizer
            return super().step(closure)


class Prints(Hook):
    def after_step(self):
        print(float(self.trainer.model.head.weight.sum()))
"""


def test_trainer_and_optimizer_are_watched_but_not_hooks_and_not_eval_step(check, at):
    report = check("trainer.type=parts.py:Own", "trainer.optimizer={type: parts.py:Careful}", more=MORE)
    report_with_hook = check("trainer.type=parts.py:Own", "hooks=[parts.py:Prints]", more=MORE)
    locations = [str(each.location) for each in report.findings]
    assert locations == [at("# in forward"), at("# in train_step"), at("# in the optimizer")]
    assert [str(each.location) for each in report_with_hook.findings] == locations[:2]


def test_a_branch_of_the_evaluation_alone_is_checked_too(check, at):
    line = "h = h if self.training else h * h.mean().item()"
    report = watch(check, line)
    assert (at(line), ".item() waits for the device.") in sightings(report)


def test_a_built_in_optimizer_is_not_the_user_s_fault(check):
    more = """
class Plain(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)
"""
    assert list(check("trainer.optimizer={type: parts.py:Plain, lr: 0.1}", more=more).findings) == []


def test_library_code_that_uses_the_host_is_a_remark_at_the_user_s_line(check, at):
    more = """
class Clips(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0, error_if_nonfinite=True)
        return super().step(closure)
"""
    report = check("trainer.optimizer={type: parts.py:Clips}", "runtime.mode=graph", more=more)
    (finding,) = report.findings
    assert (str(finding.location), finding.severity) == (at("clip_grad_norm_"), "remark")
    assert finding.problem.startswith("library code called here breaks a compiled graph: a tensor decides")


def test_a_model_that_the_user_compiles_is_watched_as_plain_python(check, at):
    more = """
class Compiled(Net):
    def __init__(self, width=8):
        super().__init__(width)
        self.fast = torch.compile(self.slow, backend="eager")

    def slow(self, x):
        return self.inner(x) * self.inner(x).mean().item()

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.head(self.fast(x)), labels)
"""
    report = check("model.type=parts.py:Compiled", more=more)
    assert report.is_ok
    assert (at(".mean().item()"), ".item() waits for the device.") in sightings(report)
