"""What SwissArmyTransformer's users load: earlier runs by --load and --mode, weights of a folder, kept samples."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.api.function_runs import Classifier, lines, losses, run, same, weights
from tests.messages import raises
from torch.nn.functional import cross_entropy

from trainwright import AutoModel, RunConfig, load_checkpoint, load_hf_dataset
from trainwright.api.training_main import copied_start
from trainwright.checkpoint.store import CheckpointStore
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.bert import Bert


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


def test_finetune_loads_the_weights_of_a_run_and_starts_at_0():
    first = weights(run("--train-iters", "3", "--experiment-name", "first"))
    begun = []
    words = ("--train-iters", "2", "--experiment-name", "second", "--mode", "finetune", "--load")
    run(*words, "runs/first", init_function=lambda args, model: begun.append(weights(model)))
    assert same(begun[0], first)
    assert [line["step"] for line in lines("second")] == [1, 2]
    run(*words, "runs/first/checkpoints/step-00000003", "--fresh")
    assert losses("second")[0] < losses("first")[0]
    shutil.rmtree("runs/first")
    run(*words, "runs/first", "--train-iters", "3")  # goes on from its own checkpoint
    assert [line["step"] for line in lines("second")] == [1, 2, 3]
    with raises(CheckpointError, "--load", "runs/first"):
        run(*words, "runs/first", "--experiment-name", "third")


def test_finetune_may_have_another_head_and_inference_may_not():
    class Larger(Classifier):
        def __init__(self):
            super().__init__()
            self.extra = torch.nn.Linear(4, 1)

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.alone = torch.nn.Linear(4, 3)

    first = weights(run("--train-iters", "2", "--experiment-name", "first"))
    words = ("--train-iters", "1", "--lr", "1e-9", "--load", "runs/first", "--mode")
    begun = []
    run(*words, "finetune", model_cls=Larger, init_function=lambda args, model: begun.append(weights(model)))
    assert all(torch.equal(begun[0][name], value) for name, value in first.items())
    with raises(CheckpointError, "extra.weight"):
        run(*words, "inference", model_cls=Larger)
    with raises(CheckpointError):
        run(*words, "finetune", "--experiment-name", "other", model_cls=Other)


def test_finetune_loads_a_folder_of_safetensors():
    torch.manual_seed(3)
    saved = Classifier()
    Path("exported").mkdir()
    save_file(saved.state_dict(), "exported/model.safetensors")
    begun = []
    words = ("--train-iters", "1", "--mode", "finetune", "--load", "exported")
    run(*words, init_function=lambda args, model: begun.append(weights(model)))
    assert same(begun[0], saved.state_dict())


def test_pretrain_resumes_from_another_run_with_all_of_its_state():
    words = ("--lr-decay-style", "constant", "--warmup", "0", "--experiment-name")
    run("--train-iters", "3", *words, "half")
    rest = run("--train-iters", "6", *words, "rest", "--load", "runs/half")
    unbroken = run("--train-iters", "6", *words, "unbroken")
    assert same(weights(rest), weights(unbroken))
    assert [line["step"] for line in lines("rest")] == [4, 5, 6]
    assert losses("rest") == losses("unbroken")[3:]


def test_inference_evaluates_what_was_trained_and_trains_nothing(caplog):
    trained = weights(run("--train-iters", "2"))
    caplog.set_level("INFO", logger="trainwright")
    model = run("--mode", "inference", "--valid-data", "6")
    assert same(weights(model), trained)
    assert not model.training
    assert "valid/acc" in caplog.text
    assert same(weights(run("--mode", "inference", "--load", "runs/run", "--save", "elsewhere")), trained)
    assert not Path("elsewhere").exists()


def test_load_rejects_what_holds_no_state():
    Path("empty").mkdir()
    with raises(CheckpointError, "--load"):
        run("--train-iters", "2", "--load", "empty")
    Path("empty/model.safetensors").write_bytes(b"")
    with raises(CheckpointError, "--mode"):
        run("--train-iters", "2", "--load", "empty")
    with raises(ConfigError, "--fresh"):
        run("--train-iters", "2", "--load", "empty", "--fresh")


def test_load_checkpoint_says_how_such_a_run_is_loaded():
    run("--train-iters", "1")
    with raises(ConfigError, "--mode"):
        load_checkpoint("runs/run")


def test_from_pretrained_accepts_a_leading_namespace(tmp_path):
    torch.manual_seed(0)
    settings = {"vocab_size": 11, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_positions": 8}
    Bert(**settings).save_pretrained(tmp_path / "home" / "tiny")
    plain = Bert.from_pretrained(tmp_path / "home" / "tiny")
    args = argparse.Namespace(device="cpu")
    for model in (
        Bert.from_pretrained(args, "tiny", home_path=tmp_path / "home"),
        Bert.from_pretrained(args, "tiny", None, tmp_path / "home"),
        Bert.from_pretrained(args, "tiny", url="local", home_path=tmp_path / "home"),
    ):
        assert same(weights(model), weights(plain))
    with raises(ConfigError):
        Bert.from_pretrained(args, "tiny", url="https://somewhere", home_path=tmp_path / "home")
    with raises(ConfigError):
        Bert.from_pretrained(args)
    with raises(ConfigError):
        Bert.from_pretrained("other", "tiny")


def test_from_pretrained_needs_only_a_config_with_the_weights(tmp_path):
    """What model_config.json is there, config.json is here; the former speaks of weights that no model here has."""
    settings = {"vocab_size": 11, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_positions": 8}
    saved = Bert(**settings)
    saved.save_pretrained(tmp_path)
    assert same(weights(Bert.from_pretrained(tmp_path)), weights(saved))
    assert type(AutoModel.from_pretrained(tmp_path)) is Bert
    (tmp_path / "config.json").rename(tmp_path / "model_config.json")
    for kind in (Bert, AutoModel):
        with raises(CheckpointError, "model_config.json"):
            kind.from_pretrained(tmp_path)


def test_load_hf_dataset_processes_a_file_once_and_keeps_the_samples(tmp_path):
    pytest.importorskip("datasets").disable_progress_bars()
    file, calls = tmp_path / "rows.jsonl", []
    rows = [{"x": [n / 24, 1.0, -n / 24, 0.5], "label": n % 3, "note": f"row {n}"} for n in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def process(row):
        calls.append(row["note"])
        return {"x": [2 * value for value in row["x"]]}

    def create(rebuild=False):
        kept = {"cache_dir": tmp_path / "kept", "offline": True, "transformer_name": "doubled"}
        return lambda path, args: load_hf_dataset(path, process, ["x", "label"], rebuild=rebuild, **kept)

    def step(data_iterator, model, args, timers):
        batch = next(data_iterator)
        assert batch.keys() == {"x", "label"}
        assert float(batch["x"].max()) == 2.0
        return cross_entropy(model(batch["x"]), batch["label"])

    words = ("--train-data", str(file), "--epochs", "1")
    run(*words, create=create(), forward_step_function=step)
    assert calls == [row["note"] for row in rows]
    run(*words, "--fresh", create=create(), forward_step_function=step)
    assert len(calls) == 24
    run(*words, "--fresh", create=create(rebuild=True), forward_step_function=step)
    assert len(calls) == 48
    assert len(losses()) == 6


# --load in --mode pretrain: a copy is a checkpoint of the run once the run has started from it

STEADY = ("--lr-decay-style", "constant", "--warmup", "0")


def make(name, seed="1"):
    return weights(run("--train-iters", "2", *STEADY, "--seed", seed, "--experiment-name", name))


def resume_from(load, *words):
    return run("--train-iters", "3", *STEADY, "--experiment-name", "rest", "--load", load, *words)


def test_a_rejected_load_leaves_nothing_behind():
    make("one")
    with raises(CheckpointError):
        resume_from("runs/one", "--seed", "1", "--lr", "0.5")
    assert not Path("runs/rest").exists()
    run("--train-iters", "1", "--experiment-name", "rest")  # begins at step 0, not with the copy
    assert [line["step"] for line in lines("rest")] == [1]


def test_another_load_after_a_rejected_one_is_accepted():
    make("one"), make("two", seed="2")
    with raises(CheckpointError):
        resume_from("runs/one", "--seed", "2")
    two = weights(resume_from("runs/two", "--seed", "2"))
    shutil.rmtree("runs/rest")
    assert same(two, weights(resume_from("runs/two", "--seed", "2")))


def test_the_copy_of_a_killed_process_is_not_used_as_a_checkpoint_of_the_run():
    make("one"), make("two", seed="2")
    config = RunConfig.from_dict({"name": "rest", "output_dir": "runs"})
    with copied_start(Path("runs/one"), config):
        assert CheckpointStore(Path("runs/rest/checkpoints")).steps() == [2]
    # It ended there: nothing has been built, and nobody took the copy away.
    resume_from("runs/two", "--seed", "2")
    assert [line["step"] for line in lines("rest")] == [3]


def test_the_same_load_resumes_and_another_one_is_rejected_by_name():
    make("one"), make("two", seed="1")
    resume_from("runs/one", "--seed", "1")
    shutil.rmtree("runs/one")  # what was copied is needed no more
    resume_from("runs/one", "--seed", "1", "--train-iters", "4")
    assert [line["step"] for line in lines("rest")] == [3, 4]
    with raises(CheckpointError, "--load", "runs/two", "4"):
        resume_from("runs/two", "--seed", "1", "--train-iters", "5")
    with raises(CheckpointError, "0", "2"):
        run("--train-iters", "3", *STEADY, "--seed", "1", "--experiment-name", "two", "--load", "runs/rest")
