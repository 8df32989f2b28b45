import pytest

from trainwright.config import RunConfig
from trainwright.errors import ConfigError


def rejection_of(settings):
    with pytest.raises(ConfigError) as rejection:
        RunConfig.from_dict(settings)
    return str(rejection.value)


@pytest.mark.parametrize("trainer", [{}, {"type": "trainer"}, {"type": "language_model"}, {"type": "classification"}])
def test_a_built_in_trainer_takes_no_unknown_key(trainer):
    text = rejection_of({"trainer": {**trainer, "temperature": 2}})
    assert text.startswith("trainer.temperature: there is no such setting.")
    assert text.endswith("Options of your own need a trainer of your own.")


@pytest.mark.parametrize("type_name", ["mine.MyTrainer", "trainers/mine.py:MyTrainer", "my_pkg:T", "registered"])
def test_a_users_trainer_keeps_further_keys(type_name):
    more = {"temperature": 2, "num_steps": 3, "warmup_steps": 4, "margin": {"a": [1]}, "alpha": None}
    config = RunConfig.from_dict({"trainer": {"type": type_name, **more}})
    assert config.trainer.options == more
    assert config.trainer.margin.a == (1,)


@pytest.mark.parametrize(
    ("key", "known"),
    [("max_step", "max_steps"), ("optimiser", "optimizer"), ("scheduler", "schedule"), ("max-steps", "max_steps")],
)
def test_a_users_trainer_rejects_keys_that_look_misspelt(key, known):
    text = rejection_of({"trainer": {"type": "mine.T", key: 1}})
    assert text.startswith(f'trainer.{key}: looks like a misspelt "{known}".')


def test_optimizer_and_optimizers_exclude_each_other():
    several = {"a": {"optimizer": "sgd"}}
    text = rejection_of({"trainer": {"optimizer": "adamw", "schedule": "cosine", "optimizers": several}})
    assert text.splitlines() == [
        "trainer.optimizer: is given together with trainer.optimizers (a). Keep one of the two.",
        "trainer.schedule: has no effect: each of trainer.optimizers (a) has its own schedule. Move it there.",
    ]


def keep_best(metric, **data):
    return {"data": {"train": "digits", **data}, "checkpoint": {"keep_best": {"metric": metric}}}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            keep_best("test/loss", test="digits"),
            "the test set never chooses a checkpoint. Use an evaluation set, such as",
        ),
        (keep_best("vald/loss", eval={"valid": "digits"}), 'there is no evaluation set "vald". Did you mean "valid"?'),
        (keep_best("vald/loss", split=[9, 1]), 'there is no evaluation set "vald". Did you mean "valid"?'),
        (keep_best("loss", eval={"val": "x"}), 'must be a set and its metric, such as val/loss; got the text "loss".'),
        (keep_best("valid/loss"), 'there is no evaluation set "valid". Add it to data.eval, or set data.split.'),
    ],
)
def test_keep_best_needs_an_evaluation_set(settings, problem):
    assert rejection_of(settings).startswith(f"checkpoint.keep_best.metric: {problem}")


@pytest.mark.parametrize(
    "settings",
    [
        keep_best("valid/loss", eval={"valid": "digits"}),
        keep_best("eval/loss", eval="digits"),
        keep_best("valid/loss", split=[90, 5, 5]),
        {**keep_best("valid/loss"), "task": "mine.Task"},
        {**keep_best("valid/loss"), "trainer": {"type": "mine.T"}},
    ],
)
def test_keep_best_accepts_declared_sets_and_those_that_code_may_build(settings):
    assert RunConfig.from_dict(settings).checkpoint.keep_best.mode == "min"


def test_only_one_axis_takes_what_is_left():
    text = rejection_of({"runtime": {"mesh": {"fsdp": -1, "tensor": -1}}})
    assert text == (
        "runtime.mesh.tensor: only one axis can take what is left (-1), got fsdp and tensor. Give the others a number."
    )
