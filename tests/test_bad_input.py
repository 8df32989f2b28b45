"""Mistakes that people make, each one clear error before anything is lost: the message's text is asserted.

Config files with mistakes are in tests/config, checkpoints with mistakes in tests/checkpoint; here is the rest.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.messages import mentions, raises

from trainwright import Hook, RunConfig, Task, Trainer, build_trainer
from trainwright.errors import CheckpointError, ComponentError, ConfigError, DataError, TrainwrightError

PROJECT = Path(__file__).parent / "project"
BASE = (PROJECT / "run.yaml").read_text()


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", *overrides])


def fails(tmp_path, *overrides, trainer=None, error=TrainwrightError):
    """Trains, and returns the message that comes instead."""
    with pytest.raises(error) as caught:
        build_trainer(load(tmp_path, *overrides), trainer).train()
    return str(caught.value)


def project_with(tmp_path, source, *, name="mine.py", **replacements):
    """A copy of the small project with one more file; returns its run.yaml."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "parts.py").write_text((PROJECT / "parts.py").read_text())
    (folder / name).write_text(source)
    text = BASE
    for old, new in replacements.values():
        assert old in text
        text = text.replace(old, new)
    (folder / "run.yaml").write_text(f"{text}output_dir: {tmp_path}\n")
    return folder / "run.yaml"


def test_an_empty_dataset(tmp_path):
    assert mentions(fails(tmp_path, "data.train.size=0"), "data.train")
    assert "data.eval.valid: Points is empty" in fails(tmp_path, "data.eval.valid.size=0")
    assert not (tmp_path / "small").exists()


def test_a_batch_larger_than_the_data(tmp_path):
    message = fails(tmp_path, "data.train.size=7")
    assert mentions(message, "trainer.global_batch_size", "8", "7", "data.train")
    assert "Use at most 7." in message


def test_a_missing_file(tmp_path):
    with raises(ConfigError, "nowhere.yaml"):
        RunConfig.load(tmp_path / "nowhere.yaml")
    message = fails(tmp_path, "model={type: 'models/nowhere.py:Net'}", error=ComponentError)
    assert "models/nowhere.py" in message


def test_a_component_that_raises_in_its_constructor_shows_the_users_line(tmp_path):
    source = (
        "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        raise OSError('no weights')\n"
    )
    path = project_with(tmp_path, source, model=("{type: parts.py:Net, width: 8, dropout: 0.1}", "{type: mine.py:Net}"))
    with raises(ComponentError, "mine.py", "4", at="run.yaml:3"):
        build_trainer(RunConfig.load(path))


def test_a_model_whose_forward_lacks_or_needs_an_argument(tmp_path):
    source = (
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 2)\n\n"
        "    def forward(self, features, labels, mask):\n        return self.layer(features)\n"
    )
    path = project_with(tmp_path, source, model=("{type: parts.py:Net, width: 8, dropout: 0.1}", "{type: mine.py:Net}"))
    with pytest.raises(DataError) as caught:
        build_trainer(RunConfig.load(path)).train()
    message = str(caught.value)
    assert mentions(message, "Net.forward", "mine.py:9")
    assert "the batch has x, labels, and the method accepts features, labels, mask" in message


def test_a_trainers_forward_that_lacks_an_argument(tmp_path):
    class Mine(Trainer):
        def forward(self, x):
            return self.model(x)["logits"].mean()

    message = fails(tmp_path, trainer=Mine)
    assert mentions(message, "Mine.forward")
    assert "test_bad_input.py:" in message


def test_a_collator_that_returns_lists(tmp_path):
    class Lists(Trainer):
        @classmethod
        def build_collator(cls, build):
            return lambda samples: {
                "x": [each["x"] for each in samples],
                "labels": [each["labels"] for each in samples],
            }

    message = fails(tmp_path, "trainer.micro_batch_size=8", trainer=Lists, error=DataError)
    assert mentions(message, "tensor")
    assert "x (list)" in message


def test_a_metric_that_no_evaluation_returns(tmp_path):
    message = fails(tmp_path, "checkpoint.keep_best={metric: valid/f1}", error=ConfigError)
    assert mentions(message, "valid/f1", "checkpoint.keep_best.metric", "valid/loss")
    assert "override checkpoint.keep_best=" in message
    # The step whose evaluation it was is not lost.
    assert build_trainer(load(tmp_path)).step == 5


class Returning(Trainer):
    returned = None

    def forward(self, **batch):
        return type(self).returned(self.model(**batch))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda outputs: None, "forward returned None. Return a loss, (loss, metrics)"),
        (lambda outputs: outputs["logits"], "and Net has no criterion"),
        (lambda outputs: outputs["logits"].mean().detach(), "The loss has no gradient"),
        (lambda outputs: (outputs["loss"], 1, 2), "A tuple must be (loss, metrics)"),
        (lambda outputs: {"logits": outputs["logits"]}, None),
        (lambda outputs: "loss", "forward returned a str"),
    ],
)
def test_what_forward_may_not_return(tmp_path, returned, message):
    class Mine(Returning):
        @classmethod
        def build_model(cls, build):
            model = build.model()
            del model.criterion  # so that nothing but forward can make the loss
            model.criterion = None
            model.forward = lambda x, labels: {
                "loss": torch.nn.functional.cross_entropy(model.layers(x), labels),
                "logits": model.layers(x),
            }
            return model

    Mine.returned = staticmethod(returned)
    text = fails(tmp_path, "evaluation.metrics={}", trainer=Mine)
    assert (message or "there is no `criterion` on the model") in text


def test_parameters_that_no_optimizer_or_two_optimizers_own(tmp_path):
    def optimizers(*globs):
        entries = ", ".join(
            f"o{number}: {{optimizer: {{type: sgd, lr: 0.1}}, match: '{glob}'}}" for number, glob in enumerate(globs)
        )
        return ("trainer.optimizer=null", "trainer.schedule=null", f"trainer.optimizers={{{entries}}}")

    assert mentions(fails(tmp_path, *optimizers("layers.0.*"), error=ConfigError), "layers.3.weight")
    assert "two optimizers own it: o0 and o1" in fails(tmp_path, *optimizers("layers.*", "*.bias"), error=ConfigError)


def test_labels_outside_the_classes(tmp_path):
    class Shifted(Trainer):
        def forward(self, **batch):
            return self.model(batch["x"], batch["labels"] + 1)

    message = fails(tmp_path, trainer=Shifted)
    assert "A label is out of range: Target 2 is out of bounds." in message


def test_a_full_disk(tmp_path):
    class Full(Hook):
        def after_step(self):
            # A file where the checkpoints' folder should be: every write below it fails.
            (self.trainer.folder / "checkpoints").write_text("")

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Full()]

    message = fails(tmp_path, trainer=Mine, error=CheckpointError)
    assert "checkpoints" in message


def test_a_log_that_cannot_be_written_any_more(tmp_path):
    trainer = build_trainer(load(tmp_path))
    (writer,) = trainer.context.writers
    writer._file = Path("/dev/full").open("w", encoding="utf-8")  # noqa: SIM115 # the writer closes it
    with raises(TrainwrightError, "metrics.json"):
        trainer.train()


def test_an_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "small").write_text("a file, not a folder")
    assert mentions(fails(tmp_path, error=ConfigError), "output_dir")


def test_a_run_folder_of_another_config(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    message = fails(tmp_path, "trainer.optimizer.lr=0.5", error=CheckpointError)
    assert "override trainer.optimizer.lr=0.5: trainer.optimizer.lr: 0.01 → 0.5" in message


def test_a_checkpoint_of_another_model(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=2")).train()
    with raises(CheckpointError, "layers.0.bias", "8", "16"):
        build_trainer(load(tmp_path, "model.width=16"), accept_changes=True)


def test_a_broken_install_of_an_extra(tmp_path, monkeypatch):
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").write_text(
        "raise ImportError('libgomp.so.1: cannot open shared object file')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    message = fails(tmp_path, "data.train={type: digits}", "model.width=8")
    assert "scikit-learn" in message
    assert "pip install" in message


def test_a_sample_that_cannot_be_read_is_named(tmp_path):
    source = (
        "class Broken:\n    def __len__(self):\n        return 40\n\n"
        "    def __getitem__(self, index):\n        return {}[index]\n"
    )
    train = ("{type: parts.py:Points, size: 50, noise: 0.1}", "{type: mine.py:Broken}")
    path = project_with(tmp_path, source, train=train)
    with pytest.raises(KeyError) as caught:
        build_trainer(RunConfig.load(path)).train()
    assert re.fullmatch(r"while reading sample \d+ of Broken", caught.value.__notes__[0])


def test_a_rate_that_is_not_a_number(tmp_path):
    message = fails(tmp_path, "trainer.optimizer.lr=fast", error=ConfigError)
    text = "override trainer.optimizer.lr=fast: trainer.optimizer.lr: must be a number, got the text 'fast'."
    assert message == text


def test_a_train_step_that_returns_nothing(tmp_path):
    class Mine(Trainer):
        def train_step(self, batch):
            super().train_step(batch)

    assert mentions(fails(tmp_path, trainer=Mine), "train_step", "grad_norm")


def test_a_metric_named_like_the_loops_own(tmp_path):
    class Mine(Trainer):
        def forward(self, **batch):
            return self.model(**batch)["loss"], {"lr": 3.0}

    assert "The metric name 'lr' is reserved" in fails(tmp_path, "evaluation.metrics={}", trainer=Mine)


def test_an_eval_step_that_returns_no_mapping(tmp_path):
    class Mine(Trainer):
        def eval_step(self, batch):
            return 1.0

    assert mentions(fails(tmp_path, trainer=Mine), "eval_step")


def test_a_batch_that_is_not_a_mapping(tmp_path):
    class Tuples(Trainer):
        @classmethod
        def build_collator(cls, build):
            return lambda samples: tuple(torch.stack([each[key] for each in samples]) for key in ("x", "labels"))

    message = fails(tmp_path, trainer=Tuples, error=DataError)
    assert "The batch is a tuple, but model(**batch) needs a mapping" in message
    assert issubclass(Task, object)


# Mutated files: whatever is in one, the answer is a config or a ConfigError that names a place.

LINES = BASE.splitlines(keepends=True)
SNIPPETS = [
    "",
    ":",
    "- ",
    "\t",
    "{",
    "}",
    "[",
    "]",
    "'",
    '"',
    "&a ",
    "*a",
    "!!python/object:os.system ",
    "|",
    ">",
    "%",
    "@",
]
SNIPPETS += [
    "null",
    "true",
    "1e400",
    "-1",
    ".nan",
    "0x1F",
    "é",
    "\x00",
    "extends: run.yaml\n",
    "type: x\n",
    "? [a]\n",
    "<<: {}",
]


@st.composite
def mutated(draw):
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(lines) - 1))
        act = draw(st.sampled_from(["insert", "replace", "delete", "swap", "repeat", "cut"]))
        column = draw(st.integers(0, len(lines[place])))
        snippet = draw(st.sampled_from(SNIPPETS) | st.text(max_size=4))
        if act == "insert":
            lines[place] = lines[place][:column] + snippet + lines[place][column:]
        elif act == "replace":
            lines[place] = lines[place][:column] + snippet + lines[place][column + len(snippet) :]
        elif act == "delete":
            lines[place] = ""
        elif act == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[place], lines[other] = lines[other], lines[place]
        elif act == "repeat":
            lines.insert(place, lines[place])
        else:
            lines[place] = lines[place][:column]
    return "".join(lines)


def check_mutated(folder, text):
    path = folder / "mutated.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        config = RunConfig.load(path)
    except ConfigError as error:
        assert re.search(r"mutated\.yaml:\d+", str(error)), str(error)  # noqa: PT017 # any other error fails by itself
    else:
        config.save(folder / "saved.yaml")
        assert RunConfig.load(folder / "saved.yaml") == config


@settings(max_examples=400)
@given(text=mutated())
def test_mutated_files_are_a_config_or_an_error_with_its_location(tmp_path_factory, text):
    check_mutated(tmp_path_factory.getbasetemp(), text)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(text=mutated())
def test_ten_thousand_mutated_files(tmp_path_factory, text):
    check_mutated(tmp_path_factory.getbasetemp(), text)


def test_the_messages_hold_no_json_or_pydantic(tmp_path):
    message = fails(tmp_path, "trainer.max_steps=soon", error=ConfigError)
    assert "pydantic" not in message
    assert "override trainer.max_steps=soon" in message
    assert json.dumps(message)
