"""What is said when memory is used up."""

import logging

import pytest
import torch
from tests.messages import mentions
from torch import nn

from trainwright.backends import Backend
from trainwright.config import RunConfig
from trainwright.errors import OutOfMemory, TrainwrightError
from trainwright.memory.out_of_memory import advice_for, explain, is_out_of_memory, out_of_memory, write_report

CPU = Backend(torch.device("cpu"))


def config(**trainer):
    return RunConfig.from_dict(
        {
            "name": "large",
            "model": {"type": "net.py:Net"},
            "trainer": {"micro_batch_size": 16, "optimizer": {"type": "adamw", "lr": 0.1}, **trainer},
        }
    )


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return model, {"main": optimizer}


def rejected_by_the_cpu():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


def caused_by(cause):
    error = ValueError("the step failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        rejected_by_the_cpu(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: not enough memory: you tried"),
        caused_by(torch.OutOfMemoryError("CUDA out of memory.")),
    ],
)
def test_out_of_memory_is_recognized_by_its_type_its_message_or_its_cause(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), ValueError("out of memory"), TrainwrightError("out of memory")]
)
def test_other_errors_are_no_lack_of_memory(error):
    assert not is_out_of_memory(error)


def test_the_report_says_what_holds_the_memory_and_what_could_change():
    model, optimizers = model_and_optimizer()
    text = explain(torch.OutOfMemoryError("Tried to allocate 3 GiB."), model, optimizers, config(), CPU)
    assert "Tried to allocate 3 GiB." in text
    assert "  134.01 KiB  parameters" in text
    assert "  134.01 KiB  gradients" in text
    assert "  268.03 KiB  optimizer state" in text
    assert "the rest of the peak: activations" in text
    assert "  520.01 KiB  0  (130.00 KiB + 130.00 KiB + 260.01 KiB + 0.00 KiB)" in text
    assert "  128.00 KiB  0.weight  gradient  (512, 64) float32" in text
    assert mentions(text, "trainer.micro_batch_size", "8", "16")
    assert mentions(text, "trainer.optimizer.state", "201.02", "8bit")


def test_only_settings_that_are_not_used_yet_are_proposed():
    everything = advice_for(config().derive({"runtime.precision": "fp32"}))
    assert [each.split("=")[0].split(":")[0].split(",")[0] for each in everything] == [
        "trainer.micro_batch_size",
        "runtime.precision",
        "model.activation_checkpointing",
        "trainer.optimizer.state",
        "model.freeze",
    ]
    frugal = config(micro_batch_size=1, optimizer={"type": "adamw", "state_dtype": "bf16"}).derive(
        {"runtime.precision": "bf16", "model.lora": {"rank": 4}, "model.activation_checkpointing": ["Block"]}
    )
    advice = [each.partition("=")[0].partition(",")[0] for each in advice_for(frugal)]
    assert advice == ["model.offload", "model.tile", "model.quantize"]
    on_cpu = advice_for(frugal.derive({"runtime.device": "cpu", "model.quantize": "nf4"}))
    assert [each.partition(",")[0] for each in on_cpu] == ["model.tile"]
    frugal = frugal.derive({"model.offload": ["decoder_input"], "model.tile": "*.mlp"})
    assert advice_for(frugal.derive({"runtime.mesh": {"fsdp": 2}})) == []
    frugal = frugal.derive({"model.quantize": "nf4"})
    assert advice_for(frugal) == []
    averaging = frugal.derive({"hooks": [{"type": "ema"}]})
    assert advice_for(averaging) == ["hooks: ema keeps a copy of the weights, and in evaluations a second."]


def test_each_of_several_optimizers_gets_its_own_advice():
    optimizers = {"a": {"optimizer": {"type": "adamw"}, "match": "a*"}, "b": {"optimizer": {"type": "sgd"}}}
    text = "\n".join(advice_for(config(optimizer=None, optimizers=optimizers)))
    assert "trainer.optimizers.a.optimizer.state=8bit" in text
    assert "trainer.optimizers.b" not in text


def test_the_error_names_step_rank_device_the_first_thing_to_try_and_the_report(tmp_path):
    model, optimizers = model_and_optimizer()
    error = out_of_memory(
        torch.OutOfMemoryError("x"),
        step=12,
        folder=tmp_path,
        model=model,
        optimizers=optimizers,
        config=config(),
        backend=CPU,
    )
    report = tmp_path / "out_of_memory" / "step-00000012" / "report.txt"
    assert isinstance(error, OutOfMemory)
    assert isinstance(error, TrainwrightError)
    assert str(error).startswith("Out of memory at step 12 on rank 0, cpu (")
    assert mentions(str(error), "trainer.micro_batch_size", "8")
    assert str(error).endswith(f"{report}")
    assert "What could change" in report.read_text()


def test_each_rank_writes_its_own_report(tmp_path):
    first, second = (write_report(tmp_path, 3, "text\n", CPU, rank=rank) for rank in (0, 1))
    assert first.parent == second.parent
    assert (first.name, second.name) == ("report.txt", "report-rank-1.txt")


def test_in_an_evaluation_the_advice_begins_with_the_evaluation(tmp_path):
    model, optimizers = model_and_optimizer()
    error = out_of_memory(
        MemoryError(),
        step=1,
        folder=tmp_path,
        model=model,
        optimizers=optimizers,
        config=config(),
        backend=CPU,
        in_evaluation=True,
    )
    assert "First to try: evaluation.batch_size" in str(error)
    assert "micro_batch_size" not in str(error)


def test_a_report_that_cannot_be_written_is_part_of_the_error(tmp_path, caplog):
    model, optimizers = model_and_optimizer()
    (tmp_path / "out_of_memory").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        error = out_of_memory(
            MemoryError(), step=1, folder=tmp_path, model=model, optimizers=optimizers, config=config(), backend=CPU
        )
    assert "could not be written" in caplog.text
    assert "Memory use" in str(error)


class FailingSnapshot(Backend):
    """A device whose snapshot fails, as torch's private dump may."""

    def write_memory_snapshot(self, folder):
        raise RuntimeError("no snapshot")


def test_a_snapshot_that_fails_leaves_the_report(tmp_path, caplog):
    path = write_report(tmp_path, 3, "text\n", FailingSnapshot(torch.device("cpu")))
    assert path.read_text() == "text\n"
    assert "no snapshot" in caplog.text


class WithSnapshot(Backend):
    """A device that writes a snapshot."""

    def write_memory_snapshot(self, folder):
        path = folder / "memory_snapshot.pickle"
        path.write_bytes(b"")
        return path


def test_the_report_names_the_snapshot(tmp_path):
    path = write_report(tmp_path, 3, "text\n", WithSnapshot(torch.device("cpu")))
    assert mentions(path.read_text(), "memory_snapshot.pickle")
