"""Every verb of every backend, on the hardware that is here; what is absent is skipped and says so."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.messages import raises

from trainwright import backends
from trainwright.backends import Backend, pick_backend
from trainwright.backends.cuda import CudaBackend
from trainwright.backends.host_memory import MemoryFacts
from trainwright.backends.tpu import TpuBackend, has_tpu
from trainwright.errors import ConfigError

CLASSES = {"cpu": Backend, "cuda": CudaBackend, "tpu": TpuBackend}
IS_HERE = {"cpu": True, "cuda": torch.cuda.is_available(), "tpu": has_tpu()}


@pytest.fixture(params=CLASSES)
def backend(request):
    if not IS_HERE[request.param]:
        pytest.skip(f"there is no {request.param} here")
    picked = pick_backend(request.param)
    picked.claim()
    return picked


def claim(backend, folder):
    backend.claim()  # once more changes nothing
    assert (torch.ones(2, device=backend.device) + 1).tolist() == [2, 2]


def repeat_bits(backend, folder):
    try:
        backend.repeat_bits()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def seed(backend, folder):
    drawn = []
    for value in (3, 4, 3):
        backend.seed(value)
        drawn.append((torch.rand(4).tolist(), torch.rand(4, device=backend.device).tolist()))
    assert drawn[0] == drawn[2]
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


def autocast(backend, folder):
    linear = torch.nn.Linear(2, 2).to(backend.device)
    inputs = torch.ones(1, 2, device=backend.device)
    with backend.autocast("bf16"):
        assert linear(inputs).dtype == torch.bfloat16
    with backend.autocast("fp32"):
        assert linear(inputs).dtype == torch.float32


def choose_precision(backend, folder):
    assert backend.choose_precision() in ("fp32", "bf16")
    assert (backend.choose_precision() == "fp32") >= (backend.device.type == "cpu")


def supports_precision(backend, folder):
    assert backend.supports_precision("fp32")
    assert backend.supports_precision(backend.choose_precision())


def float32_products(backend, folder):
    before = torch.get_float32_matmul_precision()
    with backend.float32_products(tf32=True):
        assert torch.ones(2, 2, device=backend.device).mm(torch.eye(2, device=backend.device)).sum().item() == 4
    assert torch.get_float32_matmul_precision() == before


def missing_fp8(backend, folder):
    with backend.autocast("fp8"):
        assert torch.nn.Linear(2, 2).to(backend.device)(torch.ones(1, 2, device=backend.device)).dtype == torch.bfloat16
    reason = backend.missing_fp8("auto")
    assert reason is None or backend.describe() in reason
    assert backend.missing_fp8("cpu") is None or backend.device.type != "cpu"


def to_device(backend, folder):
    batches = [{"x": torch.full((3,), number), "name": str(number)} for number in range(4)]
    handed = list(backend.to_device(iter(batches)))
    assert [batch["name"] for batch in handed] == ["0", "1", "2", "3"]
    assert [batch["x"].tolist() for batch in handed] == [[number] * 3 for number in range(4)]
    assert {batch["x"].device.type for batch in handed} == {backend.device.type}
    assert list(backend.to_device(iter([]))) == []


def warming_up(backend, folder):
    with backend.warming_up():
        value = torch.ones(3, device=backend.device) * 2
    assert value.tolist() == [2, 2, 2]


def record(backend, folder):
    total = torch.zeros(3, device=backend.device)

    def run(given):
        return [total.add_(given[0]).clone()]

    inputs = [torch.full((3,), float(number), device=backend.device) for number in (1, 2, 3)]
    with backend.warming_up():
        run([torch.zeros_like(total)])
    recording, [first] = backend.record(run, [inputs[0]])
    later = [recording.replay([each])[0] for each in inputs[1:]]
    assert [value.tolist() for value in (first, *later, total)] == [[1.0] * 3, [3.0] * 3, [6.0] * 3, [6.0] * 3]


def limited_memory(backend, folder):
    with backend.limited_memory(0.5):
        assert torch.ones(8, device=backend.device).sum().item() == 8


def memory_room(backend, folder):
    room = backend.memory_room()
    assert room is None or room > 0


def begin_peak(backend, folder):
    backend.begin_peak()
    held = torch.ones(2**20, device=backend.device)
    peak = backend.memory().peak
    assert peak is None or peak >= held.nbytes


def memory(backend, folder):
    facts = backend.memory()
    assert isinstance(facts, MemoryFacts)
    known = [number for number in (facts.in_use, facts.peak, facts.reserved) if number is not None]
    assert all(0 <= number <= (facts.total or number) for number in known)


def release_memory(backend, folder):
    backend.release_memory()


def write_memory_snapshot(backend, folder):
    path = backend.write_memory_snapshot(folder)
    assert path is None or (path.parent == folder and path.is_file())


def describe(backend, folder):
    assert backend.describe().startswith(backend.device.type)


def utilization(backend, folder):
    share = backend.utilization()
    assert share is None or 0 <= share <= 1


VERBS = {
    act.__name__: act
    for act in (
        *(
            claim,
            repeat_bits,
            seed,
            choose_precision,
            supports_precision,
            autocast,
            float32_products,
            missing_fp8,
            to_device,
            warming_up,
            record,
            limited_memory,
            memory_room,
            begin_peak,
            memory,
            utilization,
        ),
        *(begin_peak, memory, release_memory, write_memory_snapshot, describe),
    )
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_method_fulfils_its_contract(backend, verb, tmp_path):
    VERBS[verb](backend, tmp_path)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_method_of_a_backend_is_in_the_contract(kind):
    public = {name for name, _ in inspect.getmembers(CLASSES[kind], inspect.isfunction) if name[0] != "_"}
    assert public == VERBS.keys()


def test_tensors_on_the_device_are_copied_to_the_host(backend):
    tensors = [torch.arange(6.0, device=backend.device).reshape(2, 3), torch.tensor(7, device=backend.device)]
    buffers = backends.host_buffers(tensors)
    backends.copy_to_host(tensors, buffers)
    assert [buffer.device.type for buffer in buffers] == ["cpu", "cpu"]
    assert [buffer.tolist() for buffer in buffers] == [tensor.tolist() for tensor in tensors]


def test_the_functions_of_a_device_return_a_bool(backend):
    for question in (backends.reads_at_once, backends.has_fused_optimizers, backends.waits_for_memory):
        assert question(backend.device) in (True, False)
    assert backends.memory_in_use() >= 0
    assert backends.checked_device(backend.device.type).type == backend.device.type


def test_the_collectives_of_the_device_and_the_host_are_available(backend):
    kinds = dict(pair.split(":") if ":" in pair else ("cpu", pair) for pair in backend.collectives.split(","))
    assert kinds["cpu"] == "gloo"
    assert all(dist.is_backend_available(name) for name in kinds.values())


def test_auto_picks_the_available_device():
    expected = next(kind for kind in ("cuda", "tpu", "cpu") if IS_HERE[kind])
    assert pick_backend("auto").device.type == expected


@pytest.mark.skipif(IS_HERE["tpu"], reason="here is one")
def test_a_missing_tpu_is_rejected_with_the_package_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "tpu", "runtime.device", at="run.yaml:3"):
        pick_backend("tpu", where="run.yaml:3")
    with raises(ConfigError, "torch_tpu"):
        backends.checked_device("tpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with raises(ConfigError, "runtime.device", "torch_tpu"):
        pick_backend("tpu")


def test_a_tpu_s_batches_are_copied_one_ahead():
    source = iter([{"x": torch.tensor(number)} for number in range(3)])
    handed = TpuBackend(torch.device("cpu")).to_device(source)
    assert next(handed)["x"] == 0
    assert next(source)["x"] == 2  # the second is on its way already
    assert [batch["x"].item() for batch in handed] == [1]


def test_a_tpu_rejects_fp16():
    with raises(ConfigError, "runtime.precision", "fp16", "bf16"):
        TpuBackend(torch.device("cpu")).autocast("fp16")


def test_no_other_file_imports_torch_tpu():
    package = Path(backends.__file__).parents[1]
    files = [path.relative_to(package).as_posix() for path in package.rglob("*.py") if "torch_tpu" in path.read_text()]
    assert set(files) <= {"backends/tpu.py", "backends/backend.py"}
