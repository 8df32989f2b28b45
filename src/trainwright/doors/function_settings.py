"""What the flags mean for a run: from a Namespace to a RunConfig. The Namespace is read, never changed.

Flags that change the mathematics, and whatever else the user's own parser put into the Namespace, are kept in the
run's config.yaml: a run that goes on with other values is refused by name.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from trainwright.config import Node, Origin, RunConfig
from trainwright.config.problems import nearest
from trainwright.doors.arguments import DECAY_STYLES, FACTS, MODES, ZERO_STAGES, flag_names, with_defaults
from trainwright.errors import ConfigError
from trainwright.parallel import processes
from trainwright.user_code import caller

TRAINER = "trainwright.doors.training_main:FunctionTrainer"

_KEPT_FLAGS: Mapping[str, str] = {
    "train_data": "--train-data",
    "train_data_weights": "--train-data-weights",
    "split": "--split",
}
"""Flags that no section of the config holds, and that change what is learned."""

MAX_SKIPPED_UPDATES = 100


def config_of(args: argparse.Namespace) -> RunConfig:
    """Returns the config of the run that the flags describe."""
    flags = with_defaults(args)
    _refuse_misspelt(args)
    _refuse_contradictions(flags)
    max_batches = None if flags.strict_eval else flags.eval_iters
    eval_batch = None if flags.eval_batch_size is None else flags.eval_batch_size * processes.world_size()
    settings: dict[str, Any] = {
        "name": _given("--experiment-name", flags.experiment_name),
        "output_dir": _given("--save", flags.save),
        "seed": _given("--seed", flags.seed),
        "data": {
            "workers": _given("--num-workers", flags.num_workers),
            # Made by create_dataset_function, not from the config.
            "train": _given("--train-data", None),
            "eval": _given("--valid-data", {}),
            "test": _given("--test-data", None),
        },
        "trainer": _trainer(flags),
        "evaluation": {
            "every_steps": _given("--eval-interval", flags.eval_interval),
            "max_batches": _given("--eval-iters", max_batches),
            "batch_size": _given("--eval-batch-size × ranks", eval_batch),
        },
        "checkpoint": {"every_steps": _given("--save-interval", flags.save_interval), "keep_last": None},
        "log": {"every_steps": _given("--log-interval", flags.log_interval)},
        "runtime": _runtime(flags),
        # As there: an update with a loss or metric that is not finite is left out, on all ranks together.
        "incidents": {"non_finite": "skip", "max_incidents": MAX_SKIPPED_UPDATES},
    }
    return RunConfig.from_dict(settings, where=Origin.parse(caller()))


def _given(flag: str, value: Any) -> Node:
    """Returns a setting that remembers the flag which gave it, for errors."""
    return Node(value, Origin.parse(caller(), flag))


def _trainer(flags: argparse.Namespace) -> dict[str, Any]:
    schedule: dict[str, Any] = {
        "type": _given("--lr-decay-style", flags.lr_decay_style),
        "warmup_fraction": _given("--warmup", flags.warmup),
    }
    if flags.lr_decay_style != "constant":
        schedule["minimum"] = _given("--lr-decay-ratio", flags.lr_decay_ratio)
    return {
        "type": TRAINER,
        "max_steps": _given("--train-iters", flags.train_iters),
        "max_epochs": _given("--epochs", flags.epochs),
        "micro_batch_size": _given("--batch-size", flags.batch_size),
        "accumulation": _given("--gradient-accumulation-steps", flags.gradient_accumulation_steps),
        "global_batch_size": _given("--batch-size × --gradient-accumulation-steps × ranks", None),
        "max_grad_norm": _given("--clip-grad", flags.clip_grad or None),
        "optimizer": {
            "type": "adamw",
            "lr": _given("--lr", flags.lr),
            "weight_decay": _given("--weight-decay", flags.weight_decay),
        },
        "schedule": schedule,
        "arguments": _given("args", _kept_arguments(flags)),
    }


def _runtime(flags: argparse.Namespace) -> dict[str, Any]:
    precision = "fp16" if flags.fp16 else "bf16" if flags.bf16 else "fp32"
    runtime: dict[str, Any] = {
        "device": _given("--device", str(flags.device).partition(":")[0]),
        "precision": _given("--fp16 and --bf16", precision),
    }
    if flags.zero_stage:
        runtime["mesh"] = _given("--zero-stage", {"data": -1})
        # Of stages 1 and 2 the parameters stay whole between a forward and its backward.
        runtime["reshard_after_forward"] = _given("--zero-stage", flags.zero_stage == max(ZERO_STAGES))
    return runtime


def _kept_arguments(flags: argparse.Namespace) -> dict[str, Any]:
    """Returns the user's own arguments, those that YAML can hold, and the flags that have no section."""
    left_out = {*flag_names(), *FACTS} - {*_KEPT_FLAGS}
    return {
        name: _given(_KEPT_FLAGS.get(name, f"args.{name}"), value)
        for name, value in vars(flags).items()
        if name not in left_out and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _refuse_contradictions(flags: argparse.Namespace) -> None:
    problems = []
    if flags.mode not in MODES:
        problems.append(f"--mode: {flags.mode!r} is none of {', '.join(MODES)}.")
    if flags.lr_decay_style not in DECAY_STYLES:
        problems.append(f"--lr-decay-style: {flags.lr_decay_style!r} is none of {', '.join(DECAY_STYLES)}.")
    if flags.zero_stage not in ZERO_STAGES:
        problems.append(f"--zero-stage: {flags.zero_stage!r} is none of 0, 1, 2 and 3.")
    if flags.fp16 and flags.bf16:
        problems.append("--fp16 and --bf16 are both given. Keep one of them.")
    if flags.train_iters is None and flags.epochs is None and flags.mode != "inference":
        problems.append("Neither --train-iters nor --epochs is given: nobody knows when the run ends. Give one.")
    if flags.checkpoint_num_layers > 1:
        problems.append(
            f"--checkpoint-num-layers: {flags.checkpoint_num_layers}, but layers are recomputed one at a time, which "
            "needs the least memory while one of them is. Leave it out."
        )
    if flags.fresh and flags.load is not None and flags.mode == "pretrain":
        problems.append(
            "--fresh starts over, but --load in --mode pretrain goes on from what it names. Leave one out, or take "
            "its weights alone with --mode finetune."
        )
    if problems:
        raise ConfigError(" ".join(problems), where=caller())


def _refuse_misspelt(args: argparse.Namespace) -> None:
    """Refuses what is almost a flag in a Namespace made by hand, which lacks that flag: it would have no effect."""
    given = vars(args)
    for name in given.keys() - {*flag_names(), *FACTS}:
        meant = nearest(name, [flag for flag in flag_names() if flag not in given], cutoff=0.8)
        if meant is not None:
            raise ConfigError(
                f"args.{name}: there is no such flag. Did you mean {meant}? An argument of your own may have this name "
                f"where args has {meant} too, as those of get_args() do.",
                where=caller(),
            )
