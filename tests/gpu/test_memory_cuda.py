"""Memory of a GPU: a limit that is kept, a micro-batch that fits, a report with a snapshot."""

import gc

import pytest
import torch
from torch import nn

from trainwright import RunConfig, Trainer, build_trainer
from trainwright.backends import pick_backend
from trainwright.memory.module_paths import Around, put_around
from trainwright.memory.out_of_memory import is_out_of_memory, out_of_memory
from trainwright.memory.rewrite import apply_memory_settings
from trainwright.models.llama import Llama
from trainwright.models.lora import add_lora
from trainwright.models.quantize import quantize_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GIB = 2**30
WIDTH = 2**20


@pytest.fixture
def small_gpu():
    """This process gets 4 GiB of the GPU beside what earlier tests of the process still hold; returns the limit."""
    torch.compiler.reset()
    pick_backend("cuda").release_memory()
    limit = 4 * GIB + torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def backend():
    return pick_backend("cuda")


class Wide(nn.Module):
    """Keeps 32 MiB for each sample until the backward; has 32 MiB of parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, WIDTH))

    def forward(self, x):
        return (x[:, None, None] * self.weight).sin().square().mean()


class WideTrainer(Trainer):
    """Trains Wide on numbers."""

    @classmethod
    def build_model(cls, build):
        return Wide()

    @classmethod
    def build_train_data(cls, build):
        return [{"x": torch.tensor(float(number))} for number in range(256)]


def config(tmp_path, micro, **more):
    trainer = {"max_steps": 3, "global_batch_size": 256, "micro_batch_size": micro}
    trainer["optimizer"] = {"type": "adamw", "lr": 0.1}
    runtime = {"device": "cuda", "precision": "fp32"}
    return RunConfig.from_dict(
        {"name": "wide", "output_dir": str(tmp_path), "trainer": trainer, "runtime": runtime, "writers": [], **more}
    )


def test_a_limit_is_kept_and_lifted(small_gpu, backend):
    before = torch.cuda.get_per_process_memory_fraction(0)
    with backend.limited_memory(0.5):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(small_gpu * 6 // 10, dtype=torch.uint8, device="cuda")
        torch.empty(GIB // 4, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction(0) == before
    torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")


def test_the_micro_batch_that_is_found_fits_and_the_next_does_not(tmp_path, small_gpu):
    trainer = build_trainer(config(tmp_path, "auto"), WideTrainer)
    found = trainer.config.trainer.micro_batch_size
    assert 4 <= found <= 64
    trainer.train()
    assert trainer.backend.memory().peak <= 0.95 * small_gpu
    del trainer
    gc.collect()
    with pytest.raises(Exception) as caught:  # what the loop makes of it is its own affair
        build_trainer(config(tmp_path, 4 * found), WideTrainer, fresh=True).train()
    assert is_out_of_memory(caught.value)


def test_a_search_leaves_nothing_on_the_device(tmp_path, small_gpu):
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = build_trainer(config(tmp_path, "auto"), WideTrainer)
    assert torch.cuda.memory_allocated() - before < 2 * trainer.model.weight.nbytes


def test_averaged_weights_are_left_room_for(tmp_path, small_gpu):
    trainer = build_trainer(config(tmp_path, "auto", hooks=[{"type": "ema"}]), WideTrainer)
    trainer.train()
    assert trainer.backend.memory().peak <= 0.95 * small_gpu


def test_the_report_has_a_snapshot_and_names_the_parameters(tmp_path, small_gpu, backend):
    model = Wide().cuda()
    held = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(100 * GIB, dtype=torch.uint8, device="cuda")
    error = out_of_memory(
        caught.value, step=7, folder=tmp_path, model=model, optimizers={}, config=config(tmp_path, 16), backend=backend
    )
    folder = tmp_path / "out_of_memory" / "step-00000007"
    report = (folder / "report.txt").read_text()
    assert (folder / "memory_snapshot.pickle").stat().st_size > 0
    assert "weight  parameter  (8, 1048576) float32" in report
    assert "reserved by torch's allocator" in report
    assert "memory_snapshot.pickle" in report
    assert "trainer.micro_batch_size=8, or auto" in str(error)
    assert held.numel() == GIB


def long_model(**reserved):
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 4096}
    with torch.device("cuda"):
        model = Llama(vocab_size=1024, max_positions=65536, **sizes)
    add_lora(model, match="*_proj", rank=8)
    quantize_model(model, "nf4")
    apply_memory_settings(model, reserved, origin=lambda label: None)
    return model


def step_peak(model, tokens):
    """The loss and gradients of a second step with one row, and its peak in addition to what was there before."""
    ids = torch.arange(tokens, device="cuda")[None] % 1024
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}}, peak


RECOMPUTED = {"activation_checkpointing": ["DecoderLayer"]}


def test_offload_and_tiles_give_the_same_gradients_with_less_memory():
    tokens = 16384
    plain, most = step_peak(long_model(**RECOMPUTED), tokens)
    offloaded, less = step_peak(long_model(**RECOMPUTED, offload=["decoder_input"]), tokens)
    settings = {"offload": ["decoder_input"], "tile": {"layers": ["SwiGLU"], "tokens": 2048}}
    tiled, least = step_peak(long_model(**RECOMPUTED, **settings), tokens)
    one_input = tokens * 512 * 4  # of fp32
    assert most - less >= one_input
    assert less - least >= 2 * tokens * 4096 * 2
    for name, value in plain.items():
        for other in (offloaded, tiled) if value is not None else ():
            assert (value - other[name]).norm() <= 0.02 * value.norm() + 1e-6, name


def test_offloaded_tensors_have_the_same_bits(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # the backward of flash attention adds in any order, without
    try:
        plain, _ = step_peak(long_model(**RECOMPUTED), 2048)
        offloaded, _ = step_peak(long_model(**RECOMPUTED, offload=["decoder_input"]), 2048)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in plain.items():
        assert value is None or torch.equal(value, offloaded[name]), name


def test_the_peak_is_linear_in_the_length_and_does_not_depend_on_how_far_the_host_runs_ahead():
    model = long_model(**RECOMPUTED, offload=["decoder_input"], tile={"layers": ["SwiGLU"], "tokens": 2048})
    peaks = {tokens: step_peak(model, tokens)[1] for tokens in (16384, 32768, 49152)}
    first, second = peaks[32768] - peaks[16384], peaks[49152] - peaks[32768]
    assert abs(first - second) <= 0.1 * first
    assert first <= 16384 * 40 * 512 * 4


class PlainTiles(Around):
    """Runs tiles one after the other, with plain autograd."""

    def __call__(self, hidden):
        return torch.cat([self.inner(tile) for tile in hidden.split(512, dim=1)], dim=1)


def test_dropout_in_tiles_is_the_same_in_both_passes():
    found = []
    for is_plain in (True, False):
        model = long_model()
        for name, layer in model.named_modules():
            if hasattr(layer, "lora_dropout"):
                layer.lora_dropout = 0.3
                torch.nn.init.normal_(layer.lora_b, std=0.02)
            if is_plain and name.endswith("mlp"):
                put_around(layer, PlainTiles)
        if not is_plain:
            apply_memory_settings(model, {"tile": {"layers": "*.mlp", "tokens": 512}}, origin=lambda label: None)
        ids = torch.arange(2048, device="cuda")[None] % 1024
        torch.manual_seed(1)
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        found.append({"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters()}})
    for name, value in found[0].items():
        assert value is None or torch.allclose(value, found[1][name], rtol=1e-3, atol=1e-3 * value.abs().max()), name
