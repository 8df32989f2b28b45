"""The pages on the doors, done as a reader would: docs/customisation.md and the five that begin "Coming from".

How a page is read is tests/test_docs.py's; scripts run in this process, which has torch imported already.
"""

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from tests.test_docs import DOCS, Reader, _package_log_as_before, blocks_of  # noqa: F401  # the fixture acts by itself

from trainwright import load_checkpoint
from trainwright.checkpoint.store import CheckpointStore

class QuickReader(Reader):
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
            runpy.run_path(arguments[0], run_name="__main__")
        finally:
            for name in [each for each in set(sys.modules) - before if (folder / f"{each}.py").is_file()]:
                del sys.modules[name]
        out, err = self.capfd.readouterr()
        return out + err

    def read_well(self, blocks):
        """Reads blocks whose commands all succeed."""
        for language, text in blocks:
            if language:
                self.read([(language, text)])
                continue
            self.shown = ""
            for line in text.splitlines():
                self.exit_code = 0
                self.type(line)
                assert self.exit_code == 0, f"{line}\n{self.shown}"


@pytest.fixture
def reader(in_tmp, monkeypatch, capfd):
    return QuickReader(monkeypatch, capfd)


def lines(name):
    written = Path(f"runs/{name}/metrics.json").read_text("utf-8").splitlines()
    return [json.loads(line) for line in written]


def losses(name):
    return [line["loss"] for line in lines(name) if "loss" in line]


def steps(name):
    return CheckpointStore(Path(f"runs/{name}/checkpoints")).steps()


def config_of(name):
    return Path(f"runs/{name}/config.yaml").read_text("utf-8")


# I want to change …


def wishes():
    """Each wish of the page: heading → text."""
    parts = re.split(r"^##+ (.+)$", (DOCS / "customisation.md").read_text("utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {heading: text for heading, text in sections.items() if text.strip()}


PROJECT = blocks_of((DOCS / "customisation.md").read_text("utf-8").partition("\n## ")[0])
WISHES = wishes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses and the model of the page's run as it stands."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("plain"))
        reader = Reader(monkeypatch, None)
        for _, text in PROJECT:
            reader.write(text)
        from trainwright import RunConfig, build_trainer

        trainer = build_trainer(RunConfig.load("run.yaml", ["writers=[json]"]))
        trainer.train()
        return losses("run"), trainer.model.state_dict()


def changed(name, plain):
    """The parameters whose trained values differ from those of the plain run, which began with the same ones."""
    weights = load_checkpoint(f"runs/{name}").state_dict()
    return {key for key, value in plain[1].items() if not torch.equal(weights.get(key, torch.zeros(0)), value)}


def differs_from_the_second_step(name, plain):
    """The same start and the same data, but another update."""
    assert losses(name)[0] == plain[0][0]
    assert losses(name)[1:] != plain[0][1:]


def same(name, plain):
    assert losses(name) == plain[0]


def check_lora(reader, plain):
    start = torch.load  # noqa: F841


CHECKS = {
    "the loss": lambda shown, plain: losses("loss")[0] != plain[0][0],
    "the step": lambda shown, plain: losses("step")[0] == plain[0][0] and losses("step")[1:] != plain[0][1:],
    "several updates in one step": lambda shown, plain: {"lr/body", "lr/head"} <= lines("alternating")[0].keys(),
    "what goes into a step": lambda shown, plain: losses("inputs")[0] != plain[0][0],
    "the model": lambda shown, plain: len(list(load_checkpoint("runs/model").parameters())) == 2,
    "a part of a model that I did not write": lambda shown, plain: "GELU" in str(load_checkpoint("runs/part")),
    "which weights are trained": lambda shown, plain: (
        losses("frozen")[1:] != plain[0][1:] and any("lora" in name for name in load_checkpoint("runs/lora").state_dict())
    ),
    "the weights that it begins with": lambda shown, plain: losses("second")[0] < losses("first")[0],
    "the optimizer": lambda shown, plain: lines("optimizer")[-1]["largest"] > 0,
    "several optimizers": lambda shown, plain: (lines("two")[-1]["lr/body"], lines("two")[-1]["lr/head"]) == (0, 1e-3),
    "another rate for some parameters": lambda shown, plain: (
        losses("groups")[0] == plain[0][0] and losses("groups")[1:] != plain[0][1:]
    ),
    "the schedule": lambda shown, plain: (
        [line["lr"] for line in lines("cosine")[:2]] == [0.005, 0.01]
        and [line["lr"] for line in lines("waves")[:3]] == pytest.approx([1e-2, 5.5e-3, 1e-3])
    ),
    "gradient clipping": lambda shown, plain: "max_grad_norm: 0.5" in config_of("clipped"),
    "gradient accumulation": lambda shown, plain: losses("accumulated") == pytest.approx(plain[0], rel=1e-5),
    "the precision": lambda shown, plain: losses("bf16") != plain[0] and losses("bf16") == pytest.approx(plain[0], rel=0.05),
    "what happens on nan": lambda shown, plain: losses("careful") == plain[0],
    "the data": lambda shown, plain: losses("data")[0] != plain[0][0],
    "which rows are kept for evaluation": lambda shown, plain: {"valid/loss", "test/loss"} <= lines("cut")[-1].keys(),
    "the collator": lambda shown, plain: losses("collator")[0] != plain[0][0],
    "a metric": lambda shown, plain: {"valid/accuracy", "valid/margin"} <= lines("metric")[-1].keys(),
    "the evaluation": lambda shown, plain: (
        [line["step"] for line in lines("evaluation") if "valid/surely_right" in line] == [3, 6]
    ),
    "a number that no mean gives": lambda shown, plain: lines("median")[-1]["valid/median_loss"] > 0,
    "what is logged": lambda shown, plain: lines("logged")[-1]["largest_input"] > 1,
    "the line of the log itself": lambda shown, plain: lines("line")[0]["perplexity"] > 1,
    "who is told": lambda shown, plain: "still learning at 6" in shown,
    "a function every n steps": lambda shown, plain: ["head_norm" in line for line in lines("watched")] == [False, True] * 3,
    "an act at another moment": lambda shown, plain: "the lowest loss was 0." in shown,
    "when it stops": lambda shown, plain: lines("early")[-1]["step"] == 8 and "has not improved" in shown,
    "averaged weights": lambda shown, plain: (
        losses("averaged") == plain[0] and "Average" in str(CheckpointStore(Path("runs/averaged/checkpoints")))
    ),
    "being told that it is done": lambda shown, plain: "notified is done: 0." in shown,
    "which checkpoints are kept": lambda shown, plain: {4, 5, 6} <= set(steps("kept")) < {1, 2, 3, 4, 5, 6},
    "on how many processes, and how the model is split": lambda shown, plain: (
        losses("two_processes") == pytest.approx(plain[0], rel=1e-5)
    ),
    "how much memory it takes": lambda shown, plain: losses("recomputed") == plain[0],
    "nothing but a script": lambda shown, plain: lines("notebook")[-1]["step"] == 6,
}
"""What each answer must have done: of what was shown, and of the losses and weights of the run without it."""


@pytest.mark.parametrize("heading", WISHES)
def test_each_wish_is_answered_by_what_its_page_says(heading, reader, plain):
    for _, text in PROJECT:
        reader.write(text)
    reader.read_well(blocks_of(WISHES[heading]))
    assert CHECKS[heading](reader.shown, plain), reader.shown


def test_twenty_wishes_and_more_are_each_answered_in_under_ten_lines():
    assert len(WISHES) >= 20
    assert WISHES.keys() == CHECKS.keys()
    for heading, text in WISHES.items():
        files = [block.splitlines()[1:] for language, block in blocks_of(text) if language not in ("", "text")]
        commands = [block.splitlines() for language, block in blocks_of(text) if not language]
        assert commands, heading
        code = [line for block in [*files, *commands] for line in block if line.strip()]
        assert len(code) < 10, f"{heading}: {len(code)} lines"
