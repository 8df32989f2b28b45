"""`get_args` and `add_training_args`: the flags of `training_main`, with SwissArmyTransformer's names.

`REJECTED` has those of its flags that do not exist here, each with the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Number:
    """The `type` of a flag: a number in a range."""

    kind: type[int] | type[float]
    minimum: float
    maximum: float
    description: str

    def __call__(self, text: str) -> float:
        with suppress(ValueError):
            number = self.kind(text)
            if self.minimum <= number <= self.maximum:
                return number
        raise argparse.ArgumentTypeError(f"must be {self.description}; got {text!r}")


_LARGEST = sys.float_info.max
_COUNT = _Number(int, 1, _LARGEST, "a whole number of at least 1")
_WHOLE = _Number(int, 0, _LARGEST, "a whole number of at least 0")
_NUMBER = _Number(float, 0, _LARGEST, "a number of at least 0")
_POSITIVE = _Number(float, sys.float_info.min, _LARGEST, "a number above 0")
_FRACTION = _Number(float, 0, 1, "a fraction from 0 to 1")


def _ratios(text: str) -> str:
    read_ratios(text)
    return text


_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--train-iters": {"type": _COUNT, "help": "Optimizer updates."},
    "--epochs": {
        "type": _POSITIVE,
        "help": "Passes over the training data; with --train-iters, the lower limit applies.",
    },
    "--batch-size": {"type": _COUNT, "default": 4, "help": "Samples per forward on one rank."},
    "--gradient-accumulation-steps": {"type": _COUNT, "default": 1, "help": "Forwards per update on one rank."},
    "--lr": {"type": _POSITIVE, "default": 1e-4, "help": "The learning rate after the warm-up."},
    "--warmup": {"type": _FRACTION, "default": 0.01, "help": "Fraction of the updates in which the rate increases."},
    "--lr-decay-style": {"choices": DECAY_STYLES, "default": "linear", "help": "How the rate decreases afterwards."},
    "--lr-decay-iters": {
        "type": _COUNT,
        "help": "Updates of the schedule; only the value of --train-iters is supported.",
    },
    "--lr-decay-ratio": {"type": _FRACTION, "default": 0.1, "help": "The final rate as a fraction of --lr."},
    "--weight-decay": {"type": _NUMBER, "default": 0.01, "help": "Weight decay of AdamW."},
    "--clip-grad": {"type": _NUMBER, "default": 1.0, "help": "Maximum gradient norm; 0: no limit."},
    "--seed": {"type": _WHOLE, "default": 1234, "help": "The seed of all random numbers and of the order of the data."},
    "--zero-stage": {
        "type": int,
        "choices": ZERO_STAGES,
        "default": 0,
        "help": "The state that is sharded over ranks: 0 none, 1 and 2 gradients and optimizer state, 3 also "
        "parameters.",
    },
    "--checkpoint-activations": {"action": "store_true", "help": "Recompute layers in the backward pass."},
    "--checkpoint-num-layers": {
        "type": _COUNT,
        "default": 1,
        "help": "Layers that are recomputed together; only 1 is supported.",
    },
    "--checkpoint-skip-layers": {"type": _WHOLE, "default": 0, "help": "The last layers that are not recomputed."},
    "--fp16": {"action": "store_true", "help": "Autocast to float16, with loss scaling."},
    "--bf16": {"action": "store_true", "help": "Autocast to bfloat16."},
    "--device": {"default": "auto", "help": "auto, cpu, cuda or tpu; the Namespace has this rank's device."},
    "--save": {"default": "runs", "help": "The folder of run folders; the run's is SAVE/EXPERIMENT_NAME."},
    "--experiment-name": {"default": "run", "help": "The run's name. The same name resumes the run."},
    "--save-interval": {"type": _COUNT, "default": 5000, "help": "Updates between checkpoints, all of which are kept."},
    "--load": {"help": "A run, one of its checkpoints, or a folder of safetensors; see --mode."},
    "--mode": {
        "choices": MODES,
        "default": "pretrain",
        "help": "pretrain resumes from the full state of --load; finetune loads its weights and starts at step 0; "
        "inference evaluates them without training.",
    },
    "--fresh": {"action": "store_true", "help": "Rename an earlier run of this name, and start over."},
    "--accept-changes": {"action": "store_true", "help": "Resume a run although its settings have changed."},
    "--train-data": {"nargs": "+", "help": "Paths for create_dataset_function."},
    "--train-data-weights": {"nargs": "+", "type": _POSITIVE, "help": "The weight of each path; default: by size."},
    "--valid-data": {"nargs": "+", "help": "Paths of the set valid."},
    "--test-data": {"nargs": "+", "help": "Paths of the set test, evaluated once, at the end."},
    "--split": {
        "type": _ratios,
        "help": "Ratios, such as 95,5,5, that split the training data into train, valid and test.",
    },
    "--num-workers": {"type": _WHOLE, "default": 0, "help": "Processes that load data; 0: the run's process loads."},
    "--prefetch-factor": {"type": _COUNT, "help": "Batches that each of --num-workers prefetches."},
    "--eval-interval": {"type": _COUNT, "help": "Updates between evaluations; default: once, at the end."},
    "--eval-iters": {"type": _COUNT, "help": "Batches per evaluation; default: the whole set."},
    "--eval-batch-size": {
        "type": _COUNT,
        "help": "Samples per forward of an evaluation on one rank; default: as in training.",
    },
    "--strict-eval": {"action": "store_true", "help": "Evaluate whole sets and ignore --eval-iters."},
    "--log-interval": {"type": _COUNT, "default": 50, "help": "Updates per line of metrics.json."},
    "--wandb": {"action": "store_true", "help": "Also log to Weights & Biases."},
    "--wandb-project-name": {"help": "The project of --wandb."},
    "--profiling": {"type": int, "default": -1, "help": "Profile ten updates after this many; -1: none."},
    "--save-args": {"action": "store_true", "help": "Has no effect: config.yaml of the run folder has the flags."},
    "--resume-dataloader": {"action": "store_true", "help": "Has no effect: a resumed run continues in its data."},
}

_MODEL = "describes a model of SwissArmyTransformer. Add it to your own parser, from which your model class reads it."
_GENERATION = (
    "belongs to text generation, and training_main generates no text. Use `trainwright generate`, or your own parser."
)
_DEEPSPEED = (
    "configures DeepSpeed, which is not used. Use --zero-stage, --fp16 or --bf16 and --gradient-accumulation-steps."
)
_RNG = "would prevent an exact resume: a checkpoint always has the state of the random number generators. Remove it."
_ITERABLE = "is not needed: an IterableDataset is recognized by its class. Remove it."

OWN_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size", "--max-sequence-length"),
            *("--layernorm-order", "--inner-hidden-size", "--hidden-size-per-attention-head"),
            *("--num-multi-query-heads", "--is-gated-mlp", "--is-rotary-emb", "--layernorm-epsilon"),
            *("--hidden-dropout", "--attention-dropout", "--drop-path", "--make-vocab-size-divisible-by"),
        ),
        _MODEL,
    ),
    **dict.fromkeys(
        (
            *("--temperature", "--top_p", "--top_k", "--num-beams", "--length-penalty", "--no-repeat-ngram-size"),
            *("--min-tgt-length", "--out-seq-length", "--input-source", "--output-path", "--with-id"),
            "--max-inference-batch-size",
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        ("--tokenizer-type", "--img-tokenizer-path"),
        "selects a tokenizer. Create it in create_dataset_function, and add the flag to your own parser.",
    ),
}
"""Flags of SwissArmyTransformer that a program may define itself, and the reason why get_args rejects them."""

UNSUPPORTED_FLAGS: Mapping[str, str] = {
    "--model-parallel-size": "matrices are sharded by rules instead of parallel layers. Use a run file with "
    "runtime.mesh {tensor: N} and model.sharding.",
    "--parallel-output": "there are no model-parallel layers whose outputs could be gathered. Remove it.",
    "--skip-init": "the model class is called unchanged. Initialize or load the weights in init_function.",
    "--use-gpu-initialization": "the model class is called unchanged. Use `with torch.device(args.device):` in it.",
    "--summary-dir": "the log, metrics and checkpoints are in the run folder. Set --save and --experiment-name.",
    "--force-train": "--mode finetune loads the weights that the model shares with --load. Remove it.",
    "--exit-interval": "a run ends at --train-iters. For a trial use a lower number and another --experiment-name; "
    "SIGTERM and Ctrl-C save a run that can be resumed.",
    "--no-save-rng": _RNG,
    "--no-load-rng": _RNG,
    "--distributed-backend": "the backend follows from the device: nccl on a GPU, gloo on a CPU. Set --device.",
    "--iterable-dataset": _ITERABLE,
    "--iterable-dataset-eval": _ITERABLE,
    "--batch-from-same-dataset": "a batch has samples of all paths, by their weights. Remove it.",
    "--block-size": "the order of the samples needs no list in memory. Remove it.",
    "--deepspeed": _DEEPSPEED,
    "--deepspeed_config": _DEEPSPEED,
    "--deepscale": _DEEPSPEED,
    "--deepscale_config": _DEEPSPEED,
}
"""Flags of SwissArmyTransformer that would have no effect, and the reason."""

_GROUP = "the flags of a run"
"""The description of the group of flags that `add_training_args` adds."""
LOCAL_RANK = "--local_rank"
"""A flag that some launchers add. torchrun sets the environment variable LOCAL_RANK instead."""

FACTS = ("rank", "world_size", "local_rank", "device")
"""The attributes that get_args adds: this process's rank and device."""


def get_args(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parses the flags of a run, from the command line or from a list.

    The flags of a run are added to `parser`, which may have flags of your own:

        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=8)
        args = get_args(parser=parser)

    The Namespace also has `rank`, `world_size`, `local_rank` and `device`. training_main does not change it.
    """
    shorten_tracebacks()
    if parser is None:
        parser = _parser()
    elif not _has_training_args(parser):
        add_training_args(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _reject_unknown(unknown[0].partition("=")[0], parser)
    args.rank, args.world_size = processes.rank_and_size()
    given, args.local_rank = getattr(args, "local_rank", None), processes.local_rank()
    if given is not None and given != args.local_rank:
        raise ConfigError(
            f"{LOCAL_RANK}: {given} differs from LOCAL_RANK, {args.local_rank}. Start the program with torchrun.",
            where=caller(),
        )
    where = Origin.parse(caller(), "--device")
    args.device = str(pick_backend(args.device, local_rank=args.local_rank, where=where).device)
    return args


def add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags of a run to your parser, in a group of their own, and returns the parser.

    `training_main` accepts the Namespace of `parser.parse_args()`; `get_args(parser=parser)` adds the rank and the
    device to it. `parser.set_defaults(lr=3e-4)` changes a default.
    """
    if not isinstance(parser, argparse.ArgumentParser):
        problem = f"add_training_args needs an argparse.ArgumentParser, got {parser!r}."
        raise ConfigError(problem, where=caller())
    own = _flags_in_help(parser)
    taken = [flag for flag in (*_FLAGS, LOCAL_RANK) if flag in own]
    if taken:
        raise ConfigError(
            f"{taken[0]}: your parser already has this flag, which add_training_args adds. Remove yours, or give it "
            f"another name; parser.set_defaults({attribute_of(taken[0])}=…) changes the default.",
            where=caller(),
        )
    group = parser.add_argument_group("training", _GROUP)
    for flag, settings in _FLAGS.items():
        group.add_argument(flag, **settings)
    group.add_argument(LOCAL_RANK, "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def _has_training_args(parser: argparse.ArgumentParser) -> bool:
    return _GROUP in parser.format_help()


def _flags_in_help(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the flags of a parser: argparse has no public list of them. Those with a suppressed help are missing."""
    return re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", parser.format_usage())


def _reject_unknown(flag: str, parser: argparse.ArgumentParser) -> NoReturn:
    if not flag.startswith("-"):
        raise ConfigError(f"{flag!r} does not follow a flag. Write --flag value.", where=caller())
    reason = {**OWN_FLAGS, **UNSUPPORTED_FLAGS}.get(flag)
    if reason is not None:
        raise ConfigError(f"{flag}: {reason}", where=caller())
    known = _flags_in_help(parser)
    raise ConfigError(
        f"{flag}: there is no such flag. {suggest(flag, known)} Add your own flags to a parser, and pass it: "
        "get_args(parser=parser).",
        where=caller(),
    )


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Returns a copy in which every flag has a value, for a Namespace that get_args did not create.

    The values are validated like those of a command line, and numpy's scalars become Python numbers.
    """
    if not hasattr(args, "__dict__"):
        raise ConfigError(f"args is a {type(args).__name__}. Pass the Namespace of get_args().", where=caller())
    values = {**vars(_parser().parse_args([])), **vars(args)}
    for flag, settings in _FLAGS.items():
        values[attribute_of(flag)] = _checked(flag, settings, values[attribute_of(flag)])
    return argparse.Namespace(**values)


def flag_names() -> list[str]:
    """Returns the attributes of the Namespace for all flags."""
    return [attribute_of(flag) for flag in _FLAGS]


def _checked(flag: str, settings: Mapping[str, Any], value: Any) -> Any:
    """Returns a value of a Namespace with the type that the command line produces; rejects other values."""
    if value is None and settings.get("default") is None and "action" not in settings:
        return None
    kind = settings.get("type")
    try:
        if "action" in settings:
            wanted = "True or False"
            if isinstance(value, bool):
                return value
            raise TypeError
        if kind is None:
            wanted = "text"
            # Paths of datasets may have any type. A torch.device has a text form, but no fspath.
            return value if "nargs" in settings or isinstance(value, str) else _text(value)
        wanted = getattr(kind, "description", "a whole number" if kind is int else "text, such as 95,5,5")
        return [_convert(kind, each) for each in as_list(value)] if "nargs" in settings else _convert(kind, value)
    except (TypeError, ValueError, argparse.ArgumentTypeError):
        raise ConfigError(f"{flag}: must be {wanted}; got {value!r}.", where=caller()) from None


def _convert(kind: Any, value: Any) -> Any:
    # Converted via text, so that 2.5 is not a whole number; repr keeps every bit of a float.
    plain = plain_scalar(value)
    return kind(str(value if plain is None else plain))


def _text(value: Any) -> str:
    text = str(value) if type(value).__name__ == "device" else os.fspath(value)
    if not isinstance(text, str):
        raise TypeError
    return text


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing a message and exiting, as argparse does."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        raise ConfigError(f"{text[0].upper()}{text[1:]}.", where=caller())


def _parser() -> _Parser:
    parser = _Parser(description="The flags of a run.", allow_abbrev=False)
    add_training_args(parser)
    return parser


SETS = ("train", "valid", "test")
"""The sets of `--split`, in its order."""


def attribute_of(flag: str) -> str:
    """Returns the attribute of a Namespace for a flag."""
    return flag.removeprefix("--").replace("-", "_")


def read_ratios(text: str | None) -> tuple[float, ...] | None:
    """Parses `95,5,5` or `95,5`; returns None if nothing is split off (`1`, `100,0,0`)."""
    if text is None:
        return None
    try:
        ratios = tuple(float(word) for word in str(text).replace("/", ",").split(","))
    except ValueError:
        ratios = ()
    if not 1 <= len(ratios) <= len(SETS) or not all(0 <= ratio < math.inf for ratio in ratios) or not ratios[0]:
        raise ConfigError(
            f"--split: {text!r} is not a list of one to three ratios, the first of them above 0. Write 95,5,5 for "
            "train, valid and test.",
            where=caller(),
        )
    return ratios if sum(ratios[1:]) > 0 else None


def as_list(paths: Any) -> Sequence[Any]:
    """Returns the paths of a flag as a list: none, one that is not in a list, or several."""
    if paths is None:
        return []
    return paths if isinstance(paths, list | tuple) else [paths]
