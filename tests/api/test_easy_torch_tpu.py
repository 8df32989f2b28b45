"""What easy-torch-tpu's users were promised works here, and what broke there does not: one test a promise."""

import json
import re
import socket

import pytest
import torch
from tests.api.folders import equal_weights, lines, load, store_of, train, write
from tests.messages import mentions, raises
from typer.testing import CliRunner

from trainwright import build_trainer, load_checkpoint
from trainwright.analysis.check import check_run
from trainwright.cli import app
from trainwright.errors import CheckpointError, ComponentError
from trainwright.registry import resolve as registry

FILES = {
    "run.yaml": """
        name: mine
        model: {type: net.Net, width: 8}
        data: {train: {type: points.Points, size: 24}, collator: {type: shift.Shift, by: 0.5}}
        trainer:
          type: mine.Mine
          sharpness: 2.0
          max_steps: 6
          global_batch_size: 8
          micro_batch_size: 4
          optimizer: {type: walk.Walk, lr: 0.1, decay: 0.01}
        checkpoint: {every_steps: 2, keep_last: null}
        writers: [json]
        log: {every_steps: 1}
        runtime: {device: cpu}
        """,
    "trainers/mine.py": """
        from trainwright import Trainer


        class Mine(Trainer):
            def forward(self, **batch):
                logits = self.model(batch["x"]) * self.config.trainer.sharpness
                loss = self.model.criterion(logits, batch["labels"])
                return loss, {"spread": logits.std().reshape(1), "note": f"at {self.step}"}
        """,
    "models/net.py": """
        from torch import nn


        class Net(nn.Module):
            def __init__(self, width=4, has_gate=False):
                super().__init__()
                if has_gate:
                    self.gate = nn.Linear(4, 1)
                self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
                self.head = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
                self.criterion = nn.CrossEntropyLoss()

            def forward(self, x):
                for layer in self.layers:
                    x = x + layer(x)
                return self.head(x)
        """,
    "datasets/points.py": """
        import torch


        class Points:
            def __init__(self, size=24):
                self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

            def __len__(self):
                return len(self.x)

            def __getitem__(self, index):
                return {"x": self.x[index], "labels": (self.x[index].sum() > 0).long()}
        """,
    "collators/shift.py": """
        import torch


        class Shift:
            def __init__(self, by):
                self.by = by

            def __call__(self, samples):
                stacked = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
                return {**stacked, "x": stacked["x"] + self.by}
        """,
    "optimizers/walk.py": """
        import torch


        class Walk(torch.optim.Optimizer):
            def __init__(self, params, lr, decay=0.0):
                super().__init__(params, {"lr": lr, "decay": decay})

            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for one in group["params"]:
                        one.mul_(1 - group["decay"]).sub_(one.grad, alpha=group["lr"])
                return {"largest": torch.stack([one.abs().max() for one in self.param_groups[0]["params"]]).max()}
        """,
}


@pytest.fixture
def project(tmp_path):
    return write(tmp_path, FILES)


# trainers


def test_a_trainer_is_a_file_in_trainers_whose_forward_returns_loss_and_aux(project):
    train(project, "trainer.max_steps=3")
    written = lines(project)
    assert [line["note"] for line in written] == ["at 0", "at 1", "at 2"]
    assert all(isinstance(line["spread"], float) and line["spread"] > 0 for line in written)


def test_a_file_in_any_folder_of_a_kind_is_found_by_its_name(project):
    task = """
        from trainwright import Task


        class Halved(Task):
            def forward(self, model, batch):
                return model.criterion(model(batch["x"]), batch["labels"]) / 2
        """
    hook = """
        from trainwright import Hook


        class Puts(Hook):
            def after_step(self):
                self.trainer.storage.put_scalar("twice", 2.0 * self.trainer.step)
        """
    plain = "from trainwright import Trainer\n\n\nclass Plain(Trainer):\n    pass\n"
    write(project, {"tasks/halved.py": task, "hooks/puts.py": hook, "trainers/plain.py": plain})
    train(project, "trainer.sharpness=1.0", "trainer.max_steps=1")
    mine = ["trainer.type=plain.Plain", "task=halved.Halved", "hooks=[puts.Puts]"]
    train(project, *mine, "trainer.max_steps=1", "name=half")
    [whole], [half] = lines(project), lines(project, "half")
    assert (half["loss"], half["twice"]) == (pytest.approx(whole["loss"] / 2), 2.0)


def test_an_overridden_train_step_returns_four_values_and_all_else_still_works(project):
    overrides = """
        class Steps(Mine):
            def train_step(self, batch):
                update = self.begin_update()
                for micro_batch in self.micro_batches(batch):
                    assert len(micro_batch["x"]) == 4
                    update.backward(self.run_forward(micro_batch))
                loss, aux, grad_norm, lr = update.apply()
                return loss, {**aux, "doubled": loss * 2}, grad_norm, lr
        """
    write(project, {"trainers/mine.py": FILES["trainers/mine.py"] + "\n" + overrides})
    train(project)
    stepped = train(project, "trainer.type=mine.Steps", "name=steps")
    plain, own = lines(project), lines(project, "steps")
    assert [line["doubled"] for line in own] == pytest.approx([2 * line["loss"] for line in plain])
    assert [line["grad_norm"] for line in own] == [line["grad_norm"] for line in plain]
    assert {"note", "spread", "lr", "largest"} <= own[0].keys()
    assert store_of(project, "steps").steps() == [2, 4, 6]
    assert equal_weights(stepped.model, load_checkpoint(project / "runs" / "mine"))


def test_operations_that_break_the_graph_are_named_with_file_and_line_before_the_run_starts(project):
    talking = """
        from trainwright import Trainer


        class Talking(Trainer):
            def forward(self, **batch):
                loss = self.model.criterion(self.model(batch["x"]), batch["labels"])
                print(loss)
                return loss, {"copied": loss.item()}
        """
    write(project, {"trainers/talking.py": talking})
    report = check_run(project / "run.yaml", ["trainer.type=talking.Talking", "trainer.sharpness=1.0"])
    found = {(re.sub(r".*/", "", str(each.location)), each.problem) for each in report.findings}
    assert {
        ("talking.py:7", "this would break a compiled graph: a tensor is printed or turned into text."),
        ("talking.py:8", "this would break a compiled graph: .item() waits for the device."),
    } <= found
    assert not (project / "runs").exists()


# models


def test_sharding_is_data_by_parameter_and_module_globs_and_unmatched_names_are_reported(project):
    rules = """
        parameters:
          head.0.weight: [[fsdp, tensor], null]
          head.0.bias: [tensor]
          head.3.weight: [null, tensor]
          tail.*: [fsdp]
        outputs:
          head.0: [null, tensor]
        """
    write(project, {"sharding/net.yaml": rules})
    mesh = "runtime.mesh={fsdp: 2, tensor: 2}"
    arguments = [str(project / "run.yaml"), "model.sharding=sharding/net.yaml", mesh, "--world", "4"]
    done = CliRunner().invoke(app, ["shard", *arguments], env={"COLUMNS": "200"})
    told = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    assert "head.0.weight 8 × 4 [fsdp × tensor, -] 2 × 4" in told
    assert "head.3.weight 2 × 8 [fsdp, tensor] 1 × 4" in told
    assert mentions(told, "tail.*")
    assert "copied along tensor: layers.0.weight" in told


def test_activation_checkpointing_compile_repeated_blocks_and_offload_are_settings_that_change_no_result(project):
    named = FILES["models/net.py"].replace("x = x + layer(x)", 'x = x + layer(name_tensor(x, "layer_input"))')
    imported = "from torch import nn\n        from trainwright.models.layers.annotations import name_tensor"
    write(project, {"models/net.py": named.replace("from torch import nn", imported)})
    plain = train(project, "trainer.max_steps=2")
    less = [
        "model.activation_checkpointing={layers: {layers: [Linear]}}",
        "model.compile_repeated_blocks=layers",
        "model.offload=[layer_input]",
    ]
    rewritten = train(project, "trainer.max_steps=2", "name=less", *less)
    assert equal_weights(plain.model, rewritten.model)
    assert lines(project) == lines(project, "less")


def test_sub_modules_may_have_settings_of_their_own(project, caplog):
    caplog.set_level("INFO", "trainwright")
    train(
        project,
        "trainer.max_steps=1",
        "model.activation_checkpointing={layers: {layers: [Linear], every: 2}, head: [Linear]}",
    )
    assert mentions(caplog.text, "layers", "model.activation_checkpointing", "1", "2")
    assert mentions(caplog.text, "head", "model.activation_checkpointing", "2")


def test_a_checkpoint_loads_on_any_device_at_any_step_and_leniently_if_asked(project):
    trained = train(project)
    run = project / "runs" / "mine"
    model = load_checkpoint(run)
    assert equal_weights(trained.model, model)
    assert not model.training
    assert not equal_weights(load_checkpoint(run, 2), model)
    assert {each.device.type for each in load_checkpoint(run, device="meta").parameters()} == {"meta"}
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("width: 8", "width: 8\n  has_gate: true")
    )
    with raises(CheckpointError, "gate.weight"):
        load_checkpoint(run, trust=True)  # an edited config names the user's code
    lenient = load_checkpoint(run, strict=False, trust=True)
    assert torch.equal(lenient.head[0].weight, model.head[0].weight)
    assert hasattr(lenient, "gate")


# optimizers


def test_an_optimizer_is_a_file_whose_arguments_are_the_configs_and_whose_dict_is_logged(project):
    trainer = train(project, "trainer.max_steps=2")
    [group] = trainer.optimizers["main"].param_groups
    assert (group["lr"], group["decay"]) == (0.1, 0.01)
    largest = max(float(one.detach().abs().max()) for one in trainer.model.parameters())
    assert lines(project)[-1]["largest"] == pytest.approx(largest)


def test_several_named_optimizers_own_different_parameters_with_their_own_schedules(project):
    named = (
        "trainer.optimizers={body: {optimizer: {type: walk.Walk, lr: 0.1}, schedule: linear, match: 'layers.*'}, "
        "top: {optimizer: {type: sgd, lr: 0.2}, match: 'head.*'}}"
    )
    trainer = train(project, "trainer.optimizer=null", named)
    written = lines(project)
    assert (written[0]["lr/body"], written[-1]["lr/body"]) == (0.1, 0.0)
    assert {line["lr/top"] for line in written} == {0.2}
    assert "largest/body" in written[0]
    owned = [
        {id(one) for group in each.param_groups for one in group["params"]} for each in trainer.optimizers.values()
    ]
    assert not owned[0] & owned[1]
    assert owned[0] | owned[1] == {id(one) for one in trainer.model.parameters()}


def test_adamw_counts_and_repairs_nans_and_keeps_its_state_in_bf16_if_set(project):
    broken = """
        import torch

        from trainwright import Trainer


        class Broken(Trainer):
            def forward(self, **batch):
                logits = self.model(batch["x"])
                if self.step == 1 and logits.requires_grad:
                    logits.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
                return self.model.criterion(logits, batch["labels"])
        """
    write(project, {"trainers/broken.py": broken})
    optimizer = "trainer.optimizer={type: adamw, lr: 1e-2, repair_nan: true, state_dtype: bf16}"
    trainer = train(project, "trainer.type=broken.Broken", optimizer, "trainer.max_steps=3")
    counts = [line["nan_gradients"] for line in lines(project)]
    assert counts == [0, sum(one.numel() for one in trainer.model.parameters()), 0]
    assert all(one.isfinite().all() for one in trainer.model.parameters())
    state = trainer.optimizers["main"].state
    assert {one["exp_avg"].dtype for one in state.values()} == {torch.bfloat16}


def test_muon_skips_parameters_that_are_marked(project):
    marked = FILES["models/net.py"].replace(
        "self.criterion", "self.layers[0].weight.no_muon = True\n                self.criterion"
    )
    write(project, {"models/net.py": marked})
    trainer = train(project, "trainer.optimizer={type: muon, lr: 1e-2}", "trainer.max_steps=1")
    state = trainer.optimizers["main"].state
    assert "exp_avg_sq" in state[trainer.model.layers[0].weight]
    assert "exp_avg_sq" not in state[trainer.model.layers[1].weight]


# collators and data


def test_a_collator_gets_its_arguments_and_a_list_of_dicts_and_moves_nothing(project):
    seen = """
        import torch

        from .shift import Shift


        class Seen(Shift):
            def __call__(self, samples):
                assert isinstance(samples, list) and isinstance(samples[0], dict)
                batch = super().__call__(samples)
                assert {value.device.type for value in batch.values()} == {"cpu"}
                return batch
        """
    write(project, {"collators/seen.py": seen})
    trainer = train(project, "data.collator={type: seen.Seen, by: 0.25}", "trainer.max_steps=1")
    assert trainer.train_data.collator.by == 0.25


def test_the_collators_that_users_know_are_shipped():
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}]
    pairs = [{"input_ids": [1, 2], "labels": [3]}, {"input_ids": [4], "labels": [5, 6]}]
    texts = [{"text": "ab"}, {"text": "abcd"}]
    shapes = {}
    for name, arguments, samples in [
        ("equal_length", {}, rows),
        ("padded", {"pad_token_id": 0}, [*rows, {"input_ids": [7]}]),
        ("sequence_to_sequence", {"pad_token_id": 0}, pairs),
        ("tokenize", {"tokenizer": "bytes", "pad_token_id": 0}, texts),
    ]:
        collator = registry.find("collator", name, project_dir=".")(**arguments)
        shapes[name] = {key: tuple(value.shape) for key, value in collator(samples).items()}
    assert shapes["equal_length"]["input_ids"] == (2, 3)
    assert shapes["padded"]["attention_mask"] == (3, 3)
    assert shapes["sequence_to_sequence"]["input_ids"] == shapes["sequence_to_sequence"]["labels"] == (2, 2)
    assert shapes["tokenize"]["input_ids"] == (2, 4)


@pytest.mark.parametrize("streaming", ["false", "true"], ids=["in memory", "streaming"])
def test_data_comes_through_hugging_face_datasets(project, streaming):
    pytest.importorskip("datasets").disable_progress_bars()
    rows = [{"x": [float(n), 0.0, 1.0, -n], "labels": n % 2} for n in range(24)]
    write(project, {"rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    data = f"data.train={{type: huggingface, path: json, data_files: [rows.jsonl], streaming: {streaming}}}"
    trainer = train(project, data, "trainer.max_steps=3")
    assert trainer.train_data.samples_seen == 24
    assert lines(project)[-1]["loss"] > 0


# logs


def test_all_that_was_logged_there_is_logged_here(project):
    trainer = train(project, "hooks=[{type: count_progress}]", "trainer.max_steps=2")
    written = [json.loads(line) for line in (trainer.folder / "metrics.json").read_text().splitlines()]
    assert {"loss", "grad_norm", "spread", "note", "lr", "samples_seen", "anomalies", "hours", "seconds_per_step"} <= (
        written[-1].keys()
    )
    assert [line["samples_seen"] for line in written] == [8, 16]
    assert trainer.is_finished


# what broke there


def test_a_checkpoint_holds_more_than_weights_and_a_resumed_run_ends_with_the_same_bits(project):
    optimizer = "trainer.optimizer={type: adamw, lr: 1e-2}"
    whole = train(project, optimizer, "name=whole")
    train(project, optimizer, "trainer.max_steps=3")
    halves = train(project, optimizer)
    assert equal_weights(whole.model, halves.model)
    assert lines(project, "whole") == lines(project)
    assert store_of(project).read(6, "optimizers")["main"].keys()


def test_a_resumed_run_does_not_replay_its_data(project):
    watching = """
        from .mine import Mine


        class Watching(Mine):
            def train_step(self, batch):
                result = super().train_step(batch)
                result.metrics["seen"] = [round(value, 4) for value in batch["x"][:, 0].tolist()]
                return result
        """
    write(project, {"trainers/watching.py": watching})
    for max_steps in (1, 3):
        train(project, "trainer.type=watching.Watching", f"trainer.max_steps={max_steps}")
    seen = [value for line in lines(project) for value in line["seen"]]
    assert len(set(seen)) == 24


def test_a_run_has_as_many_epochs_as_it_is_given(project):
    trainer = train(project, "trainer.max_steps=null", "trainer.max_epochs=2.5")
    assert trainer.train_data.samples_seen == 60
    assert trainer.epoch == 2


def test_an_error_in_the_data_is_raised_at_once_with_its_location(project):
    broken = """
        from .points import Points


        class Broken(Points):
            calls = 0

            def __getitem__(self, index):
                Broken.calls += 1
                raise OSError("no such row")
        """
    write(project, {"datasets/broken.py": broken})
    trainer = build_trainer(load(project, "data.train.type=broken.Broken"))
    with pytest.raises(OSError, match="no such row") as caught:
        trainer.train()
    assert re.fullmatch(r"while reading sample \d+ of Broken", caught.value.__notes__[0])
    assert str(caught.traceback[-1].path).endswith("datasets/broken.py")
    assert type(trainer.train_data.dataset).calls == 1


def test_building_and_training_reaches_for_no_network(project, monkeypatch):
    def reject(*_):
        raise AssertionError("something reached for the network")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, reject)
    assert train(project, "trainer.max_steps=2").step == 2


def test_a_config_with_a_mistake_leaves_nothing_behind(project):
    write(project, {"run.yaml": FILES["run.yaml"].replace("width", "widht")})
    with raises(ComponentError, "widht", "width", at="run.yaml:2"):
        build_trainer(load(project))
    assert not (project / "runs").exists()
