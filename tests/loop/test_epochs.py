"""Epochs: the events of hooks, periods of epochs, the end of an epoch, and samplers in a run."""

import json

import pytest
import torch
from tests.faults.runs import assert_same_end, config_of
from tests.loop.small_runs import at, lines_of, make, run, store_of
from tests.messages import raises
from tests.project.parts import Points
from torch.utils.data import Sampler

from trainwright import CallbackHook, Every, Hook, RunConfig, Trainer, build_component, build_trainer
from trainwright.data.fetch import StreamBrokenError
from trainwright.errors import ConfigError, DataError, TrustError

PLAIN = ("data.eval={}", "evaluation={}", "model.dropout=0.0", "data.train.noise=0.0", "trainer.schedule=null")
TWENTY = (*PLAIN, "data.train.size=20", "trainer.max_steps=null", "trainer.max_epochs=3")
"""Epochs of 20 samples in batches of 8: they straddle at steps 3, 5 and 8, or end with steps 3, 6 and 9."""
STREAM = "data.train={type: tests.project.parts:PointStream, size: 20}"


class Events(Hook):
    """Keeps the events of each step; nothing of it is in a checkpoint."""

    def __init__(self):
        self.seen = []

    def before_epoch(self):
        self.seen.append(("before_epoch", self.trainer.epoch, self.trainer.step))

    def after_epoch(self):
        self.seen.append(("after_epoch", self.trainer.epoch, self.trainer.step))


class Order(Hook):
    """Keeps all events of the loop, in their order."""

    def __init__(self):
        self.seen = []

    def before_epoch(self):
        self.seen.append("before_epoch")

    def before_step(self):
        self.seen.append("before_step")

    def after_step(self):
        self.seen.append("after_step")

    def after_eval(self, logs):
        self.seen.append("after_eval")

    def after_epoch(self):
        self.seen.append("after_epoch")

    def after_save(self, path):
        self.seen.append("after_save")


def events_of(folder, *overrides, **rest):
    events = Events()
    return run(folder, *overrides, hooks=[events], **rest), events.seen


def sizes_of(folder, *overrides, hooks=(), trainer=Trainer):
    """The samples of each step of a run, and the run."""
    sizes = []

    class Noting(trainer):
        def train_step(self, batch):
            sizes.append(len(batch["x"]))
            return super().train_step(batch)

    return sizes, run(folder, *overrides, trainer=Noting, hooks=hooks)


# events


@pytest.mark.parametrize(("last_batch", "ends"), [("straddle", [3, 5, 8]), ("short", [3, 6, 9]), ("drop", [2, 4, 6])])
def test_an_epoch_ends_with_the_update_that_uses_its_last_sample(last_batch, ends, tmp_path):
    trainer, seen = events_of(tmp_path / "run", *TWENTY, f"data.last_batch={last_batch}")
    begins = [0, *ends[:-1]]
    expected = [[("before_epoch", n, begins[n]), ("after_epoch", n, ends[n])] for n in range(3)]
    assert seen == [event for pair in expected for event in pair]
    assert trainer.step == ends[-1]


def test_after_epoch_follows_the_evaluation_and_precedes_the_save(tmp_path):
    order = Order()
    settings = ("data.train.size=16", "trainer.max_steps=2", "evaluation.every_epochs=1", "checkpoint.every_epochs=1")
    run(tmp_path / "run", *settings, "checkpoint.asynchronous=false", hooks=[order])
    step = ["before_step", "after_step"]
    assert order.seen == ["before_epoch", *step, *step, "after_eval", "after_epoch", "after_save"]


def test_the_metrics_of_an_epoch_are_in_the_storage_and_what_a_hook_puts_there_is_in_the_line(tmp_path):
    seen = []

    def look(trainer):
        latest = trainer.storage.latest()
        seen.append((latest["valid/loss"][1], latest["loss"][1]))
        trainer.storage.put_scalar("epoch_done", trainer.epoch)

    settings = ("data.train.size=16", "trainer.max_steps=4", "evaluation.every_epochs=1", "log={every_epochs: 1}")
    run(tmp_path / "run", *settings, hooks=[CallbackHook(after_epoch=look)])
    assert seen == [(2, 2), (4, 4)]
    assert [(line["step"], line["epoch_done"]) for line in lines_of(tmp_path / "run")] == [(2, 0), (4, 1)]


@pytest.mark.parametrize("last_batch", ["straddle", "short"])
@pytest.mark.parametrize("left_at", [1, 2, 3, 4, 5, 6])
def test_a_run_resumed_within_an_epoch_does_not_begin_it_again(last_batch, left_at, tmp_path):
    settings = (*TWENTY, f"data.last_batch={last_batch}", "checkpoint.every_steps=null")
    whole, expected = events_of(tmp_path / "whole", *settings)
    first, second = Events(), Events()
    leave = at(left_at, lambda trainer: trainer.interrupt("SIGTERM"))
    run(tmp_path / "halves", *settings, hooks=[first, leave])
    resumed = run(tmp_path / "halves", *settings, hooks=[second])
    assert first.seen + second.seen == expected
    assert (resumed.step, resumed.max_steps) == (whole.step, whole.max_steps)
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


def test_a_rollback_to_an_earlier_epoch_begins_the_next_one_again(tmp_path):
    settings = (*TWENTY, "data.last_batch=short", "checkpoint.every_steps=2", "anomalies={non_finite: rollback}")
    events, bad = Events(), []

    class Once(Trainer):
        def forward(self, **batch):
            outputs = super().forward(**batch)
            if self.step == 3 and not bad:
                bad.append(3)
                outputs["loss"] = outputs["loss"] * float("nan")
            return outputs

    run(tmp_path / "run", *settings, trainer=Once, hooks=[events])
    assert [epoch for name, epoch, _ in events.seen if name == "before_epoch"] == [0, 1, 1, 2]


def test_a_rollback_leaves_out_as_many_batches_as_it_is_told_if_one_is_short(tmp_path):
    rollback = "anomalies={non_finite: rollback, skip_batches: 2}"
    settings = (*TWENTY, "data.last_batch=short", "trainer.micro_batch_size=8", rollback)

    class Second(Trainer):
        def forward(self, **batch):
            outputs = super().forward(**batch)
            is_bad = self.train_data.batch_positions == (8, 16)
            return {**outputs, "loss": outputs["loss"] * float("nan")} if is_bad else outputs

    trainer = run(tmp_path / "run", *settings, trainer=Second)
    assert trainer.train_data.state_dict()["left_out"] == [[8, 20]]
    assert trainer.step == 1 + 3 + 3


def test_a_hook_can_end_the_run_with_an_epoch_and_the_step_is_evaluated(tmp_path):
    stop = Every(epochs=2)(lambda trainer: trainer.stop("two epochs"))
    trainer = run(
        tmp_path / "run", "data.train.size=16", "trainer.max_steps=9", "evaluation.every_steps=50", hooks=[stop]
    )
    assert (trainer.step, trainer.is_finished, trainer.stop_reason) == (4, True, "two epochs")
    assert "valid/loss" in lines_of(tmp_path / "run")[-1]


def test_every_calls_a_function_at_the_end_of_epochs(tmp_path):
    (tmp_path / "look.py").write_text(
        "seen = []\n\ndef look(trainer):\n    seen.append((trainer.epoch, trainer.step))\n"
    )
    seen = []
    run(tmp_path / "run", *TWENTY, hooks=[Every(epochs=2)(lambda trainer: seen.append((trainer.epoch, trainer.step)))])
    assert seen == [(1, 5)]
    for wrong in ({}, {"steps": 1, "epochs": 1}, {"epochs": 0}, {"epochs": 1.5}):
        with raises(ConfigError, "Every"):
            Every(**wrong)


# periods


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{every_epochs: 1}", [3, 5, 8]),
        ("{every_epochs: 2}", [5, 8]),
        ("{every_epochs: 0.5}", [2, 3, 4, 5, 7, 8]),  # positions 10, 20, 30, 40, 50 and 60
        ("{every_epochs: 1.5}", [4, 8]),
        ("{every_epochs: 1, every_steps: 4}", [3, 4, 5, 8]),
    ],
)
def test_lines_checkpoints_and_evaluations_come_by_epochs(section, expected, tmp_path):
    events = []

    class Evaluated(Hook):
        def after_eval(self, logs):
            events.append(self.trainer.step)

    settings = (*TWENTY[1:], "data.eval={valid: {type: tests.project.parts:Points, size: 4}}")
    periods = (f"log={section}", f"evaluation={section}", f"checkpoint={{{section[1:-1]}, keep_last: 99}}")
    trainer = run(tmp_path / "run", *settings, *periods, hooks=[Evaluated()])
    assert events == expected
    assert [line["step"] for line in lines_of(tmp_path / "run")] == expected
    assert store_of(tmp_path / "run").steps() == expected
    again = RunConfig.load(tmp_path / "run" / "config.yaml", trust=True)
    assert (again.log, again.checkpoint) == (trainer.config.log, trainer.config.checkpoint)


def test_a_line_of_an_epoch_has_the_mean_of_its_updates(tmp_path):
    losses = []

    class Noting(Trainer):
        def train_step(self, batch):
            result = super().train_step(batch)
            losses.append((result.loss.item(), len(batch["x"])))
            return result

    run(tmp_path / "run", *TWENTY, "data.last_batch=short", "log.every_epochs=1", trainer=Noting)
    for number, line in enumerate(lines_of(tmp_path / "run")):
        epoch = losses[number * 3 : number * 3 + 3]
        assert line["loss"] == pytest.approx(sum(loss * size for loss, size in epoch) / 20)


def test_a_period_of_epochs_replaces_the_default_period_of_steps():
    config = RunConfig.from_dict({"log": {"every_epochs": 1}, "checkpoint": {"every_epochs": 2}})
    assert (config.log.every_steps, config.checkpoint.every_steps) == (None, None)
    config = RunConfig.from_dict({"log": {"every_epochs": 1, "every_steps": 7}})
    assert config.log.every_steps == 7
    with raises(ConfigError, "log.every_steps", "log.every_epochs"):
        RunConfig.from_dict({"log": {"every_steps": None}})


# the end of an epoch


@pytest.mark.parametrize("micro_batch", [8, 4, 2, 1])
def test_the_gradient_of_a_short_batch_is_exactly_that_of_its_mean(micro_batch, tmp_path):
    settings = (
        *TWENTY[:-1],
        "trainer.max_epochs=2",
        "data.last_batch=short",
        "data.shuffle=false",
        f"trainer.micro_batch_size={micro_batch}",
        "trainer.optimizer={type: sgd, lr: 0.5}",
        "trainer.max_grad_norm=null",
        "log.every_steps=1",
    )
    trainer = make(tmp_path / "run", *settings)
    model = build_component(trainer.config, "model")
    model.load_state_dict(trainer.model.state_dict())
    optimizer, points, losses = torch.optim.SGD(model.parameters(), lr=0.5), Points(20), []
    for _ in range(2):
        loader = torch.utils.data.DataLoader(points, batch_size=8)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    trainer.train()
    assert [line["loss"] for line in lines_of(tmp_path / "run")] == pytest.approx(losses, rel=1e-5)
    for own, other in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (["data.last_batch=short"], [8, 8, 4] * 3),
        (["data.last_batch=drop"], [8, 8] * 3),
        (["data.last_batch=short", "trainer.max_epochs=1.3"], [8, 8, 4, 6]),
        (["data.last_batch=short", "trainer.max_samples=26"], [8, 8, 4, 6]),
        (["data.last_batch=drop", "trainer.max_epochs=1.5"], [8, 8, 8]),
        (["data.last_batch=short", "trainer.max_steps=4"], [8, 8, 4, 8]),
        (["data.last_batch=short", "trainer.global_batch_size=32", "trainer.micro_batch_size=8"], [20] * 3),
        (["data.last_batch=short", "runtime.mode=graph"], [8, 8, 4] * 3),
        (["data.last_batch=short", "data.num_workers=2"], [8, 8, 4] * 3),
    ],
)
def test_steps_are_counted_for_each_end_of_an_epoch(settings, sizes, tmp_path):
    found, trainer = sizes_of(tmp_path / "run", *TWENTY, *settings)
    assert found == sizes
    assert (trainer.step, trainer.max_steps) == (len(sizes), len(sizes))


def test_a_sampler_that_was_removed_is_rejected(tmp_path):
    class Sampled(Trainer):
        @classmethod
        def build_sampler(cls, build, dataset):
            return torch.utils.data.SequentialSampler(dataset)

    run(tmp_path, *TWENTY, trainer=Sampled, hooks=[at(3, lambda trainer: trainer.interrupt("SIGTERM"))])
    with raises(DataError, "data.sampler"):
        make(tmp_path, *TWENTY)
    assert run(tmp_path, *TWENTY, accept_changes=True).epoch == 2


def test_a_finished_run_goes_on_with_more_epochs(tmp_path):
    short = (*TWENTY, "data.last_batch=short")
    run(tmp_path / "whole", *short, "trainer.max_epochs=4")
    run(tmp_path / "halves", *short, "trainer.max_epochs=2", "name=halves")
    trainer = run(tmp_path / "halves", *short, "trainer.max_epochs=4")
    assert (trainer.step, trainer.max_steps) == (12, 12)
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


# streams


def test_a_stream_ends_an_epoch_with_its_last_batch(tmp_path):
    limits = ("trainer.max_steps=50", "trainer.max_epochs=3")
    trainer, seen = events_of(tmp_path / "run", *PLAIN[:3], STREAM, *limits, "log.every_epochs=1")
    expected = [[("before_epoch", n, 3 * n), ("after_epoch", n, 3 * n + 3)] for n in range(3)]
    assert seen == [event for pair in expected for event in pair]
    assert (trainer.step, [line["step"] for line in lines_of(tmp_path / "run")]) == (9, [3, 6, 9])


def test_a_schedule_and_unfreezing_by_epochs_follow_the_epochs_of_a_stream(tmp_path):
    limits = (*PLAIN[:3], STREAM, "trainer.max_steps=50", "trainer.max_epochs=2", "log.every_steps=1")
    schedule = "trainer.schedule={type: 'torch.optim.lr_scheduler:StepLR', step_size: 1, step_on: epoch}"
    trainer = run(tmp_path / "schedule", *limits, schedule)
    rate = trainer.config.trainer.optimizer.lr
    rates = [line["lr"] for line in lines_of(tmp_path / "schedule")]
    assert rates == pytest.approx([rate] * 3 + [0.1 * rate] * 3)
    seen = []
    hook = CallbackHook(after_step=lambda trainer: seen.append(trainer.model.layers[0].weight.requires_grad))
    run(tmp_path / "freeze", *limits, "model.freeze={match: 'layers.0.*', until_epoch: 1}", hooks=[hook])
    assert seen == [False] * 3 + [True] * 3


@pytest.mark.parametrize("left_at", [2, 3, 4])
def test_a_stream_that_reads_ahead_resumes_exactly(left_at, tmp_path):
    settings = (*PLAIN[:3], STREAM, "trainer.max_steps=50", "trainer.max_epochs=3", "data.shuffle_buffer=7")
    _, expected = events_of(tmp_path / "whole", *settings)
    first, second = Events(), Events()
    run(tmp_path / "halves", *settings, hooks=[first, at(left_at, lambda trainer: trainer.interrupt("SIGTERM"))])
    run(tmp_path / "halves", *settings, hooks=[second])
    assert first.seen + second.seen == expected
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


def test_reading_ahead_does_not_change_the_batches_and_an_error_comes_in_its_turn(tmp_path):
    class Failing(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (Points(20)[index] for index in range(16))
            raise OSError("no disk")

    class Own(Trainer):
        @classmethod
        def build_train_data(cls, build):
            return Failing()

    steps = []
    for hooks in ([], [Events()]):
        trainer = make(
            tmp_path / f"run{len(hooks)}",
            *PLAIN[:3],
            "data.train=null",
            "trainer.max_steps=9",
            "data.shuffle_buffer=8",
            trainer=Own,
            hooks=hooks,
        )
        with pytest.raises(StreamBrokenError, match="no disk"):
            trainer.train()
        steps.append(trainer.step)
    assert steps[0] == steps[1] > 0


def test_the_short_batch_of_a_stream_can_be_dropped(tmp_path):
    limits = ("trainer.max_steps=50", "trainer.max_epochs=2", "data.last_batch=drop")
    sizes, _ = sizes_of(tmp_path / "run", *PLAIN[:3], STREAM, *limits)
    assert sizes == [8] * 4


# samplers from a file


class Odd(Sampler):
    """A user's sampler: the odd samples of the dataset that it is given, in a random order."""

    def __init__(self, dataset, step=2):
        self.dataset, self.step = dataset, step

    def __iter__(self):
        odd = range(1, len(self.dataset), self.step)
        return iter([odd[number] for number in torch.randperm(len(odd)).tolist()])

    def __len__(self):
        return len(range(1, len(self.dataset), self.step))


SAMPLERS = {
    "weighted": (f"{{type: weighted, weights: {[1] * 10 + [2] * 10}}}", 20),
    "subset": ("{type: 'torch.utils.data:SubsetRandomSampler', indices: [0, 2, 4, 6, 8, 10, 12, 14, 16]}", 9),
    "random": ("{type: 'torch.utils.data:RandomSampler', num_samples: 12}", 12),
    "batches": (
        "{type: 'torch.utils.data:BatchSampler', sampler: 'torch.utils.data:RandomSampler', drop_last: false}",
        20,
    ),
    "nested": (
        "{type: 'torch.utils.data:BatchSampler', sampler: {type: 'torch.utils.data:RandomSampler'}, "
        "batch_size: 5, drop_last: true}",
        20,
    ),
    "own": ("{type: 'tests.loop.test_epochs:Odd'}", 10),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_with_a_sampler_resumes_exactly(name, tmp_path):
    section, epoch_size = SAMPLERS[name]
    settings = (*TWENTY, f"data.sampler={section}", "data.shuffle=false", "checkpoint.every_steps=null")
    whole = run(tmp_path / "whole", *settings)
    assert whole.train_data.samples_seen == 3 * epoch_size
    run(tmp_path / "halves", *settings, hooks=[at(2, lambda trainer: trainer.interrupt("SIGTERM"))])
    run(tmp_path / "halves", *settings, "data.num_workers=2")
    assert_same_end(tmp_path / "whole", tmp_path / "halves")


def test_a_batch_sampler_from_a_file_makes_the_steps(tmp_path):
    sizes, trainer = sizes_of(tmp_path / "run", *TWENTY, f"data.sampler={SAMPLERS['nested'][0]}")
    assert sizes == [5] * 12
    assert trainer.max_steps == 12


def test_a_sampler_given_in_code_defines_the_order(tmp_path):
    class Own(Trainer):
        @classmethod
        def build_sampler(cls, build, dataset):
            return Odd(dataset)

    trainer = run(tmp_path / "run", *TWENTY, trainer=Own)
    assert sorted(trainer.train_data.samples_at(0, 10)) == list(range(1, 20, 2))
    with raises(ConfigError, "data.sampler", "build.sampler(dataset)"):
        make(tmp_path / "other", *TWENTY, f"data.sampler={SAMPLERS['own'][0]}", trainer=Own)


def test_samplers_lie_in_their_folder_next_to_the_run_file(tmp_path):
    (tmp_path / "samplers").mkdir()
    (tmp_path / "samplers" / "odd.py").write_text(
        "import torch\n\n\nclass Odd(torch.utils.data.Sampler):\n"
        "    def __init__(self, data_source):\n        self.size = len(data_source)\n\n"
        "    def __iter__(self):\n        return iter(range(1, self.size, 2))\n"
    )
    text = (config_of(tmp_path / "run", *TWENTY)).to_yaml()
    (tmp_path / "run.yaml").write_text(text)
    config = RunConfig.load(tmp_path / "run.yaml", ["data.sampler=odd.Odd"])
    assert list(build_component(config, "data.sampler")) == list(range(1, 20, 2))
    assert build_trainer(config).max_steps == 4  # three epochs of 10


MIX = "data.train={type: mix, sources: {a: {type: tests.project.parts:Points}, b: {type: tests.project.parts:Points}}"


@pytest.mark.parametrize(
    ("settings", "error", "mentions"),
    [
        (["data.sampler=weighted", "data.shuffle=true"], ConfigError, ["data.shuffle", "data.sampler"]),
        (["data.sampler=weighted", "data.group_by_length=true"], ConfigError, ["data.group_by_length"]),
        (["data.sampler=weighted"], ConfigError, ["data.sampler", "weights"]),
        (["data.sampler={type: weighted, weights: [1, 2]}"], ConfigError, ["data.sampler.weights", 2, 20]),
        (["data.sampler=wieghted"], ConfigError, ["data.sampler", "wieghted", "weighted"]),
        (["data.sampler='torch.utils.data:DistributedSampler'"], ConfigError, ["DistributedSampler", "rank"]),
        (
            ["data.sampler={type: 'torch.utils.data:BatchSampler', sampler: 'torch.utils.data:RandomSampler'}"],
            ConfigError,
            ["data.sampler", "drop_last"],
        ),
        (
            [f"data.sampler={SAMPLERS['nested'][0]}", "data.last_batch=short"],
            ConfigError,
            ["data.last_batch", "drop_last"],
        ),
        (
            [f"data.sampler={SAMPLERS['nested'][0]}", "trainer.global_batch_size=4"],
            DataError,
            [5, "trainer.global_batch_size", 4],
        ),
        ([STREAM, "data.sampler=weighted", "trainer.max_steps=2"], ConfigError, ["data.sampler", "stream"]),
        ([STREAM, "data.last_batch=straddle", "trainer.max_steps=2"], ConfigError, ["data.last_batch", "stream"]),
        ([STREAM, "log.every_epochs=0.5", "trainer.max_steps=2"], ConfigError, ["log.every_epochs", "0.5", "stream"]),
        ([MIX + "}", "data.sampler=weighted"], ConfigError, ["data.sampler", "mixture"]),
        ([MIX + "}", "data.last_batch=drop"], ConfigError, ["data.last_batch", "mixture"]),
        ([MIX + ", same_source_batches: true}", "data.last_batch=short"], ConfigError, ["same_source_batches"]),
        (["data.last_batch=keep"], ConfigError, ["data.last_batch"]),
        (["log.every_epochs=0"], ConfigError, ["log.every_epochs"]),
    ],
)
def test_settings_that_contradict_each_other_are_rejected_with_their_location(settings, error, mentions, tmp_path):
    with raises(error, *mentions, at="override"):
        make(tmp_path / "run", *TWENTY, *settings)


def test_epochs_without_a_dataset_are_rejected(tmp_path):
    class Making(Trainer):
        def next_train_inputs(self, iterator):
            return {"x": torch.zeros(8, 4), "labels": torch.zeros(8, dtype=torch.long)}

    settings = (*PLAIN[:3], "data.train=null", "trainer.max_steps=2")
    for wrong in ("data.sampler=weighted", "data.last_batch=short", "checkpoint.every_epochs=1"):
        with raises(ConfigError, wrong.partition("=")[0], at="override"):
            make(tmp_path / "run", *settings, wrong, trainer=Making)
    with raises(ConfigError, "before_epoch", at="test_epochs.py"):
        make(tmp_path / "run", *settings, trainer=Making, hooks=[Events()])


def test_a_function_of_weights_in_an_untrusted_run_folder_is_not_called(tmp_path):
    (tmp_path / "weights.py").write_text("raise SystemExit('called')\n")
    text = config_of(tmp_path / "run", *TWENTY).to_yaml()
    config = RunConfig.load(_write(tmp_path / "config.yaml", text), ["data.sampler={type: weighted, weights: w.py:fn}"])
    assert config.data.sampler.weights == "w.py:fn"
    stolen = tmp_path / "stolen"
    config.save(_folder(stolen) / "config.yaml")
    saved = (stolen / "config.yaml").read_text().replace("name: run", "name: other")
    (stolen / "config.yaml").write_text(saved)
    with pytest.raises(TrustError, match=r"data\.sampler\.weights"):
        build_trainer(RunConfig.load(stolen / "config.yaml", trust=False))


def _write(path, text):
    path.write_text(text)
    return path


def _folder(path):
    path.mkdir()
    return path


def test_the_state_of_a_sampler_is_plain(tmp_path):
    trainer = run(tmp_path / "run", *TWENTY, f"data.sampler={SAMPLERS['own'][0]}")
    state = store_of(tmp_path / "run").read(trainer.step, "training")["data"]["sampler"]
    assert json.loads(json.dumps(dict(state)))["epoch"] == 3
