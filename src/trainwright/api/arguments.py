"""`get_args`: the flags by which SwissArmyTransformer's users describe a run, as a plain Namespace."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from trainwright.backends import pick_backend
from trainwright.config import Origin
from trainwright.config.frozen import plain_scalar
from trainwright.config.problems import suggest
from trainwright.errors import ConfigError, shorten_tracebacks
from trainwright.parallel import processes
from trainwright.user_code.locations import caller

MODES = ("pretrain", "finetune", "inference")
DECAY_STYLES = ("constant", "linear", "cosine")
ZERO_STAGES = (0, 1, 2, 3)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _whole(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError
    return number


def _positive(text: str) -> float:
    number = _number(text)
    if number == 0:
        raise ValueError
    return number


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError
    return number


def _ratios(text: str) -> str:
    read_ratios(text)
    return text


_WANTED: Mapping[Callable[[str], Any], str] = {
    _count: "a whole number from 1 on",
    _whole: "a whole number from 0 on",
    int: "a whole number",
    _number: "a number from 0 on",
    _positive: "a number above 0",
    _fraction: "a fraction from 0 to 1",
    _ratios: "text, such as 95,5,5",
}

_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--train-iters": {"type": _count, "help": "Updates, whatever the number of forwards in each."},
    "--epochs": {"type": _positive, "help": "Passes over the training data; with --train-iters, the first limit ends."},
    "--batch-size": {"type": _count, "default": 4, "help": "Samples of one forward on one rank."},
    "--gradient-accumulation-steps": {"type": _count, "default": 1, "help": "Forwards of one update on one rank."},
    "--lr": {"type": _positive, "default": 1e-4, "help": "The learning rate after the warm-up."},
    "--warmup": {"type": _fraction, "default": 0.01, "help": "The part of the updates in which the rate rises."},
    "--lr-decay-style": {"choices": DECAY_STYLES, "default": "linear", "help": "How the rate falls afterwards."},
    "--lr-decay-ratio": {"type": _fraction, "default": 0.1, "help": "The last rate, as a part of --lr."},
    "--weight-decay": {"type": _number, "default": 0.01, "help": "Of AdamW."},
    "--clip-grad": {"type": _number, "default": 1.0, "help": "Gradients are scaled down to this norm; 0: never."},
    "--seed": {"type": _whole, "default": 1234, "help": "All randomness and the order of data follow from it."},
    "--zero-stage": {
        "type": int,
        "choices": ZERO_STAGES,
        "default": 0,
        "help": "What ranks share out: 0 nothing, 1 and 2 gradients and the optimizer's state, 3 parameters too.",
    },
    "--checkpoint-activations": {"action": "store_true", "help": "Layers are recomputed in the backward pass."},
    "--checkpoint-num-layers": {"type": _count, "default": 1, "help": "Layers that are recomputed together: 1."},
    "--fp16": {"action": "store_true", "help": "Forwards in float16, with a scaled loss."},
    "--bf16": {"action": "store_true", "help": "Forwards in bfloat16."},
    "--device": {"default": "auto", "help": "auto, cpu, cuda or tpu; in the Namespace it is this rank's own device."},
    "--save": {"default": "runs", "help": "Where run folders are: this run's is SAVE/EXPERIMENT_NAME."},
    "--experiment-name": {"default": "run", "help": "The run's name. The same name again continues the run."},
    "--save-interval": {"type": _count, "default": 5000, "help": "Updates between checkpoints, all of which are kept."},
    "--load": {"help": "A run, one of its checkpoints, or a folder of safetensors; see --mode."},
    "--mode": {
        "choices": MODES,
        "default": "pretrain",
        "help": "pretrain goes on from --load with all of its state; finetune takes its weights and begins at 0; "
        "inference evaluates them and trains nothing.",
    },
    "--fresh": {"action": "store_true", "help": "Sets an earlier run of this name aside and starts over."},
    "--accept-changes": {"action": "store_true", "help": "Continues a run although its settings have changed."},
    "--train-data": {"nargs": "+", "help": "Paths, each given to create_dataset_function."},
    "--train-data-weights": {"nargs": "+", "type": _positive, "help": "The share of each; without: by their sizes."},
    "--valid-data": {"nargs": "+", "help": "Paths of the set valid."},
    "--test-data": {"nargs": "+", "help": "Paths of the set test, which is evaluated once, at the end."},
    "--split": {"type": _ratios, "help": "Ratios, such as 95,5,5: cuts the training data into train, valid and test."},
    "--num-workers": {"type": _whole, "default": 0, "help": "Processes that load data; 0: none but the run's own."},
    "--eval-interval": {"type": _count, "help": "Updates between evaluations; without: once, at the end."},
    "--eval-iters": {"type": _count, "help": "Batches of an evaluation; without: the whole set."},
    "--eval-batch-size": {"type": _count, "help": "Samples of an evaluation's forward on one rank; as in training."},
    "--strict-eval": {"action": "store_true", "help": "Evaluates whole sets, whatever --eval-iters says."},
    "--log-interval": {"type": _count, "default": 50, "help": "Updates per line of metrics.json."},
}

FACTS = ("rank", "world_size", "local_rank", "device")
"""What get_args adds: where this process stands among those of the run."""


def get_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the flags of a run, of this process's command line or of a list.

    Flags of your own are read before, by a parser of your own, whose rest is given here:

        known, rest = parser.parse_known_args()
        args = argparse.Namespace(**vars(get_args(rest)), **vars(known))

    The Namespace also has `rank`, `world_size`, `local_rank` and `device`. It is never changed afterwards.
    """
    shorten_tracebacks()
    args, unknown = _parser().parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise ConfigError(f"{flag!r} follows no flag. Write --flag value.", where=caller())
        raise ConfigError(
            f"{flag}: there is no such flag. {suggest(flag, [*_FLAGS, '--help'])} Flags of your own are read before, "
            "by parse_known_args of a parser of your own.",
            where=caller(),
        )
    args.rank, args.world_size = processes.rank_and_size()
    args.local_rank = processes.local_rank()
    where = Origin.parse(caller(), "--device")
    args.device = str(pick_backend(args.device, local_rank=args.local_rank, where=where).device)
    return args


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Returns a copy in which every flag has a value, for a Namespace that was made by hand.

    Its values are checked as those of a command line are, and numpy's numbers become plain ones.
    """
    if not hasattr(args, "__dict__"):
        raise ConfigError(f"args is a {type(args).__name__}. Give what get_args() returns.", where=caller())
    values = {**vars(_parser().parse_args([])), **vars(args)}
    for flag, settings in _FLAGS.items():
        values[attribute_of(flag)] = _checked(flag, settings, values[attribute_of(flag)])
    return argparse.Namespace(**values)


def flag_names() -> list[str]:
    """Returns the names of the flags as attributes of the Namespace."""
    return [attribute_of(flag) for flag in _FLAGS]


def _checked(flag: str, settings: Mapping[str, Any], value: Any) -> Any:
    """Returns a value of a Namespace as the command line would have given it, or rejects it in the flag's name."""
    read: Callable[[Any], Any]
    if settings.get("action") == "store_true":
        wanted, read = "True or False", _bool
    elif "type" in settings:
        wanted, read = _WANTED[settings["type"]], _reader(settings["type"])
    else:
        wanted, read = "text", _text
    if value is None and settings.get("default") is None and "action" not in settings:
        return None
    try:
        if settings.get("nargs") != "+":
            return read(value)
        # A path is whatever create_dataset_function takes.
        return value if "type" not in settings else [read(each) for each in as_list(value)]
    except (TypeError, ValueError):
        raise ConfigError(f"{flag}: must be {wanted}; got {value!r}.", where=caller()) from None


def _reader(kind: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Reads a value by its text, so that 2.5 is no whole number; a float's has every bit of it."""

    def read(value: Any) -> Any:
        return kind(str(value if (plain := plain_scalar(value)) is None else plain))

    return read


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _text(value: Any) -> str:
    # A torch.device is a device's name, and a Path one of a folder.
    text = str(value) if type(value).__name__ == "device" else os.fspath(value)
    if not isinstance(text, str):
        raise TypeError
    return text


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print before it leaves the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}.", where=caller())

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            wanted = _WANTED[action.type] if callable(action.type) else "something else"
            flag = action.option_strings[0]
            raise ConfigError(f"{flag}: must be {wanted}; got {arg_string!r}.", where=caller()) from error


def _parser() -> _Parser:
    parser = _Parser(description="The flags of a run.", allow_abbrev=False)
    for flag, settings in _FLAGS.items():
        parser.add_argument(flag, **settings)
    return parser


PARTS = ("train", "valid", "test")
"""The sets that `--split` makes, in its order."""


def attribute_of(flag: str) -> str:
    """Returns the name by which a Namespace has a flag."""
    return flag.removeprefix("--").replace("-", "_")


def read_ratios(text: str | None) -> tuple[float, ...] | None:
    """Reads `95,5,5` or `95,5`; None where nothing is cut off (`1`, `100,0,0`)."""
    if text is None:
        return None
    try:
        ratios = tuple(float(word) for word in str(text).replace("/", ",").split(","))
    except ValueError:
        ratios = ()
    if not 1 <= len(ratios) <= len(PARTS) or not all(0 <= ratio < math.inf for ratio in ratios) or not ratios[0]:
        raise ConfigError(
            f"--split: {text!r} is no list of one to three ratios, the first of them above 0. Write 95,5,5 for train, "
            "valid and test.",
            where=caller(),
        )
    return ratios if sum(ratios[1:]) > 0 else None


def as_list(paths: Any) -> Sequence[Any]:
    """Returns the paths of a flag: none, one that stands alone, or several."""
    if paths is None:
        return []
    return paths if isinstance(paths, list | tuple) else [paths]
