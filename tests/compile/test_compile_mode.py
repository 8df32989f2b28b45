"""`runtime.mode: compile`: the same updates as in eager mode, from few graphs, and the same again after a resume."""

import json

import pytest
import torch
from tests.faults.runs import config_of
from tests.loop.small_runs import PLAIN, at, lines_of
from tests.memory.models import Layer
from tests.messages import raises
from tests.project.parts import Net
from torch import nn

from trainwright import Mean, Trainer, build_trainer, get_event_storage
from trainwright.compile.regions import check_mode
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.trainers.classification import ClassificationTrainer

COMPILED = ("runtime.mode=compile", "runtime.compile_backend=aot_eager")
COUNTS = ("graphs", "graph_breaks", "recompilations")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(folder, *overrides, hooks=(), trainer=Trainer):
    """Builds the run of `folder`, or goes on."""

    class WithHooks(trainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

    return build_trainer(config_of(folder, *overrides), WithHooks)


def run(folder, *overrides, **rest):
    trainer = make(folder, *overrides, **rest)
    trainer.train()
    return trainer


def weights_of(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def same_bits(one, other):
    return all(torch.equal(value, weights_of(other)[name]) for name, value in weights_of(one).items())


def counts_of(trainer):
    """How much was compiled in all steps: (graphs, breaks, recompilations)."""
    lines = [json.loads(line) for line in (trainer.folder / "metrics.json").read_text().splitlines()]
    return tuple(sum(line.get(f"compile/{name}", 0) for line in lines) for name in COUNTS)


def without_counts(lines):
    return [{name: value for name, value in line.items() if not name.startswith("compile/")} for line in lines]


class Telling(Trainer):
    """Puts a scalar and returns metrics from within its forward, and reads the step."""

    def forward(self, **batch):
        outputs = super().forward(**batch)
        get_event_storage().put_scalar("spread", outputs["logits"].std())
        if not self.model.training:
            return outputs
        count = torch.ones_like(batch["labels"]).sum()
        return outputs["loss"] * (1.0 + 0.1 * self.step), {"share": Mean((outputs["logits"] > 0).sum(), 2 * count)}


def test_puts_and_metrics_are_those_of_eager_mode_and_cost_neither_break_nor_graph(tmp_path):
    settings = (*PLAIN, "log.every_steps=1")
    eager = run(tmp_path / "eager", *settings, trainer=Telling)
    compiled = run(tmp_path / "compiled", *settings, *COMPILED, trainer=Telling)
    assert same_bits(eager, compiled)
    told, expected = without_counts(lines_of(compiled.folder)), lines_of(eager.folder)
    assert [line.keys() for line in told] == [line.keys() for line in expected]
    assert told == [pytest.approx(line) for line in expected]
    # The step is a number that changes: one more graph holds for all of them.
    assert counts_of(compiled)[1] == 0
    assert counts_of(compiled)[2] <= 1


def test_training_and_evaluation_are_a_graph_each_with_the_bits_of_eager_mode(tmp_path):
    settings = ("model.dropout=0.0", "data.eval.valid.size=32", "evaluation.batch_size=8")
    eager, compiled = run(tmp_path / "eager", *settings), run(tmp_path / "compiled", *settings, *COMPILED)
    assert same_bits(eager, compiled)
    assert without_counts(lines_of(compiled.folder)) == lines_of(eager.folder)
    assert counts_of(compiled) == (2, 0, 0)


class Weighted(Trainer):
    """Reads settings in its forward: an option of its own, a list in one, and a setting."""

    def forward(self, **batch):
        section = self.config.trainer
        scale = section.scale * section.table.factors[1] / section.global_batch_size
        return {"loss": super().forward(**batch)["loss"] * scale}


def test_settings_that_a_compiled_forward_reads_break_no_graph(tmp_path):
    options = (f"trainer.type={__name__}:Weighted", "trainer.scale=0.5", "trainer.table={factors: [1, 3]}")
    trainers = []
    for name, more in (("eager", ()), ("compiled", (*COMPILED, "runtime.max_graph_breaks=0"))):
        trainers.append(build_trainer(config_of(tmp_path / name, *PLAIN, *options, *more)))
        trainers[-1].train()
    assert same_bits(*trainers)


class Growing(Trainer):
    """Sees rows of another number in every step."""

    def next_train_inputs(self, iterator):
        batch = next(iterator)
        rows = 2 + self.step % 5
        return {name: value[:rows] for name, value in batch.items()}


def test_batches_of_many_shapes_take_one_graph_more(tmp_path):
    settings = (*PLAIN, "trainer.micro_batch_size=8")
    eager = run(tmp_path / "eager", *settings, trainer=Growing)
    compiled = run(tmp_path / "compiled", *settings, *COMPILED, trainer=Growing)
    assert same_bits(eager, compiled)
    assert counts_of(compiled) == (2, 0, 1)


def test_a_resumed_run_with_dropout_has_the_same_bits(tmp_path):
    settings = (*PLAIN[:2], "model.dropout=0.5", *COMPILED)
    whole = run(tmp_path / "whole", *settings)
    run(tmp_path / "cut", *settings, hooks=[at(3, lambda trainer: trainer.interrupt("a test"))])
    torch._dynamo.reset()  # as in another process
    resumed = run(tmp_path / "cut", *settings)
    assert same_bits(whole, resumed)
    assert lines_of(resumed.folder)[-1]["loss"] == lines_of(whole.folder)[-1]["loss"]


def test_the_mode_may_change_between_runs_of_one_folder(tmp_path):
    whole = run(tmp_path / "whole", *PLAIN)
    run(tmp_path / "cut", *PLAIN, hooks=[at(3, lambda trainer: trainer.interrupt("a test"))])
    assert same_bits(whole, run(tmp_path / "cut", *PLAIN, *COMPILED))


def test_bf16_rounds_as_in_eager_mode(tmp_path):
    settings = (*PLAIN, "runtime.precision=bf16")
    assert same_bits(run(tmp_path / "eager", *settings), run(tmp_path / "compiled", *settings, *COMPILED))


class Deep(nn.Module):
    """Equal layers, and a criterion that the loop applies."""

    def __init__(self, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        width = next(self.layers[0].parameters()).shape[-1]
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, 2)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        hidden = self.enter(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.leave(hidden)


DEEP = (*PLAIN[:2], "data.train.size=400")


def deep(depth, **more):
    words = ", ".join(f"{key}: {value}" for key, value in {"depth": depth, **more}.items())
    return f"model={{type: tests.compile.test_compile_mode:Deep, {words}}}"


def test_with_compile_repeated_blocks_a_deeper_stack_takes_no_more_graphs(tmp_path):
    counts = []
    for depth in (2, 5):
        compiled = run(tmp_path / f"compiled-{depth}", *DEEP, deep(depth, compile_repeated_blocks="layers"), *COMPILED)
        counts.append(counts_of(compiled))
        torch._dynamo.reset()
    assert same_bits(run(tmp_path / "eager", *DEEP, deep(5)), compiled)
    assert counts[0] == counts[1]
    assert counts[0][1:] == (0, 0)


@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": "Layer"}])
def test_compile_repeated_blocks_work_in_graph_mode(tmp_path, more):
    eager = run(tmp_path / "eager", *DEEP, deep(3))
    graph = run(tmp_path / "graph", *DEEP, deep(3, compile_repeated_blocks="layers", **more), "runtime.mode=graph")
    assert same_bits(eager, graph)


def test_recomputed_layers_are_compiled_with_the_rest(tmp_path):
    eager = run(tmp_path / "eager", *DEEP, deep(3))
    compiled = run(
        tmp_path / "compiled", *DEEP, deep(3, activation_checkpointing="Layer"), *COMPILED, "runtime.max_graph_breaks=0"
    )
    assert same_bits(eager, compiled)
    assert counts_of(compiled) == (1, 0, 0)


class Penalized(Trainer):
    """A step of its own, which differentiates an output too."""

    def train_step(self, batch):
        update = self.begin_update()
        for micro_batch in self.micro_batches(batch):
            result = self.run_forward(micro_batch)
            result.loss = result.loss + 0.1 * result.outputs["logits"].square().mean()
            update.backward(result)
        return update.apply()


@pytest.mark.parametrize("trainer", [Penalized, ClassificationTrainer])
def test_outputs_that_a_step_uses_leave_the_graph(tmp_path, trainer):
    eager = run(tmp_path / "eager", *PLAIN, trainer=trainer)
    compiled = run(tmp_path / "compiled", *PLAIN, *COMPILED, trainer=trainer)
    assert same_bits(eager, compiled)
    assert without_counts(lines_of(compiled.folder)) == lines_of(eager.folder)


class Breaking(Net):
    """Two lines that no graph holds, which a watch of tensors does not see."""

    def forward(self, x, labels=None):
        torch._dynamo.graph_break()
        hidden = x * 2
        torch._dynamo.graph_break()
        return super().forward(hidden, labels)


BREAKING = ("model={type: tests.compile.test_compile_mode:Breaking}", *PLAIN[:2])


def breaking_lines():
    first = Breaking.forward.__code__.co_firstlineno
    return [f"test_compile_mode.py:{first + offset}" for offset in (1, 3)]


@pytest.mark.parametrize(("number", "lines"), [(0, breaking_lines()[:1]), (1, breaking_lines())])
def test_more_breaks_than_expected_end_the_run_with_their_lines(tmp_path, number, lines):
    with raises(TrainwrightError, number, "runtime.max_graph_breaks") as caught:
        run(tmp_path / "run", *BREAKING, *COMPILED, f"runtime.max_graph_breaks={number}")
    assert all(line in str(caught.value) for line in lines)


class WithoutHooks(Trainer):
    @classmethod
    def build_hooks(cls, build):
        return []


@pytest.mark.parametrize("number", [0, 1])
def test_breaks_are_counted_also_where_the_hooks_are_the_users_own(tmp_path, number):
    settings = (*BREAKING, *COMPILED, f"runtime.max_graph_breaks={number}")
    trainer = build_trainer(config_of(tmp_path / "run", *settings), WithoutHooks)
    with raises(TrainwrightError, number, "runtime.max_graph_breaks"):
        trainer.train()
    assert not trainer.compiled_forward.compilations.is_listening


class BreakingDeep(Deep):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


def test_with_compile_repeated_blocks_a_break_outside_of_the_blocks_is_one_too_many_also_without_hooks(tmp_path):
    settings = (*DEEP, deep(2, compile_repeated_blocks="layers").replace(":Deep", ":BreakingDeep"), *COMPILED)
    trainer = build_trainer(config_of(tmp_path / "run", *settings, "runtime.max_graph_breaks=0"), WithoutHooks)
    with raises(TrainwrightError, "runtime.max_graph_breaks", "0"):
        trainer.train()


def test_torchs_settings_are_as_before_after_a_run(tmp_path):
    def settings():
        return (
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint,
            torch._functorch.config.activation_memory_budget,
        )

    before = settings()
    run(
        tmp_path / "run",
        *DEEP,
        deep(2, activation_checkpointing="Layer"),
        *COMPILED,
        "runtime.compile_memory_budget=0.5",
    )
    assert settings() == before == (False, 1.0)


@pytest.fixture
def failing_backward():
    """A backend of torch.compile whose backward cannot be compiled, as where a compiler is not installed."""
    from torch._dynamo.backends import registry
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed

    def fail(graph, inputs):
        raise BackendCompilerFailed("inductor", RuntimeError("no compiler was found\n1,150 lines more"), None)

    registry.register_backend(aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=fail), name="failing")
    yield "runtime.compile_backend=failing"
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        table.pop("failing", None)


def failed_backward(trainer):
    """Runs a forward and its backward; returns the error."""
    trainer.set_batch(None, 8)
    with trainer.storage, pytest.raises(RuntimeError) as caught:
        trainer.run_forward({"x": torch.ones(8, 4), "labels": torch.zeros(8, dtype=torch.int64)}).loss.backward()
    return caught.value


def test_a_backward_that_cannot_be_compiled_is_explained_in_one_sentence(tmp_path, failing_backward):
    trainer = make(tmp_path / "run", *PLAIN, "runtime.mode=compile", failing_backward)
    error = failed_backward(trainer)
    with raises(TrainwrightError, "torch.compile") as caught:
        trainer.compiled_forward.explain(error)
    assert "1,150" not in str(caught.value)
    assert "aot_eager" in str(caught.value)


def test_a_compilation_that_a_signal_has_ended_is_the_stop_that_it_is(tmp_path, failing_backward, caplog):
    trainer = make(tmp_path / "run", *PLAIN, "runtime.mode=compile", failing_backward)
    error = failed_backward(trainer)
    trainer.interrupt("SIGTERM")
    with caplog.at_level("INFO", "trainwright"), pytest.raises(SystemExit) as caught:
        trainer._explain_compilation(error)
    assert caught.value.code == 143
    assert "SIGTERM ended the compilation in step 1. The same command starts over" in caplog.text


def test_expected_breaks_are_counted_and_change_nothing(tmp_path):
    eager = run(tmp_path / "eager", *BREAKING)
    compiled = run(tmp_path / "compiled", *BREAKING, *COMPILED, "runtime.max_graph_breaks=2")
    assert same_bits(eager, compiled)
    assert counts_of(compiled)[1] == 2


class Renaming(Trainer):
    """Evaluates with another key than the model takes."""

    def next_eval_inputs(self, iterator):
        batch = next(iterator)
        return {"points": batch["x"], "labels": batch["labels"]}, {}


def test_a_batch_that_does_not_fit_is_rejected_in_the_words_of_eager_mode(tmp_path):
    said = []
    for name, settings in (("eager", ()), ("compiled", COMPILED)):
        with pytest.raises(DataError) as caught:
            run(tmp_path / name, "trainer.max_steps=1", *settings, trainer=Renaming)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "has no parameter points" in said[0]


class TooFewClasses(Net):
    def forward(self, x, labels=None):
        return super().forward(x, labels + 2)


def test_a_label_outside_of_the_classes_is_explained(tmp_path):
    with raises(TrainwrightError):
        run(tmp_path / "run", *PLAIN[:2], "model={type: tests.compile.test_compile_mode:TooFewClasses}", *COMPILED)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("runtime.mode=compile", "runtime.compile_backend=indctor"), ("torch.compile",)),
        (("runtime.mode=graph", "runtime.compile_backend=indctor"), ("torch.compile",)),
        (("runtime.compile_backend=inductor",), ("runtime.mode", "eager")),
        (("runtime.max_graph_breaks=0",), ("runtime.mode", "eager")),
    ],
)
def test_settings_that_cannot_hold_are_rejected_with_their_place(tmp_path, settings, said):
    name = settings[-1].partition("=")[0]
    with raises(ConfigError, *said, settings[-1], name):
        make(tmp_path / "run", *settings)


def test_a_pipeline_is_rejected(tmp_path):
    with raises(ConfigError, "runtime.mode", "compile", "pipeline"):
        check_mode(config_of(tmp_path / "run", "runtime.mode=compile"), {"fsdp": 1, "pipeline": 2})


@pytest.mark.slow
def test_inductor_trains_alike_and_finds_its_kernels_again(tmp_path):
    eager = run(tmp_path / "eager", *PLAIN)
    for name in ("compiled", "again"):
        compiled = run(tmp_path / name, *PLAIN, "runtime.mode=compile")
        torch._dynamo.reset()
    for name, value in weights_of(eager).items():
        torch.testing.assert_close(weights_of(compiled)[name], value, rtol=1e-4, atol=1e-5)
    assert sum(line.get("compile/cache_hits", 0) for line in lines_of(compiled.folder)) > 0
