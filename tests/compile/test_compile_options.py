"""`runtime.compile_mode` and `compile_options`: where they reach torch.compile, and which raise before the run."""

import pytest
import torch
from tests.faults.runs import config_of
from tests.loop.small_runs import PLAIN
from tests.memory.models import Layer
from tests.messages import raises
from torch import nn

from trainwright import RunConfig, build_trainer
from trainwright.checkpoint.resume import changed_settings
from trainwright.compile.regions import check_mode
from trainwright.errors import ConfigError
from trainwright.memory.repeated_blocks import compile_stacks

OPTIONS = "runtime.compile_options={max_autotune_gemm: true, triton.unique_kernel_names: false}"


@pytest.fixture
def compilations(monkeypatch):
    """The arguments of every call of torch.compile; the code itself is compiled by aot_eager, without a compiler."""
    calls, compile_really = [], torch.compile

    def compile_quickly(function, **arguments):
        calls.append(arguments)
        kept = {name: value for name, value in arguments.items() if name not in ("mode", "options")}
        return compile_really(function, **{**kept, "backend": "aot_eager"})

    monkeypatch.setattr(torch, "compile", compile_quickly)
    torch._dynamo.reset()
    yield calls
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("setting", "arguments"),
    [
        ("runtime.compile_mode=max-autotune-no-cudagraphs", {"mode": "max-autotune-no-cudagraphs"}),
        (OPTIONS, {"options": {"max_autotune_gemm": True, "triton.unique_kernel_names": False}}),
    ],
)
def test_they_reach_the_forward_of_training_and_evaluation(tmp_path, compilations, setting, arguments):
    trainer = build_trainer(config_of(tmp_path / "run", *PLAIN, "runtime.mode=compile", setting))
    trainer.train()
    assert compilations[-2:] == [{"backend": "inductor", **arguments}] * 2
    assert RunConfig.load(trainer.folder / "config.yaml") == trainer.config


def test_they_reach_repeated_blocks_that_inductor_compiles(compilations):
    for backend, expected in (("inductor", {"mode": "default"}), ("aot_eager", {})):
        model = nn.Sequential(nn.Sequential(Layer(), Layer()))
        compile_stacks(model, {"path": "0", "backend": backend}, arguments={"mode": "default"})
        model(torch.randn(2, 8))
        assert compilations.pop() == {"backend": backend, "fullgraph": True, **expected}


def test_repeated_blocks_use_them_in_mode_eager(tmp_path):
    config = config_of(tmp_path / "run", "model.compile_repeated_blocks=layers", OPTIONS)
    check_mode(config, {})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("runtime.mode=eager", OPTIONS), ("runtime.compile_options", "eager")),
        (("runtime.mode=eager", "runtime.compile_mode=default"), ("runtime.compile_mode", "eager")),
        (
            ("runtime.mode=compile", OPTIONS, "runtime.compile_mode=default"),
            ("runtime.compile_mode", "runtime.compile_options"),
        ),
        (
            ("runtime.mode=compile", "runtime.compile_backend=aot_eager", OPTIONS),
            ("runtime.compile_options", "aot_eager", "inductor"),
        ),
        (("runtime.mode=compile", "runtime.compile_mode=max-autotune"), ("max-autotune-no-cudagraphs", "graph")),
        (("runtime.mode=graph", "runtime.compile_mode=max-autotune"), ("max-autotune-no-cudagraphs",)),
        (("runtime.mode=compile", "runtime.compile_mode=reduce-overhead"), ("reduce-overhead", "runtime.mode: graph")),
        (("runtime.mode=graph", "runtime.compile_mode=reduce-overhead"), ("reduce-overhead",)),
        (("runtime.mode=compile", "runtime.compile_options={triton.cudagraphs: true}"), ("triton.cudagraphs",)),
        (("runtime.mode=compile", "runtime.compile_options={max_autotun: true}"), ("max_autotun", "max_autotune")),
        (("runtime.mode=graph", "runtime.compile_options={max_autotune: fast}"), ("max_autotune", "bool")),
    ],
)
def test_what_cannot_hold_is_rejected_before_the_run(tmp_path, settings, said):
    with raises(ConfigError, *said, at=settings[-1] if "aot_eager" not in settings[1] else OPTIONS):
        build_trainer(config_of(tmp_path / "run", *settings))
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_an_unknown_option_is_located_at_its_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "runtime:\n  mode: compile\n  compile_options:\n    epilogue_fusion: true\n    epilog_fusion: true\n"
    )
    with raises(ConfigError, "epilog_fusion", "epilogue_fusion", at="run.yaml:5"):
        check_mode(RunConfig.load(path), {})


def test_they_may_change_between_two_starts_of_a_run(tmp_path):
    configs = [config_of(tmp_path, *each) for each in ((), (OPTIONS,), ("runtime.compile_mode=default",))]
    assert [changed_settings(configs[0], each) for each in configs] == [{}, {}, {}]
