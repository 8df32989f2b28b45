"""Estimates, compared with a real step and a real checkpoint."""

import pytest
from tests.analysis.runs import LENGTH, MODEL, small_run

from trainwright import RunConfig, build_trainer
from trainwright.analysis import estimate as kinds
from trainwright.analysis import fake_ranks
from trainwright.analysis.estimate import AVERAGES, Estimate, HeldBytes, estimate

ROWS = f"""
import torch

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, place):
        tokens = torch.arange({LENGTH}) % 96
        return {{"input_ids": tokens, "labels": tokens}}
"""


def plan(*arguments, world_size=1, rank=0, **settings):
    config = small_run(*arguments, **settings)
    return estimate(config, world_size=world_size, rank=rank, sequence_length=LENGTH)


@pytest.fixture
def real_run(in_tmp):
    (in_tmp / "rows.py").write_text(ROWS)
    settings = small_run().to_dict() | {"data": {"train": {"type": "rows.py:Rows"}}, "writers": []}
    return lambda **changes: RunConfig.from_dict({**settings, **changes}, project_dir=in_tmp)


def test_a_step_without_memory_counts_as_a_real_one(real_run):
    config = real_run()
    predicted = estimate(config, world_size=1)
    trainer = build_trainer(config)
    trainer.model.train()
    with HeldBytes() as watch, trainer.storage:
        batch = next(trainer.train_data.batches(lambda each: each))
        watch.label(trainer.model.parameters(), kinds.PARAMETERS)
        for _ in range(2):
            watch.begin_peak()
            trainer.set_batch(None, 2)
            trainer.context.updater.begin_step(0)
            trainer.train_step(batch)
    assert predicted.peak_bytes == pytest.approx(sum(watch.peak.values()), rel=0.02)
    assert predicted.peak_bytes > 4 * 4 * predicted.num_parameters


def test_a_checkpoint_on_disk_is_as_large_as_predicted(real_run):
    config = real_run(hooks=[{"type": "ema"}])
    predicted = estimate(config, world_size=1)
    trainer = build_trainer(config)
    trainer.train()
    [folder] = (trainer.folder / "checkpoints").glob("step-*")
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert predicted.checkpoint_bytes == pytest.approx(on_disk, rel=0.1)
    assert predicted.checkpoint_bytes > 4 * 4 * predicted.num_parameters * 0.99
    assert predicted.at_peak[AVERAGES] == 4 * predicted.num_parameters


def test_weights_gradients_and_states_of_adamw_are_four_copies():
    found = plan()
    weights = found.most[kinds.PARAMETERS]
    assert weights == pytest.approx(4 * found.num_parameters, rel=0.02)
    assert found.most[kinds.GRADIENTS] == pytest.approx(weights, rel=0.02)
    assert found.most[kinds.STATES] == pytest.approx(2 * weights, rel=0.05)


def test_eight_ranks_share_what_one_would_hold():
    one, eight = plan(), plan({"fsdp": -1}, world_size=8)
    for kind in (kinds.PARAMETERS, kinds.GRADIENTS):
        assert eight.most[kind] == pytest.approx(one.most[kind] / 8, rel=0.15)  # blocks of 512 bytes
    assert eight.most[kinds.GATHERED] > 0
    assert eight.checkpoint_bytes == pytest.approx(one.checkpoint_bytes, rel=0.001)
    assert one.most[kinds.GATHERED] == one.most[kinds.COMMUNICATION] == 0


def test_recomputation_holds_less():
    plain = plan(model__num_layers=6)
    recomputed = plan(model__num_layers=6, model__activation_checkpointing=["DecoderLayer"])
    assert recomputed.most[kinds.ACTIVATIONS] < 0.5 * plain.most[kinds.ACTIVATIONS]
    assert recomputed.peak_bytes < plain.peak_bytes


def test_activations_grow_with_the_micro_batch():
    small, large = plan(trainer__micro_batch_size=2), plan(trainer__micro_batch_size=8)
    ratio = large.most[kinds.ACTIVATIONS] / small.most[kinds.ACTIVATIONS]
    assert ratio == pytest.approx(4, rel=0.15)
    assert large.most[kinds.PARAMETERS] == small.most[kinds.PARAMETERS]


def test_half_precision_is_counted():
    full, half = plan(runtime__precision="fp32"), plan(runtime__precision="bf16")
    assert half.most[kinds.ACTIVATIONS] < full.most[kinds.ACTIVATIONS]


def test_what_fits_keeps_some_room():
    at_peak = {kinds.PARAMETERS: 40, kinds.ACTIVATIONS: 40, kinds.TEMPORARY: 10, kinds.BATCH: 0}
    found = Estimate(1, 0, {}, 10, 1, {}, 10, at_peak, at_peak, 100, [])
    assert found.peak_bytes == 90
    assert found.fits(95)
    assert not found.fits(94)
    assert found.largest_micro_batch(200) == 30
    assert found.largest_micro_batch(40) == 0


def test_what_is_not_counted_is_a_remark():
    found = plan(trainer__micro_batch_size="auto", trainer__global_batch_size=4, runtime__mode="compile")
    assert found.micro_batch_size == 4
    assert [remark.split()[0] for remark in found.remarks] == ["micro_batch_size", "runtime.precision", "Counted"]
    assert MODEL["num_layers"] == 2


def test_a_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    few, many = (
        plan({"pipeline": -1}, world_size=4, model__num_layers=4, trainer__gradient_accumulation_steps=number)
        for number in (1, 8)
    )
    assert many.gradient_accumulation_steps == 8
    assert many.most[kinds.ACTIVATIONS] > 2.5 * few.most[kinds.ACTIVATIONS] > 0
    one = plan(model__num_layers=4)
    assert many.checkpoint_bytes == pytest.approx(one.checkpoint_bytes, rel=0.01)


def test_a_gpu_s_fused_forms_hold_no_scores_and_no_copies():
    settings = {"model__dropout": 0.1, "model__num_layers": 4, "model__fused_loss": False}
    cpu, gpu = (plan(runtime__device=device, **settings) for device in ("cpu", "cuda"))
    assert gpu.most[kinds.ACTIVATIONS] < 0.9 * cpu.most[kinds.ACTIVATIONS]
    assert gpu.most[kinds.PARAMETERS] == cpu.most[kinds.PARAMETERS]
    assert gpu.most[kinds.GRADIENTS] == cpu.most[kinds.GRADIENTS]


LONG = 512
ADAPTED = {"lora": {"match": "*_proj", "rank": 4}, "quantize": "nf4", "activation_checkpointing": ["DecoderLayer"]}


def long_rows(**model):
    settings = small_run().to_dict()
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 1024}
    model = {"type": "llama", "max_positions": LONG, **sizes, **ADAPTED, **model}
    trainer = {**settings["trainer"], "global_batch_size": 1, "micro_batch_size": 1}
    config = RunConfig.from_dict({**settings, "model": model, "trainer": trainer})
    return estimate(config.derive({"runtime.device": "cuda"}), world_size=1, sequence_length=LONG)


def test_offloaded_inputs_and_tiles_are_not_counted_on_the_device(monkeypatch, caplog):
    monkeypatch.setattr(fake_ranks, "_MAX_EQUAL_READS", 5)  # of the 14 quantized layers
    with caplog.at_level("INFO", logger="trainwright"):
        plain = long_rows()
        lean = long_rows(offload=["decoder_input"], tile={"layers": "SwiGLU", "tokens": 256})
    assert "built in main memory" not in caplog.text
    assert plain.peak_bytes - lean.peak_bytes > 2 * (LONG - 256) * 1024 * 2
    assert lean.remarks[-1] == "model.offload keeps 0.0 GB on the host, in addition."
    assert not any("model.offload" in remark for remark in plain.remarks)
