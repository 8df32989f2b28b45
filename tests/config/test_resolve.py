import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tests.messages import raises

from trainwright.config import BatchPlan, RunConfig, micro_batch_alone, resolve_batch, resolve_mesh
from trainwright.errors import ConfigError


def with_mesh(**mesh):
    return RunConfig.from_dict({"runtime": {"mesh": mesh}})


def with_trainer(**trainer):
    return RunConfig.from_dict({"trainer": trainer})


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ({}, (8, 1, 1, 1, 1)),
        ({"fsdp": -1}, (1, 8, 1, 1, 1)),
        ({"fsdp": -1, "tensor": 2}, (1, 4, 2, 1, 1)),
        ({"replicate": 2, "fsdp": 2, "pipeline": 2}, (2, 2, 1, 1, 2)),
    ],
)
def test_the_mesh_fills_the_world(mesh, sizes):
    assert tuple(resolve_mesh(with_mesh(**mesh), 8).values()) == sizes
    assert list(resolve_mesh(with_mesh(**mesh), 8)) == ["replicate", "fsdp", "tensor", "context", "pipeline"]


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (
            {"fsdp": 2, "tensor": 2},
            "runtime.mesh: fsdp 2 × tensor 2 is 4 ranks, but the run has 8. "
            "Run on 4 ranks, or set runtime.mesh.replicate: -1 for the remaining ranks.",
        ),
        (
            {"fsdp": 3},
            "runtime.mesh: fsdp 3 is 3 ranks, but the run has 8. Run on 3 ranks, or change the axes to match.",
        ),
        (
            {"fsdp": -1, "tensor": 3},
            "runtime.mesh: fsdp ? × tensor 3 cannot have 8 ranks: 8 is not a multiple of 3. "
            "Run on a multiple of 3 ranks, or change the other axes.",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_rejected_with_the_arithmetic(mesh, message):
    with pytest.raises(ConfigError) as rejection:
        resolve_mesh(with_mesh(**mesh), 8)
    assert str(rejection.value) == message


@pytest.mark.parametrize(
    ("given_sizes", "plan"),
    [
        ({}, (32, 16, 1)),
        ({"global_batch_size": 64}, (64, 32, 1)),
        ({"micro_batch_size": 8}, (16, 8, 1)),
        ({"gradient_accumulation_steps": 4}, (32, 4, 4)),
        ({"global_batch_size": 64, "micro_batch_size": 8}, (64, 8, 4)),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 8}, (64, 4, 8)),
        ({"micro_batch_size": 8, "gradient_accumulation_steps": 3}, (48, 8, 3)),
        ({"global_batch_size": 48, "micro_batch_size": 8, "gradient_accumulation_steps": 3}, (48, 8, 3)),
    ],
)
def test_the_batch_size_that_was_left_out_is_derived(given_sizes, plan):
    assert resolve_batch(with_trainer(**given_sizes), 2) == BatchPlan(*plan)


def test_a_contradiction_is_rejected_with_file_line_and_arithmetic(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lm.yaml").write_text("trainer:\n  micro_batch_size: 8\n  global_batch_size: 100\n")
    with pytest.raises(ConfigError) as rejection:
        resolve_batch(RunConfig.load("lm.yaml"), 2)
    assert str(rejection.value) == (
        "lm.yaml:3: trainer.global_batch_size: 100 is not micro_batch_size 8 × 2 data ranks × a whole number. "
        "Use a multiple of 16, or set micro_batch_size."
    )


@pytest.mark.parametrize(
    ("given_sizes", "problem"),
    [
        (
            {"global_batch_size": 100, "micro_batch_size": 8, "gradient_accumulation_steps": 2},
            "100 is not micro_batch_size 8 × 3 data ranks × gradient_accumulation_steps 2 = 48. "
            "Use 48, or remove one of the three.",
        ),
        (
            {"global_batch_size": 2},
            "2 is not 3 data ranks × a whole number. Use a multiple of 3.",  # no micro_batch_size would help
        ),
        (
            {"gradient_accumulation_steps": 2},
            "the default, 32, is not 3 data ranks × gradient_accumulation_steps 2 × a whole number. Use a multiple of "
            "6, "
            "or set micro_batch_size.",
        ),
        ({}, "the default, 32, is not 3 data ranks × a whole number. Use a multiple of 3, or set micro_batch_size."),
        (
            {"global_batch_size": 33, "gradient_accumulation_steps": 2},
            "33 is not 3 data ranks × gradient_accumulation_steps 2 × a whole number. Use a multiple of 6, or set "
            "gradient_accumulation_steps.",
        ),
    ],
)
def test_the_rejection_names_what_was_given(given_sizes, problem):
    with pytest.raises(ConfigError) as rejection:
        resolve_batch(with_trainer(**given_sizes), 3)
    assert str(rejection.value) == f"trainer.global_batch_size: {problem}"


sizes = st.none() | st.integers(1, 64)


@given(sizes, sizes, sizes, st.integers(1, 9))
def test_a_plan_always_adds_up_and_keeps_what_was_given(total, micro, gradient_accumulation_steps, ranks):
    given_sizes = {
        "global_batch_size": total,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": gradient_accumulation_steps,
    }
    try:
        plan = resolve_batch(with_trainer(**given_sizes), ranks)
    except ConfigError:
        reject()  # the contradictions are tested above
    assert plan.global_batch_size == plan.micro_batch_size * ranks * plan.gradient_accumulation_steps
    assert all(value in (None, getattr(plan, name)) for name, value in given_sizes.items())


@pytest.mark.parametrize(("trainer", "plan"), [({}, (32, 16, 1)), ({"global_batch_size": 64}, (64, 32, 1))])
def test_with_auto_the_plan_is_the_largest_that_could_be(trainer, plan):
    assert resolve_batch(with_trainer(micro_batch_size="auto", **trainer), 2) == BatchPlan(*plan)


def test_auto_with_gradient_accumulation_or_an_uneven_batch_is_rejected():
    with raises(ConfigError, "trainer.gradient_accumulation_steps", "4", "micro_batch_size"):
        resolve_batch(with_trainer(micro_batch_size="auto", gradient_accumulation_steps=4), 1)
    with raises(ConfigError, "10", "3"):
        resolve_batch(with_trainer(micro_batch_size="auto", global_batch_size=10), 3)


@pytest.mark.parametrize(
    ("trainer", "number"),
    [({"micro_batch_size": 4, "global_batch_size": 8}, 4), ({"micro_batch_size": "auto", "global_batch_size": 8}, 8)],
)
def test_an_evaluation_alone_needs_no_batch_arithmetic(trainer, number):
    assert micro_batch_alone(with_trainer(**trainer)) == number
    assert micro_batch_alone(RunConfig()) == 32
