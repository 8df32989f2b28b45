"""What Oumi's users were promised works here, and what broke there does not: one test a promise."""

import json
import tomllib
from pathlib import Path

import pydantic
import pytest
import torch
from tests.api.folders import equal_weights, lines, load, on_two_ranks, store_of, train, write
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from trainwright import Hook, RunConfig, Trainer, build_trainer, load_checkpoint, run_experiment
from trainwright.cli import app
from trainwright.export.huggingface import export_run
from trainwright.registry import resolve as registry

ROOT = Path(__file__).parents[2]

FILES = {
    "run.yaml": """
        name: mine
        model: {type: simple.SimpleModel, input_dim: 4, output_dim: 2}
        data:
          train: {type: rows.Indexed, size: 32}
          eval: {valid: {type: rows.Indexed, size: 13, seed: 1}}
        trainer:
          max_steps: 6
          global_batch_size: 8
          micro_batch_size: 4
          optimizer: {type: adamw, lr: 0.05}
          schedule: {type: cosine, warmup_steps: 2}
        evaluation: {every_steps: 3, metrics: {accuracy: {type: accuracy, outputs: outputs}}}
        checkpoint: {every_steps: 2, keep_last: null}
        writers: [json]
        log: {every_steps: 1}
        runtime: {device: cpu}
        """,
    "models/simple.py": """
        from torch import nn


        class SimpleModel(nn.Module):
            def __init__(self, input_dim, output_dim):
                super().__init__()
                self.body = nn.Sequential(nn.Linear(input_dim, 8), nn.ReLU(), nn.Dropout(0.1))
                self.linear = nn.Linear(8, output_dim)
                self.criterion = nn.CrossEntropyLoss()

            def forward(self, inputs, labels=None, **kwargs):
                outputs = self.linear(self.body(inputs))
                return {"outputs": outputs, "loss": None if labels is None else self.criterion(outputs, labels)}
        """,
    "datasets/rows.py": """
        import torch
        from torch.utils.data import Dataset, IterableDataset


        class Indexed(Dataset):
            def __init__(self, size=32, seed=0):
                self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))

            def __len__(self):
                return len(self.inputs)

            def __getitem__(self, index):
                return {"inputs": self.inputs[index], "labels": (self.inputs[index].sum() > 0).long()}


        class Streamed(IterableDataset):
            def __init__(self, size=32, seed=0):
                self.rows = Indexed(size, seed)

            def __iter__(self):
                return (self.rows[index] for index in range(len(self.rows)))


        class Both(Indexed):
            def __iter__(self):
                return (self[index] for index in range(len(self)))
        """,
}


@pytest.fixture
def project(tmp_path):
    return write(tmp_path, FILES)


# the config


def test_the_config_defines_everything_is_immutable_and_is_serializable(project):
    config = load(project)
    for change in (
        lambda: setattr(config.trainer, "max_steps", 9),
        lambda: config.model.arguments.__setitem__("input_dim", 5),
        lambda: setattr(config.data.train, "size", 1),
    ):
        with pytest.raises((pydantic.ValidationError, TypeError, AttributeError)):
            change()
    config.save(project / "again.yaml")
    assert RunConfig.load(project / "again.yaml") == config
    trainer = train(project, "trainer.max_steps=2")
    assert RunConfig.load(trainer.folder / "config.yaml") == trainer.config


# data


@pytest.mark.parametrize("name", ["Indexed", "Streamed", "Both"])
def test_a_dataset_is_map_style_iterable_or_both_and_a_data_loader_accepts_it(project, name):
    sets = [f"data.train.type=rows.{name}", f"data.eval.valid.type=rows.{name}"]
    trainer = train(project, *sets, "trainer.max_steps=4")
    assert lines(project)[-1].keys() >= {"loss", "valid/loss", "valid/accuracy"}
    assert trainer.train_data.samples_seen == 32
    batch = next(iter(DataLoader(trainer.train_data.dataset, batch_size=4)))
    assert batch["inputs"].shape == (4, 4)


def test_loader_options_are_in_the_config_and_change_no_result(project):
    plain = train(project, "trainer.max_steps=2")
    options = ["data.num_workers=1", "data.loader={prefetch_factor: 3, multiprocessing_context: fork}"]
    loaded = train(project, "trainer.max_steps=2", "name=workers", *options)
    assert (loaded.train_data.options.num_workers, loaded.config.data.loader.prefetch_factor) == (1, 3)
    assert equal_weights(plain.model, loaded.model)


# models


def test_the_documented_model_trains_evaluates_and_resumes_from_a_config_alone(project):
    for steps in (2, 6):
        assert (
            CliRunner()
            .invoke(
                app,
                [
                    "train",
                    str(project / "run.yaml"),
                    f"output_dir={project / 'runs'}",
                    "-q",
                    f"trainer.max_steps={steps}",
                    "trainer.schedule=null",
                ],
            )
            .exit_code
            == 0
        )
    whole = train(project, "name=whole", "trainer.schedule=null")
    assert equal_weights(load_checkpoint(project / "runs" / "mine"), whole.model)
    assert [line["step"] for line in lines(project) if "valid/loss" in line] == [2, 3, 6]


def test_the_documented_model_runs_under_hugging_faces_trainer_unchanged(project):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model_class = registry.find("model", "simple.SimpleModel", project_dir=project)
    rows = registry.find("dataset", "rows.Indexed", project_dir=project)(size=32)
    arguments = transformers.TrainingArguments(
        output_dir=str(project / "theirs"),
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=0.05,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
    )
    theirs = transformers.Trainer(
        model=model_class(input_dim=4, output_dim=2), args=arguments, train_dataset=rows, eval_dataset=rows
    )
    before = theirs.evaluate()["eval_loss"]
    theirs.train()
    assert theirs.evaluate()["eval_loss"] < before
    assert theirs.predict(rows).predictions.shape == (32, 2)


def test_without_labels_there_is_no_loss_and_a_loss_that_is_missing_is_the_criterions(project):
    text = FILES["models/simple.py"].replace("None if labels is None else self.criterion(outputs, labels)", "None")
    plain = train(project, "trainer.max_steps=2")
    write(project, {"models/lossless.py": text})
    left_to_us = train(project, "trainer.max_steps=2", "name=lossless", "model.type=lossless.SimpleModel")
    assert equal_weights(plain.model, left_to_us.model)
    assert left_to_us.model(torch.zeros(1, 4))["loss"] is None


def test_weights_of_a_custom_model_are_saved_and_loaded_again(project):
    trained = train(project, "trainer.max_steps=2")
    assert equal_weights(load_checkpoint(trained.folder), trained.model)
    folder = export_run(trained.folder, project / "exported", file_format="safetensors")
    again = build_trainer(load(project, "name=again", f"model.pretrained={folder}"))
    assert equal_weights(again.model, trained.model)


def test_a_constructor_neither_loads_nor_moves_weights_both_follow_it(project):
    """It is called once, on the CPU; then the weights are loaded, and then the model is moved to its device."""
    watched = """
        from .simple import SimpleModel


        class Watched(SimpleModel):
            acts = []

            def __init__(self, input_dim, output_dim):
                super().__init__(input_dim, output_dim)
                self.note("made")

            def _apply(self, function, *rest, **options):  # what .to(device) calls
                self.note("moved")
                return super()._apply(function, *rest, **options)

            def note(self, act):
                devices = {each.device.type for each in self.parameters()}
                self.acts.append((act, devices, self.linear.weight.tolist()))
        """
    write(project, {"models/watched.py": watched})
    trained = train(project, "trainer.max_steps=2")
    folder = export_run(trained.folder, project / "exported", file_format="safetensors")
    settings = ["name=again", "model.type=watched.Watched", f"model.pretrained={folder}", "trainer.schedule=null"]
    acts = registry.find("model", "watched.Watched", project_dir=project).acts

    def weights_of_acts():
        assert [act for act, _, _ in acts] == ["made", "moved"]
        assert all(devices == {"cpu"} for _, devices, _ in acts)
        (_, _, made), (_, _, moved) = acts
        acts.clear()
        return made, moved

    begun = build_trainer(load(project, *settings))
    made, moved = weights_of_acts()
    assert made != moved == trained.model.linear.weight.tolist()  # loaded in between
    begun.train()
    end = begun.model.linear.weight.tolist()
    load_checkpoint(begun.folder)
    made, moved = weights_of_acts()
    assert made != moved == end
    resumed = build_trainer(load(project, *settings))
    made, moved = weights_of_acts()
    assert end not in (made, moved)  # the checkpoint is read last of all, on the device
    assert resumed.model.linear.weight.tolist() == end


# what broke there


def test_training_and_evaluation_read_the_loss_in_the_same_way(project):
    forms = """
        from types import SimpleNamespace

        from .simple import SimpleModel


        class AsObject(SimpleModel):
            def forward(self, inputs, labels=None, **kwargs):
                return SimpleNamespace(**super().forward(inputs, labels))


        class AsLoss(SimpleModel):
            def forward(self, inputs, labels=None, **kwargs):
                return super().forward(inputs, labels)["loss"]
        """
    write(project, {"models/forms.py": forms})
    overrides = ["trainer.max_steps=2", "evaluation.metrics={}"]
    expected = train(project, *overrides).eval_logs
    for name in ("AsObject", "AsLoss"):
        assert train(project, *overrides, f"name={name}", f"model.type=forms.{name}").eval_logs == expected


def test_a_resumed_run_keeps_schedule_scaler_and_randomness(project):
    whole = train(project, "name=whole", "runtime.precision=fp16")
    stopping = [Stopping]

    class Stops(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), *(each() for each in stopping)]

    train(project, "runtime.precision=fp16", trainer_class=Stops)
    stopping.clear()
    assert store_of(project).steps()[-1] == 3
    resumed = train(project, "runtime.precision=fp16", trainer_class=Stops)
    assert equal_weights(whole.model, resumed.model)
    assert whole.context.updater.loss_scale.state_dict() == resumed.context.updater.loss_scale.state_dict()
    assert [(line["lr"], line["loss"]) for line in lines(project)] == [
        (line["lr"], line["loss"]) for line in lines(project, "whole")
    ]


class Stopping(Hook):
    """Has the run leave after its third step, as a signal would."""

    def after_step(self):
        if self.trainer.step == 3:
            self.trainer.interrupt("SIGTERM")


class Noting(Trainer):
    """Notes the first number of every sample that this rank trains on, and counts those that it evaluates."""

    def post_init(self):
        self.seen, self.num_evaluated = [], 0

    def train_step(self, batch):
        if self.batch.num_samples:
            self.seen += batch["inputs"][: self.batch.num_samples, 0].tolist()
        return super().train_step(batch)

    def eval_step(self, batch):
        self.num_evaluated += self.batch.num_samples
        return super().eval_step(batch)


def test_a_stream_is_shared_out_over_ranks_and_every_rank_evaluates(project):
    def act(rank):
        settings = ["trainer.max_steps=4", "evaluation.every_steps=null", "trainer.micro_batch_size=null"]
        trainer = train(project, *settings, "data.train.type=rows.Streamed", "data.num_workers=0", trainer_class=Noting)
        told = {"seen": trainer.seen, "evaluated": trainer.num_evaluated, "logs": trainer.eval_logs}
        (project / f"{rank}.json").write_text(json.dumps(told))

    on_two_ranks(project, act)
    first, second = (json.loads((project / f"{rank}.json").read_text()) for rank in range(2))
    assert len({*first["seen"], *second["seen"]}) == len(first["seen"]) + len(second["seen"]) == 32
    assert (first["evaluated"] + second["evaluated"], min(first["evaluated"], second["evaluated"])) == (13, 6)
    assert first["logs"] == second["logs"]


def test_trainers_collators_and_hooks_are_registered_by_imports_and_named_on_the_command_line(project):
    parts = """
        from trainwright import Hook, Trainer, register
        from trainwright.data.collators.stack import Stack

        from .models.simple import SimpleModel

        register("model", "oumi_simple")(SimpleModel)
        register("collator", "oumi_stack")(Stack)


        @register("trainer", "oumi_trainer")
        class Mine(Trainer):
            def train_loop_end(self):
                return {**super().train_loop_end(), "mine": 1.0}


        @register("hook", "oumi_hook")
        class Puts(Hook):
            def after_step(self):
                self.trainer.storage.put_scalar("put", 2.0)
        """
    write(project, {"parts.py": parts})
    changes = [
        "imports=[parts]",
        "model={type: oumi_simple, input_dim: 4, output_dim: 2}",
        "data.collator=oumi_stack",
        "trainer.type=oumi_trainer",
        "hooks=[oumi_hook]",
        f"output_dir={project / 'runs'}",
    ]
    done = CliRunner().invoke(app, ["train", "-q", str(project / "run.yaml"), *changes])
    assert done.exit_code == 0, done.output
    assert (lines(project)[-1]["mine"], lines(project)[-1]["put"]) == (1.0, 2.0)


# what its users ask for


def test_installing_needs_no_heavy_package_except_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">")[0].partition("=")[0] for requirement in project["dependencies"]}
    assert not names & {"transformers", "datasets", "accelerate", "pandas", "pyarrow", "wandb", "tensorboard", "ray"}


def test_logs_are_there_while_the_run_is_under_way(project):
    told = []

    class Reads(Hook):
        def after_step(self):
            path = self.trainer.folder / "metrics.json"
            told.append(len(path.read_text().splitlines()) if path.exists() else 0)

    class Reading(Trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*build.hooks(), Reads()]

    train(project, "trainer.max_steps=3", trainer_class=Reading)
    assert told == [0, 1, 2]


def test_a_search_over_settings_is_a_loop_over_overrides(project):
    losses = {}
    for rate in (1e-5, 5e-2):
        config = load(project, f"name=rate-{rate}", f"trainer.optimizer.lr={rate}", "trainer.max_steps=12")
        _, logs = run_experiment(config)
        losses[rate] = logs["valid/loss"]
    assert min(losses, key=losses.get) == 5e-2
