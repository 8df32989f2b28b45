"""A check of a real project: the report of a correct one, and a finding for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest


def errors_of(report):
    return [(str(each.location), each.problem) for each in report.findings if each.severity == "error"]


def remarks_of(report):
    return [(str(each.location), each.problem) for each in report.findings if each.severity == "remark"]


def marked(finding):
    start, stop = finding.location.columns
    return finding.location.text[start:stop]


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


# a correct run


def test_a_correct_run_has_no_finding_and_lists_what_was_checked(check):
    report = check()
    assert list(report.findings) == []
    assert report.is_ok
    assert report.render() == (
        "ok: Net with 58 parameters; 24 samples, valid 12; 12 steps of 8 samples (micro-batch 4 × "
        "gradient_accumulation_steps 2).\n"
        "Checked: config, 8 components, a training step, a batch in two micro-batches, evaluation of valid, a "
        "checkpoint, read back bit-equal, graph safety, a step after the checkpoint."
    )


def test_a_check_leaves_nothing_behind(check, in_tmp):
    check("hooks=[{type: early_stopping, metric: valid/loss}]")
    assert files_in(in_tmp) == {"parts.py", "run.yaml"}


def test_an_earlier_run_is_not_touched_and_not_continued(check, project, in_tmp):
    project()
    (in_tmp / "runs" / "run").mkdir(parents=True)
    (in_tmp / "runs" / "run" / "config.yaml").write_text("nonsense: 1\n")
    assert check().is_ok
    assert files_in(in_tmp / "runs") == {"run", "run/config.yaml"}


@pytest.mark.parametrize(
    "setting",
    [
        "trainer.schedule={type: 'torch.optim.lr_scheduler:StepLR', step_size: 1, step_on: epoch}",
        "trainer.schedule={type: 'torch.optim.lr_scheduler:OneCycleLR', max_lr: 0.1}",
        "trainer.schedule={type: 'torch.optim.lr_scheduler:CosineAnnealingLR'}",
        "trainer.schedule={type: 'torch.optim.lr_scheduler:ReduceLROnPlateau', metric: valid/loss}",
        "trainer.schedule={type: reduce_on_plateau, metric: valid/loss}",
        f"data.sampler={{type: weighted, weights: {[1.0] * 24}}}",
        "data.sampler={type: 'torch.utils.data:SequentialSampler'}",
    ],
)
def test_schedulers_of_torch_and_samplers_have_no_finding(check, setting):
    report = check(setting, "evaluation.every_steps=4")
    assert list(report.findings) == []


def test_a_wrong_argument_of_a_scheduler_is_found_at_its_line(check):
    report = check("trainer.schedule={type: 'torch.optim.lr_scheduler:StepLR', step_sise: 1}")
    assert [problem for _, problem in errors_of(report)] == [
        'trainer.schedule: StepLR has no argument "step_sise".',
        'trainer.schedule: StepLR needs the argument "step_size".',
    ]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("data.train", "{type: json_lines, path: no.jsonl}"),
        ("data.train", "{type: text, path: no.txt, streaming: true}"),
        ("data.eval.valid", "{type: json_lines, path: no.jsonl}"),
    ],
)
def test_a_missing_data_file_is_one_finding_at_its_setting(check, name, source):
    (error,) = errors_of(check(f"{name}={source}"))
    assert error[0] == f"override {name}={source}"


def test_weights_of_a_mixture_that_pack_would_ignore_are_an_error_as_in_training(check):
    source = "{type: mix, sources: {a: {type: parts.py:Points, weight: 3}, b: {type: parts.py:Points, weight: 1}}}"
    (error,) = errors_of(check(f"data.train={{type: pack, length: 16, source: {source}}}"))
    assert "mix with weights" in error[1]


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_a_check_works_in_every_mode(check, mode):
    assert check(f"runtime.mode={mode}").is_ok


def test_settings_of_the_compiler_are_checked_and_the_steps_run_without_it(check):
    compiled = ("runtime.mode=compile", "runtime.compile_memory_budget=0.5", "runtime.max_graph_breaks=3")
    assert check(*compiled, "runtime.compile_options={max_autotune: true}").is_ok
    report = check(*compiled, "runtime.compile_options={max_autotun: true}")
    assert [location for location, _ in errors_of(report)] == ["override runtime.compile_options={max_autotun: true}"]


def test_workers_mesh_device_and_precision_are_tried_on_one_cpu(check):
    report = check("data.num_workers=2", "runtime={device: cuda, precision: bf16, mesh: {replicate: 2}}")
    assert report.is_ok
    assert report.facts[-1] == "12 steps of 8 samples (micro-batch 4 × 2 ranks × gradient_accumulation_steps 1)"


def test_a_large_accumulation_is_cut_short_but_the_steps_are_those_of_the_run(check):
    report = check("trainer.max_steps=null", "trainer.max_epochs=4", "trainer.micro_batch_size=1")
    assert report.is_ok
    assert report.facts[-1] == "12 steps of 8 samples (micro-batch 1 × gradient_accumulation_steps 8)"


def test_a_micro_batch_that_only_the_run_can_find_is_tried_in_two_micro_batches(check):
    report = check("trainer.micro_batch_size=auto")
    assert report.is_ok
    assert report.facts[-1] == "12 steps of 8 samples (micro-batch of at most 8, as the memory allows)"


# the config and its components


def test_every_wrong_setting_is_a_finding_with_its_line(check):
    run = "model: parts.py:Net\ntrainer:\n  max_step: 5\n  optimizer: {type: adamw}\nruntime:\n  mode: fast\n"
    report = check("lgo=1", run=run)
    assert [location for location, _ in errors_of(report)] == ["override lgo=1", "run.yaml:3", "run.yaml:6"]
    findings = list(report.findings)
    assert findings[1].problem == "trainer.max_step: there is no such setting."
    assert findings[1].advice.startswith('Did you mean "max_steps"?')
    assert [marked(each) for each in findings] == ["lgo", "max_step", "fast"]
    assert not report.is_ok


def test_every_wrong_component_is_reported_not_only_the_first(check, at):
    run = """\
model:
  type: parts.py:Net
  widht: 3
  depth: 2
data:
  train: {type: parts.py:Pints}
trainer:
  max_steps: 3
  optimizer: {type: adamv}
  schedule: {type: cosine, warmup_step: 3}
hooks:
  - {type: early_stopping}
writers: [consle]
"""
    report = check(run=run)
    assert errors_of(report) == [
        ("run.yaml:3", 'model: Net has no argument "widht".'),
        ("run.yaml:4", 'model: Net has no argument "depth".'),
        ("run.yaml:6", 'data.train.type: parts.py has no "Pints".'),
        ("run.yaml:9", 'trainer.optimizer.type: no optimizer "adamv".'),
        ("run.yaml:10", 'trainer.schedule: Cosine has no argument "warmup_step".'),
        ("run.yaml:12", 'hooks.0: EarlyStopping needs the argument "metric".'),
        ("run.yaml:13", 'writers.0.type: no writer "consle".'),
    ]
    assert [marked(each) for each in list(report.findings)[:5]] == ["widht", "depth", "Pints", "adamv", "warmup_step"]
    first = next(iter(report.findings))
    assert first.advice == 'Did you mean "width"? Its parameters: width=8.'


def test_a_file_that_cannot_be_imported_is_one_finding_at_its_own_line(check, at):
    report = check(more="\nraise RuntimeError('half written')\n")
    assert errors_of(report) == [(at("raise RuntimeError"), "RuntimeError: half written.")]


def test_a_syntax_error_is_shown_where_it_is(check, at):
    report = check(more="\nclass Net(nn.Module:\n    pass\n")
    assert errors_of(report) == [(at("class Net(nn.Module:"), "SyntaxError: invalid syntax.")]


# building


def test_parts_that_fail_to_build_do_not_hide_each_other(spoilt, at):
    report = spoilt(
        "        self.inner = nn.Linear(4, width)",
        "        raise ValueError(f'{width} is odd')",
        "data.train.size=0",
        "hooks=[parts.py:Broken]",
        more="\nclass Broken(Hook):\n    def __init__(self):\n        self.x = 1 / 0\n",
    )
    assert errors_of(report) == [
        (at("raise ValueError"), "ValueError: 8 is odd."),
        (at("1 / 0"), "ZeroDivisionError: division by zero."),
        ("run.yaml:3", "data.train: Points is empty."),
    ]
    assert next(iter(report.findings)).advice == "It was reached from model (run.yaml:1)."
    assert report.skipped == ["a training step", "evaluation", "a checkpoint", "graph safety"]


def test_a_section_that_a_trainer_leaves_without_effect_is_an_error(check):
    more = """
class Own(Trainer):
    @classmethod
    def build_optimizers(cls, build, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)
"""
    (error,) = errors_of(check("trainer.type=parts.py:Own", more=more))
    assert error[0] == "run.yaml:9"
    assert error[1].startswith("trainer.optimizer: has no effect")


def test_a_batch_contradiction_is_reported_and_the_rest_is_still_tried(check):
    report = check("trainer.gradient_accumulation_steps=3")
    assert errors_of(report) == [
        (
            "override trainer.gradient_accumulation_steps=3",
            "trainer.global_batch_size: 8 is not micro_batch_size 4 × 1 data rank × gradient_accumulation_steps 3 = "
            "12.",
        )
    ]
    assert "a training step" in report.checked


# data


def test_an_empty_evaluation_set_is_named(check):
    report = check("data.eval.valid.size=0")
    assert ("run.yaml:4", "data.eval.valid: Points is empty.") in errors_of(report)


@pytest.mark.parametrize("override", [[], ["trainer.micro_batch_size=1"]])
def test_a_batch_larger_than_the_data_is_reported_and_the_rest_is_still_tried(check, override):
    report = check("data.train.size=5", *override)
    (error,) = errors_of(report)
    assert error[0] == "run.yaml:7"
    assert error[1].startswith("trainer.global_batch_size: 8 is more than the 5 samples of data.train")
    assert "a training step" in report.checked


def test_samples_of_unequal_shapes_are_an_error(spoilt, at):
    report = spoilt("torch.arange(4.0) + index,", "torch.ones(5 if index == 3 else 4),")
    problem = 'the samples have unequal shapes: field "x" is (4,) in sample 0 and (5,) in sample 3.'
    assert errors_of(report) == [
        (at("torch.ones(5"), f"data.train: {problem}"),
        (at("torch.ones(5"), f"data.eval.valid: {problem}"),
    ]
    assert next(iter(report.findings)).advice == "Make them equal, or write a collator that pads them (data.collator)."
    assert "a checkpoint, read back bit-equal" in report.checked


def test_samples_of_unequal_fields_are_an_error(spoilt):
    report = spoilt('{"x":', '({"id": 1} if index == 2 else {}) | {"x":', "data.eval={}")
    ((_, problem),) = errors_of(report)
    assert problem == "data.train: the samples have unequal fields: sample 0 has x, labels, sample 2 has id, x, labels."


COLLATOR = """
class Collator:
    def __call__(self, samples):
        return {"x": [sample["x"]%s for sample in samples], "labels": torch.tensor([s["labels"] for s in samples])}
"""


def test_a_collator_that_returns_lists_of_numbers_is_an_error_at_its_return(check, at):
    report = check("data.collator=parts.py:Collator", more=COLLATOR % ".tolist()")
    assert errors_of(report) == [
        (at('{"x": [sample["x"]'), 'the collator returns lists of numbers instead of tensors for "x".')
    ]
    assert next(iter(report.findings)).advice == 'Return torch.tensor(…): {"x": torch.tensor([…]), …}.'


def test_lists_of_tensors_may_be_meant_unless_they_would_have_to_be_cut(check, spoilt):
    right, wrong = "self.inner(x)", "self.inner(torch.stack(x))"
    collator = "data.collator=parts.py:Collator"
    report = spoilt(right, wrong, collator, "trainer.micro_batch_size=8", more=COLLATOR % "")
    words = 'the collator returns lists of tensors for "x", which are not split into micro-batches.'
    assert (report.is_ok, [problem for _, problem in remarks_of(report)]) == (True, [words])
    report = spoilt(right, wrong, collator, more=COLLATOR % "")
    assert words in [problem for _, problem in errors_of(report)]


def test_a_dataset_that_raises_is_shown_at_its_own_line(spoilt, at):
    report = spoilt('return {"x":', 'return {}["missing"] or {"x":')
    assert errors_of(report) == [(at('["missing"]'), "KeyError: 'missing'.")]


# forward and loss


def test_a_forward_that_requires_what_the_batch_lacks_names_both(spoilt, at):
    report = spoilt("x, labels=None", "x, mask, labels=None")
    assert errors_of(report) == [(at("mask"), 'Net.forward requires "mask", which the batch lacks.')]
    (finding,) = report.findings
    assert marked(finding) == "mask"
    assert finding.advice == (
        "The batch has x, labels; forward accepts x, mask, labels. "
        'Return "mask" from the dataset or collator, or give the parameter a default.'
    )


def test_a_forward_that_lacks_what_the_batch_has_names_both(spoilt, at):
    report = spoilt('{"x":', '{"weight": 1.0, "x":')
    assert errors_of(report) == [
        (at("def forward"), 'the batch has "weight", which Net.forward does not accept.'),
    ]


def test_names_that_differ_on_both_sides_are_one_finding(spoilt, at):
    report = spoilt("def forward(self, x, labels=None):", "def forward(self, image, labels=None):\n        x = image")
    assert errors_of(report) == [
        (
            at("def forward"),
            'Net.forward requires "image", which the batch lacks, and the batch has "x", '
            "which Net.forward does not accept.",
        )
    ]


def test_a_trainer_s_own_forward_is_compared_with_the_batch_too(check, at):
    more = "\nclass Own(Trainer):\n    def forward(self, x, target):\n        return self.model(x, target)['loss']\n"
    report = check("trainer.type=parts.py:Own", more=more)
    assert errors_of(report) == [
        (
            at("target):"),
            'Own.forward requires "target", which the batch lacks, and the batch has "labels", '
            "which Own.forward does not accept.",
        )
    ]


RETURN = 'return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("return logits.detach().mean()", "The loss has no gradient: nothing it was computed from requires one."),
        ("return None or None", "forward returned None."),
        ("return logits", "forward returned a tensor of shape (4, 2), and Net has no criterion."),
        ("return logits.mean() / 0.0 * 0.0", "the first loss is nan."),
        ("return logits.mean() + 1e38 * 10", "the first loss is inf."),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_shown_at_its_return(spoilt, at, line, problem):
    report = spoilt(RETURN, line)
    assert (at(line), problem) in errors_of(report)


def test_an_exception_in_forward_is_shown_once_at_the_user_s_innermost_line(spoilt, at):
    report = spoilt(RETURN, "return helper(logits)", more="\n\ndef helper(logits):\n    return logits @ logits\n")
    ((location, problem),) = errors_of(report)
    assert location == at("logits @ logits")
    assert problem.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_labels_outside_the_classes_are_an_error_with_both_numbers(check, at):
    report = check("data.train.classes=24")
    ((location, problem),) = errors_of(report)
    assert location == at("cross_entropy(logits")
    assert problem.startswith("the labels of data.train go from ")
    assert problem.endswith(", but the logits have 2 classes (shape (4, 2)): labels must be in 0 … 1.")
    assert marked(next(iter(report.findings))) == "nn.functional.cross_entropy(logits, labels)"


def test_labels_to_ignore_are_inside_the_classes(spoilt):
    assert spoilt("index % self.classes", "-100 if index % 2 else 0", "trainer.micro_batch_size=8").is_ok


def test_ignored_labels_next_to_a_plain_loss_are_an_error_where_batches_are_split(spoilt, at):
    ((location, problem),) = errors_of(spoilt("index % self.classes", "-100 if index % 2 else 0"))
    assert location == at("def forward")
    assert problem.startswith("Some labels are -100")


# one batch, whole and in two micro-batches


def split_finding(report):
    (found,) = [each for each in report.findings if "two micro-batches" in each.problem]
    assert report.is_ok
    return found


def test_batch_norm_depends_on_the_micro_batch(spoilt, at):
    found = split_finding(spoilt("nn.Linear(4, width)", "nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width))"))
    assert str(found.location) == at(RETURN)
    assert "BatchNorm1d" in found.advice


def test_negatives_from_the_batch_depend_on_the_micro_batch(spoilt):
    negatives = "nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(x)))"
    found = split_finding(spoilt("nn.functional.cross_entropy(logits, labels)", negatives))
    assert "negatives" in found.advice


def test_a_mean_over_another_number_of_elements_depends_on_the_micro_batch(spoilt):
    masked = "(logits[x[:, 0] > 12] ** 2).mean()"
    found = split_finding(spoilt("nn.functional.cross_entropy(logits, labels)", masked))
    assert "Mean(total, count)" in found.advice


@pytest.mark.parametrize("inputs", ["logits", "logits + 0.05 * torch.randn_like(logits)"])
def test_a_sum_over_samples_depends_on_the_micro_batch_also_with_noise(spoilt, inputs):
    summed = f"nn.functional.cross_entropy({inputs}, labels, reduction='sum')"
    found = split_finding(spoilt("nn.functional.cross_entropy(logits, labels)", summed))
    assert "a sum over samples" in found.advice


def test_dropout_is_no_finding(spoilt):
    report = spoilt("nn.Linear(4, width)", "nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5))")
    assert not list(report.findings)
    assert "a batch in two micro-batches" in report.checked


def test_a_forward_that_draws_random_numbers_is_not_compared(spoilt):
    report = spoilt("self.inner(x)", "self.inner(x + torch.randn_like(x))")
    assert not list(report.findings)
    assert "a batch in two micro-batches" not in report.checked


def test_labels_of_an_evaluation_set_name_the_set(check):
    ((_, problem),) = errors_of(check("data.eval.valid.classes=5"))
    assert problem.startswith("the labels of data.eval.valid go from 0 to 3, but the logits have 2 classes")


def test_token_ids_outside_an_embedding_name_the_embedding(spoilt, at):
    parts = ("self.inner = nn.Linear(4, width)", "self.words = nn.Embedding(5, width)")
    more = "\nclass Words(Net):\n    def forward(self, x, labels):\n"
    more += "        return self.head(self.words(x.long())).mean()\n"
    report = spoilt(*parts, "model.type=parts.py:Words", more=more)
    problems = errors_of(report)
    assert {location for location, _ in problems} == {at("self.words(x.long())")}
    assert problems[0][1].startswith("the token ids of data.train go from ")
    assert problems[0][1].endswith("but the embedding words has num_embeddings = 5: ids must be in 0 … 4.")


def test_a_metric_without_its_output_is_shown_at_its_setting(check):
    report = check("evaluation.metrics={accuracy: {type: accuracy, outputs: scores}}")
    (error, *_) = errors_of(report)
    assert error[0].startswith("override evaluation.metrics=")
    assert error[1] == "evaluation.metrics.accuracy.outputs: forward returns no 'scores'; it returns logits."


# gradients and optimizers


def test_parameters_without_a_gradient_are_a_remark_that_names_them(spoilt, at):
    line = "self.spare = nn.Linear(3, 3)"
    report = spoilt("self.head = ", f"{line}\n        self.head = ")
    assert report.is_ok
    assert remarks_of(report) == [(at(line), "no gradient reached spare.weight, spare.bias in the first step.")]


def test_parameters_that_no_optimizer_owns_are_a_remark_that_names_them(check, at):
    more = """
class Own(Trainer):
    @classmethod
    def build_optimizers(cls, build, model):
        return torch.optim.SGD(model.head.parameters(), lr=0.1)
"""
    report = check("trainer.type=parts.py:Own", "trainer.optimizer=null", more=more)
    problem = "no optimizer owns inner.weight, inner.bias: these parameters are never updated."
    assert remarks_of(report) == [(at("def build_optimizers"), problem)]
    assert report.is_ok


# evaluation, hooks, checkpoint


def test_unknown_metrics_are_errors_at_their_settings(check):
    report = check("checkpoint.keep_best={metric: valid/los}", "hooks=[{type: early_stopping, metric: valid/acc}]")
    assert errors_of(report) == [
        (
            "override hooks=[{type: early_stopping, metric: valid/acc}]",
            "early_stopping.metric: no evaluation returns 'valid/acc'.",
        ),
        (
            "override checkpoint.keep_best={metric: valid/los}",
            "checkpoint.keep_best.metric: no evaluation returns 'valid/los'.",
        ),
    ]
    assert [marked(each) for each in report.findings] == ["valid/acc", "valid/los"]


def test_a_failed_step_does_not_hide_a_failed_evaluation(check, at):
    more = """
class Own(Trainer):
    def train_step(self, batch):
        return self.nope(batch)

    def eval_step(self, batch):
        return {"loss": self.neither}
"""
    report = check("trainer.type=parts.py:Own", more=more)
    assert errors_of(report) == [
        (at("self.nope"), "AttributeError: 'Own' object has no attribute 'nope'."),
        (at("self.neither"), "AttributeError: 'Own' object has no attribute 'neither'."),
    ]
    assert "a checkpoint, read back bit-equal" in report.checked


def test_a_hook_that_raises_is_shown_at_its_line(check, at):
    more = "\nclass Sad(Hook):\n    def after_step(self):\n        self.trainer.nope\n"
    report = check("hooks=[parts.py:Sad]", more=more)
    assert errors_of(report) == [(at("self.trainer.nope"), "AttributeError: 'Trainer' object has no attribute 'nope'.")]
    assert "evaluation of valid" in report.checked


FORGETFUL = """
class Forgetful(torch.optim.SGD):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr, momentum=0.9)

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for value in self.state.values():
            value%s
"""


def test_an_optimizer_that_comes_back_different_from_a_checkpoint_is_an_error(check):
    report = check("trainer.optimizer={type: parts.py:Forgetful}", more=FORGETFUL % '["momentum_buffer"].zero_()')
    ((location, problem),) = errors_of(report)
    assert location == "override trainer.optimizer={type: parts.py:Forgetful}"
    assert problem.startswith("a checkpoint reads back different: optimizer main.state.0.momentum_buffer")


def test_a_checkpoint_that_cannot_be_read_back_is_an_error(check):
    report = check("trainer.optimizer={type: parts.py:Forgetful}", more=FORGETFUL % ".clear()")
    ((_, problem),) = errors_of(report)
    assert problem.startswith("a checkpoint cannot be read back: KeyError")


def test_hook_state_that_cannot_be_saved_is_an_error(check):
    more = "\nclass Odd(Hook):\n    def state_dict(self):\n        return {'open': open}\n"
    assert errors_of(check("hooks=[parts.py:Odd]", more=more)) != []


def test_what_user_code_prints_is_kept_off_the_report(spoilt, capsys):
    report = spoilt("logits = ", "print('hello')\n        logits = ")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err
    assert "hello" not in report.render().replace("print('hello')", "")


def test_a_project_in_another_folder_is_shown_relative_to_the_current_one(check, project, in_tmp, monkeypatch):
    from trainwright.analysis.check import check_run

    project(more="\nraise RuntimeError('no')\n")
    (in_tmp / "elsewhere").mkdir()
    monkeypatch.chdir(in_tmp / "elsewhere")
    ((location, _),) = errors_of(check_run(Path("../run.yaml")))
    assert location.startswith("../parts.py:")


def test_a_failing_criterion_is_shown_at_its_assignment(check, at):
    more = """
class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.criterion = nn.BCEWithLogitsLoss()

    def forward(self, x):
        return self.layer(x)
"""
    report = check("model={type: parts.py:Scores}", "evaluation.metrics={}", more=more)
    [error] = [each for each in report.findings if each.severity == "error"]
    assert f"{error.location.file}:{error.location.line}" == at("nn.BCEWithLogitsLoss()")
    assert "BCEWithLogitsLoss, cannot compare outputs [" in error.problem
