"""What LiBai's users were promised works here, and what broke there does not: one test a promise."""

import itertools
import json

import pytest
import torch
from tests.api.folders import equal_weights, lines, load, on_two_ranks, store_of, train, write
from tests.messages import raises
from typer.testing import CliRunner

from trainwright import AutoModel, Every, Hook, Trainer, build_trainer, get_event_storage
from trainwright.cli import app
from trainwright.errors import ConfigError
from trainwright.hooks.callback import CallbackHook

FILES = {
    "run.yaml": """
        name: mine
        model: {type: net.Net}
        data:
          train: {type: points.Points, size: 50}
          eval: {valid: {type: points.Points, size: 20, seed: 1}}
        trainer:
          max_steps: 6
          global_batch_size: 8
          micro_batch_size: 4
          optimizer: {type: sgd, lr: 0.1}
        evaluation: {every_steps: 2}
        checkpoint: {every_steps: 2, keep_last: 2}
        writers: [json]
        log: {every_steps: 1}
        runtime: {device: cpu}
        """,
    "models/net.py": """
        import torch
        from torch import nn

        from trainwright import get_event_storage


        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
                self.head = nn.Linear(4, 2)
                self.criterion = nn.CrossEntropyLoss()

            def forward(self, x, labels=None):
                for layer in self.layers:
                    x = torch.tanh(layer(x))
                logits = self.head(x)
                if self.training:
                    right = (logits.argmax(-1) == labels).float().mean()
                    get_event_storage().put_scalar("some_accuracy", right)
                return {"logits": logits}
        """,
    "datasets/points.py": """
        import torch


        class Points:
            def __init__(self, size=50, seed=0):
                self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))

            def __len__(self):
                return len(self.x)

            def __getitem__(self, index):
                return {"x": self.x[index], "labels": (self.x[index].sum() > 0).long()}


        class Documents:
            def __len__(self):
                return 60

            def __getitem__(self, index):
                return {"input_ids": [index] * (1 + index % 7)}
        """,
}


@pytest.fixture
def project(tmp_path):
    return write(tmp_path, FILES)


# the trainer and its hooks


def test_a_trainer_builds_everything_from_its_config_and_every_build_method_may_be_replaced(project):
    called = []

    def noting(name):
        def build(cls, build, *arguments):
            called.append(name)
            return getattr(super(Mine, cls), name)(build, *arguments)

        return classmethod(build)

    names = [name for name in vars(Trainer) if name.startswith("build_")]
    Mine = type("Mine", (Trainer,), {})
    for name in names:
        setattr(Mine, name, noting(name))
    whole = train(project, trainer_class=Mine)
    assert sorted(called) == sorted(names)
    assert equal_weights(whole.model, train(project, "name=plain").model)


def test_the_loop_runs_its_events_in_order_inside_of_an_event_storage(project):
    calls = []

    class Diary(Hook):
        def before_train(self):
            calls.append(("before_train", get_event_storage().step))

        def before_step(self):
            calls.append(("before_step", get_event_storage().step))

        def after_step(self):
            calls.append(("after_step", get_event_storage().step))

        def after_train(self):
            calls.append(("after_train", get_event_storage().step))

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            hooks = super().build_hooks(build)
            hooks.append(Diary())
            return hooks

        def train_step(self, batch):
            calls.append(("train_step", get_event_storage().step))
            return super().train_step(batch)

    train(project, "trainer.max_steps=2", trainer_class=Mine)
    steps = [(name, step) for step in (1, 2) for name in ("before_step", "train_step", "after_step")]
    assert calls == [("before_train", 0), *steps, ("after_train", 2)]


def test_hooks_are_appended_in_build_hooks_and_a_callback_hook_calls_functions(project):
    calls = []

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [
                *super().build_hooks(build),
                CallbackHook(
                    before_train=lambda trainer: calls.append("begin"),
                    after_step=lambda trainer: calls.append(trainer.iter),
                    after_train=lambda trainer: calls.append("end"),
                ),
                Every(2)(lambda trainer: calls.append(f"every {trainer.iter}")),
            ]

    train(project, "trainer.max_steps=3", trainer_class=Mine)
    assert calls == ["begin", 1, 2, "every 2", 3, "end"]


def test_iter_is_a_read_only_alias_of_the_step(project):
    trainer = train(project, "trainer.max_steps=3")
    assert trainer.iter == trainer.step == trainer.global_step == 3
    with pytest.raises(AttributeError):
        trainer.iter = 5


def test_the_acts_of_its_shipped_hooks_are_settings(project):
    best = "checkpoint.keep_best={metric: valid/loss, mode: max}"
    schedule = "trainer.schedule={type: linear}"
    trainer = train(project, best, schedule, "checkpoint.every_steps=1", "log.every_steps=3")
    written = lines(project)
    evaluated = {line["step"]: line["valid/loss"] for line in written if "valid/loss" in line}
    worst = max(evaluated, key=evaluated.get)
    assert list(evaluated) == [2, 4, 6]  # EvalHook
    assert [line["step"] for line in written if "loss" in line] == [3, 6]  # PeriodicWriter
    assert store_of(project).steps() == sorted({worst, 5, 6})  # PeriodicCheckpointer, BestCheckpointer
    assert written[-1]["lr"] == 0.0  # LRScheduler
    assert "seconds_per_step" in trainer.storage.latest()  # IterationTimer


def test_a_replaced_train_step_may_keep_the_previous_output(project):
    class KeepsPrevious(Trainer):
        previous = None

        def train_step(self, batch):
            update = self.begin_update()
            outputs = []
            for micro_batch in self.micro_batches(batch):
                logits = self.model(**micro_batch)["logits"]
                loss = self.model.criterion(logits, micro_batch["labels"])
                update.backward(loss)
                outputs.append(logits.detach())
            result = update.apply()
            if self.previous is not None:
                result.metrics["drift"] = (torch.cat(outputs) - self.previous).abs().mean()
            self.previous = torch.cat(outputs)
            return result

    trainer = train(project, trainer_class=KeepsPrevious)
    assert ["drift" in line for line in lines(project)] == [False, *[True] * 5]
    assert trainer.previous.shape == (8, 2)
    assert equal_weights(trainer.model, train(project, "name=plain").model)


# events and commands


def test_a_value_put_inside_of_a_model_reaches_console_json_and_tensorboard(project, capsys):
    train(project, "writers=[console, json, tensorboard]", "log.every_steps=2", "trainer.max_steps=2")
    [line] = lines(project)
    assert 0.0 <= line["some_accuracy"] <= 1.0
    assert "some_accuracy" in "".join(capsys.readouterr())
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(project / "runs" / "mine" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("some_accuracy")] == [2]


def test_fast_dev_run_tries_everything_and_keeps_nothing_and_overrides_come_last(project, monkeypatch):
    monkeypatch.chdir(project)
    done = CliRunner().invoke(app, ["train", "run.yaml", "--fast-dev-run", "trainer.optimizer.lr=0.5"])
    assert done.exit_code == 0, done.output
    assert not (project / "runs").exists()
    assert CliRunner().invoke(app, ["train", "run.yaml", "-q", "trainer.optimizer.lr=0.5"]).exit_code == 0
    assert lines(project)[-1]["lr"] == 0.5


def test_eval_only_evaluates_the_newest_checkpoint_and_resume_continues(project, monkeypatch):
    monkeypatch.chdir(project)
    invoke = CliRunner().invoke
    assert invoke(app, ["train", "run.yaml", "-q", "trainer.max_steps=4"]).exit_code == 0
    logged = lines(project)[-1]
    before = {path: path.read_bytes() for path in (project / "runs").rglob("*") if path.is_file()}
    done = invoke(app, ["train", "run.yaml", "-q", "--eval-only", "trainer.max_steps=4"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["valid/loss"] == logged["valid/loss"]
    assert {path: path.read_bytes() for path in (project / "runs").rglob("*") if path.is_file()} == before
    done = invoke(app, ["train", "run.yaml", "-q", "--resume"])
    assert done.exit_code == 0, done.output
    assert [line["step"] for line in lines(project)] == [1, 2, 3, 4, 5, 6]


# parallelism and memory


LLAMA = """
    name: mine
    model: {type: llama, vocab_size: 32, hidden_size: 16, num_layers: 2, num_heads: 2, max_positions: 8}
    data: {train: {type: counting.Counting}}
    trainer: {type: language_model, max_steps: 3, global_batch_size: 8, micro_batch_size: 4, max_grad_norm: 0.5}
    checkpoint: {every_steps: null}
    writers: [json]
    log: {every_steps: 1}
    runtime: {device: cpu}
    """
COUNTING = """
    import torch


    class Counting:
        def __len__(self):
            return 40

        def __getitem__(self, index):
            ids = (torch.arange(8) * (1 + index % 3) + index) % 32
            return {"input_ids": ids, "labels": ids}
    """


def test_data_zero_tensor_and_pipeline_parallelism_compute_what_one_process_does(project):
    write(project, {"run.yaml": LLAMA, "datasets/counting.py": COUNTING})
    adamw = "trainer.optimizer={type: adamw, lr: 1e-2}"
    train(project, adamw, "name=one")
    layouts = ["replicate", "fsdp", "tensor", "pipeline"]
    for axis in layouts:
        micro = "trainer.micro_batch_size=2" if axis == "pipeline" else "trainer.micro_batch_size=4"
        on_two_ranks(
            project, lambda _, a=axis, m=micro: train(project, adamw, m, f"name={a}", f"runtime.mesh={{{a}: 2}}")
        )
    expected = [(line["loss"], line["grad_norm"]) for line in lines(project, "one")]
    for axis in layouts:
        found = [(line["loss"], line["grad_norm"]) for line in lines(project, axis)]
        assert list(itertools.chain(*found)) == pytest.approx(list(itertools.chain(*expected)), rel=1e-4), axis


def test_models_load_hugging_faces_weights_and_agree_in_numbers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    theirs.save_pretrained(tmp_path)
    ours = AutoModel.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 64, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids)["logits"], theirs(ids).logits, atol=1e-5, rtol=1e-5)


# what broke there


def test_a_resumed_run_continues_its_data_order(project):
    whole = train(project, "name=whole")
    train(project, "trainer.max_steps=3")
    resumed = train(project)
    assert resumed.train_data.samples_seen == 48
    assert equal_weights(whole.model, resumed.model)


class Noting(Trainer):
    """Notes the first number of every sample that this rank trains on."""

    def post_init(self):
        self.seen = []

    def train_step(self, batch):
        self.seen.append(batch["x"][: self.batch.num_samples, 0].tolist())
        return super().train_step(batch)


def test_ranks_share_out_each_epoch_with_every_sample_once(project):
    def act(rank):
        limit = ["trainer.max_steps=null", "trainer.max_epochs=2", "data.eval={}", "evaluation={}"]
        trainer = train(project, *limit, trainer_class=Noting)
        (project / f"{rank}.json").write_text(json.dumps(trainer.seen))

    on_two_ranks(project, act)
    ranks = [json.loads((project / f"{rank}.json").read_text()) for rank in range(2)]
    in_order = [value for shares in zip(*ranks, strict=True) for share in shares for value in share]
    for epoch in (in_order[:50], in_order[50:]):
        assert len(set(epoch)) == len(epoch) == 50
    assert in_order[:50] != in_order[50:]


def test_train_valid_and_test_never_share_a_document_not_even_packed(project):
    packed = "data={train: {type: pack, length: 16, source: {type: points.Documents}}, split: [70, 20, 10]}"
    model = "model={type: llama, vocab_size: 64, hidden_size: 8, num_layers: 1, num_heads: 1, max_positions: 16}"
    trainer = build_trainer(load(project, packed, model, "trainer.type=language_model"))
    sets = [trainer.train_data, trainer.eval_data["valid"], trainer.context.test_data]
    documents = [
        {
            int(token)
            for row in range(len(each.dataset))
            for token, document in zip(*(each.dataset[row][key] for key in ("input_ids", "document_ids")), strict=True)
            if document >= 0
        }
        for each in sets
    ]
    assert set.union(*documents) == set(range(60))
    assert sum(map(len, documents)) == 60


def test_the_final_evaluation_reaches_the_metrics_file(project):
    trainer = train(project, "evaluation.every_steps=4", "trainer.max_steps=5")
    assert lines(project)[-1]["step"] == 5
    assert lines(project)[-1]["valid/loss"] == trainer.eval_logs["valid/loss"]


def test_evaluation_sets_keep_their_own_results_and_the_test_set_chooses_nothing(project):
    points = "{{type: points.Points, size: 20, seed: {}}}".format
    sets = [f"data.eval={{first: {points(1)}, second: {points(2)}}}", f"data.test={points(3)}"]
    train(project, *sets, "checkpoint.keep_best={metric: first/loss}")
    last = lines(project)[-1]
    assert len({last["first/loss"], last["second/loss"], last["test/loss"]}) == 3
    assert [line["step"] for line in lines(project) if "test/loss" in line] == [6]
    with raises(ConfigError):
        load(project, *sets, "checkpoint.keep_best={metric: test/loss}")


def test_an_iteration_is_one_update_however_many_micro_batches_it_has(project):
    counts = {}
    for micro in (1, 8):
        trainer = train(project, f"name=micro-{micro}", f"trainer.micro_batch_size={micro}")
        counts[micro] = (trainer.iter, trainer.train_data.samples_seen, store_of(project, f"micro-{micro}").steps())
    assert counts[1] == counts[8] == (6, 48, [4, 6])


def test_precision_recomputation_and_sharding_act_in_eager_mode_or_are_rejected(project):
    watched = """
        from torch import nn

        from .net import Net


        class Watched(nn.Linear):
            def forward(self, x):
                self.calls = getattr(self, "calls", 0) + 1
                outputs = super().forward(x)
                self.dtype = outputs.dtype
                return outputs


        class WatchedNet(Net):
            def __init__(self):
                super().__init__()
                self.layers[0] = Watched(4, 4)
        """
    write(project, {"models/watched.py": watched})
    once = ["data.eval={}", "evaluation={}", "trainer.max_steps=1", "trainer.micro_batch_size=8"]
    overrides = [*once, "model.type=watched.WatchedNet", "runtime.precision=bf16"]
    plain = train(project, *overrides).model.layers[0]
    assert (plain.calls, plain.dtype) == (1, torch.bfloat16)
    recomputed = train(
        project, *overrides, "name=activation_checkpointing", "model.activation_checkpointing=[Watched]"
    ).model.layers[0]
    assert recomputed.calls == 2  # the second time in the backward pass
    with raises(ConfigError, "runtime.mesh"):
        build_trainer(load(project, "runtime.mesh={fsdp: 2}"))
    with raises(ConfigError, "runtime.mode"):
        build_trainer(load(project, "runtime.mode=graph", "runtime.precision=fp16"))


def test_clipping_is_by_the_norm_of_all_groups_together(project):
    groups = "trainer.optimizer={type: sgd, lr: 1.0, groups: [{match: 'head.*', lr: 1.0, weight_decay: 0.0}]}"
    before = build_trainer(load(project, groups, "name=start")).model.state_dict()
    trainer = train(project, groups, "trainer.max_steps=1", "trainer.max_grad_norm=0.05")
    assert len(trainer.optimizers["main"].param_groups) > 1
    moved = [(value - before[name]).norm() for name, value in trainer.model.state_dict().items()]
    assert float(torch.stack(moved).norm()) == pytest.approx(0.05, rel=1e-3)
    assert lines(project)[0]["grad_norm"] > 0.05


def test_hooks_have_state_that_a_resumed_run_gets_back(project):
    class Counts(Hook):
        count = 0

        def after_step(self):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    class Mine(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), Counts()]

    train(project, "trainer.max_steps=2", trainer_class=Mine)
    assert train(project, trainer_class=Mine).hooks[-1].count == 6
