"""Graph mode on a GPU: a step captured as one CUDA graph gives what the same kernels give one by one."""

import pytest
import torch
from tests.compile import test_graph_changes as changes
from tests.compile import test_graph_mode as on_cpu

from trainwright import build_trainer
from trainwright.backends.cuda import CudaBackend
from trainwright.errors import HostReadError, TrainwrightError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class WithoutBatchNorm(on_cpu.Net):
    """A bias before a BatchNorm has no gradient but noise, which optimizers that normalise blow up."""

    def __init__(self):
        super().__init__()
        self.layers[1] = torch.nn.LayerNorm(8)


@pytest.fixture(autouse=True)
def _without_batch_norm(monkeypatch):
    monkeypatch.setattr(on_cpu, "Net", WithoutBatchNorm)


def train(folder, mode, kind=on_cpu.Base, *, backend="aot_eager", precision="fp32", **sections):
    runtime = {"mode": mode, "device": "cuda", "precision": precision, "tf32": False}
    if mode != "eager":
        runtime["compile_backend"] = backend
    trainer = build_trainer(on_cpu.config_of(folder / mode, mode, runtime=runtime, **sections), kind)
    trainer.train()
    return trainer


def assert_close_runs(folder, kind=on_cpu.Base, *, modes=("compile", "graph"), tolerance=1e-5, **sections):
    """Compares runs of the same kernels, launched one by one and in one graph."""
    first, second = (on_cpu.outcome(train(folder, mode, kind, **dict(sections))) for mode in modes)
    for one, other in zip(first[0], second[0], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=10 * tolerance, abs=tolerance, nan_ok=True), name
    for one, other in zip(first[1], second[1], strict=True):
        near = {"rtol": 10 * tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(one.float().cpu(), other.float().cpu(), **near)


replays = on_cpu.replays


@pytest.mark.parametrize(
    "optimizer",
    [
        {"type": "adamw", "lr": 1e-2, "report": True},
        {"type": "lion", "lr": 1e-3},
        {"type": "muon", "lr": 1e-2},
        {"type": "sgd", "lr": 0.1, "momentum": 0.9},
        {"type": "torch.optim:RMSprop", "lr": 1e-3},
        {"type": "torch.optim:Adam", "lr": 1e-3, "foreach": True, "fused": False},
    ],
    ids=lambda each: each["type"],
)
def test_a_captured_run_equals_the_run_of_the_same_kernels(tmp_path, replays, optimizer):
    # Rates are single precision in a graph, and some optimizers have another formula there.
    assert_close_runs(tmp_path, trainer={"optimizer": optimizer}, tolerance=1e-3)
    assert len(replays) == 11  # three warm up


def test_a_captured_run_of_compiled_code_equals_the_compiled_run(tmp_path, replays):
    assert_close_runs(tmp_path, backend="inductor", precision="bf16", tolerance=1e-3)
    assert len(replays) == 11


def test_anomalies_are_held_back_in_replays(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu.Base, "data", {"bad": (77,)})
    anomalies = {"non_finite": "skip", "spike": "skip", "spike_window": 8}
    assert_close_runs(tmp_path, anomalies=anomalies, evaluation={})


def test_a_run_that_goes_back_records_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(on_cpu.Base, "data", {"bad": (77,)})
    assert_close_runs(tmp_path, anomalies={"non_finite": "rollback"}, checkpoint={"every_steps": 2}, evaluation={})


@pytest.mark.parametrize("kind", [on_cpu.TwoOptimizers, on_cpu.LateOptimizer])
def test_two_updates_in_one_step_are_captured(tmp_path, kind):
    assert_close_runs(tmp_path, kind, trainer={"micro_batch_size": 16, "optimizer": None}, tolerance=1e-3)


def test_the_step_tensor_counts_and_hooks_see_gradients(tmp_path):
    assert_close_runs(tmp_path / "a", on_cpu.ByStepTensor)
    assert_close_runs(tmp_path / "b", on_cpu.HooksSeeGradients)


def test_a_mode_may_change_and_the_run_goes_on(tmp_path):
    for mode, max_steps in (("graph", 5), ("eager", 9), ("graph", 14)):
        config = on_cpu.config_of(
            tmp_path,
            mode,
            runtime={"mode": mode, "device": "cuda"} | ({"compile_backend": "aot_eager"} if mode == "graph" else {}),
            checkpoint={"every_steps": 5},
            trainer={"max_steps": max_steps},
        ).derive({"trainer.schedule": {"type": "constant"}})
        trainer = build_trainer(config, on_cpu.Base)
        trainer.train()
    assert trainer.step == 14


def test_an_optimizer_that_steps_after_a_replay_sees_that_graphs_gradients(tmp_path, replays):
    optimizer = {"type": "torch.optim:RMSprop", "lr": 1e-3, "foreach": False}
    limits = {"max_steps": 24, "micro_batch_size": 16, "optimizer": optimizer}
    assert_close_runs(tmp_path, changes.TwoWidths, trainer=limits, tolerance=1e-3)
    assert len(replays) >= 16


def test_a_change_between_steps_is_captured_anew(tmp_path):
    freezing = changes._with(changes._at_seven(lambda trainer: trainer.model.layers[0].requires_grad_(False)))
    assert_close_runs(tmp_path, freezing, trainer={"max_steps": 16, "micro_batch_size": 16}, tolerance=1e-3)


@pytest.mark.parametrize("kind", [on_cpu.ReadsStep, on_cpu.ReadsLoss])
def test_what_the_host_reads_is_rejected_with_its_line(tmp_path, kind):
    with pytest.raises(TrainwrightError) as rejected:
        train(tmp_path, "graph", kind)
    assert "test_graph_mode.py:" in str(rejected.value)
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator is not left in capture mode


class ThreeWidths(changes.TwoWidths):
    """Batches of three widths in turn, of which one leaves a layer without a gradient."""

    def next_train_inputs(self, iterator):
        batch = next(iterator)
        rows = batch["x"][:, :4] if self.step % 3 == 1 else batch["x"]
        rest = {"labels": batch["labels"]}
        if self.step % 3 == 2:
            rows, rest = torch.cat([rows, rows]), {"labels": batch["labels"].repeat(2)}
        return {**rest, "x": rows.contiguous()}


@pytest.mark.parametrize("kind", ["adamw", "torch.optim:RMSprop"])
def test_graphs_of_three_shapes_share_memory_and_equal_the_run_of_the_same_kernels(tmp_path, replays, kind):
    optimizer = {"type": kind, "lr": 1e-3} | ({} if kind == "adamw" else {"foreach": False})
    # RMSprop reads the gradients of each graph after its replay.
    limits = {"max_steps": 36, "micro_batch_size": 16, "optimizer": optimizer}
    assert_close_runs(tmp_path, ThreeWidths, trainer=limits, tolerance=1e-3)
    assert len(replays) >= 20


def record_three_lengths(backends):
    """Captures a step of three lengths; returns the bytes that torch reserved for it, and a check of each replay."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 8192), torch.nn.GELU(), torch.nn.Linear(8192, 1)).cuda()
    parameters = list(model.parameters())

    def run(given):
        for parameter in parameters:
            parameter.grad = None
        loss = model(given[0]).square().mean()
        loss.backward()
        return [loss]

    batches = [torch.randn(length, 256, device="cuda") for length in (4096, 3072, 2048)]
    for backend in backends:
        for batch in batches:
            with backend.warming_up():
                run([batch])
    expected = []
    for batch in batches:
        expected.append((run([batch])[0].item(), [parameter.grad.clone() for parameter in parameters]))
    backends[0].release_memory()
    before = torch.cuda.memory_reserved()
    recordings = [
        backend.record(run, [batch], parameters=parameters)[0] for backend, batch in zip(backends, batches, strict=True)
    ]
    reserved = torch.cuda.memory_reserved() - before

    def check(number):
        [loss] = recordings[number].replay([batches[number]])
        assert loss.item() == pytest.approx(expected[number][0], rel=1e-5)
        for parameter, gradient in zip(parameters, expected[number][1], strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)

    return reserved, check


def test_graphs_of_one_backend_reserve_less_memory_and_keep_their_gradients_in_any_order():
    shared = CudaBackend(torch.device("cuda", 0))
    apart, _ = record_three_lengths([CudaBackend(torch.device("cuda", 0)) for _ in range(3)])
    together, check = record_three_lengths([shared] * 3)
    assert together < 0.7 * apart
    for number in (0, 1, 2, 1, 0, 2, 2, 0, 1):
        check(number)


def test_a_failed_capture_and_dropped_graphs_leave_the_backend_able_to_capture():
    backend, value = CudaBackend(torch.device("cuda", 0)), torch.ones(3, device="cuda")
    with backend.warming_up():
        value * 2
    for _ in range(3):
        recording, _ = backend.record(lambda given: [given[0] * 2], [value])
        with pytest.raises(HostReadError):
            backend.record(lambda given: [given[0] * given[0].sum().item()], [value])
        other, _ = backend.record(lambda given: [given[0] * 3], [value])
        assert recording.replay([value])[0].tolist() == [2.0] * 3
        assert other.replay([value])[0].tolist() == [3.0] * 3
        del recording, other
