"""`trainwright explain`: the loop as it will run, read from the classes alone."""

import re
import shutil
from pathlib import Path

import pytest
from tests.messages import mentions
from typer.testing import CliRunner

from trainwright import RunConfig, Trainer
from trainwright.analysis.explain import DEFAULT_HOOKS, explain
from trainwright.build.components import Build
from trainwright.cli import app
from trainwright.commands.explain import render
from trainwright.commands.new import Kind, template_folder
from trainwright.loop.hook import HOOK_EVENTS
from trainwright.models.llama import Llama

PARTS = '''
"""Parts that must never be made."""
import torch
from trainwright import Hook, Task, Trainer

raise_in_constructors = True


class Mine(Trainer):
    """My trainer."""

    @classmethod
    def build_model(cls, build):
        """Makes a model of mine."""
        return build.model()

    @classmethod
    def build_hooks(cls, build):
        return build.hooks()

    @torch.no_grad()
    def next_train_inputs(self, iterator):
        """Takes
        the next."""
        return next(iterator)

    def eval_end(self, aggregated):
        return super().eval_end(aggregated)

    def save(self):
        """Saves elsewhere too."""
        return super().save()


class Further(Mine):
    def eval_end(self, aggregated):
        """First of three."""
        return super().eval_end(aggregated)


class Learns(Task):
    """What I learn."""

    def __init__(self):
        raise RuntimeError("made")

    def build_model(self):
        """Makes the task's model."""

    def build_dataset(self, split):
        """Makes the task's data."""

    def forward(self, model, batch):
        """Runs the model my way."""

    def aggregate_logs(self, state, outputs):
        """Collects."""


class Acts(Hook):
    def __init__(self, every_steps=5):
        raise RuntimeError("made")

    def after_step(self):
        """Acts at times."""


class NoHook:
    def after_eval(self, logs):
        """Inherits from nothing."""


def made_by_a_function():
    raise RuntimeError("made")


class Net(torch.nn.Module):
    def __init__(self):
        raise RuntimeError("made")

    def forward(self, x):
        """Computes."""


class Data:
    def __init__(self):
        raise RuntimeError("made")
'''

RUN = """
model: {type: parts.py:Net}
data: {train: {type: parts.py:Data}, eval: {valid: {type: parts.py:Data}}}
trainer: {max_steps: 30, global_batch_size: 8, micro_batch_size: 4, optimizer: {type: sgd, lr: 0.1}}
evaluation: {every_steps: 10}
checkpoint: {every_steps: null, keep_best: {metric: valid/loss}}
"""


@pytest.fixture
def project(in_tmp):
    Path("parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    return in_tmp


def lines_of(*overrides):
    """Each line as its words, with the runs of spaces between columns made two."""
    rendered = render(explain(RunConfig.load("run.yaml", overrides)))
    return [re.sub(" {2,}", "  ", line.strip()) for line in rendered]


def below(lines, phase):
    """The lines of the acts below a phase."""
    start = next(number for number, line in enumerate(lines) if line.split("  ")[0] == phase)
    acts = []
    for line in lines[start + 1 :]:
        if not line.startswith(("* ", "- ", "! ")):
            break
        acts.append(" ".join(line.split()))
    return acts


def place(name, text=PARTS):
    """`parts.py:line` of a definition."""
    return f"parts.py:{next(n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith(name))}"


def test_nothing_is_built(project):
    lines = lines_of("trainer.type=parts.py:Mine", "task=parts.py:Learns", "hooks=[parts.py:Acts]")
    assert "made" not in "\n".join(lines)
    assert not list(project.glob("runs"))


def test_phases_are_in_the_order_of_the_loop(project):
    lines = [line.split("  ")[0] for line in lines_of()]
    order = ["before_train", "while step < max_steps:", "before_step", "batch = next_train_inputs(iterator)"]
    order += ["result = train_step(batch)", "step += 1", "after_step", "evaluate", "before_eval", "eval_step"]
    order += ["eval_end", "after_eval", "write", "train_loop_end", "save", "after_save", "after_train", "close"]
    places = [lines.index(phase) for phase in order]
    assert places == sorted(places)
    assert set(HOOK_EVENTS) - {"on_anomaly"} <= set(lines)


def test_a_phase_without_overrides_is_one_line(project):
    lines = lines_of()
    assert "batch = next_train_inputs(iterator)  trainwright's own" in lines
    assert "after_save  no hook" in lines


def test_steps_during_the_backward_pass_are_shown(project):
    assert any(
        line.startswith("the optimizer's step, during the backward pass")
        for line in lines_of("trainer.optimizer_in_backward=true")
    )
    assert not mentions(lines_of(), "during the backward pass")


def test_limits_periods_and_batches_are_shown(project):
    lines = lines_of()
    assert "The loop: up to 30 steps; 8 samples a step in 2 micro-batches" in lines
    assert "evaluate  valid: every 10 steps, and at the end" in lines
    assert "write  every 10 steps, and at the end" in lines
    assert "save  once, at the end; and when valid/loss is the lowest so far" in lines
    first_of = lines_of("trainer.max_epochs=2")
    assert any("until the first of 30 steps, 2 epochs" in line for line in first_of)
    assert mentions(lines_of("data.eval={}", "checkpoint={}"), "data.eval")


def test_an_override_is_shown_with_its_line_and_first_words(project):
    lines = lines_of("trainer.type=parts.py:Mine")
    # A decorator's line is not where a reader looks: the def is.
    where = place("def next_train_inputs")
    assert below(lines, "batch = next_train_inputs(iterator)") == [f"* Mine.next_train_inputs {where} Takes"]


def test_calls_of_super_are_followed_in_their_order(project):
    lines = lines_of("trainer.type=parts.py:Further")
    acts = [line.split()[1] for line in below(lines, "eval_end")]
    assert acts == ["Further.eval_end", "Mine.eval_end", "Trainer.eval_end"]
    assert [line[0] for line in below(lines, "eval_end")] == ["*", "*", "-"]


def test_an_override_outside_of_the_phases_is_named_too(project):
    lines = lines_of("trainer.type=parts.py:Mine")
    assert below(lines, "also overridden")[0] == f"* Mine.save {place('def save')} Saves elsewhere too."


def test_construction_shows_what_builds_each_part(project):
    lines = lines_of()
    assert below(lines, "model") == [f"* parts.py:Net (run.yaml:2) {place('class Net')}"]
    assert below(lines, "data.eval")[0].startswith("* valid: parts.py:Data (run.yaml:3) ")
    assert below(lines, "writers")[0].startswith("- console (default) trainwright/writers/console.py:")


def test_a_trainer_that_builds_a_part_itself_comes_before_its_section(project):
    lines = lines_of("trainer.type=parts.py:Mine")
    first, second = below(lines, "model")
    assert first == f"* Mine.build_model {place('def build_model')} Makes a model of mine."
    assert mentions(second, "build")
    hooks = next(line for line in lines if line.startswith("hooks, in the order"))
    assert "it may add or remove hooks" in hooks


def test_a_task_overrides_sections_which_then_have_no_effect(project):
    lines = lines_of("task=parts.py:Learns")
    first, second = below(lines, "model")
    assert "Learns.build_model" in first
    assert "has no effect and will be rejected" in second
    assert any("Runs the model my way." in line for line in below(lines, "forward, for each micro-batch"))
    assert any("Collects." in line for line in below(lines, "aggregate_logs"))
    assert any(line.startswith("evaluate  the sets of Learns.build_dataset: every 10") for line in lines)


def test_hooks_act_in_their_order_with_their_periods(project):
    Path("act.py").write_text('def act(trainer):\n    """Acts."""\n')
    hooks = "hooks=[{type: every, steps: 7, call: act.py:act}, parts.py:Acts, parts.py:NoHook]"
    lines = lines_of(hooks)
    acts = below(lines, "after_step")
    assert acts[0].startswith("- TimeSteps.after_step trainwright/hooks/throughput.py:")
    assert acts[-2] == "* act act.py:1 every 7 steps: Acts."
    assert acts[-1].endswith("every 5 steps: Acts at times.")
    assert below(lines, "after_eval") == [f"* NoHook.after_eval {place('def after_eval')} Inherits from nothing."]


def test_the_events_of_a_hook_from_a_function_are_unknown(project):
    acts = below(lines_of("hooks=[parts.py:made_by_a_function]"), "hooks, in the order of their calls")
    assert acts[-1].endswith("returns a hook; its events are known only once it is built")


def test_the_default_hooks_are_those_that_a_run_gets(project):
    config = RunConfig.load("run.yaml")
    assert [type(hook) for hook in Build(config).hooks()] == list(DEFAULT_HOOKS)


def test_every_overridable_method_of_a_trainer_is_somewhere_in_the_story(project):
    names = [name for name, value in vars(Trainer).items() if not name.startswith("_") and callable(value)]
    methods = "\n".join(f"    def {name}(self, *rest): pass" for name in names if not name.startswith("build_"))
    builders = [name for name in vars(Trainer) if name.startswith("build_")]
    methods += "\n" + "\n".join(f"    @classmethod\n    def {name}(cls, *rest): pass" for name in builders)
    Path("all.py").write_text(f"from trainwright import Trainer\n\nclass All(Trainer):\n{methods}\n")
    text = "\n".join(lines_of("trainer.type=all.py:All"))
    assert [name for name in [*names, *builders] if f"All.{name}" not in text] == []


def test_missing_components_are_problems_and_do_not_stop_the_rest(project):
    Path("broken.py").write_text("def f(:\n")
    done = CliRunner().invoke(
        app, ["explain", "run.yaml", "model.type=parts.py:Nett", "trainer.optimizer.type=broken.py:Fast", "hooks=[no]"]
    )
    assert done.exit_code == 1
    assert mentions(done.output, "override model.type=", "Nett", "parts.py")
    assert "broken.py cannot be imported: SyntaxError" in done.output
    assert 'no hook "no"' in done.output
    assert "close" in done.output
    assert "3 parts of this run cannot be found" in done.output


def test_a_trainer_that_cannot_be_found_leaves_trainwrights_own(project):
    lines = lines_of("trainer.type=parts.py:Net")
    assert mentions(below(lines, "trainer"), "trainer.type", "parts.py")
    assert "eval_step  trainwright's own" in lines


@pytest.mark.parametrize("kind", list(Kind))
def test_every_written_project_explains_itself_in_plain_lines(kind, in_tmp, monkeypatch):
    shutil.copytree(template_folder(kind), "mine")
    monkeypatch.chdir("mine")
    done = CliRunner().invoke(app, ["explain", "run.yaml"])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    files = [
        path.as_posix()
        for folder in ("trainers", "models", "optimizers", "collators", "hooks")
        for path in Path(folder).glob("*.py")
    ]
    assert [file for file in files if f" {file}:" not in done.output] == []


def test_a_run_folder_is_explained_by_its_saved_config(project):
    Path("runs/first").mkdir(parents=True)
    RunConfig.load("run.yaml", ["trainer.max_steps=77"]).save("runs/first/config.yaml")
    done = CliRunner().invoke(app, ["explain", "runs/first"])
    assert done.exit_code == 0, done.output
    assert "up to 77 steps" in done.output


def test_in_a_terminal_only_remarks_are_cut(project):
    lines = explain(RunConfig.load("run.yaml"))
    plain, narrow = render(lines), render(lines, columns=130)
    assert max(map(len, narrow)) <= 130
    assert any(line.endswith("…") for line in narrow)
    for whole, cut in zip(plain, narrow, strict=True):
        assert cut.removesuffix("…").rstrip() in whole
    assert any("\x1b[" in line for line in render(lines, in_colour=True))


LLAMA_RUN = """
model:
  type: llama
  preset: tiny
  num_layers: 3
  lora: {match: "*.q_proj", rank: 4}
  freeze: ["model.layers.0.*"]
data: {train: {type: stdlib_code}}
trainer:
  max_steps: 3
  global_batch_size: 2
  optimizer:
    type: adamw
    groups: [{match: "*.lora_b", lr: 0.1}]
"""


@pytest.fixture
def llama(project):
    Path("run.yaml").write_text(LLAMA_RUN)
    return project


def test_rules_of_a_shipped_model_show_what_they_match_and_how_much_is_trained(llama):
    lines = lines_of()
    preset, lora, frozen, total = lines[(first := lines.index("model")) + 2 : first + 6]
    assert preset.startswith("preset tiny  vocab_size 512, hidden_size 64,")
    assert preset.endswith("but num_layers 3")
    layers = "model.layers.0.self_attn.q_proj, model.layers.1.self_attn.q_proj, …"
    assert lora == f'lora "*.q_proj"  adapters of rank 4: 3 layers ({layers})'
    assert frozen == 'freeze "model.layers.0.*"  11 parameters, 49,792 weights'
    assert total == "182,208 weights  of which 1,024 (0.562 %) are trained"
    assert 'group "*.lora_b"  lr 0.1: 2 parameters, 512 weights' in lines
    assert "the rest  the optimizer's own settings: 2 parameters, 512 weights" in lines


def test_what_explain_counts_is_what_training_gets(llama):
    trainer = Build(RunConfig.load("run.yaml"))
    parameters = list(trainer.model().parameters())
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    words = f"{sum(each.numel() for each in parameters):,} weights  of which {trained:,} "
    assert any(line.startswith(words) for line in lines_of())


def test_replacements_are_shown_but_not_applied_and_hide_later_counts(llama):
    lines = lines_of('model.replace={"layers.*.mlp": {type: "parts.py:Net"}}')
    told = 'replace "layers.*.mlp"  by parts.py:Net: 3 modules (model.layers.0.mlp, model.layers.1.mlp, …)'
    assert told in lines
    assert 'lora "*.q_proj"  adapters of rank 4' in lines
    assert 'group "*.lora_b"  lr 0.1' in lines
    assert not any(" weights" in line for line in lines)


def test_rules_of_a_user_model_are_shown_without_counts(project):
    lines = lines_of("model.freeze=inner.*", "trainer.optimizer.groups=[{match: '*.bias', lr: 1}]")
    assert 'freeze "inner.*"' in lines
    assert 'group "*.bias"  lr 1' in lines


def test_a_pretrained_folder_is_shown_with_its_files(llama):
    Llama.from_preset("tiny").save_pretrained("published")
    lines = lines_of("model={type: llama, pretrained: {folder: published, strict: false}}", "trainer.optimizer=adamw")
    assert any(
        re.match(r"pretrained published  from published: 1 file of weights, 0\.\d MB; strict False", one)
        for one in lines
    )
    assert "131,392 weights  of which all are trained" in lines
    lines = lines_of("model={type: llama, pretrained: org/name}", "trainer.optimizer=adamw")
    assert any(one.startswith("pretrained org/name  is not") for one in lines)
    assert not any(" weights" in one for one in lines)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.preset=tinny", "llama has no preset 'tinny'. Did you mean \"tiny\"?"),
        ("model.num_heads=5", "model: hidden_size 64 does not split into 5 heads"),
        ("model.wide=5", 'model: Llama has no argument "wide"'),
        ("model.freeze=nope", "model.freeze: no parameter matches 'nope'"),
        ("model.lora=3", "model.lora: must be a mapping, got 3"),
        ('model.lora={match: "*.no_proj"}', "model.lora.match: "),
        ("model.replace={mlp: nope}", 'no model "nope"'),
        ("trainer.optimizer.groups=[{match: '*norm*', lr: 1}]", "model.layers.0.input_layernorm.weight is frozen, "),
    ],
)
def test_wrong_rules_are_problems_and_do_not_stop_the_rest(llama, override, problem):
    done = CliRunner().invoke(app, ["explain", "run.yaml", override])
    assert done.exit_code == 1
    [line] = [line for line in done.output.splitlines() if line.strip().startswith("! ")]
    assert f"override {override}: " in line or "run.yaml:" in line
    assert problem in line
    assert "1 part of this run cannot be found or used" in done.output
    assert "The loop" in done.output


def test_the_group_files_of_a_run_are_listed(project):
    folder = project / "configs" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "often.yaml").write_text("every_steps: 1\n")
    text = "\n".join(render(explain(RunConfig.load("run.yaml", ["checkpoint=often"]))))
    assert mentions(text, "checkpoint: often", "configs/checkpoint/often.yaml", "override checkpoint=often")
    assert "Group files" not in "\n".join(render(explain(RunConfig.load("run.yaml"))))
