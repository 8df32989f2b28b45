"""The loop and its override points, on a real small run."""

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch
from tests.messages import raises
from torch import nn

from trainwright import CallbackHook, Hook, Mean, RunConfig, StepResult, Trainer, build_trainer, get_event_storage
from trainwright.anomaly import detection as anomalies
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, DataError, OutOfMemory, TrainwrightError
from trainwright.hooks.ema import EMA
from trainwright.loop import trainer as step_end
from trainwright.loop.hook import HookCalls

PROJECT = Path(__file__).parents[1] / "project"


def load(tmp_path, *overrides):
    return RunConfig.load(PROJECT / "run.yaml", [f"output_dir={tmp_path}", *overrides])


def lines(tmp_path, name="small"):
    return [json.loads(line) for line in (tmp_path / name / "metrics.json").read_text().splitlines()]


def without_time(line):
    return {
        key: value
        for key, value in line.items()
        if not key.endswith(("_per_second", "_per_step", "slowest_rank_share"))
    }


def test_a_line_closes_each_window_and_the_last_step_is_always_written(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=11")).train()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [3, 5, 6, 9, 10, 11]
    assert ["loss" in line for line in written] == [True, False, True, True, False, True]
    assert [line["step"] for line in written if "valid/loss" in line] == [5, 10, 11]
    assert {"loss", "grad_norm", "lr"} <= written[0].keys()


def test_a_hook_that_is_appended_to_a_built_trainer_is_an_error_instead_of_never_called(tmp_path):
    trainer = build_trainer(load(tmp_path))
    with pytest.raises(AttributeError):
        trainer.hooks.append(Hook())


class Modes(Trainer):
    """Notes the modes of the model and of its frozen layer in each forward of training."""

    @classmethod
    def build_model(cls, build):
        return cls.prepare(build.model())

    @staticmethod
    def prepare(model):
        return model

    def post_init(self):
        self.seen = []

    def train_step(self, batch):
        self.seen.append((self.model.training, next(self.model.children()).training))
        return super().train_step(batch)


def test_a_model_that_comes_in_eval_mode_is_trained_in_train_mode(tmp_path):
    class Pretrained(Modes):
        prepare = staticmethod(lambda model: model.eval())

    trainer = build_trainer(load(tmp_path, "trainer.max_steps=2"), Pretrained)
    trainer.train()
    assert trainer.seen == [(True, True)] * 2


@pytest.mark.parametrize("event", ["before_step", "after_step", "after_eval"])
def test_a_hook_that_leaves_the_model_in_eval_mode_is_undone_with_a_warning(tmp_path, event, caplog):
    class Frozen(Modes):
        @staticmethod
        def prepare(model):
            next(model.children()).eval()
            return model

        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), CallbackHook(**{event: lambda trainer, *_: trainer.model.eval()})]

    trainer = build_trainer(load(tmp_path, "trainer.max_steps=4", "evaluation.every_steps=1"), Frozen)
    trainer.train()
    assert trainer.seen == [(True, False)] * 4
    assert caplog.text.count("in eval mode") == 1


def test_a_model_whose_train_method_keeps_it_in_eval_mode_stays_so(tmp_path):
    class Kept(Modes):
        @staticmethod
        def prepare(model):
            kind = type(model)
            model.__class__ = type(kind.__name__, (kind,), {"train": lambda self, mode=True: kind.train(self, False)})
            return model.train()

    trainer = build_trainer(load(tmp_path, "trainer.max_steps=2"), Kept)
    trainer.train()
    assert trainer.seen == [(False, False)] * 2


def test_two_updates_that_are_open_at_once_weigh_their_losses_by_the_samples_of_each_micro_batch(tmp_path):
    class Twice(Trainer):
        def train_step(self, batch):
            updates = [self.begin_update(), self.begin_update()]
            counts = []
            for micro_batch in self.micro_batches(batch):
                counts.append([update.num_samples for update in updates])
                for update in updates:
                    update.backward(self.run_forward(micro_batch))
            seen.append(counts)
            results = [update.apply() for update in updates]
            return results[0]

    seen = []
    trainer = build_trainer(load(tmp_path, "trainer.max_steps=1", "trainer.global_batch_size=8"), Twice)
    trainer.set_num_micro_batches(3)
    trainer.train()
    assert seen == [[[2, 2], [3, 3], [3, 3]]]


def test_a_resumed_run_reports_its_step_before_the_first_batch(tmp_path):
    build_trainer(load(tmp_path, "trainer.max_steps=3")).train()
    seen = []

    class Slow(Trainer):
        def next_train_inputs(self, iterator):
            seen.append(self.heartbeat.current[:2])
            return super().next_train_inputs(iterator)

    build_trainer(load(tmp_path, "trainer.max_steps=4"), Slow).train()
    assert seen == [("data", 4)]


def test_the_events_come_in_the_order_of_the_loop(tmp_path):
    calls = []

    class Diary(Hook):
        def __getattribute__(self, name):
            if name in ("before_train", "after_train", "before_step", "after_step", "before_eval", "close"):
                return lambda: calls.append(name)
            if name in ("after_eval", "after_save"):
                return lambda _: calls.append(name)
            return super().__getattribute__(name)

        before_train = after_train = before_step = after_step = before_eval = close = after_eval = after_save = None

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Diary()]

        def train_step(self, batch):
            calls.append("train_step")
            return super().train_step(batch)

        def train_loop_begin(self):
            calls.append("train_loop_begin")

        def train_loop_end(self):
            calls.append("train_loop_end")
            return super().train_loop_end()

    overrides = ("trainer.max_steps=2", "evaluation.every_steps=2", "log.every_steps=1", "checkpoint.every_steps=2")
    build_trainer(load(tmp_path, *overrides), Mine).train()
    step = ["before_step", "train_step", "after_step"]
    assert calls == [
        *["before_train", "train_loop_begin", *step, "train_loop_end", "train_loop_begin"],
        *[*step, "before_eval", "after_eval", "train_loop_end", "after_save", "after_train", "close"],
    ]


def test_forward_gets_exactly_the_collators_keys_once_per_micro_batch(tmp_path):
    seen = []

    class Mine(Trainer):
        def forward(self, **batch):
            if self.model.training:
                seen.append((self.step, sorted(batch), len(batch["x"])))
            outputs = self.model(**batch)
            return outputs["loss"], {"double": outputs["loss"] * 2, "words": "text"}

    build_trainer(load(tmp_path, "trainer.max_steps=2", "evaluation.metrics={}"), Mine).train()
    assert seen == [(step, ["labels", "x"], 4) for step in (0, 0, 1, 1)]
    line = lines(tmp_path)[-1]
    assert line["double"] == pytest.approx(2 * line["loss"])
    assert line["words"] == "text"


def test_the_loss_does_not_depend_on_the_micro_batch_size(tmp_path):
    losses = {}
    for micro in (2, 4, 8):
        config = load(tmp_path, f"name=micro{micro}", f"trainer.micro_batch_size={micro}", "model.dropout=0.0")
        build_trainer(config).train()
        losses[micro] = [line["loss"] for line in lines(tmp_path, f"micro{micro}") if "loss" in line]
    assert losses[2] == pytest.approx(losses[8], rel=1e-5)
    assert losses[4] == pytest.approx(losses[8], rel=1e-5)


def test_an_overridden_train_step_may_return_a_plain_tuple(tmp_path):
    class Mine(Trainer):
        def train_step(self, batch):
            update = self.begin_update()
            for micro_batch in self.micro_batches(batch):
                update.backward(self.run_forward(micro_batch))
            result = update.apply()
            assert isinstance(result, StepResult)
            result.metrics["mine"] = 5.0
            return tuple(result)

    build_trainer(load(tmp_path, "trainer.max_steps=3"), Mine).train()
    assert lines(tmp_path)[0]["mine"] == 5.0


def test_a_step_without_our_update_still_follows_the_schedule(tmp_path):
    rates = []

    class Mine(Trainer):
        def train_step(self, batch):
            loss = self.model(**batch)["loss"]
            optimizer = self.optimizers["main"]
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            return loss, {}, torch.tensor(0.0), rates[-1]

    build_trainer(load(tmp_path, "trainer.max_steps=6"), Mine).train()
    assert rates[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    assert rates[-1] == 0.0


def test_next_train_inputs_may_take_several_batches(tmp_path):
    class Mine(Trainer):
        def next_train_inputs(self, iterator):
            first, second = next(iterator), next(iterator)
            return {key: torch.cat([first[key], second[key]]) for key in first}

        def train_step(self, batch):
            update = self.begin_update()
            update.backward(self.run_forward(batch))
            return update.apply()

    trainer = build_trainer(load(tmp_path, "trainer.max_steps=4"), Mine)
    trainer.train()
    assert trainer.train_data.samples_seen == 4 * 2 * 8


def test_an_adversarial_pair_steps_in_turn(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = nn.Linear(2, 4)
            self.critic = nn.Linear(4, 1)

    class Adversarial(Trainer):
        @classmethod
        def build_model(cls, build):
            return Pair()

        def train_step(self, batch):
            real, noise = batch["x"], torch.randn(len(batch["x"]), 2)
            update = self.begin_update()
            fake = self.model.generator(noise).detach()
            critic_loss = self.model.critic(fake).mean() - self.model.critic(real).mean()
            before = [parameter.clone() for parameter in self.model.generator.parameters()]
            update.backward(critic_loss)
            critic = update.apply(optimizers=("critic",))
            assert all(map(torch.equal, before, self.model.generator.parameters()))
            held = [parameter.clone() for parameter in self.model.critic.parameters()]
            update = self.begin_update()
            update.backward(-self.model.critic(self.model.generator(noise)).mean())
            result = update.apply(optimizers=("generator",))
            assert all(map(torch.equal, held, self.model.critic.parameters()))
            result.metrics["critic_loss"] = critic.loss
            return result

    config = RunConfig.from_dict(
        {
            "name": "pair",
            "output_dir": str(tmp_path),
            "data": {"train": {"type": "parts.py:Points"}},
            "trainer": {
                "type": "mine.py:Adversarial",
                "max_steps": 6,
                "global_batch_size": 8,
                "optimizers": {
                    "generator": {"optimizer": {"type": "adamw", "lr": 1e-3}, "match": "generator.*"},
                    "critic": {
                        "optimizer": {"type": "sgd", "lr": 1e-2},
                        "schedule": {"type": "linear"},
                        "match": "critic.*",
                    },
                },
            },
            "writers": ["json"],
            "log": {"every_steps": 1},
            "runtime": {"device": "cpu"},
        },
        project_dir=PROJECT,
    )
    build_trainer(config, Adversarial).train()
    written = lines(tmp_path, "pair")
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 6]
    assert written[0]["lr/generator"] == written[-1]["lr/generator"] == 1e-3
    assert (written[0]["lr/critic"], written[-1]["lr/critic"]) == (1e-2, 0.0)
    assert "critic_loss" in written[0]


def test_train_loop_ends_dict_is_the_line(tmp_path):
    class Mine(Trainer):
        def train_loop_end(self):
            logs = super().train_loop_end()
            return {"only": logs["loss"], "as_tensor": torch.tensor(2.0), "as_mean": Mean(3.0, 2)}

    build_trainer(load(tmp_path, "trainer.max_steps=3", "data.eval={}"), Mine).train()
    assert lines(tmp_path)[0] == {"step": 3, "only": pytest.approx(0.7, abs=0.5), "as_tensor": 2.0, "as_mean": 1.5}


def test_puts_inside_the_model_reach_the_line(tmp_path):
    class Talking(Trainer):
        def forward(self, **batch):
            storage = get_event_storage()
            assert storage.step == self.step + 1
            storage.put_scalar("put", float(self.step + 1))
            storage.put_scalar("raw", float(self.step + 1), smoothing_hint=False)
            return self.model(**batch)["loss"]

    config = load(tmp_path, "trainer.max_steps=3", "data.eval={}", "evaluation.metrics={}")
    build_trainer(config, Talking).train()
    line = lines(tmp_path)[0]
    assert (line["put"], line["raw"]) == (2.0, 3.0)


def test_nothing_is_copied_to_the_host_between_log_periods(tmp_path, monkeypatch):
    waits = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def watched(self, *arguments, _name=name, _original=original, **keywords):
            # The state of the CPU's generator, and the labels of a batch that is still on the host.
            is_on_host = self.dtype == torch.uint8 or sys._getframe(1).f_code.co_name == "count_ignored"
            if not is_on_host:
                waits.append(_name)
            return _original(self, *arguments, **keywords)

        monkeypatch.setattr(torch.Tensor, name, watched)
    counts = {}

    class Counting(Hook):
        def before_step(self):
            counts[self.trainer.step + 1] = len(waits)

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Counting()]

    for module in (step_end, anomalies):  # as on a device where reading waits
        monkeypatch.setattr(module, "reads_at_once", lambda device: False)
    overrides = ("log.every_steps=5", "trainer.max_steps=10", "evaluation.every_steps=99", "checkpoint.every_steps=99")
    build_trainer(load(tmp_path, *overrides, "hooks=[{type: ema}]"), Mine).train()
    assert counts[1] == counts[2] == counts[5]  # steps 1 to 4 waited for nothing
    assert counts[6] > counts[5]  # the log line of step 5 did
    assert counts[6] == counts[10]


def test_the_step_has_three_spellings_and_a_tensor(tmp_path):
    trainer = build_trainer(load(tmp_path, "trainer.max_steps=2"))
    trainer.train()
    assert trainer.step == trainer.iter == trainer.global_step == int(trainer.step_tensor) == 2
    with pytest.raises(AttributeError):
        trainer.iter = 3


def test_the_epoch_is_that_of_the_steps_first_sample(tmp_path):
    epochs = []

    class Mine(Trainer):
        def train_step(self, batch):
            epochs.append(self.epoch)
            return super().train_step(batch)

    build_trainer(load(tmp_path, "data.train.size=12", "trainer.max_steps=5"), Mine).train()
    assert epochs == [0, 0, 1, 2, 2]  # samples 0, 8, 16, 24, 32 of epochs of 12


def test_stop_ends_the_run_as_if_the_step_were_the_last(tmp_path):
    class Stopping(Hook):
        def after_step(self):
            if self.trainer.step == 4:
                self.trainer.stop("enough")

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Stopping()]

    trainer = build_trainer(load(tmp_path, "data.test={type: 'parts.py:Points', size: 9}"), Mine)
    logs = trainer.train()
    assert (trainer.step, trainer.stop_reason) == (4, "enough")
    assert lines(tmp_path)[-1]["step"] == 4
    assert {"valid/loss", "test/loss"} <= logs.keys()
    assert trainer.context.store.steps()[-1] == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_trains_and_keeps_fp32_weights(tmp_path, precision):
    overrides = (f"runtime.precision={precision}", "trainer.max_steps=30", "data.train.noise=0.0")
    trainer = build_trainer(load(tmp_path, *overrides))
    trainer.train()
    losses = [line["loss"] for line in lines(tmp_path) if "loss" in line]
    assert losses[-1] < losses[0]
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    assert ("loss_scale" in lines(tmp_path)[0]) == (precision == "fp16")


def test_autocast_reaches_the_models_forward(tmp_path):
    dtypes = []

    class Mine(Trainer):
        def forward(self, **batch):
            outputs = self.model(**batch)
            dtypes.append(outputs["logits"].dtype)
            return outputs

    build_trainer(load(tmp_path, "runtime.precision=bf16", "trainer.max_steps=1"), Mine).train()
    assert set(dtypes) == {torch.bfloat16}


def test_a_trainer_made_by_hand_says_how_it_is_made(tmp_path):
    with raises(TrainwrightError, "build_trainer"):
        Trainer(load(tmp_path), None, nn.Linear(1, 1), None)


def test_an_overridden_forward_needs_a_mapping(tmp_path):
    class Tuples:
        def __call__(self, samples):
            return tuple(torch.stack([sample[key] for sample in samples]) for key in ("x", "labels"))

    class Mine(Trainer):
        @classmethod
        def build_collator(cls, build):
            return Tuples()

        def forward(self, **batch):
            return batch["x"].sum()

    with raises(DataError):
        build_trainer(load(tmp_path), Mine).train()


def test_two_builds_of_one_config_train_to_equal_bits(tmp_path):
    weights = []
    for name in ("a", "b"):
        trainer = build_trainer(load(tmp_path, f"name={name}"))
        trainer.train()
        weights.append(torch.cat([parameter.flatten() for parameter in trainer.model.parameters()]))
    assert torch.equal(*weights)
    first, second = ([without_time(line) for line in lines(tmp_path, name)] for name in ("a", "b"))
    assert first == second


# what hooks may do in the midst of a step, and how runs end


def with_hooks(*hooks):
    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), *hooks]

    return Mine


def final_state(tmp_path, name):
    store = CheckpointStore(tmp_path / name / "checkpoints")
    training = store.read(store.steps()[-1], "training")
    return store.read(store.steps()[-1], "model"), training["hooks"], training["generators"]


def test_a_save_in_the_midst_of_a_step_holds_every_hooks_turn(tmp_path):
    class Saver(Hook):
        def after_step(self):
            if self.trainer.step == 3:
                self.path = self.trainer.save()

        def after_eval(self, logs):
            self.trainer.save()

    saver = Saver()
    trainer = build_trainer(load(tmp_path, "hooks=[{type: ema, decay: 0.5}]"), with_hooks(saver))
    # Registered before the averages: at its turn they have not moved yet, and in after_eval they are still swapped in.
    averages = next(hook for hook in trainer.hooks if isinstance(hook, EMA))
    trainer._hook_calls = HookCalls([saver, averages])
    trainer.train()
    store = trainer.context.store
    assert saver.path == store.path(3)
    states = {step: store.read(step, "training")["hooks"]["EMA"]["averages"] for step in store.steps()}
    for step, averages in states.items():
        assert not torch.equal(store.read(step, "model")["layers.0.weight"], averages["layers.0.weight"])


def test_an_interruption_and_a_stop_in_one_step_lose_nothing_of_the_end(tmp_path):
    class Both(Hook):
        def after_eval(self, logs):
            self.trainer.stop("enough")

        def after_step(self):
            if self.trainer.step == 5:
                self.trainer.interrupt("SIGTERM")

        def before_train(self):
            if self.trainer.step == 5:
                self.trainer.stop("still enough")

    overrides = ("data.test={type: 'parts.py:Points', size: 9}", "evaluation.every_steps=5")
    first = build_trainer(load(tmp_path, *overrides), with_hooks(Both()))
    first.train()
    assert (first.interrupted, first.stop_reason) == (True, "SIGTERM")
    second = build_trainer(load(tmp_path, *overrides), with_hooks(Both()))
    logs = second.train()
    assert (second.step, second.interrupted, second.is_finished) == (5, False, True)
    assert "test/loss" in logs
    last = lines(tmp_path)[-1]  # the first run left its evaluation to the second
    assert (last["step"], sorted(name for name in last if name.endswith("/loss"))) == (5, ["test/loss", "valid/loss"])


def test_a_signal_in_the_very_last_step_is_a_finished_run(tmp_path):
    ended = []

    class Late(Hook):
        def after_step(self):
            if self.trainer.step == 12:
                self.trainer.interrupt("SIGTERM")

        def after_train(self):
            ended.append(self.trainer.step)

    trainer = build_trainer(load(tmp_path, "data.eval={}", "evaluation.metrics={}"), with_hooks(Late()))
    trainer.train()
    assert ended == [12]
    assert not trainer.interrupted


def test_a_hook_that_draws_before_training_changes_nothing_of_a_resumed_run(tmp_path):
    class Drawing(Hook):
        def __init__(self):
            self.drawn = []

        def before_train(self):
            random.random()

        def after_step(self):
            self.drawn.append(random.random())

    class Leaving(Hook):
        def after_step(self):
            if self.trainer.step == 6:
                self.trainer.interrupt("test")

    whole, first, second = Drawing(), Drawing(), Drawing()
    build_trainer(load(tmp_path, "name=whole"), with_hooks(whole)).train()
    build_trainer(load(tmp_path, "name=parts"), with_hooks(first, Leaving())).train()
    build_trainer(load(tmp_path, "name=parts"), with_hooks(second)).train()
    assert first.drawn + second.drawn == whole.drawn


def test_an_evaluation_before_a_step_leaves_its_randomness_alone(tmp_path):
    class Early(Hook):
        def before_step(self):
            self.trainer.evaluate()

    build_trainer(load(tmp_path, "name=plain", "model.dropout=0.5")).train()
    build_trainer(load(tmp_path, "name=early", "model.dropout=0.5"), with_hooks(Early())).train()
    plain, early = ([line.get("loss") for line in lines(tmp_path, name)] for name in ("plain", "early"))
    assert plain == early


def test_a_bare_loss_of_a_micro_batch_weighs_that_micro_batch(tmp_path):
    class Bare(Trainer):
        def train_step(self, batch):
            update = self.begin_update()
            for micro_batch in self.micro_batches(batch):
                update.backward(self.model(**micro_batch)["loss"])
            return update.apply()

    overrides = ("trainer.max_steps=null", "trainer.max_samples=11", "model.dropout=0.0", "log.every_steps=1")
    build_trainer(load(tmp_path, "name=ours", *overrides)).train()
    build_trainer(load(tmp_path, "name=bare", *overrides), Bare).train()
    ours, bare = ([line["loss"] for line in lines(tmp_path, name)] for name in ("ours", "bare"))
    assert ours == pytest.approx(bare, rel=1e-6)


def test_a_nan_is_warned_of_once(tmp_path, caplog):
    overrides = ("trainer.max_grad_norm=null", "data.eval={}", "anomalies={non_finite: skip, max_anomalies: 99}")
    config = load(tmp_path, "trainer.optimizer={type: sgd, lr: 1e30}", *overrides)
    with caplog.at_level("WARNING", logger="trainwright"):
        build_trainer(config).train()
    assert caplog.text.count("the loss is nan. Lower the learning rate") == 1


def test_a_second_process_is_kept_out_of_the_folder(tmp_path):
    seen = []

    class Intruder(Hook):
        def after_step(self):
            if self.trainer.step == 1:
                child = os.fork()
                if child == 0:
                    try:
                        build_trainer(load(tmp_path))
                    except CheckpointError as error:
                        os._exit(0 if f"is in use by process {os.getppid()}" in str(error) else 1)
                    os._exit(2)
                seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    build_trainer(load(tmp_path), with_hooks(Intruder())).train()
    assert seen == [0]


def test_the_names_of_a_line_keep_their_order(tmp_path):
    build_trainer(load(tmp_path)).train()
    evaluated = [[name for name in line if "/" in name] for line in lines(tmp_path)]
    assert {tuple(names) for names in evaluated if names} == {("valid/loss", "valid/accuracy")}


def test_a_step_that_runs_out_of_memory_says_what_holds_it_and_what_to_change(tmp_path):
    class Greedy(Trainer):
        def forward(self, **batch):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB.")

    with raises(OutOfMemory, "1", "0") as caught:
        build_trainer(load(tmp_path), Greedy).train()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    (report,) = tmp_path.rglob("report.txt")
    assert "layers.0" in report.read_text()


def test_an_evaluation_that_is_told_to_leave_is_done_by_the_resumed_run(tmp_path):
    class Slow(Trainer):
        def eval_step(self, batch):
            if self.step == 4 and not self.interrupted and leaving:
                self.interrupt("SIGTERM")
            return super().eval_step(batch)

    whole, halves = ("evaluation.every_steps=4", "name=whole"), ("evaluation.every_steps=4", "name=halves")
    leaving = []
    logs = build_trainer(load(tmp_path, *whole), Slow).train()
    leaving.append(True)
    first = build_trainer(load(tmp_path, *halves), Slow)
    first.train()
    assert (first.step, first.interrupted, first.state.has_unfinished_step) == (4, True, True)
    leaving.clear()
    second = build_trainer(load(tmp_path, *halves), Slow)
    assert second.train() == logs
    untimed = [[without_time(line) for line in lines(tmp_path, name)] for name in ("whole", "halves")]
    assert untimed[0] == untimed[1]
