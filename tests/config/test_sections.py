import re

import pytest
from tests.messages import raises

from trainwright.config import RunConfig
from trainwright.config.elsewhere import KEYS_WITHOUT_SETTING, OPTIONS_ELSEWHERE, TRAINER_KEYS_ELSEWHERE
from trainwright.config.sections import Section
from trainwright.errors import ConfigError


def rejection_of(settings):
    with pytest.raises(ConfigError) as rejection:
        RunConfig.from_dict(settings)
    return str(rejection.value)


@pytest.mark.parametrize("bare", ["digits", {"type": "digits"}])
def test_one_bare_evaluation_set_is_named_eval(bare):
    assert RunConfig.from_dict({"data": {"eval": bare}}).data.eval == {"eval": {"type": "digits"}}


@pytest.mark.parametrize("name", ["train", "Valid", "1st", "a/b"])
def test_a_wrong_name_of_a_set_is_rejected(name):
    assert rejection_of({"data": {"eval": {name: "digits"}}}).startswith(f'data.eval.{name}: "{name}" cannot name')


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            {"batch_size": 3},
            "data.loader.batch_size: is not set here. Set trainer.global_batch_size and trainer.micro_batch_size.",
        ),
        ({"shuffle": True}, "data.loader.shuffle: is not set here. Set data.shuffle."),
        ({"num_workers": 1}, "data.loader.num_workers: is not set here. Set data.num_workers."),
        ({"collate_fn": "x"}, "data.loader.collate_fn: is not set here. Set data.collator."),
        (
            {"pin_memry": True},
            'data.loader.pin_memry: the loader has no such argument. Did you mean "pin_memory"? Known: '
            "prefetch_factor, pin_memory, timeout, multiprocessing_context.",
        ),
        ({"pin_memory": "yes"}, 'data.loader.pin_memory: must be true or false, got the text "yes".'),
        ({"prefetch_factor": 0}, "data.loader.prefetch_factor: must be more than 0, got 0."),
    ],
)
def test_a_loader_argument_that_is_set_elsewhere_or_wrong_is_rejected(loader, message):
    assert rejection_of({"data": {"loader": loader}}) == message


def test_loader_arguments_are_kept_as_given():
    assert RunConfig.from_dict({"data": {"loader": {"prefetch_factor": 4.0}}}).data.loader == {"prefetch_factor": 4}


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("trainer", "max_steps", True, "must be a whole number, got true."),
        ("trainer", "max_steps", 1.5, "must be a whole number, got 1.5."),
        ("trainer", "max_steps", 0, "must be more than 0, got 0."),
        ("trainer", "max_epochs", float("inf"), "must be a finite number, got inf."),
        ("trainer", "max_grad_norm", "1.0", 'must be a number, got the text "1.0". Remove the quotes.'),
        ("trainer", "optimizers", [1], "must be a mapping (key: value), got a list of 1."),
        ("data", "split", [1], "must be a list of at least 2, got a list of 1."),
        ("data", "num_workers", -1, "must be at least 0, got -1."),
        ("runtime", "precision", "fp4", 'must be auto, fp32, bf16, fp16 or fp8, got the text "fp4".'),
        ("runtime", "mesh", 3, "must be a mapping (key: value), got 3."),
        ("checkpoint", "keep_best", {"mode": "min"}, None),
    ],
)
def test_a_wrong_value_is_rejected_with_what_we_got(section, key, value, message):
    text = rejection_of({section: {key: value}})
    expected = f"{section}.{key}: {message}"
    assert text == (
        expected if message else "checkpoint.keep_best.metric: is missing. Add it; got a mapping with mode."
    )


def test_split_ratios_are_positive():
    assert rejection_of({"data": {"split": [90, 0]}}) == "data.split.1: must be more than 0, got 0."
    assert RunConfig.from_dict({"data": {"split": [90, 5, 5]}}).data.split == (90, 5, 5)


@pytest.mark.parametrize("size", [0, -2, True, 1.5, "2"])
def test_a_mesh_axis_is_positive_or_minus_one(size):
    assert rejection_of({"runtime": {"mesh": {"fsdp": size}}}).startswith("runtime.mesh.fsdp: must be a positive whole")


def test_whole_floats_are_whole_numbers():
    trainer = RunConfig.from_dict({"trainer": {"max_tokens": 1e9, "max_epochs": 2}}).trainer
    assert (trainer.max_tokens, trainer.max_epochs) == (10**9, 2.0)
    assert isinstance(trainer.max_tokens, int)


def test_optimizers_take_one_glob_or_several():
    several = {"a": {"optimizer": "adamw", "match": "x.*"}, "b": {"optimizer": "sgd", "match": ["y", "z"]}}
    optimizers = RunConfig.from_dict({"trainer": {"optimizers": several}}).trainer.optimizers
    assert optimizers.a.match == ("x.*",)
    assert optimizers["b"].match == ("y", "z")
    assert optimizers.a.optimizer.type == "adamw"


def test_an_unknown_key_of_one_optimizer_names_that_sections_keys():
    text = rejection_of({"trainer": {"optimizers": {"a": {"optimizer": "adamw", "mach": "x"}}}})
    assert text == (
        'trainer.optimizers.a.mach: there is no such setting. Did you mean "match"? Known: optimizer, schedule, match.'
    )


def test_every_key_of_every_section_has_a_docstring():
    public = [section for section in Section.__subclasses__() if not section.__name__.startswith("_")]
    assert len(public) >= 10
    for section in public:
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


@pytest.mark.parametrize("trainer", [{}, {"type": "trainer"}, {"type": "language_model"}, {"type": "classification"}])
def test_a_built_in_trainer_rejects_unknown_keys(trainer):
    text = rejection_of({"trainer": {**trainer, "temperature": 2}})
    assert text.startswith("trainer.temperature: there is no such setting.")
    assert text.endswith("Only a custom trainer has further options.")


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
    assert text.startswith(f'trainer.{key}: looks like a misspelled "{known}".')


def test_optimizer_and_optimizers_exclude_each_other():
    several = {"a": {"optimizer": "sgd"}}
    text = rejection_of({"trainer": {"optimizer": "adamw", "schedule": "cosine", "optimizers": several}})
    assert text.splitlines() == [
        "trainer.optimizer: is set together with trainer.optimizers (a). Keep one of the two.",
        "trainer.schedule: has no effect: each of trainer.optimizers (a) has its own schedule. Move it there.",
    ]


def keep_best(metric, **data):
    return {"data": {"train": "digits", **data}, "checkpoint": {"keep_best": {"metric": metric}}}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            keep_best("test/loss", test="digits"),
            "the test set cannot select a checkpoint. Use an evaluation set, such as",
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


def test_only_one_axis_can_be_the_remaining_ranks():
    text = rejection_of({"runtime": {"mesh": {"fsdp": -1, "tensor": -1}}})
    assert text == ("runtime.mesh.tensor: only one axis can be -1, got fsdp and tensor. Set the others to a number.")


@pytest.mark.parametrize("kind", ["trainer", "trainers/mine.py:Mine"])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("learning_rate", "trainer.optimizer.lr"),
        ("per_device_train_batch_size", "trainer.micro_batch_size"),
        ("num_train_epochs", "trainer.max_epochs"),
        ("save_total_limit", "checkpoint.keep_last"),
        ("accumulate_grad_batches", "trainer.gradient_accumulation_steps"),
    ],
)
def test_options_of_other_trainers_are_rejected_with_the_setting(in_tmp, kind, name, setting):
    (in_tmp / "run.yaml").write_text(f"trainer:\n  type: {kind}\n  {name}: 1\n")
    with raises(ConfigError, f"trainer.{name}", setting, at="run.yaml:3"):
        RunConfig.load(in_tmp / "run.yaml")


@pytest.mark.parametrize("table", [TRAINER_KEYS_ELSEWHERE, OPTIONS_ELSEWHERE])
def test_the_settings_that_answer_options_of_other_trainers_exist(table):
    for key, setting in table.items():
        section, dot, name = re.match(r"(\w+)(\.?)(\w*)", setting).groups()
        assert section in RunConfig.model_fields, f"{key}: {setting}"
        if dot and section != "model":
            assert name in RunConfig.model_fields[section].annotation.model_fields, f"{key}: {setting}"


@pytest.mark.parametrize("key", KEYS_WITHOUT_SETTING)
def test_options_without_a_setting_are_rejected_with_what_to_do(in_tmp, key):
    (in_tmp / "run.yaml").write_text(f"trainer:\n  type: trainer\n  {key}: 1\n")
    with raises(ConfigError, f"trainer.{key}", KEYS_WITHOUT_SETTING[key], at="run.yaml:3"):
        RunConfig.load(in_tmp / "run.yaml")


def test_options_of_other_trainers_are_answered_in_every_section():
    assert rejection_of({"learning_rate": 1e-3}) == (
        "learning_rate: there is no such setting. Set trainer.optimizer.lr."
    )
    assert rejection_of({"checkpoint": {"save_total_limit": 2}}).endswith("Set checkpoint.keep_last.")
    assert "Known: " in rejection_of({"evaluation": {"strategy": "epoch"}})  # it may be another one than of devices


def test_a_user_s_trainer_may_have_options_that_built_in_ones_reject(in_tmp):
    (in_tmp / "run.yaml").write_text("trainer:\n  type: trainers/mine.py:Mine\n  weight_decay: 0.5\n")
    trainer = RunConfig.load(in_tmp / "run.yaml", ["trainer.devices=[cpu]", "trainer.num_processes=4"]).trainer
    assert (trainer.weight_decay, trainer.devices, trainer.num_processes) == (0.5, ("cpu",), 4)
    with raises(ConfigError, "trainer.push_to_hub", "--push"):
        RunConfig.load(in_tmp / "run.yaml", ["trainer.push_to_hub=true"])
    with raises(ConfigError, "trainer.weight_decay", "trainer.optimizer.weight_decay"):
        RunConfig.load(in_tmp / "run.yaml", ["trainer.type=trainer"])
    with raises(ConfigError, "trainer.lr", "trainer.optimizer.lr"):
        RunConfig.load(in_tmp / "run.yaml", ["trainer.type=trainer", "~trainer.weight_decay", "trainer.lr=0.1"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("type: dpo, betta: 0.2", ["trainer.betta", '"beta"']),
        ("type: dpo, loss_type: sigmiod", ["trainer.loss_type", "sigmoid", "kto"]),
        ("type: dpo, beta: high", ["trainer.beta", "number"]),
        ("type: dpo, beta: 0", ["trainer.beta", "0"]),
        ("type: dpo, label_smoothing: 0.5", ["trainer.label_smoothing", "0.5"]),
        ("type: dpo, simpo_gamma: 1.0", ["trainer.simpo_gamma", "sigmoid", "simpo"]),
        ("type: dpo, loss_type: orpo, precompute_reference: true", ["trainer.precompute_reference", "orpo"]),
        ("type: reward, beta: 0.1", ["trainer.beta"]),
        ("type: distill, teacher: big", ["trainer.teacher", '"big"', "pretrained"]),
        ("type: distill, teacher: {layers: 2}", ["trainer.teacher", "layers"]),
        ("type: distill, alpha: 2", ["trainer.alpha", "at most 1"]),
        ("type: language_model, beta: 0.1", ["trainer.beta"]),
    ],
)
def test_the_options_of_built_in_trainers_are_checked(tmp_path, options, words):
    (tmp_path / "run.yaml").write_text(f"trainer: {{{options}}}\n")
    with raises(ConfigError, *words, at="run.yaml:1"):
        RunConfig.load(tmp_path / "run.yaml")


def test_options_are_saved_as_they_are_written(tmp_path):
    (tmp_path / "run.yaml").write_text("trainer: {type: dpo, loss_type: simpo, simpo_gamma: 1, beta: 2}\n")
    config = RunConfig.load(tmp_path / "run.yaml")
    config.save(tmp_path / "saved.yaml")
    assert RunConfig.load(tmp_path / "saved.yaml") == config
    assert config.trainer.options == {"loss_type": "simpo", "simpo_gamma": 1, "beta": 2}
