"""The pages on the APIs, done as a reader would: docs/customisation.md and those that begin "Coming from".

How a page is read is tests/test_docs.py's; scripts run in this process, which has torch imported already.
"""

import csv
import json
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.forked_program import run_script
from tests.test_docs import (
    DOCS,
    ForkingReader,
    _package_log_as_before,  # noqa: F401  # the fixture acts by itself
    blocks_of,
    without_root_handlers,
)

from trainwright import RunConfig, Trainer, build_trainer, load_checkpoint
from trainwright.api import experiments
from trainwright.checkpoint.store import CheckpointStore
from trainwright.config.builtin import BUILT_INS
from trainwright.config.trainer_options import TRAINER_OPTIONS
from trainwright.errors import TrainwrightError


class QuickReader(ForkingReader):
    """A reader whose scripts start at once."""

    def type(self, line):
        program, *arguments = shlex.split(line, comments=True)
        if program == "python":
            self.typed.append(line)
            self.shown += self.run_script(arguments)
        else:
            super().type(line)

    def run_script(self, arguments):
        before, folder = set(sys.modules), Path.cwd()
        self.monkeypatch.setattr(sys, "argv", arguments)
        self.monkeypatch.syspath_prepend(folder)
        self.capfd.readouterr()
        try:
            with without_root_handlers():
                runpy.run_path(arguments[0], run_name="__main__")
        except (SystemExit, TrainwrightError) as left:
            self.exit_code = 1
            print(left)
        finally:
            for name in [each for each in set(sys.modules) - before if (folder / f"{each}.py").is_file()]:
                del sys.modules[name]
        out, err = self.capfd.readouterr()
        return out + err

    def read_well(self, blocks):
        """Reads blocks whose commands all succeed, but for those of which the page says that they are rejected."""
        for language, text in blocks:
            if language:
                self.read([(language, text)])
                continue
            self.shown = ""
            for line in text.splitlines():
                self.exit_code = 0
                self.type(line)
                assert (self.exit_code != 0) == line.endswith("# rejected"), f"{line}\n{self.shown}"


class ApartReader(QuickReader):
    """A reader whose scripts run in children: Lightning changes the logging of its process."""

    def run_script(self, arguments):
        done = run_script(*arguments)
        self.exit_code = done.returncode
        return done.stdout + done.stderr


@pytest.fixture
def reader(in_tmp, monkeypatch, capfd):
    yield QuickReader(monkeypatch, capfd)
    # A reader's commands end with their process: what they have imported from the folder is nobody's afterwards.
    for name, module in list(sys.modules.items()):
        if "." not in name and Path(getattr(module, "__file__", None) or "/").is_relative_to(in_tmp):
            del sys.modules[name]


def lines(name):
    written = Path(f"runs/{name}/metrics.json").read_text("utf-8").splitlines()
    return [json.loads(line) for line in written]


def losses(name):
    return [line["loss"] for line in lines(name) if "loss" in line]


def valid_losses(name):
    return [line["valid/loss"] for line in lines(name) if "valid/loss" in line]


def kept(name):
    return set(CheckpointStore(Path(f"runs/{name}/checkpoints")).steps())


# I want to change …


def changes():
    """Each change on the page: heading → text."""
    parts = re.split(r"^##+ (.+)$", (DOCS / "customisation.md").read_text("utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {heading: text for heading, text in sections.items() if text.strip()}


PROJECT = blocks_of((DOCS / "customisation.md").read_text("utf-8").partition("\n## ")[0])
CHANGES = changes()


@dataclass(frozen=True)
class Plain:
    """The page's run as it stands: what any answer is compared with."""

    start: dict[str, torch.Tensor]
    losses: list[float]
    valid: list[float]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("plain"))
        for _, text in PROJECT:
            ForkingReader(monkeypatch, None).write(text)
        trainer = build_trainer(RunConfig.load("run.yaml", ["writers=[json]"]))
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train()
        return Plain(start, losses("run"), valid_losses("run"))


def is_another_update(name, plain):
    """The same start and the same data, but other losses once an update was made."""
    return losses(name)[0] == plain.losses[0] and losses(name)[1:] != plain.losses[1:]


def moved(name, plain):
    """The parameters that training has changed."""
    trained = load_checkpoint(f"runs/{name}").state_dict()
    return {key for key, value in plain.start.items() if not torch.equal(trained[key], value)}


def rates(name, key="lr"):
    return [line[key] for line in lines(name)]


CHECKS = {
    "Change the loss": lambda shown, plain: losses("loss")[0] != plain.losses[0],
    "Change the step": lambda shown, plain: is_another_update("step", plain),
    "Make several updates in one step": lambda shown, plain: {"lr/body", "lr/head"} <= lines("alternating")[0].keys(),
    "Add up several losses in one step": lambda shown, plain: losses("penalized")[0] > plain.losses[0],
    "Change the learning rate from a hook": lambda shown, plain: (
        [line["lr"] for line in lines("halved") if "lr" in line][-1] == lines("halved")[0]["lr"] / 2
    ),
    "Use LBFGS, Muon or schedule-free optimizers": lambda shown, plain: (
        losses("lbfgs")[-1] < losses("lbfgs")[0] and {"lr/muon", "lr/rest"} <= lines("matrices")[0].keys()
    ),
    "Change the batch of a step": lambda shown, plain: losses("inputs")[0] != plain.losses[0],
    "Train without a dataset": lambda shown, plain: (
        len(losses("made")) == 6 and losses("made")[0] != plain.losses[0] and "made by next_train_inputs" in shown
    ),
    "Save your own state": lambda shown, plain: (
        CheckpointStore(Path("runs/state/checkpoints")).read(6, "training")["task"]["shared"]["mean"].shape == (4,)
    ),
    "Use your own model": lambda shown, plain: len(list(load_checkpoint("runs/model").parameters())) == 2,
    "Replace a module of a model": lambda shown, plain: "GELU" in str(load_checkpoint("runs/part")),
    "Freeze parameters or train with LoRA": lambda shown, plain: (
        moved("frozen", plain) == {"head.weight", "head.bias"} and len(load_checkpoint("runs/lora").state_dict()) == 6
    ),
    "Start from existing weights": lambda shown, plain: losses("second")[0] < losses("first")[0],
    "Use your own optimizer": lambda shown, plain: lines("optimizer")[-1]["largest"] > 0,
    "Use several optimizers": lambda shown, plain: (
        (rates("two", "lr/body")[-1], rates("two", "lr/head")[-1]) == (0.0, 1e-3)
    ),
    "Set the learning rate of some parameters": lambda shown, plain: is_another_update("groups", plain),
    "Change the learning rate schedule": lambda shown, plain: (
        rates("cosine")[:2] == [0.005, 0.01] and rates("waves")[:3] == pytest.approx([1e-2, 5.5e-3, 1e-3])
    ),
    "Use a schedule with state": lambda shown, plain: (
        len(rates("plateau")) == len(rates("cycle")) == 6 and max(rates("cycle")) == pytest.approx(0.1, rel=0.1)
    ),
    "Clip gradients": lambda shown, plain: is_another_update("clipped", plain),
    "Accumulate gradients": lambda shown, plain: (
        losses("accumulated") == pytest.approx(plain.losses, rel=1e-5) and "8 samples (2 × 4 micro-batches)" in shown
    ),
    "Set the precision": lambda shown, plain: plain.losses != losses("bf16") == pytest.approx(plain.losses, rel=0.05),
    "Respond to NaN and loss spikes": lambda shown, plain: (
        losses("careful") == plain.losses and RunConfig.load("runs/careful/config.yaml").anomalies.spike == "skip"
    ),
    "Use your own dataset": lambda shown, plain: losses("data")[0] != plain.losses[0],
    "Split a dataset": lambda shown, plain: {"valid/loss", "test/loss"} <= lines("cut")[-1].keys(),
    "Change the collator": lambda shown, plain: 0 < abs(losses("collator")[0] - plain.losses[0]) < 0.05,
    "Build one component in a script": lambda shown, plain: True,  # the page shows what is printed
    "Use a built-in metric": lambda shown, plain: (
        {"valid/top1", "valid/f1", "valid/auroc"} <= lines("scores")[-1].keys()
    ),
    "Write a metric": lambda shown, plain: {"valid/accuracy", "valid/margin"} <= lines("metric")[-1].keys(),
    "Change the evaluation": lambda shown, plain: (
        [line["step"] for line in lines("evaluation") if "valid/surely_right" in line] == [3, 6]
    ),
    "Aggregate over an evaluation set": lambda shown, plain: lines("worst")[-1]["valid/worst_batch"] > plain.valid[-1],
    "Log a value": lambda shown, plain: lines("logged")[-1]["largest_input"] > 1,
    "Change the log line": lambda shown, plain: lines("line")[0]["perplexity"] > 1,
    "Write a writer": lambda shown, plain: "loss above 0.1 at step 6" in shown,
    "Log images, histograms and texts": lambda shown, plain: (
        lines("drawn")[-1]["summary"] == f"valid/loss is {plain.valid[-1]:.3f}"
        and any(Path("runs/drawn/tensorboard").iterdir())
    ),
    "Call a function every n steps": lambda shown, plain: (
        [line.get("head_norm", 0) > 0 for line in lines("watched")] == [False, True] * 3
    ),
    "Write a hook": lambda shown, plain: f"the lowest loss was {min(plain.valid):.3f}" in shown,
    "Stop early": lambda shown, plain: lines("early")[-1]["step"] == 8 and "has not improved" in shown,
    "Evaluate averaged weights": lambda shown, plain: (
        losses("averaged") == plain.losses != valid_losses("averaged") and valid_losses("averaged") != plain.valid
    ),
    "Call a function at the end": lambda shown, plain: f"notified is done: {plain.valid[-1]:.3f}" in shown,
    "Choose a variant of a section": lambda shown, plain: (
        (len(losses("longer")), len(losses("gentle"))) == (8, 6)
        and (rates("longer")[0], rates("gentle")[0]) == (1e-3, 3e-3)
    ),
    "Reference or remove a setting": lambda shown, plain: (
        RunConfig.load("runs/width-4/config.yaml").trainer.global_batch_size == 4
        and len(valid_losses("width-4")) == 1 < len(plain.valid)
    ),
    "Run code on one process only": lambda shown, plain: (
        Path("notes.txt").read_text() == "written once\n" and losses("noted") == pytest.approx(plain.losses, rel=1e-5)
    ),
    "Choose which checkpoints are kept": lambda shown, plain: {4, 5, 6} <= kept("kept") < {1, 2, 3, 4, 5, 6},
    "Run on several processes": lambda shown, plain: losses("two_processes") == pytest.approx(plain.losses, rel=1e-5),
    "Reduce memory": lambda shown, plain: (
        losses("recomputed") == plain.losses and "2 of 2 Linear are recomputed" in shown
    ),
    "Train from a script": lambda shown, plain: lines("notebook")[-1]["step"] == 6,
}
"""What each answer must have done, told by what was shown and by the losses of the run without it."""


@pytest.mark.parametrize("heading", CHANGES)
def test_each_change_is_answered_by_what_its_page_says(heading, reader, plain):
    for _, text in PROJECT:
        reader.write(text)
    reader.read_well(blocks_of(CHANGES[heading]))
    assert CHECKS[heading](reader.shown, plain), reader.shown


def test_more_than_thirty_changes_are_each_answered_in_under_ten_lines():
    assert len(CHANGES) > 30  # as the page says
    assert CHANGES.keys() == CHECKS.keys()
    for heading, text in CHANGES.items():
        files = [block.splitlines()[1:] for language, block in blocks_of(text) if language not in ("", "text")]
        commands = [block.splitlines() for language, block in blocks_of(text) if not language]
        assert commands, heading
        code = [line for block in [*files, *commands] for line in block if line.strip()]
        assert len(code) < 10, f"{heading}: {len(code)} lines"


# Coming from …


COMMUNITIES = ("easy_torch_tpu", "model_garden", "oumi", "swissarmytransformer", "libai")
COMMUNITIES += ("hf_trainer", "lightning", "accelerate", "torchtitan", "trl")

PEFT_TYPES = ("lora",)


def text_of(page):
    return (DOCS / f"coming_from_{page}.md").read_text("utf-8")


def test_every_community_has_a_page_with_the_same_parts():
    assert {path.stem for path in DOCS.glob("coming_from_*.md")} == {f"coming_from_{name}" for name in COMMUNITIES}
    parts = ["A short example", "Side by side", "What works in the same way", "What trainwright adds", "Differences"]
    for name in COMMUNITIES:
        assert re.findall(r"^## (.+)$", text_of(name), flags=re.MULTILINE) == parts
        rows = [line for line in text_of(name).splitlines() if line.startswith("| ")]
        assert re.fullmatch(r"\| [\w -]+ \| trainwright \|", rows[0])
        assert all(row.count(" | ") == 1 for row in rows)


SECTIONS = ("data", "trainer", "evaluation", "checkpoint", "log", "runtime", "anomalies", "preemption", "watchdog")


@pytest.mark.parametrize("name", COMMUNITIES)
def test_the_settings_and_components_that_a_table_names_exist(name):
    rows = [line.split(" | ")[-1] for line in text_of(name).splitlines() if line.startswith("| ")]
    quoted = " ".join(quote for row in rows for quote in re.findall(r"`([^`]*)`", row))
    for section, key in re.findall(rf"(?<![\w.])({'|'.join(SECTIONS)})\.([a-z_0-9]+)", quoted):
        known = {*RunConfig.model_fields[section].annotation.model_fields}
        if section == "trainer":
            known.update(*(options.model_fields for options in TRAINER_OPTIONS.values()))
        is_attribute = section == "trainer" and (
            hasattr(Trainer, key) or key in ("model", "ranks", "device", "storage")
        )
        assert key in known or is_attribute or f"{section}.{key}" == "log.txt", f"{section}.{key}"
    for found in re.findall(r"\{type: ([a-z_]+)[,}]", quoted):
        assert any(found in names for names in (*BUILT_INS.values(), PEFT_TYPES)), found


def test_the_page_for_easy_torch_tpu_works_from_the_first_line_to_the_last(reader):
    reader.read_well(blocks_of(text_of("easy_torch_tpu")))
    assert {"logit_size", "stage", "largest_weight", "samples_seen", "hours"} <= lines("run")[-1].keys()
    assert losses("run") == losses("steps") == losses("less")
    assert losses("halves") == losses("whole")


def is_equal(run, other):
    """True if both runs have the same weights, bit for bit."""
    first, second = (load_checkpoint(f"runs/{name}").state_dict() for name in (run, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], value) for name, value in second.items())


def test_the_page_for_oumi_works_from_the_first_line_to_the_last(reader):
    reader.read_well(blocks_of(text_of("oumi")))
    assert is_equal("halves", "whole")
    assert "valid/accuracy" in lines("streamed")[-1]


def test_the_page_for_torchtitan_works_from_the_first_line_to_the_last(reader):
    reader.read_well(blocks_of(text_of("torchtitan")))
    assert losses("tensor") == pytest.approx(losses("run"), rel=1e-5)
    assert losses("halves")[:10] == losses("whole")
    assert losses("own") == pytest.approx(losses("own-alone"), rel=1e-5)


def test_the_page_for_trl_works_from_the_first_line_to_the_last(reader):
    """With TRL on the path (tests/test_integrations.py) its program is run too, and its losses are compared."""
    pytest.importorskip("transformers")
    blocks = blocks_of(text_of("trl"))
    if find_spec("trl") is None:
        blocks = [block for block in blocks if "python there_sft.py" not in block[1] and "difference" not in block[1]]
    reader.read_well(blocks)
    assert losses("smaller") == pytest.approx(losses("sft"), rel=1e-5)
    assert losses("wide") == pytest.approx(losses("sft"), rel=1e-5)
    assert losses("longer") == losses("sft")


def test_the_page_for_model_garden_works_from_the_first_line_to_the_last(reader, monkeypatch):
    monkeypatch.setattr(experiments, "_registered", {})
    reader.read_well(blocks_of(text_of("model_garden")))
    assert (lines("second")[-1]["step"], lines("second")[-1]["lr"]) == (8, 1e-3)
    assert "valid/loss" not in lines("second")[-1]
    assert [line["step"] for line in lines("driven") if "valid/error" in line] == [8]
    assert lines("driven")[-1]["valid/samples"] == 20
    assert lines("driven")[0]["learning_rate"] == 1e-2


def test_the_page_for_swissarmytransformer_works_from_the_first_line_to_the_last(reader):
    reader.read_well(blocks_of(text_of("swissarmytransformer")))
    first, again = lines("points"), lines("stopped")
    assert [line["loss"] for line in first] == [line["loss"] for line in again]
    assert first[-1]["valid/accuracy"] == again[-1]["valid/accuracy"]
    assert lines("finetuned")[0]["loss"] < first[0]["loss"]
    assert {"time/batch", "test/accuracy"} <= lines("cut")[-1].keys()
    assert lines("notebook")[-1]["step"] == 6


def test_the_page_for_libai_works_from_the_first_line_to_the_last(reader):
    reader.read_well(blocks_of(text_of("libai")))
    assert "drift" in lines("stepped")[-1]
    assert (lines("quick")[-1]["lr"], lines("quick")[-1]["step"]) == (0.5, 6)
    assert losses("recorded") == losses("run")
    assert 0 <= lines("run")[-1]["some_accuracy"] <= 1
    assert RunConfig.load("runs/run/config.yaml").trainer.optimizer.type == "trainwright.optim.adamw:AdamW"


def test_the_page_for_hf_trainer_works_and_both_sides_train_alike(reader):
    transformers = pytest.importorskip("transformers")
    reader.read_well(blocks_of(text_of("hf_trainer")))
    history = json.loads(Path("theirs-1/checkpoint-27/trainer_state.json").read_text())["log_history"]
    assert losses("run") == pytest.approx([line["loss"] for line in history if "loss" in line], rel=1e-6)
    evaluated = [(line["eval_loss"], line["eval_accuracy"]) for line in history if "eval_loss" in line]
    ours = [(line["valid/loss"], line["valid/accuracy"]) for line in lines("run") if "valid/loss" in line]
    assert ours == [pytest.approx(each, rel=1e-6) for each in evaluated]
    best = transformers.AutoModelForSequenceClassification.from_pretrained("theirs-1/best").state_dict()
    weights = load_checkpoint("runs/run", step="best").state_dict()
    torch.testing.assert_close(weights, best, rtol=1e-5, atol=1e-6)
    assert losses("accumulated") == pytest.approx(losses("run"), rel=1e-4)
    if transformers.__version__.startswith("5.23."):  # of which the page says it
        history = json.loads(Path("theirs-2/checkpoint-27/trainer_state.json").read_text())["log_history"]
        first = lines("run")[0]
        assert history[0]["loss"] == pytest.approx(2 * first["loss"], rel=1e-5)
        assert history[0]["grad_norm"] == pytest.approx(2 * first["grad_norm"], rel=1e-3)
    assert is_equal("halves", "whole")
    assert lines("weighted")[-1]["step"] < 27


def test_the_page_for_lightning_works_and_both_sides_train_alike(in_tmp, monkeypatch, capfd):
    ApartReader(monkeypatch, capfd).read_well(blocks_of(text_of("lightning")))
    with Path("theirs/lightning_logs/version_0/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    theirs = [(float(row["val_loss"]), float(row["val_accuracy"])) for row in rows if row["val_loss"]]
    ours = [(line["valid/loss"], line["valid/accuracy"]) for line in lines("run") if "valid/loss" in line]
    assert ours == [pytest.approx(each, rel=1e-5) for each in theirs]
    assert rates("run") == pytest.approx([float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]][::2], rel=1e-6)
    trained = next(float(row["train_loss"]) for row in rows if row["train_loss"])
    assert trained != pytest.approx(losses("run")[0], rel=1e-2)  # that of the last micro-batch
    theirs = torch.load("theirs/best.ckpt", weights_only=True)["state_dict"]
    weights = load_checkpoint("runs/run", step="best").state_dict()
    torch.testing.assert_close(weights, {name.removeprefix("net."): each for name, each in theirs.items()})
    assert [line["loss"] for line in lines("unsplit")] == pytest.approx(losses("run"), rel=1e-5)
    assert is_equal("halves", "whole")
    assert losses("manual")[0] == losses("run")[0] != losses("manual")[-1]


def test_the_page_for_accelerate_works_and_both_sides_train_alike(in_tmp, monkeypatch, capfd):
    ApartReader(monkeypatch, capfd).read_well(blocks_of(text_of("accelerate")))
    theirs = json.loads(Path("theirs.json").read_text())
    of_updates = [sum(pair) / 2 for pair in zip(theirs["losses"][::2], theirs["losses"][1::2], strict=True)]
    assert losses("ours") == pytest.approx(of_updates, rel=1e-5)
    assert [line["valid/accuracy"] for line in lines("ours") if "valid/accuracy" in line] == theirs["accuracies"]
    weights = load_checkpoint("runs/ours", model=runpy.run_path("parts.py")["Net"](16)).state_dict()
    torch.testing.assert_close(weights, torch.load("theirs.pt", weights_only=True))
    assert losses("two") == pytest.approx(losses("run"), rel=1e-5)
    assert losses("halves") == pytest.approx(losses("run"), rel=1e-5)
    assert {"norm_squared"} <= lines("penalized")[0].keys()
    assert not Path("runs/left/checkpoints").exists()
