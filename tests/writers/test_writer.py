"""The contract of a writer: what it is told, when, and what it may hold."""

import logging

import pytest
import torch
from tests.faults.runs import config_of
from tests.messages import check_message
from tests.project.parts import Net

from trainwright import EventStorage, Hook, RunConfig, Trainer, Writer, build_trainer, get_event_storage
from trainwright.writers.writer import RunInfo

QUICK = ("data.eval={}", "evaluation={}", "log.every_steps=1", "trainer.schedule={type: constant}")


def make(folder, *overrides, writers=(), hooks=(), trainer=Trainer, **rest):
    class Written(trainer):
        @classmethod
        def build_writers(cls, build):
            return [*build.writers(), *writers]

        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

    return build_trainer(config_of(folder, *QUICK, *overrides), Written, **rest)


class Recording(Writer):
    """Records its calls."""

    def __init__(self, calls=None):
        self.calls = [] if calls is None else calls
        self.run = None

    def begin(self, run):
        self.run = run
        self.calls.append("begin")

    def write(self, storage):
        self.calls.append(storage.line["step"])

    def close(self):
        self.calls.append("close")


class Noting(Hook):
    def __init__(self, calls):
        self.calls = calls

    def before_train(self):
        self.calls.append("before_train")


def test_a_writer_without_a_write_says_what_to_override():
    class Silent(Writer):
        pass

    with pytest.raises(NotImplementedError, match=r"Silent must override write\(storage\)"):
        Silent().write(EventStorage())
    Silent().close()


def test_begin_comes_first_and_describes_the_run(tmp_path):
    writer = Recording()
    trainer = make(tmp_path / "group" / "run", "trainer.max_steps=2", writers=[writer], hooks=[Noting(writer.calls)])
    trainer.train()
    assert writer.calls == ["begin", "before_train", 1, 2, "close"]
    run = writer.run
    assert (run.name, run.folder, run.step, run.is_resumed) == ("run", tmp_path / "group" / "run", 0, False)
    assert run.config == trainer.config
    assert len(run.id) == 10
    assert run.id.isalnum()


def test_a_resumed_run_keeps_its_id_and_tells_its_step_and_fresh_changes_the_id(tmp_path):
    first, second, third, fourth = Recording(), Recording(), Recording(), Recording()
    make(tmp_path / "run", "trainer.max_steps=2", writers=[first]).train()
    make(tmp_path / "run", "trainer.max_steps=4", writers=[second]).train()
    assert second.calls == ["begin", 3, 4, "close"]
    assert (second.run.id, second.run.step, second.run.is_resumed) == (first.run.id, 2, True)
    make(tmp_path / "run", "trainer.max_steps=4", writers=[third]).train()
    assert third.calls == []  # nothing is left to do
    make(tmp_path / "run", "trainer.max_steps=2", writers=[fourth], fresh=True).train()
    assert (fourth.run.step, fourth.run.is_resumed) == (0, False)
    assert fourth.run.id != first.run.id


class Stumbling(Trainer):
    def train_step(self, batch):
        if self.step == 1:
            raise ArithmeticError("stumbled")
        return super().train_step(batch)


def test_a_run_that_died_before_its_first_checkpoint_keeps_its_id_unless_its_settings_change(tmp_path):
    ids = []
    for rate in ("1e-2", "1e-2", "1e-3"):
        writer = Recording()
        trainer = make(tmp_path / "run", f"trainer.optimizer.lr={rate}", writers=[writer], trainer=Stumbling)
        with pytest.raises(ArithmeticError):
            trainer.train()
        assert writer.calls == ["begin", 1, "close"]
        assert writer.run.step == 0
        ids.append(writer.run.id)
    assert ids[0] == ids[1] != ids[2]


def test_a_step_that_was_saved_but_not_written_is_still_to_come(tmp_path):
    class Failing(Hook):
        def after_eval(self, logs):
            raise ArithmeticError("no")

    overrides = (
        "trainer.max_steps=4",
        "data.eval={valid: {type: parts.py:Points, size: 9}}",
        "checkpoint.every_steps=2",
    )
    with pytest.raises(ArithmeticError):
        make(tmp_path / "run", *overrides, hooks=[Failing()]).train()
    writer = Recording()
    make(tmp_path / "run", *overrides, writers=[writer]).train()
    assert writer.run.step == 3
    assert writer.calls == ["begin", 4, "close"]


def test_an_error_in_begin_ends_the_run_before_its_first_step_and_closes_the_writers(tmp_path):
    class Broken(Recording):
        def begin(self, run):
            raise ArithmeticError("no")

    first, broken = Recording(), Broken()
    with pytest.raises(ArithmeticError):
        make(tmp_path / "run", writers=[first, broken]).train()
    assert (first.calls, broken.calls) == (["begin", "close"], ["close"])


def info(settings):
    return RunInfo(RunConfig.from_dict(settings).masked(), "run", "id", None, 0, is_resumed=False)


def test_settings_are_flat_plain_values_without_secrets():
    hook = {
        "type": "hooks/chat.py:Chat",
        "token": "xoxb-1",
        "hf_token": "hf_1",
        "api_key": "k",
        "password": "p",
        "eos_token": "</s>",
        "max_tokens": 5,
        "url": "https://me:hunter2@host/a?token=abc",
        "names": ["a", "b"],
        "nothing": None,
    }
    settings = info({"hooks": [hook], "trainer": {"max_steps": 3, "optimizer": {"type": "sgd", "lr": 0.1}}}).settings
    assert settings["trainer.optimizer.lr"] == 0.1
    assert settings["trainer.max_steps"] == 3
    assert {
        name.removeprefix("hooks.0."): value for name, value in settings.items() if name.startswith("hooks.0.")
    } == {
        "type": "hooks/chat.py:Chat",
        "token": "***",
        "hf_token": "***",
        "api_key": "***",
        "password": "***",
        "eos_token": "</s>",
        "max_tokens": 5,
        "url": "https://me:***@host/a?token=***",
        "names": '["a", "b"]',
    }
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())


class Drawing(Hook):
    """Puts an image, a histogram and a text at each step."""

    def after_step(self):
        storage = self.trainer.storage
        storage.put_image("pixels", torch.zeros(2, 2))
        storage.put_histogram("weights", self.trainer.model.layers[0].weight)
        storage.put_text("note", f"step {self.trainer.step}")


def test_a_writer_receives_what_was_put_since_the_line_before(tmp_path):
    class Media(Recording):
        def write(self, storage):
            weights = storage.histograms["weights"].num_values
            self.calls.append((storage.line["step"], storage.images["pixels"].shape, weights, storage.texts["note"]))

    writer = Media()
    make(tmp_path / "run", "trainer.max_steps=4", "log.every_steps=2", writers=[writer], hooks=[Drawing()]).train()
    assert writer.calls == ["begin", (2, (2, 2, 1), 32, "step 2"), (4, (2, 2, 1), 32, "step 4"), "close"]


def test_what_an_evaluation_puts_is_in_its_line_under_the_name_of_the_set(tmp_path):
    class Sampling(Trainer):
        def eval_step(self, batch):
            get_event_storage().put_text("sample", f"{len(batch['x'])} points")
            return super().eval_step(batch)

    class Texts(Recording):
        def write(self, storage):
            self.calls.append((storage.line["step"], dict(storage.texts)))

    writer = Texts()
    overrides = ("data.eval={valid: {type: parts.py:Points, size: 3}}", "evaluation.every_steps=2", "log.every_steps=3")
    make(tmp_path / "run", "trainer.max_steps=4", *overrides, writers=[writer], trainer=Sampling).train()
    text = {"valid/sample": "3 points"}
    assert writer.calls == ["begin", (2, text), (3, {}), (4, text), "close"]


def test_the_log_warns_once_of_what_no_writer_stores(tmp_path, caplog):
    def warnings(*overrides, writers=()):
        caplog.clear()
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        with caplog.at_level(logging.WARNING, logger="trainwright"):
            make(folder, "trainer.max_steps=3", *overrides, writers=writers, hooks=[Drawing()]).train()
        return [record.getMessage() for record in caplog.records]

    first, second, third = warnings("writers=[csv]")
    check_message(first, "images", "pixels")
    check_message(second, "histograms", "weights")
    check_message(third, "texts", golden=False)
    assert len(warnings("writers=[console]")) == 2
    assert warnings("writers=[json]") == []
    assert warnings("writers=[csv]", writers=[Recording()]) == []
    assert warnings("writers=[tensorboard]") == []
    assert warnings("writers=[]") == []


class Putting(Net):
    """Puts what it computes."""

    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        storage = get_event_storage()
        storage.put_histogram("logits", outputs["logits"])
        storage.put_image("logits", outputs["logits"].sigmoid())
        storage.put_text("note", "from a model")
        return outputs


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_a_model_puts_in_every_mode(tmp_path, mode):
    class Media(Recording):
        def write(self, storage):
            logits = storage.histograms["logits"].num_values
            self.calls.append((storage.line["step"], storage.images["logits"].shape, logits, dict(storage.texts)))

    writer = Media()
    options = (f"runtime.mode={mode}", "trainer.max_steps=6", "log.every_steps=2", "trainer.micro_batch_size=4")
    options += ("runtime.compile_backend=aot_eager",) * (mode == "compile")
    options += ("model.type=tests.writers.test_writer:Putting",)
    make(tmp_path / "run", *options, writers=[writer]).train()
    # Two micro-batches of four samples and two classes; the image is the last one's.
    expected = [(step, (4, 2, 1), 16, {"note": "from a model"}) for step in (2, 4, 6)]
    assert writer.calls == ["begin", *expected, "close"]
