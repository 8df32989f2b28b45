"""The API for functions: its flags, its datasets, its stopwatches, and what it says of mistakes."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from tests.api.function_runs import Classifier, Points, flags, lines, run
from tests.messages import raises
from torch.nn.functional import cross_entropy

from trainwright import Every, add_training_args, get_args, train
from trainwright.api.arguments import OWN_FLAGS, UNSUPPORTED_FLAGS, attribute_of, flag_names, with_defaults
from trainwright.api.training_main import FunctionData, Timers, config_of, read_ratios
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.events import EventStorage

HERE = Path(__file__)


def line_of(text):
    """The number of the first line of this file that holds a text."""
    return next(number for number, line in enumerate(HERE.read_text("utf-8").splitlines(), 1) if text in line)


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp):
    """Runs land in an empty folder."""


# the flags


SAT_FLAGS = [
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--vocab-size",
    "--max-sequence-length",
    "--layernorm-order",
    "--inner-hidden-size",
    "--hidden-size-per-attention-head",
    "--model-parallel-size",
    "--skip-init",
    "--use-gpu-initialization",
    "--num-multi-query-heads",
    "--is-gated-mlp",
    "--is-rotary-emb",
    "--layernorm-epsilon",
    "--hidden-dropout",
    "--attention-dropout",
    "--drop-path",
    "--make-vocab-size-divisible-by",
    "--parallel-output",
    "--experiment-name",
    "--train-iters",
    "--batch-size",
    "--lr",
    "--mode",
    "--seed",
    "--zero-stage",
    "--checkpoint-activations",
    "--checkpoint-num-layers",
    "--checkpoint-skip-layers",
    "--fp16",
    "--bf16",
    "--gradient-accumulation-steps",
    "--profiling",
    "--epochs",
    "--log-interval",
    "--summary-dir",
    "--save-args",
    "--lr-decay-iters",
    "--lr-decay-style",
    "--lr-decay-ratio",
    "--warmup",
    "--weight-decay",
    "--save",
    "--load",
    "--force-train",
    "--save-interval",
    "--no-save-rng",
    "--no-load-rng",
    "--resume-dataloader",
    "--distributed-backend",
    "--local_rank",
    "--exit-interval",
    "--wandb",
    "--wandb-project-name",
    "--eval-batch-size",
    "--eval-iters",
    "--eval-interval",
    "--strict-eval",
    "--train-data",
    "--train-data-weights",
    "--iterable-dataset",
    "--iterable-dataset-eval",
    "--batch-from-same-dataset",
    "--valid-data",
    "--test-data",
    "--split",
    "--num-workers",
    "--block-size",
    "--prefetch-factor",
    "--temperature",
    "--top_p",
    "--top_k",
    "--num-beams",
    "--length-penalty",
    "--no-repeat-ngram-size",
    "--min-tgt-length",
    "--out-seq-length",
    "--input-source",
    "--output-path",
    "--with-id",
    "--max-inference-batch-size",
    "--device",
    "--tokenizer-type",
    "--img-tokenizer-path",
    "--deepspeed",
    "--deepspeed_config",
    "--deepscale",
    "--deepscale_config",
]
"""The flags of sat/arguments.py and those that DeepSpeed adds to them."""


@pytest.mark.parametrize("flag", SAT_FLAGS)
def test_every_flag_of_swissarmytransformer_is_there_or_is_rejected_with_a_reason(flag):
    if flag in {**OWN_FLAGS, **UNSUPPORTED_FLAGS}:
        with raises(ConfigError, flag, at="test_functions.py"):
            get_args([flag, "3"])
    else:
        assert flag.removeprefix("--").replace("-", "_") in vars(get_args([]))


def test_the_lists_of_flags_do_not_overlap_and_name_no_unknown_flag():
    assert len(SAT_FLAGS) == 89
    assert not OWN_FLAGS.keys() & UNSUPPORTED_FLAGS.keys()
    assert {*OWN_FLAGS, *UNSUPPORTED_FLAGS} <= {*SAT_FLAGS}
    assert not {attribute_of(flag) for flag in (*OWN_FLAGS, *UNSUPPORTED_FLAGS)} & {*flag_names()}


def test_flags_that_are_settings_are_mapped():
    config = config_of(
        flags("--train-iters", "4", "--lr-decay-iters", "4", "--num-workers", "2", "--prefetch-factor", "3", "--wandb")
    )
    assert config.data.loader == {"prefetch_factor": 3}
    assert [writer.type for writer in config.writers] == ["console", "json", "wandb"]
    config = config_of(flags("--train-iters", "4", "--wandb", "--wandb-project-name", "mine", "--profiling", "1"))
    assert config.writers[-1].project == "mine"
    assert config.hooks == ({"type": "profiler", "first": 1},)
    plain = config_of(flags("--train-iters", "4"))
    assert config_of(flags("--train-iters", "4", "--save-args", "--resume-dataloader")) == plain
    assert (plain.hooks, plain.data.loader, len(plain.writers)) == ((), {}, 2)


@pytest.mark.parametrize(
    "words",
    [
        ("--lr-decay-iters", "9"),
        ("--checkpoint-skip-layers", "1"),
        ("--wandb-project-name", "x"),
        ("--prefetch-factor", "2"),
    ],
)
def test_a_flag_without_effect_is_rejected(words):
    with raises(ConfigError, words[0], at="test_functions.py"):
        config_of(flags("--train-iters", "4", *words))


def test_an_attribute_without_effect_is_rejected_but_not_one_of_the_users_model():
    args = flags("--train-iters", "4")
    args.num_layers, args.model_parallel_size = 7, 1
    assert config_of(args).trainer.arguments.num_layers == 7
    args.model_parallel_size = 2
    with raises(ConfigError, "args.model_parallel_size", at="test_functions.py"):
        config_of(args)


def test_text_of_a_flag_is_not_a_reference():
    args = flags("--train-iters", "1", "--experiment-name", "a${seed}")
    args.template = "${x}"
    config = config_of(args)
    assert (config.name, config.trainer.arguments.template) == ("a${seed}", "${x}")


def test_training_args_are_added_to_a_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    assert add_training_args(parser) is parser
    parser.set_defaults(lr=0.5)
    args = parser.parse_args(["--width", "3", "--train-iters", "2"])
    assert (args.width, args.train_iters, args.lr) == (3, 2, 0.5)
    assert "--train-iters" in parser.format_help()
    config = config_of(argparse.Namespace(**{**vars(args), "device": "cpu"}))
    assert (config.trainer.max_steps, config.trainer.optimizer.lr, config.trainer.arguments.width) == (2, 0.5, 3)


@pytest.mark.parametrize("is_added", [False, True])
def test_get_args_uses_a_parser_with_flags_of_the_user(is_added):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-layers", type=int)
    if is_added:
        add_training_args(parser)
    args = get_args(["--num-layers", "3", "--lr", "0.1"], parser=parser)
    assert (args.num_layers, args.lr, args.rank) == (3, 0.1, 0)
    with raises(ConfigError, "--num-layerz", '"--num-layers"', at="test_functions.py"):
        get_args(["--num-layerz", "3"], parser=parser)


def test_a_flag_that_the_parser_has_is_rejected():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    with raises(ConfigError, "--lr", "set_defaults", at="test_functions.py"):
        add_training_args(parser)
    with raises(ConfigError, "ArgumentParser", at="test_functions.py"):
        add_training_args([])


def test_the_local_rank_of_a_launcher_must_be_the_environment_s(monkeypatch):
    assert get_args(["--local_rank", "0"]).local_rank == get_args(["--local-rank=0"]).local_rank == 0
    with raises(ConfigError, "--local_rank", "1", "0", at="test_functions.py"):
        get_args(["--local_rank", "1"])


def test_get_args_parses_the_command_line_and_adds_rank_and_device(monkeypatch):
    monkeypatch.setattr("sys.argv", ["finetune.py", "--train-iters", "7", "--train-data", "a", "b"])
    args = get_args()
    assert (args.train_iters, args.train_data) == (7, ["a", "b"])
    assert (args.rank, args.world_size, args.local_rank) == (0, 1, 0)
    assert torch.zeros(1).to(get_args(["--device", "cpu"]).device).device.type == "cpu"


def test_flags_of_one_s_own_are_read_before():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--margin", type=float)
    known, rest = parser.parse_known_args(["--margin", "0.5", "--lr", "0.1"])
    args = argparse.Namespace(**vars(get_args(rest)), **vars(known))
    assert (args.margin, args.lr) == (0.5, 0.1)
    assert config_of(argparse.Namespace(**{**vars(args), "train_iters": 3})).trainer.arguments.margin == 0.5


def test_an_unknown_flag_is_rejected_with_the_nearest_one():
    with raises(ConfigError, "--train-iters") as caught:
        get_args(["--train-iter", "5"])  # misspelt
    assert str(caught.value).startswith(f"{HERE}:{line_of('  # misspelt')}: ")
    with raises(ConfigError, "--batch-size"):
        get_args(["--batch_size=4"])
    with raises(ConfigError, "oops"):
        get_args(["oops"])


def test_a_wrong_value_is_rejected_with_what_is_wanted():
    for words in (
        ["--batch-size", "0"],
        ["--warmup", "20"],
        ["--lr", "fast"],
        ["--epochs", "0"],
        ["--clip-grad", "-1"],
        ["--zero-stage", "4"],
        ["--zero-stage", "x"],
        ["--mode", "train"],
        ["--lr"],
    ):
        with raises(ConfigError, *words) as caught:
            get_args(words)
        assert str(caught.value).startswith(f"{HERE}:")


def test_the_zero_stage_changes_the_sharding_and_nothing_else():
    plain = config_of(flags("--train-iters", "1")).to_dict()
    for stage in "123":
        other = config_of(flags("--train-iters", "1", "--zero-stage", stage)).to_dict()
        runtime = other.pop("runtime")
        assert runtime["mesh"]["fsdp"] == -1
        assert runtime["reshard_after_forward"] == (stage == "3")
        assert other == {name: value for name, value in plain.items() if name != "runtime"}


def test_a_namespace_made_by_hand_has_every_default():
    args = argparse.Namespace(train_iters=2, train_data=["24"], device="cpu")
    config = config_of(args)
    assert config.trainer.micro_batch_size == 4
    assert config.trainer.max_steps == 2
    assert vars(args).keys() == {"train_iters", "train_data", "device"}


def test_what_yaml_cannot_hold_is_left_out_of_the_config_and_ranks_too():
    args = argparse.Namespace(**vars(flags("--train-iters", "1")), tokenizer=object(), sizes=[1, 2], deep={"a": None})
    assert dict(config_of(args).trainer.arguments) == {"train_data": ("24",), "sizes": (1, 2)}


def test_skipped_layers_are_not_recomputed_and_change_no_loss():
    words = ("--train-iters", "3", "--checkpoint-activations")
    run(*words, "--experiment-name", "all")
    run(*words, "--experiment-name", "first", "--checkpoint-skip-layers", "1")
    assert [line["loss"] for line in lines("all")] == [line["loss"] for line in lines("first")]
    with raises(ConfigError, "--checkpoint-skip-layers", "2"):
        run(*words, "--experiment-name", "none", "--checkpoint-skip-layers", "2")


def test_a_profile_is_written():
    run("--train-iters", "4", "--profiling", "1")
    assert list(Path("runs/run/profile").iterdir())


# the data


@pytest.mark.parametrize("text", ["", "a", "-1,2", "0,1", "1,2,3,4", "5,nan"])
def test_a_split_that_is_not_a_list_of_ratios_is_rejected(text):
    with raises(ConfigError, "--split"):
        read_ratios(text)


def test_ratios_that_cut_nothing_off_are_none():
    assert read_ratios("1") is read_ratios("100,0,0") is read_ratios(None) is None
    assert read_ratios("0.9/0.1") == (0.9, 0.1)


def data_of(*words):
    args = flags("--train-iters", "1", *words)
    return FunctionData(Points, args, with_defaults(args))


def test_every_path_is_in_every_part_of_a_split():
    data = data_of("--train-data", "20", "10+100", "--split", "8,1,1")
    parts = {name: [int(sample[2]) for sample in data.dataset(name)] for name in ("train", "valid", "test")}
    assert [len(part) for part in parts.values()] == [24, 3, 3]
    assert sorted(number for part in parts.values() for number in part) == [*range(20), *range(100, 110)]
    assert all(sum(number >= 100 for number in part) for part in parts.values())


def test_a_part_of_ratio_0_may_come_from_a_path():
    data = data_of("--train-data", "20", "--split", "80,0,20", "--valid-data", "5+50")
    assert len(data.dataset("test")) == 4
    assert len(data.dataset("valid")) == 5


def test_a_path_that_is_given_twice_counts_twice():
    assert len(data_of("--train-data", "20", "20").dataset("train")) == 40


def test_without_training_data_there_is_nothing_to_train():
    with raises(ConfigError, "--train-data"):
        run(args=argparse.Namespace(train_iters=1, device="cpu"))


# the stopwatches


def test_timers_add_up_and_reject_what_makes_no_stretch():
    timers = Timers()
    with EventStorage() as storage:
        storage.step = 1
        for _ in "12":
            timers("load").start()
            timers("load").stop()
        assert "time/load" in storage.latest()
        seconds = timers("load").elapsed(reset=False)
        assert seconds > 0
        assert timers("load").elapsed() == seconds
        assert timers("load").elapsed() == 0
        fails_at('timers("load").stop()  # idle', lambda: timers("load").stop(), "load")  # idle
        timers("load").start()
        with raises(TrainwrightError):
            timers("load").start()
        timers("load").reset()
        timers("load").start()


# the short form


def test_train_is_the_short_form():
    noted = []

    def forward(model, batch):
        x, labels, _ = batch
        return cross_entropy(model(x), labels), {"n": len(x)}

    hook = Every(1)(lambda trainer: noted.append(trainer.step))
    trainer = train(Classifier(), Points(24), forward=forward, max_steps=3, batch_size=4, hooks=[hook])
    assert trainer.step == 3
    assert noted == [1, 2, 3]
    assert lines("notebook")[-1]["n"] == 4


def test_the_notebook_s_cells_run_in_order():
    """Every code cell of examples/notebook.ipynb, in one namespace, as a notebook does."""
    pytest.importorskip("sklearn", reason="it holds the digits")
    cells = json.loads((HERE.parents[2] / "examples" / "notebook.ipynb").read_text("utf-8"))["cells"]
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "Save the notebook without outputs."
            exec(compile("".join(cell["source"]), f"<cell {number}>", "exec"), names)
    assert names["trainer"].eval_logs["valid/loss"] < 2.0
    assert names["trainer"].step == 150  # it went on from step 100
    assert names["lines"][-1]["step"] == 150


# bad input: one clear error each, with the user's file and line


def fails_at(text, call, *mentions, kind=TrainwrightError):
    """Asserts that a call raises an error that begins with this file and the line that holds a text."""
    with raises(kind, *mentions) as caught:
        call()
    assert str(caught.value).startswith(f"{HERE}:{line_of(text)}: ")


def test_a_forward_step_that_returns_none_is_rejected():
    def step_none(data_iterator, model, args, timers):
        next(data_iterator)

    call = lambda: run("--train-iters", "1", forward_step_function=step_none)  # noqa: E731
    fails_at("def step_none", call, "step_none")


def test_a_forward_step_that_returns_three_values_is_rejected():
    def step_three(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        return cross_entropy(model(x), labels), {}, 3

    call = lambda: run("--train-iters", "1", forward_step_function=step_three)  # noqa: E731
    fails_at("def step_three", call, "step_three", "3")


def test_a_forward_step_whose_loss_is_not_a_number_is_rejected():
    def step_scores(data_iterator, model, args, timers):
        return model(next(data_iterator)[0]), {}

    call = lambda: run("--train-iters", "1", forward_step_function=step_scores)  # noqa: E731
    fails_at("def step_scores", call)


def test_a_second_next_in_one_forward_step_is_rejected():
    def greedy(data_iterator, model, args, timers):
        next(data_iterator)
        return next(data_iterator)  # once more

    call = lambda: run("--train-iters", "1", forward_step_function=greedy)  # noqa: E731
    fails_at("  # once more", call)


def test_a_forward_step_that_does_not_use_its_batch_is_rejected():
    def idle(data_iterator, model, args, timers):
        return model(torch.ones(1, 4)).sum()

    call = lambda: run("--train-iters", "1", forward_step_function=idle)  # noqa: E731
    fails_at("def idle", call)


def test_a_dataset_function_that_returns_a_list_is_rejected():
    def create_list(path, args):
        return [1, 2, 3]

    def create_none(path, args):
        return None

    fails_at(
        "def create_list",
        lambda: run("--train-iters", "1", create=create_list),
        "3",
        kind=DataError,
    )
    fails_at("def create_none", lambda: run("--train-iters", "1", create=create_none), kind=DataError)


def test_a_class_that_needs_more_than_args_is_rejected():
    class Demanding(Classifier):
        def __init__(self, width):
            super().__init__()

    call = lambda: run("--train-iters", "1", model_cls=Demanding)  # noqa: E731
    fails_at("class Demanding", call, "Demanding", kind=ConfigError)
    with raises(ConfigError, "model_cls", "3"):
        run("--train-iters", "1", model_cls=3)


def test_a_metric_of_another_length_than_the_batch_is_rejected():
    def step_odd(data_iterator, model, args, timers):
        x, labels, _ = next(data_iterator)
        return cross_entropy(model(x), labels), {"odd": torch.ones(3)}

    words = ("--train-iters", "1", "--valid-data", "4")
    call = lambda: run(*words, forward_step_function=step_odd, handle_metrics_function=dict)  # noqa: E731
    fails_at("def step_odd", call, "odd", "(3,)", "4")


def test_a_handle_metrics_function_that_returns_nothing_is_rejected():
    def forgetful(metrics):
        metrics.clear()

    call = lambda: run("--train-iters", "1", "--valid-data", "4", handle_metrics_function=forgetful)  # noqa: E731
    fails_at("def forgetful", call, "forgetful")


def test_contradictions_between_flags_are_rejected():
    for words, mentions in (
        ((), ("--train-iters", "--epochs")),
        (("--train-iters", "1", "--checkpoint-num-layers", "2"), ("--checkpoint-num-layers", "2")),
        (("--train-iters", "1", "--split", "9,1", "--valid-data", "4"), ("valid",)),
        (("--train-iters", "1", "--split", "a,b"), ("--split", "a,b")),
        (("--train-iters", "1", "--train-data-weights", "1", "2"), ("1", "2")),
    ):
        with raises(ConfigError, *mentions):
            run(*words)
